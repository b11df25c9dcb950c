"""What the newest snapshot on this node has and live state has not made yet: memory is reserved for that too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard, split_owner
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.restore.absent_state import absent_state
from flashckpt.restore.source_names import SourceNames
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.state.registry import StateRegistry


def recorded_beside(table: ShardTable, layout: int, directory: JobDirectory, tracked: StateRegistry) -> list[Shard]:
    """Return shards of the newest snapshot that are not among the planned ones: optimizer state, lists of tensors.

    Only a forecast: what the restore then brings is planned when it is there.

    Args:
        table: What memory would be reserved for.
        layout: Its layout hash; where this rank's newest snapshot has the same, there is nothing to add.
        directory: Of the job on this node.
        tracked: The live objects, after `structure`.
    """
    own = [(identity, held) for identity, _, held, *_ in _slots(directory.segments(rank=tracked.world.rank))]
    if own and max(own)[1] == layout:  # the usual restart: without a look at the segments of all other ranks
        return []
    slots = list(_slots(directory.segments()))
    newest = max((identity for identity, *_ in slots), default=None)
    held = [one for one in slots if one[0] == newest]
    mine = [one for one in held if one[1] == tracked.world.rank]
    if not held or any(one[2] == layout for one in mine):
        return []
    labels = {*tracked.modules, *tracked.optimizers, *tracked.objects}
    known = set(table.fqns)
    manifests = list(_manifests(mine or held))
    if mine and manifests and manifests[0].world_size == tracked.world.size:
        held_rows = manifests[0].table
        found = [held_rows.shard(row) for row in range(len(held_rows)) if held_rows.fqn(row) not in known]
        named = [(split_owner(shard.fqn)[0], shard) for shard in found]
        return [shard for fqn, shard in named if fqn.partition(".")[0] in labels and not tracked.exclusion(fqn)]
    state = absent_state(tracked, SourceNames(list(_manifests(held))))
    return [shard for shard in state.shards if shard.fqn not in known]


def _slots(segments: Sequence[Path]) -> Iterator[tuple[SnapshotId, int, int, Path, int]]:
    """Yield (identity, rank, layout hash, segment, slot) of each COMPLETE slot of some segments of this node."""
    for path in segments:
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as segment:
            for slot, header in enumerate(segment.headers()):
                if header.is_complete:
                    yield header.identity, segment.spec.rank, segment.spec.layout_hash, path, slot


def _manifests(slots: Sequence[tuple[SnapshotId, int, int, Path, int]]) -> Iterator[Manifest]:
    for identity, _, _, path, slot in slots:
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as segment:
            pin = segment.pin(slot)
            if pin is not None:
                with pin:
                    manifest = pin.manifest()
                if manifest.identity == identity:
                    yield manifest
