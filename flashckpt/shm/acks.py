"""Which snapshots every rank has acknowledged: what invariant M1 relies on. Torch-free.

A rank publishes the ids of its COMPLETE slots: in its control row for the ranks of its node and, when the job
has several nodes, under a key of the generation in the process group's store, from the copy thread. What is
read may be out of date, and that is enough: an id goes away only when every rank has acknowledged a newer
one, so the newest id that every rank once published is either still held by all or superseded by a newer
common one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashckpt.core.generation import Generation
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.snapshot_id import NEVER, SnapshotId
from flashckpt.shm.control import MAX_COMPLETE, Control, RankAcks, decode_acks, encode_acks

_PREFIX = "flashckpt/complete"
_LENGTHS = range(16, 16 * (MAX_COMPLETE + 1) + 1, 16)
"""Bytes of what a rank publishes: the low watermark, and at most MAX_COMPLETE identities."""


class GroupStore(Protocol):
    """The part of a c10d store that is used; `check` does not wait for a key."""

    def set(self, key: str, value: Any, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return a key's value (waits for it)."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""


class SnapshotAcks:
    """This rank's side: publish what it holds, read what all ranks hold.

    Args:
        control: The node's control file, or None without one.
        local_rank: This rank's row.
        rank, world_size, generation: This rank's, the worker group's.
        local_world_size: Ranks of this node, rows 0 to local_world_size - 1 of the control file.
        store: The process group's store; None if all ranks are on this node.
        restored: Id of the snapshot *in memory* that this generation was restored from.
        parent: Id this generation was restored from, in memory or on storage; `restored` if not given.
            Snapshots that it rolled back are not published, even before their slots are marked EMPTY.
    """

    def __init__(
        self,
        *,
        control: Control | None,
        local_rank: int,
        rank: int,
        world_size: int,
        local_world_size: int,
        generation: int,
        store: GroupStore | None = None,
        restored: SnapshotId | None = None,
        parent: SnapshotId | None = None,
    ) -> None:
        """Publishes nothing yet."""
        self._control, self._local_rank, self._local_world_size = control, local_rank, local_world_size
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._store = store if world_size > local_world_size else None
        self._restored = restored
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
        if self._control is not None:
            row = self._control.row(self._local_rank)
            if row.generation != self._generation or row.rank != self._rank:
                row.forget()  # the list of the row's previous owner must never be read as ours
                row.rank, row.world_size, row.generation = self._rank, self._world_size, self._generation
            row.publish(mine)
        if self._store is not None:
            self._store.set(self._key(self._rank), encode_acks(mine))

    def known(self) -> AckedSnapshots:
        """Return what all ranks of this generation hold, and what can never become common."""
        held = self._from_store() if self._store is not None else self._from_control()
        return combine_acks(held, restored=self._restored)

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/g{self._generation}/r{rank}"

    def _from_store(self) -> list[RankAcks | None]:
        assert self._store is not None
        keys = [self._key(rank) for rank in range(self._world_size)]
        # check first: get() waits for a key that is not set yet
        return [_acks_of(bytes(self._store.get(key))) if self._store.check([key]) else None for key in keys]

    def _from_control(self) -> list[RankAcks | None]:
        assert self._control is not None
        return rank_acks(self._control, generation=self._generation, rows=self._local_world_size)


def _acks_of(raw: bytes) -> RankAcks | None:
    """Return what a rank has published in the store; None of what no rank writes: nothing is known of it then."""
    return decode_acks(raw) if len(raw) in _LENGTHS else None


def rank_acks(control: Control, *, generation: int, rows: int | None = None) -> list[RankAcks | None]:
    """Return what each row has published; None for a row of another generation (a dead previous owner)."""
    found: list[RankAcks | None] = []
    for index in range(control.rows if rows is None else rows):
        row = control.row(index)
        found.append(row.published if row.generation == generation else None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedSnapshots:
    """What one rank knows about all ranks.

    Attributes:
        common: Ids that every rank holds (or that this generation was restored from), newest first.
        unrecoverable: Identities that some rank holds and that can never become common: another rank is
            them and does not hold them. They protect nothing; without them two ranks that lost
            different snapshots would each keep the slots the other waits for.
    """

    common: tuple[SnapshotId, ...] = ()
    unrecoverable: frozenset[SnapshotId] = frozenset()


def combine_acks(held: Sequence[RankAcks | None], *, restored: SnapshotId | None = None) -> AckedSnapshots:
    """Return what follows from the published lists of all ranks; None stands for a rank that has not published.

    `restored` is the snapshot in memory that this generation began with: every rank agreed that it was common.
    """
    lists = [part for part in held if part is not None]
    everything = {identity for part in lists for identity in part.complete}
    unrecoverable = {i for i in everything if i != restored and any(p.lacks(i) for p in lists)}
    common: set[SnapshotId] = {restored} if restored is not None else set()
    if lists and len(lists) == len(held):
        common |= set.intersection(*(set(part.complete) for part in lists))
    return AckedSnapshots(common=tuple(sorted(common, reverse=True)), unrecoverable=frozenset(unrecoverable))
