"""`pytest --share K/N`: of each file's tests and their cases every Nth, from the Kth on; a file with fewer runs one.

No file is left out, only cases: CI walks through the long suites commit by commit, a nightly run takes all.
"""

from __future__ import annotations

import argparse
import itertools

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=share, metavar="K/N", help="of each file's cases every Nth, from the Kth on")


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
    wanted = config.getoption("--share")
    if wanted is None:
        return
    kept: set[pytest.Item] = set()
    for _, cases in itertools.groupby(items, key=lambda item: item.path):
        kept |= set(chosen(list(cases), *wanted))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def chosen(cases: list[pytest.Item], number: int, of: int) -> list[pytest.Item]:
    """Return every `of`th case from `number` on, and one where there are fewer."""
    step = min(of, len(cases))
    return cases[number % step :: step]
