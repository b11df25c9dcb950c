"""Every recipe of the pages is run in the test that support.pages names, or its page says that it was not run.

A recipe is a fenced block of Python, bash or YAML, known by its page and first line; a new one without an entry fails
the first test. Command lines: test_docs_commands.py.
"""

from __future__ import annotations

import re

import pytest
from support.pages import BLOCKS, PAGES, blocks, entry
from support.paths import ROOT


def test_every_block_has_a_test_or_its_page_says_that_it_has_none() -> None:
    recipes = [(page, text) for page, language, text in blocks() if language in {"python", "bash", "sh", "yaml"}]
    unknown = [(page, text.splitlines()[0]) for page, text in recipes if entry(page, text) is None]
    assert unknown == []
    stale = [key for key in BLOCKS if not any(page == key[0] and text.startswith(key[1]) for page, text in recipes)]
    assert stale == []


@pytest.mark.parametrize(("key", "where"), BLOCKS.items(), ids=lambda value: str(value)[:40])
def test_what_a_block_refers_to_is_there(key: tuple[str, str], where: str) -> None:
    if where.startswith("not run: "):
        (page,) = [path for path in PAGES if path.name == key[0]]
        assert where.removeprefix("not run: ") in page.read_text()
        return
    file, _, test = where.partition("::")
    assert re.search(rf"^def {test}", next((ROOT / "tests").rglob(file)).read_text(), re.MULTILINE)
