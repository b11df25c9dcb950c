"""An object is whole when its constructor has ended: no method makes an attribute that was not there before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

ENGINE = ROOT / "flashckpt"
ROOMS = ("core", "planning", "snapshot", "state", "restore", "checkpoint", "daemon/persister")
FILES = sorted(
    [*ENGINE.glob("*.py"), *(path for room in ROOMS for path in (ENGINE / room).glob("*.py"))],
)
CONSTRUCTORS = {"__init__", "__post_init__"}


def assigned(function: ast.AST) -> Iterator[str]:
    """Yield the names that a method assigns to `self.<name>`."""
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and is_self(part.value):
                    yield part.attr


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def made_late(source: str) -> list[str]:
    """Return `Class.attribute` of every attribute that only a method other than the constructor makes."""
    late = []
    for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        methods = [node for node in kind.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        declared = {
            node.target.id
            for node in kind.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        declared |= {
            t.id for node in kind.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        }
        declared |= {name for method in methods if method.name in CONSTRUCTORS for name in assigned(method)}
        for method in methods:
            late += [f"{kind.name}.{name}" for name in assigned(method) if name not in declared]
    return late


def test_the_rule_is_seen_to_be_broken() -> None:
    source = """
class Late:
    there: int

    def __init__(self):
        self.first, self.second = 1, 2

    def begin(self):
        self.there = self.first = 3
        self.third, other.fourth = 4, 5
        self.first += 1
"""
    assert made_late(source) == ["Late.third"]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ENGINE)) for path in FILES])
def test_no_attribute_appears_outside_a_constructor(path: Path) -> None:
    assert made_late(path.read_text()) == []
