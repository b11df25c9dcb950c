"""`pytest --share K/N`: of each file's tests and their cases every Nth, from the Kth on; a file with fewer runs one.

No file is left out, only cases: CI walks through the long suites commit by commit, a nightly run takes all.
`--matrix K/N` takes every Nth only of what is marked `matrix`, the dear generated cases of `make test`.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=share, metavar="K/N", help="of each file's cases every Nth, from the Kth on")
    parser.addoption("--matrix", type=share, metavar="K/N", help="the same, of those that are marked `matrix` alone")


def share(text: str) -> tuple[int, int]:
    """Return K and N of "K/N"; K may be any number, such as that of a commit."""
    try:
        number, of = (int(part) for part in text.split("/"))
    except ValueError:
        number, of = 0, 0
    if of < 1 or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 and N from 1")
    return number % of, of


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.getoption("--share"):
        _keep_share(config, items, list(items), *wanted)
    if wanted := config.getoption("--matrix"):
        _keep_share(config, items, [item for item in items if item.get_closest_marker("matrix")], *wanted)


def _keep_share(
    config: pytest.Config, items: list[pytest.Item], shared: list[pytest.Item], number: int, of: int
) -> None:
    """Take from `items` those of `shared` that are not in the share."""
    kept = set(items).difference(shared)
    for _, of_file in itertools.groupby(shared, key=lambda item: item.path):
        cases: dict[object, list[pytest.Item]] = {}
        for item in of_file:
            cases.setdefault(_shared(item) or item, []).append(item)
        kept.update(*chosen(list(cases.values()), number, of))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _shared(item: pytest.Item) -> tuple[tuple[str, int], ...]:
    """Return which setup of its module a test has: tests of one setup, which may take minutes, go together."""
    callspec: Any = getattr(item, "callspec", None)
    scopes = getattr(callspec, "_arg2scope", {})
    return tuple((name, callspec.indices[name]) for name, scope in scopes.items() if scope.value != "function")


def chosen(cases: list[list[pytest.Item]], number: int, of: int) -> list[list[pytest.Item]]:
    """Return every `of`th case from `number` on, and one where there are fewer."""
    step = min(of, len(cases))
    return cases[number % step :: step]
