"""No promise without a test: every sentence of README and docs that promises something names what holds it."""

from __future__ import annotations

from typing import Any

import pytest
from support.tools import load_tool


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_tool("promises")


def test_every_promise_names_a_test_that_is_there(tool: Any) -> None:
    _, wrong = tool.pairs()
    assert not wrong, "\n".join(["", *wrong, "", "tests/project/promises.txt says of each promise what holds it"])


def test_the_page_is_the_generated_one(tool: Any) -> None:
    assert tool.PAGE.read_text() == tool.page_of(tool.pairs()[0]), "run: python tools/promises.py"


def test_promises_are_found_at_all(tool: Any) -> None:
    assert len(tool.promises()) > 100
    (found,) = [s for s in tool.sentences("A word. **Never torn.** A slot is\nwhole.\n") if tool.WORDS.search(s)]
    assert found == "**Never torn.** A slot is whole."
