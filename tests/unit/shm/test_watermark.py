"""What all ranks of one node are known to hold, through their rows; between nodes: `test_ack_relay.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm import acks
from flashckpt.shm.acks import SnapshotAcks, combine_acks
from flashckpt.shm.control import Control, RankAcks


@pytest.fixture
def control(shm_dir: Path) -> Control:
    return Control.open(shm_dir / "control", rows=2)


def marks(control: Control, generation: int = 2, restored: Any = None, **world: Any) -> list[SnapshotAcks]:
    sizes = {"world_size": 2, "local_world_size": 2} | world
    return [
        SnapshotAcks(control=control, local_rank=r, rank=r, generation=generation, restored=restored, **sizes)
        for r in range(2)
    ]


def common(mark: SnapshotAcks) -> list[SnapshotId]:
    """Return the snapshots that all ranks hold, newest first."""
    return list(mark.known().common)


def test_nothing_is_common_until_everybody_has_published(control: Any) -> None:
    a, b = marks(control)
    a.publish([SnapshotId(2, 10), SnapshotId(2, 5)])
    assert common(a) == []
    b.publish([SnapshotId(2, 5)])
    assert common(a) == common(b) == [(2, 5)]


def test_a_row_of_a_dead_generation_does_not_count(control: Any) -> None:
    """The previous occupants both held (1, 50); only one of the new ranks has started."""
    for mark in marks(control, generation=1):
        mark.publish([SnapshotId(1, 50)])
    a, _ = marks(control)
    a.publish([SnapshotId(1, 50), SnapshotId(2, 60)])
    assert common(a) == []


def test_a_row_whose_generation_was_set_before_its_list_does_not_count(control: Any) -> None:
    for mark in marks(control, generation=1):
        mark.publish([SnapshotId(1, 50)])
    for i in range(2):
        control.row(i).generation, control.row(i).rank = 2, i
    assert common(marks(control)[0]) == []


def test_ranks_that_lost_different_snapshots_do_not_wait_for_each_other(control: Any) -> None:
    """Two slots; rank 0 discards step 45, rank 1 holds it: without `low_watermark` nobody could ever overwrite."""
    a, b = marks(control)
    a.publish([SnapshotId(2, 40)], low_watermark=SnapshotId(2, 45))
    b.publish([SnapshotId(2, 45), SnapshotId(2, 40)])
    known = b.known()
    assert known.common == ((2, 40),)
    assert known.unrecoverable == {(2, 45)}


def test_what_a_rank_has_not_come_to_yet_is_not_unrecoverable(control: Any) -> None:
    a, b = marks(control)
    a.publish([SnapshotId(2, 40)])
    b.publish([SnapshotId(2, 45), SnapshotId(2, 40)])
    assert b.known().unrecoverable == frozenset()


def test_passing_is_remembered_when_later_lists_are_published(control: Any) -> None:
    a, b = marks(control)
    a.publish([SnapshotId(2, 40)], low_watermark=SnapshotId(2, 45))
    a.publish([SnapshotId(2, 40)])
    b.publish([SnapshotId(2, 45), SnapshotId(2, 40)])
    assert b.known().unrecoverable == {(2, 45)}


def test_the_snapshot_restored_from_counts_as_common_even_on_a_rank_with_an_empty_memory(control: Any) -> None:
    """A replaced node holds nothing; the others may still free what is older than the restore point."""
    a, b = marks(control, restored=(1, 40))
    a.publish([SnapshotId(1, 40), SnapshotId(1, 35)])
    b.publish([])
    assert common(a) == [(1, 40)]
    assert (1, 40) not in a.known().unrecoverable
    b.publish([SnapshotId(2, 45)])
    assert (1, 40) not in a.known().unrecoverable, "never given up before something newer is common"
    assert a.known().common == ((1, 40),)


def test_what_is_known_is_worked_out_once_for_the_same_rows_and_again_for_any_other(
    control: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy thread asks after it has published, so that `step()` finds the answer: of these very rows, never of older ones."""
    asked: list[int] = []

    def counting(held: Any, **rest: Any) -> Any:
        asked.append(len(held))
        return combine_acks(held, **rest)

    monkeypatch.setattr(acks, "combine_acks", counting)
    a, b = marks(control, generation=7)
    for step in (1, 2, 3):
        for mark in (a, b):
            mark.publish([SnapshotId(7, step)])
            a.known()
            assert common(b) == ([(7, step)] if mark is b else []), "the other rank's row counts too"
    assert len(asked) == 6, "once for each publication"
    b.publish([SnapshotId(7, 3)], low_watermark=SnapshotId(7, 4))
    a.publish([SnapshotId(7, 4), SnapshotId(7, 3)])
    assert a.known().unrecoverable == {(7, 4)}


def test_known_of_nobody_is_nothing() -> None:
    assert combine_acks([]).common == ()
    assert combine_acks([None, RankAcks.of([SnapshotId(1, 1)])]).common == ()


def test_an_abandoned_snapshot_is_not_published_even_before_its_slot_is_marked(control: Any) -> None:
    """All ranks hold (1, 30); this life was restored from (1, 10). Were (1, 30) common, (1, 10) could go."""
    a, b = marks(control, restored=(1, 10))
    for mark in (a, b):
        mark.publish([SnapshotId(1, 30), SnapshotId(1, 10)])
    assert common(a) == [(1, 10)]
    assert control.row(0).complete == [(1, 10)]
