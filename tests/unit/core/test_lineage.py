"""The choice of the restore point: newest common snapshot, never an abandoned one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.lineage import newest

from flashckpt.core.lineage import Generation, SlotRecord, by_preference, common, is_rolled_back, partially_held
from flashckpt.core.snapshot_id import SnapshotId


def record(rank: int, generation: int, step: int, world_size: int = 2, node: int = 0) -> SlotRecord:
    return SlotRecord(rank=rank, node=node, generation=generation, step=step, world_size=world_size)


def test_only_what_every_rank_holds_is_common() -> None:
    records = [record(0, 1, 10), record(0, 1, 15), record(1, 1, 10), record(1, 1, 20)]
    assert common(records) == [(1, 10)]
    assert common([*records, record(1, 1, 15)]) == [(1, 15), (1, 10)]
    assert common([]) == []


def test_the_same_step_of_two_generations_is_never_mixed() -> None:
    assert common([record(0, 1, 10), record(1, 2, 10)]) == []


def test_a_replica_of_one_rank_does_not_stand_for_another() -> None:
    assert common([record(0, 1, 10), record(0, 1, 10, node=1)]) == []


def test_worlds_of_different_size_are_counted_by_their_own() -> None:
    records = [record(r, 1, 10, 2) for r in range(2)] + [record(r, 2, 20, 4) for r in range(4)]
    assert common(records) == [(2, 20), (1, 10)]
    assert common(records, 2) == [(1, 10)]
    assert common([*records[:3]]) == [(1, 10)]


def test_the_highest_generation_wins_over_the_highest_step() -> None:
    assert newest([SnapshotId(1, 900), SnapshotId(2, 30)]) == (2, 30)
    assert newest([]) is None


def test_what_was_abandoned_is_never_chosen_again() -> None:
    """Generation 2 was restored from (1, 20): a late commit of (1, 30) by an old daemon is not chosen."""
    lives = [Generation(number=1), Generation(number=2, parent=SnapshotId(1, 20))]
    assert newest([SnapshotId(1, 20), SnapshotId(1, 30)], lives) == (1, 20)
    assert is_rolled_back(SnapshotId(1, 21), lives)
    assert not is_rolled_back(SnapshotId(1, 20), lives)
    assert not is_rolled_back(SnapshotId(2, 25), lives)


def test_a_generation_between_the_parent_and_its_child_is_abandoned_whole() -> None:
    lives = [
        Generation(number=1),
        Generation(number=2, parent=SnapshotId(1, 20)),
        Generation(number=3, parent=SnapshotId(1, 10)),
    ]
    assert newest([SnapshotId(1, 10), SnapshotId(1, 20), SnapshotId(2, 5), SnapshotId(2, 30)], lives) == (1, 10)


def test_a_claim_alone_hides_nothing() -> None:
    """A generation that died before it had restored, or whose parent is unknown, abandons no snapshot."""
    assert newest([SnapshotId(1, 20)], [Generation(number=1), Generation(number=2), Generation(number=3)]) == (1, 20)


@given(st.data())
def test_along_any_history_the_choice_stays_on_the_line_of_the_living(data: Any) -> None:
    """Replay: each life restores the newest choice; a snapshot off the present line is never chosen later."""
    lives: list[Generation] = []
    held: list[SnapshotId] = []
    line: dict[SnapshotId, bool] = {}
    for generation in range(1, data.draw(st.integers(2, 6))):
        parent = newest(held, lives)
        assert parent is None or line[parent]
        lives.append(Generation(number=generation, parent=parent))
        if parent is not None:  # a fresh start abandons nothing
            for identity in line:
                line[identity] &= identity[0] <= parent[0] and identity[1] <= parent[1]
        step = parent[1] if parent else 0
        for _ in range(data.draw(st.integers(0, 4))):
            step += data.draw(st.integers(1, 3))
            line[SnapshotId(generation, step)] = True
            if data.draw(st.booleans()):
                held.append(SnapshotId(generation, step))
        late = [i for i in line if i not in held]  # daemons of any generation commit late
        held += [i for i in late if data.draw(st.booleans())]


def test_partly_held_is_unfinished_only_while_every_rank_of_that_life_can_be_reached() -> None:
    """A rank that lives on and lacks a snapshot never completed it; one that is lost with its node may have."""
    records = [record(0, 2, 10), record(1, 2, 10), record(0, 2, 15)]
    assert partially_held(records, []) == {(2, 15): True}  # rank 1 is here: it holds step 10
    assert partially_held([record(0, 2, 15)], [(2, 0)]) == {(2, 15): False}
    assert partially_held([record(0, 2, 15)], [(2, 0), (2, 1)]) == {(2, 15): True}
    assert partially_held([record(0, 2, 15)], [(2, 0), (1, 1)]) == {(2, 15): False}  # it was here in an earlier life
    assert partially_held([record(0, 2, 15), record(1, 2, 15)], []) == {}


def test_slots_of_two_worlds_under_one_identity_are_of_no_snapshot() -> None:
    assert partially_held([record(0, 2, 15, 3), record(1, 2, 15, 4)], []) == {}


def test_unfinished_ones_stand_behind_the_next_whole_one_everything_else_newest_first() -> None:
    assert by_preference({SnapshotId(1, 5), SnapshotId(1, 10)}, {SnapshotId(1, 15): True}) == [(1, 10), (1, 15), (1, 5)]
    assert by_preference({SnapshotId(1, 5)}, {SnapshotId(1, 15): False, SnapshotId(1, 10): False}) == [
        (1, 15),
        (1, 10),
        (1, 5),
    ]
    assert by_preference({SnapshotId(1, 5)}, {SnapshotId(2, 15): True, SnapshotId(2, 10): False}) == [
        (2, 10),
        (1, 5),
        (2, 15),
    ]
    assert by_preference(set(), {SnapshotId(2, 15): True, SnapshotId(2, 10): True}) == [(2, 15), (2, 10)]
    assert by_preference({SnapshotId(2, 15)}, {SnapshotId(2, 15): True}) == [(2, 15)]  # partly in memory, and committed
