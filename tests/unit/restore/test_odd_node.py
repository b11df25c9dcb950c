"""The node on which alone numbers became bad, from what all nodes hold; and its agent's count of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.planning.inventory import HeldSlot, Inventory, Member
from flashckpt.planning.odd_node import odd_node
from flashckpt.shm.agent_folder import bad_numbers, bad_steps, end_suspects, note_bad_numbers, note_suspect


def node(name: str, rank: int, **suspects: int) -> Inventory:
    """One rank that holds snapshots of steps 1, 2, ..., each so suspect."""
    slots = [HeldSlot(rank, 3, int(step[1:]), 2, 9, None, suspect) for step, suspect in suspects.items()]
    return Inventory(node=name, host=name.upper(), slots=tuple(slots), members=(Member(3, rank),))


@pytest.mark.parametrize(
    ("a", "b", "odd"),
    [
        ({"_1": 0, "_2": 2}, {"_1": 0, "_2": 0}, "a"),
        ({"_1": 0, "_2": 2, "_3": 2}, {"_1": 0, "_2": 0, "_3": 2}, "a"),  # from there it spread
        ({"_1": 0, "_2": 0}, {"_1": 0, "_2": 2}, "b"),
        ({"_2": 2}, {"_2": 2}, None),
        ({"_2": 1}, {"_2": 0}, None),  # both hold it, and one of them writes it
        ({"_2": 2}, {"_3": 0}, None),  # what the other had then is not known
        ({"_2": 0}, {"_2": 0}, None),
    ],
)
def test_the_node_whose_own_state_alone_was_bad_first(a: dict[str, int], b: dict[str, int], odd: str | None) -> None:
    found = odd_node([node("a", 0, **a), node("b", 1, **b)])
    assert (found and found.node) == odd
    if found is not None:
        assert (found.host, found.ranks, found.identity) == (
            found.node.upper(),
            ("ab".index(found.node),),
            SnapshotId(3, 2),
        )


def test_a_replica_in_the_memory_of_another_node_speaks_for_the_node_of_its_rank() -> None:
    mine, other = node("a", 0, _2=2), node("b", 1, _2=0)
    both = Inventory(node="b", host="B", slots=(*other.slots, *mine.slots), members=other.members)
    found = odd_node([mine, both])
    assert found is not None
    assert found.node == "a"


def test_one_node_alone_is_never_odd() -> None:
    assert odd_node([node("a", 0, _2=2)]) is None


def test_steps_count_once_and_another_node_clears_them(tmp_path: Path) -> None:
    assert bad_numbers(tmp_path) == []
    for step in (7, 7, 31):
        note_bad_numbers(tmp_path, step, is_here=True)
    assert bad_numbers(tmp_path) == [7, 31]
    note_bad_numbers(tmp_path, 40, is_here=False)
    assert bad_numbers(tmp_path) == []


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ([(0, -1)], (3, 4)),
        ([(0, -1), (1, 9)], (3, 4)),  # what was bad was restored
        ([(0, -1), (1, -1), (2, 9)], (3, 4)),
        ([(0, -1), (1, 2)], None),
        ([(0, -1), (1, 2), (2, 9)], None),  # and is forgotten for good
    ],
)
def test_steps_in_which_numbers_became_bad_hold_until_a_start_goes_back_to_before_them(
    ends: list[tuple[int, int]], found: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bad_steps(tmp_path) is None
    monkeypatch.setenv("FLASHCKPT_RESTART", "0")
    for rank, first, last in ((0, 1, 1), (0, 0, 0), (0, 5, 6), (1, 3, 4), (2, 0, 0)):  # two were good again
        monkeypatch.setenv("RANK", str(rank))
        note_suspect(tmp_path, first, last)
    for end in ends:
        end_suspects(tmp_path, *end)
    assert bad_steps(tmp_path) == found
