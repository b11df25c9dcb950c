"""What the project promises about itself: hooks, workflows, changelog fragments, commit subjects."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paths import ROOT

from flashckpt import __version__

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
CI = (ROOT / ".ci" / "run").read_text()
TYPES = ("added", "changed", "fixed", "removed", "security")


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def test_workflows_call_targets_that_exist() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = re.sub(r"\$\{\{[^}]*\}\}", "", path.read_text())
        for goals in re.findall(r"\bmake ((?:[a-z0-9-]+ ?)+)", text):
            assert set(goals.split()) <= TARGETS, path.name
        for names in re.findall(r"target: \[([^\]]*)\]", text):
            assert {name.strip() for name in names.split(",")} <= TARGETS, path.name


def test_hosted_workflow_runs_every_suite_of_the_script() -> None:
    """.ci/run is the list; a suite that the hosted jobs forget would only ever run by hand."""
    suites = set(re.findall(r"^ *\"?(?:once|suite|root_suite) ([a-z0-9-]+)", CI, re.MULTILINE))
    hosted = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert suites
    assert {name for name in suites if not re.search(rf"\b{name}\b", hosted)} == set()


def test_python_versions_are_the_same_everywhere() -> None:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    text = (ROOT / "noxfile.py").read_text()
    assert spec is not None
    listed = re.findall(r'"(3\.\d+)"', text.split("PYTHONS =", 1)[1].splitlines()[0])
    jobs = workflow("ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == listed
    assert f'requires-python = ">={listed[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_hooks_need_no_environment_of_ours_and_have_the_versions_of_the_checks() -> None:
    """A newcomer's `pre-commit install` works before `make setup`, and finds what `make check` would."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert ".venv" not in text
    for repo in yaml.safe_load(text)["repos"]:
        name = repo["repo"].rpartition("/")[2].removesuffix("-pre-commit")
        if name in pinned:
            assert repo["rev"] == f"v{pinned.pop(name)}", name
    assert not {"ruff", "codespell", "validate-pyproject"} & set(pinned), "a check without a hook"


def test_newest_release_of_the_changelog_is_dated_and_is_the_version() -> None:
    (newest, *_) = re.findall(r"^## (?!Unreleased$)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)", newest)


def test_changelog_fragments_have_a_type_and_text() -> None:
    for path in (ROOT / "changelog.d").glob("*.md"):
        if path.name == "README.md":
            continue
        assert re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(TYPES)})\.md", path.name), path.name
        assert len(path.read_text().strip()) > 20, path.name


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ("Refuse a step that does not grow\n\nBecause.\n", True),
        ("Merge branch 'x' " + "y" * 80, True),
        ("", False),
        ("A" * 73, False),
        ("Ends with a stop.", False),
        ("Subject\nno empty line", False),
    ],
)
def test_commit_subjects_are_short_and_plain(tmp_path: Path, message: str, accepted: bool) -> None:
    file = tmp_path / "message"
    file.write_text(message)
    hook = ROOT / "tools" / "check_commit_subject.py"
    done = subprocess.run([sys.executable, hook, file], check=False, capture_output=True, text=True)
    assert (done.returncode == 0) == accepted
    assert accepted or done.stderr.startswith("commit message: ")


def test_nothing_but_logging_writes_to_standard_output() -> None:
    """A library's notices go through `logging`; standard output belongs to the user's program."""
    own_output = ("flashckpt/cli/", "flashckpt/bench/", "daemon/", "trainer/")
    for folder in ("flashckpt", "sampler"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_relative_to(ROOT / "flashckpt") and name.startswith(own_output):
                continue
            if re.match(r"flashckpt/(sampler|trainer|daemon)/", name):
                continue
            code = path.read_text()
            assert not re.search(r"^\s*print\(|sys\.stdout\b|logging\.basicConfig", code, re.MULTILINE), name
