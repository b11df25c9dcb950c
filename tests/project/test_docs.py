"""Every link in README and docs leads to a file or heading that exists. Command lines: test_docs_commands.py."""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path

import pytest
from support.paths import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
NO_MODULES = {
    "out/gpu",
    "out/tiny",
    "out/tiny/checkpoints",
    "data/mine",
    "test/distributed/checkpoint",
    "launcher/test_run.py",
    "test/distributed/launcher/test_run.py",
}
"""Folders that a user's program makes, and PyTorch's files."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        folder = page.parent.relative_to(ROOT).as_posix()
        path = page if not target else ROOT / posixpath.normpath(f"{folder}/{target}")
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in headings(path), f"{page.name}: {target}#{anchor}"


def test_loop_of_the_readme_is_the_example() -> None:
    """The example runs in tests/integration/programs/programs_examples.py, so the README's block is known to run."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    _, _, program = (ROOT / "examples" / "first_loop.py").read_text().partition('"""\n\n')
    assert block == program


def headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@functools.cache
def modules() -> set[str]:
    """Return every module and folder of the repository as a path without its suffix."""
    tops = ("flashckpt", "daemon", "sampler", "trainer", "extras", "tests", "benchmarks", "examples")
    paths = [path.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*")]
    return {path.with_suffix("").as_posix() for path in paths if path.suffix in {"", ".py"}}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_named_in_a_page_exist(page: Path) -> None:
    """`room/module` without a suffix names a module, with one a file; both from the root or from inside a package."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for span in set(re.findall(r"`((?:[a-z][a-z_]*/)+[a-z_]+(?:\.py)?)`", text)) - NO_MODULES:
        name = re.sub(r"^flashckpt/(?=sampler/|trainer/|daemon/)", "", span.removesuffix(".py"))  # links in the package
        assert any(f"/{path}".endswith(f"/{name}") for path in modules()), f"{page.name}: there is no {span}"


def test_links_are_found_at_all() -> None:
    """The pattern above must not quietly stop matching."""
    assert sum(page.read_text().count("](") for page in PAGES) > 20


def test_documentation_is_at_most_45_thousand_words() -> None:
    """A word has a letter or a digit: bars of tables and marks of lists are none. Generated pages count."""
    words = [
        word for page in (ROOT / "docs").rglob("*.md") for word in page.read_text().split() if re.search(r"\w", word)
    ]
    assert len(words) <= 45_000
