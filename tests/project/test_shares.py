"""`pytest --share K/N` leaves out no file, and N shares one after the other leave out no case; so does `--matrix`."""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from support.shares import chosen, pytest_collection_modifyitems, share


@pytest.mark.parametrize("of", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_each_share_has_a_case_of_each_file_and_all_together_every_case(count: int, of: int) -> None:
    cases: Any = list(range(count))
    shares = [chosen(cases, number, of) for number in range(of)]
    assert all(0 < len(part) <= -(-count // min(of, count)) for part in shares)
    assert {one for part in shares for one in part} == set(cases)


@pytest.mark.parametrize(("text", "expected"), [("0/1", (0, 1)), ("2/3", (2, 3)), ("48879/3", (0, 3))])
def test_the_number_of_a_share_may_be_that_of_a_commit(text: str, expected: tuple[int, int]) -> None:
    assert share(text) == expected


@pytest.mark.parametrize("text", ["", "1", "1/0", "-1/3", "a/3", "1/2/3"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not K/N"):
        share(text)


@dataclasses.dataclass(eq=False)  # in a set each is itself
class Item:
    """A collected test."""

    path: str
    number: int
    marked: bool

    def get_closest_marker(self, name: str) -> bool:
        return self.marked and name == "matrix"


def test_of_what_is_marked_a_share_is_taken_and_of_the_rest_everything() -> None:
    collected = [Item(file, number, marked=file == "wide") for file in ("wide", "plain") for number in range(5)]
    taken: list[list[int]] = []
    for number in range(2):
        items: Any = list(collected)
        dropped: list[Any] = []
        config: Any = SimpleNamespace(
            getoption={"--share": None, "--matrix": (number, 2)}.get,
            hook=SimpleNamespace(pytest_deselected=lambda items, into=dropped: into.extend(items)),
        )
        pytest_collection_modifyitems(config, items)
        assert [item.number for item in items if item.path == "plain"] == list(range(5))
        assert sorted([*map(id, items), *map(id, dropped)]) == sorted(map(id, collected))
        taken.append([item.number for item in items if item.path == "wide"])
    assert taken == [[0, 2, 4], [1, 3]]
