"""Every link in README and docs leads to a file or heading that exists. Command lines: test_docs_commands.py."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


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
    """The example runs in tests/test_examples.py, so the README's block is known to run."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    _, _, program = (ROOT / "examples" / "first_loop.py").read_text().partition('"""\n\n')
    assert block == program


def headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_are_found_at_all() -> None:
    """The pattern above must not quietly stop matching."""
    assert sum(page.read_text().count("](") for page in PAGES) > 20
