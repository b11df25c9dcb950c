"""Which snapshots every rank has acknowledged: what invariant M1 relies on. Torch-free.

A rank publishes the ids of its COMPLETE slots in its control row. The ranks of its node read it there; when the job
has several nodes, `ack_relay` carries it to the others and what all have acknowledged to this node's control page.
Either way publishing and reading are accesses to mapped memory: they send nothing, and nothing can keep them waiting.

What is read may be out of date, and that is enough: an id goes away only when every rank has acknowledged a newer
one, so the newest id that every rank once published is either still held by all or superseded by a newer
common one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.snapshot_id import NEVER, SnapshotId
from flashckpt.shm.control import Control, RankAcks, published_in
from flashckpt.shm.group_acks import NOBODY, AckedSnapshots, GroupAcks, decode_group, node_acks


class SnapshotAcks:
    """This rank's side: publish what it holds, read what all ranks hold.

    Args:
        control: The node's control file.
        local_rank: This rank's row.
        rank, world_size, generation: This rank's, the worker group's.
        local_world_size: Ranks of this node, rows 0 to local_world_size - 1 of the control file.
        restored: Id of the snapshot *in memory* that this generation was restored from.
        parent: Id this generation was restored from, in memory or on storage; `restored` if not given.
            Snapshots that it rolled back are not published, even before their slots are marked EMPTY.
        on_publish: Called after each publication: wakes the relay, where this rank has it.
    """

    def __init__(
        self,
        *,
        control: Control,
        local_rank: int,
        rank: int,
        world_size: int,
        local_world_size: int,
        generation: int,
        restored: SnapshotId | None = None,
        parent: SnapshotId | None = None,
        on_publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Publishes nothing yet."""
        self._control, self._local_rank, self._local_world_size = control, local_rank, local_world_size
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._restored, self._on_publish = restored, on_publish
        self._line = [Generation(number=generation, parent=parent or restored)]
        self._low_watermark = NEVER

    def publish(self, identities: Iterable[SnapshotId], *, low_watermark: SnapshotId | None = None) -> None:
        """Publish what this rank holds COMPLETE; call after each COMPLETE, discard, skip and rolled-back slot.

        Args:
            identities: Its COMPLETE snapshots.
            low_watermark: The id just discarded or skipped: this rank will complete nothing up to it any more. Without
                it two ranks that lost different snapshots would wait for each other for ever.
        """
        if low_watermark is not None:
            self._low_watermark = max(self._low_watermark, low_watermark)
        mine = RankAcks.of((i for i in identities if not is_rolled_back(i, self._line)), self._low_watermark)
        row = self._control.row(self._local_rank)
        if row.generation != self._generation or row.rank != self._rank:
            row.forget()  # the list of the row's previous owner must never be read as ours
            row.rank, row.world_size, row.generation = self._rank, self._world_size, self._generation
        row.publish(mine)
        self._on_publish()

    def known(self) -> AckedSnapshots:
        """Return what all ranks of this generation hold, and what can never become common; from mapped memory alone."""
        if self._world_size > self._local_world_size:
            return (job_acks(self._control, self._generation) or NOBODY).known(self._restored)
        rows = tuple(self._control.row(index).acks_bytes for index in range(self._local_world_size))
        return _known_from(rows, self._generation, self._restored)


@functools.lru_cache(maxsize=8)  # the copy thread asks after each publication, and `step()` finds the answer
def _known_from(rows: tuple[bytes, ...], generation: int, restored: SnapshotId | None) -> AckedSnapshots:
    """Return what follows from the rows of all ranks: a matter of their bytes alone."""
    return combine_acks([published_in(row, generation) for row in rows], restored=restored)


def rank_acks(control: Control, *, generation: int, rows: int | None = None) -> list[RankAcks | None]:
    """Return what each row has published; None for a row of another generation (a dead previous owner)."""
    count = control.rows if rows is None else rows
    return [published_in(control.row(index).acks_bytes, generation) for index in range(count)]


def job_acks(control: Control, generation: int) -> GroupAcks | None:
    """Return the record of the whole job in the control page; None where there is none of this generation."""
    raw = control.job_acks(generation)
    return None if raw is None else decode_group(raw)


def combine_acks(held: Sequence[RankAcks | None], *, restored: SnapshotId | None = None) -> AckedSnapshots:
    """Return what follows from the published lists of all ranks; None stands for a rank that has not published.

    `restored` is the snapshot in memory that this generation began with: every rank agreed that it was common.
    """
    return node_acks(held).known(restored)
