"""No crash point without a call in the product, and none that no test kills at."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS

from flashckpt.faults import CRASH_POINTS

FOLDERS = ("flashckpt", "daemon", "trainer", "sampler", "extras")


def product() -> str:
    return "".join(path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def texts(tree: ast.AST) -> Iterator[str]:
    """The string constants of code: no comments, and no docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def is_over_all_points(node: ast.AST) -> bool:
    return isinstance(node, ast.comprehension) and getattr(node.iter, "id", "") == "CRASH_POINTS"


def killed_at(source: str) -> set[str]:
    """The points that a test module kills at: named one by one, or as a group of `CRASH_POINTS` by its prefix."""
    tree = ast.parse(source)
    found = {text.partition(":")[0] for text in texts(tree)} & set(CRASH_POINTS)
    for node in ast.walk(tree):
        if is_over_all_points(node):
            groups = {text.rstrip(".") for test in getattr(node, "ifs", ()) for text in texts(test)}
            found |= {point for point in CRASH_POINTS if point.partition(".")[0] in groups}
    return found


@pytest.fixture(scope="module")
def killed() -> set[str]:
    files = [path for path in TESTS.rglob("*.py") if "support" not in path.parts and path != Path(__file__)]
    return set().union(*(killed_at(path.read_text()) for path in files))


def test_points_that_are_declared_are_the_points_that_are_called() -> None:
    assert set(re.findall(r'crash_point\("([a-z.-]+)"\)', product())) == set(CRASH_POINTS)


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_every_point_is_killed_at_by_a_test(point: str, killed: set[str]) -> None:
    assert point in killed


def test_comments_and_docstrings_kill_nothing() -> None:
    assert killed_at('"""slot.during-copy"""\n# "slot.after-writing"\n') == set()
    assert killed_at('run("slot.during-copy:2")\n') == {"slot.during-copy"}
    assert killed_at('P = [p for p in CRASH_POINTS if p.startswith("save.")]') == {
        "save.during-pack",
        "save.before-index",
        "save.before-commit",
    }
