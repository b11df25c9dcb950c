"""Plug-ins: what is missing or broken is one clear error."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from flashckpt import entry_points
from flashckpt.cli.main import main
from flashckpt.errors import ConfigError
from flashckpt.storage.factory import open_store
from flashckpt.trainer.__main__ import main as trainer


def test_all_entry_points_of_ours_can_be_loaded() -> None:
    groups = entry_points._own()
    assert set(groups) == {getattr(entry_points, name) for name in
                           ("STORES", "COMMANDS", "TRAINER", "PERSISTER", "HOOKS", "PRELOAD", "EXTRAS")}  # fmt: skip
    for entries in groups.values():
        for entry in entries.values():
            assert entry.load() is not None


def test_of_two_installations_the_entry_points_of_the_first_on_the_path_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("1", "2"):
        folder = tmp_path / number / f"flashckpt-{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "entry_points.txt").write_text(f"[flashckpt.stores]\nshelf = shelf:Store{number}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "1"), str(tmp_path / "2"), *sys.path])
    monkeypatch.setattr(entry_points, "_checkout", lambda _: None)
    assert entry_points._own.__wrapped__()[entry_points.STORES]["shelf"].target == "shelf:Store1"


def test_metadata_of_other_packages_is_not_read_for_what_is_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused() -> Mapping[str, Any]:
        raise AssertionError("read")

    monkeypatch.setattr(entry_points, "_others", refused)
    open_store(tmp_path)
    open_store("webhdfs://name/run")
    assert entry_points.find(entry_points.COMMANDS, "export") is not None


DECLARED = """\
# a comment
[console_scripts]
tool = other:main

[flashckpt.stores]
one = other.stores:One [fast]
two=other.stores:Two

[flashckpt.preload]
all = other.warm
"""


@pytest.mark.parametrize(
    "folder", ["other_tool-1.2.dist-info", "other_tool-1.2-py3.11.egg-info", "other_tool.egg-info"]
)
def test_entry_points_are_read_as_importlib_metadata_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "entry_points.txt").write_text(DECLARED)
    (tmp_path / folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tool\nVersion: 1.2\n")
    (tmp_path / folder / "PKG-INFO").write_text((tmp_path / folder / "METADATA").read_text())
    monkeypatch.setattr(sys, "path", [str(tmp_path / "no such folder"), str(tmp_path), *sys.path])
    found = dict(entry_points._installed())["other-tool"]
    for group in (entry_points.STORES, entry_points.PRELOAD):
        points = [
            one
            for one in importlib.metadata.entry_points(group=group)
            if one.dist is not None and one.dist.name == "other-tool"
        ]
        theirs = {(one.name, f"{one.module}:{one.attr}" if one.attr else one.module) for one in points}
        assert {(one.name, one.target) for one in found[group].values()} == theirs


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for an installation that has the core alone."""
    monkeypatch.setattr(entry_points, "_own", dict)


@pytest.mark.usefixtures("without")
def test_missing_extra_is_a_configuration_error_that_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("export", "import", "bench", "plan"):
        with pytest.raises(SystemExit) as ended:
            main([command, "x", "y", "--json"])
        error = json.loads(capsys.readouterr().out)["error"]
        assert (ended.value.code, error["exit_code"]) == (10, 10)
        assert f"{command} is not installed" in error["problem"]
        assert "pip install" in error["remedy"]
    for words in (["--dry-run", "--world", "4"], ["--eval.every", "1"]):
        assert trainer([*words, "--config", str(ROOT / "configs" / "tiny.toml")]) == 10
        assert "is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no_such_module:x", "is not installed"),
        ("no_such_package.module:x", "is not installed"),
        ("json:no_such_name", "cannot be loaded"),
    ],
)
def test_plugin_that_cannot_be_loaded_is_a_configuration_error_with_its_package(target: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"x of the package other {problem}") as error:
        entry_points.EntryPoint("x", target, "other").load()
    assert error.value.exit_code == 10


def test_a_name_of_ours_cannot_be_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {entry_points.COMMANDS: {"export": entry_points.EntryPoint("export", "json:dumps", "other")}}
    monkeypatch.setattr(entry_points, "_others", lambda: theirs)
    found = entry_points.find(entry_points.COMMANDS, "export")
    assert found is not None
    assert found.package == entry_points.OURS
    assert [one.package for one in entry_points.every(entry_points.COMMANDS) if one.name == "export"] == [
        entry_points.OURS
    ]
