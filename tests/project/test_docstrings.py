"""A docstring, and what it says of an argument, begins with the thing: not with What, Of, As or That."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

ROOMS = (
    "flashckpt",
    "flashckpt/storage",
    "flashckpt/checkpoint",
    "daemon",
    "daemon/launcher",
    "sampler",
    "sampler/order",
    "sampler/datasets",
)
"""Folders that follow the rule; a folder below one is a room of its own."""
TURNED = re.compile(r"^\s*(?:\w+: )?(?:What|Of|As|That)\b")
NOT_YET = {"flashckpt/session.py"}


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings and of the strings below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def turned(source: str) -> list[tuple[int, str]]:
    """Return the lines that begin with one of the four words: the first, and those of arguments and attributes."""
    found = []
    for at, text in texts(ast.parse(source)):
        for number, line in enumerate(text.splitlines()):
            if TURNED.match(line) and (number == 0 or re.match(r"\s+\w+: ", line)):
                found.append((at + number, line.strip()))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_the_thing(room: str) -> None:
    paths = [path for path in sorted((ROOT / room).glob("*.py")) if path.relative_to(ROOT).as_posix() not in NOT_YET]
    assert paths
    found = {Path(path.relative_to(ROOT)): turned(path.read_text()) for path in paths}
    assert {f"{path}:{at}: {line}" for path, lines in found.items() for at, line in lines} == set()


def test_turned_sentences_are_found() -> None:
    source = '"""What it is."""\nx = 1\n"""Of the thing."""\ndef f():\n    """Do it.\n\n    Args:\n        a: As given.\n        b: The thing.\n    """\n'
    assert [at for at, _ in turned(source)] == [1, 3, 8]
