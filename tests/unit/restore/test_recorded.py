"""What a restart looks at before it reserves memory, and what it unpacks of what all ranks have published."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from support.memory_tier import FakeJob

from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.planning.inventory import HeldSlot, Inventory, unpack_all
from flashckpt.restore.absent_state import recorded_beside
from flashckpt.shm.segment import Segment
from flashckpt.state.placement import current_world
from flashckpt.state.registry import StateRegistry


def test_a_rank_whose_own_snapshot_has_the_planned_layout_looks_at_no_other_ranks_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(str(tmp_path / "root"), shapes={"w": (8, 4)})
    try:
        job.step(10)
        names = [path.name for path in job.directory.segments()]
        assert len(names) > 1
        with contextlib.closing(Segment.attach(job.directory.segments(rank=0)[0])) as own:
            layout = own.spec.layout_hash
        looked: list[str] = []
        attach = Segment.attach

        def noting(path: Any, **options: Any) -> Segment:
            looked.append(Path(path).name)
            return attach(path, **options)

        monkeypatch.setattr(Segment, "attach", noting)
        tracked = StateRegistry(current_world())
        assert recorded_beside(ShardTable.from_shards([], []), layout, job.directory, tracked) == []
        assert looked == names[:1]
        recorded_beside(ShardTable.from_shards([], []), layout + 1, job.directory, tracked)
        assert set(looked) == set(names)
    finally:
        job.die()


def test_slots_of_a_node_are_unpacked_once_and_all_else_of_every_rank() -> None:
    slots = tuple(HeldSlot(rank, 1, 10, 4, 7, SnapshotId(0, 5)) for rank in range(2))
    published = [Inventory(node=node, slots=slots, need_bytes=i, host=node) for i, node in enumerate("abab")]
    found = unpack_all([one.pack() for one in published])
    assert [one.slots for one in found] == [slots, slots, (), ()]
    assert [(one.node, one.need_bytes, one.host) for one in found] == [(n, i, n) for i, n in enumerate("abab")]
