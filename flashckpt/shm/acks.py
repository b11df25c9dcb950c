"""Which snapshots every rank has acknowledged, and which slot may be overwritten for it: invariant M1. Torch-free.

A rank publishes the ids of its COMPLETE slots in its control row. The ranks of its node read it there; when the job
has several nodes, `ack_relay` carries it to the others and what all have acknowledged to this node's control page.
Either way publishing and reading are accesses to mapped memory: they send nothing, and nothing can keep them waiting.

What is read may be out of date, and that is enough: an id goes away only when every rank has acknowledged a newer
one, so the newest id that every rank once published is either still held by all or superseded by a newer
common one.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.snapshot_id import NEVER, SnapshotId
from flashckpt.core.superblock import SlotHeader
from flashckpt.errors import DamagedError
from flashckpt.shm.control import MAX_COMPLETE, Control, ControlView, RankAcks, published_in

# -- What a group of ranks (a node, the whole job) has acknowledged, in one record of bounded size. Pure -----------
#
# Records of groups that do not overlap merge into the record of all of them, in any order and by any number of
# levels: the result says what the ranks' own lists would say. Where a list has to be cut, the record says less,
# never something else: a snapshot that is known too late costs a skip, one that is believed to be common too
# early is lost.

MAX_COMMON, MAX_OTHERS = MAX_COMPLETE, 160
"""Ids in one record: those that the whole group holds, and the others; the newest of each."""
_Ids = tuple[SnapshotId, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAcks:
    """What a group of ranks has acknowledged.

    Attributes:
        is_whole: Whether every rank of the group has published.
        common: Ids that every rank of it holds, newest first; empty unless it is whole.
        lacked: Ids that some rank holds and another does not and never will, newest first.
        open: Ids that some rank holds and that may still become common, newest first.
        low_watermark: The highest of its ranks'.
        listed_above: All ids above this one that a rank holds are listed here; of others nothing is known.
    """

    is_whole: bool
    common: _Ids = ()
    lacked: _Ids = ()
    open: _Ids = ()
    low_watermark: SnapshotId = NEVER
    listed_above: SnapshotId = NEVER

    @classmethod
    def of_rank(cls, published: RankAcks) -> GroupAcks:
        """Return the record of one rank."""
        complete = published.complete
        return cls(
            is_whole=True,
            common=complete,
            low_watermark=published.low_watermark,
            listed_above=complete[-1] if len(complete) >= MAX_COMPLETE else NEVER,
        )

    @property
    def held(self) -> frozenset[SnapshotId]:
        """Every id that is listed."""
        return frozenset((*self.common, *self.lacked, *self.open))

    def lacks(self, identity: SnapshotId) -> bool:
        """Return whether some rank of the group does not hold `identity` and never will."""
        if identity in self.common or identity in self.open:
            return False
        return identity in self.lacked or self.listed_above < identity <= self.low_watermark

    def known(self, restored: SnapshotId | None = None) -> AckedSnapshots:
        """Return what follows for a rank of the job that this record is of.

        Args:
            restored: The snapshot in memory that this generation began with: every rank agreed that it was common.
        """
        common = {*self.common, *([restored] if restored is not None else [])}
        return AckedSnapshots(
            common=tuple(sorted(common, reverse=True)), unrecoverable=frozenset(self.lacked) - {restored}
        )


NOBODY = GroupAcks(is_whole=False)
"""The record of a group of which nothing is known."""


def merge_acks(groups: Iterable[GroupAcks]) -> GroupAcks:
    """Return the record of all groups together; equal records may be given once."""
    parts = list(groups)
    is_whole = bool(parts) and all(part.is_whole for part in parts)
    held = frozenset().union(*(part.held for part in parts))
    common = frozenset[SnapshotId]()
    if is_whole:
        common = frozenset(parts[0].common).intersection(*(part.common for part in parts[1:]))
    others = sorted(held - common, reverse=True)
    listed = sorted(common, reverse=True)
    cut = [*listed[MAX_COMMON:], *others[MAX_OTHERS:]]
    kept = others[:MAX_OTHERS]
    lacked = tuple(identity for identity in kept if any(part.lacks(identity) for part in parts))
    return GroupAcks(
        is_whole=is_whole,
        common=tuple(listed[:MAX_COMMON]),
        lacked=lacked,
        open=tuple(identity for identity in kept if identity not in lacked),
        low_watermark=max((part.low_watermark for part in parts), default=NEVER),
        listed_above=max([NEVER, *cut, *(part.listed_above for part in parts)]),
    )


def node_acks(published: Sequence[RankAcks | None]) -> GroupAcks:
    """Return the record of ranks from their own lists; None stands for a rank that has not published."""
    groups = [NOBODY if one is None else GroupAcks.of_rank(one) for one in published]
    return groups[0] if len(groups) == 1 else merge_acks(groups)


def encode_group(what: GroupAcks) -> bytes:
    """Return 16 bytes per pair: two ids, the counts, then the lists."""
    counts = (int(what.is_whole), len(what.common)), (len(what.lacked), len(what.open))
    pairs = (what.low_watermark, what.listed_above, *counts, *what.common, *what.lacked, *what.open)
    return b"".join(struct.pack("<qq", *pair) for pair in pairs)


@functools.lru_cache(maxsize=64)  # who waits for news reads again and again what it has read before
def decode_group(raw: bytes) -> GroupAcks:
    """Return what `encode_group` wrote.

    Raises:
        ValueError: It wrote something else.
    """
    if len(raw) % 16 or len(raw) < 64:
        raise ValueError(f"{len(raw)} bytes")
    low, above, (whole, common), (lacked, more), *ids = struct.iter_unpack("<qq", raw)
    if min(common, lacked, more) < 0 or common + lacked + more != len(ids):
        raise ValueError(f"{len(ids)} ids, not {common} + {lacked} + {more}")
    found = tuple(map(SnapshotId._make, ids))
    return GroupAcks(
        is_whole=bool(whole),
        common=found[:common],
        lacked=found[common : common + lacked],
        open=found[common + lacked :],
        low_watermark=SnapshotId(*low),
        listed_above=SnapshotId(*above),
    )


class SnapshotAcks:
    """This rank's side: publish what it holds, read what all ranks hold.

    Args:
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
        on_publish: Callable[[], None] | None = None,
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
        held = [i for i in identities if i[0] == self._generation or not is_rolled_back(i, self._line)]
        mine = RankAcks.of(held, self._low_watermark)
        row = self._control.row(self._local_rank)
        if row.generation != self._generation or row.rank != self._rank:
            row.forget()  # the list of the row's previous owner must never be read as ours
            row.rank, row.world_size, row.generation = self._rank, self._world_size, self._generation
        row.publish(mine)
        if self._on_publish is not None:
            self._on_publish()

    def known(self) -> AckedSnapshots:
        """Return what all ranks of this generation hold, and what can never become common; from mapped memory alone."""
        if self._world_size > self._local_world_size:
            return (job_acks(self._control, self._generation) or NOBODY).known(self._restored)
        rows = tuple(map(self._control.acks_bytes, range(self._local_world_size)))
        return _known_from(rows, self._generation, self._restored)


@functools.lru_cache(maxsize=8)  # the copy thread asks after each publication, and `step()` finds the answer
def _known_from(rows: tuple[bytes, ...], generation: int, restored: SnapshotId | None) -> AckedSnapshots:
    """Return what follows from the rows of all ranks: a matter of their bytes alone."""
    return combine_acks([published_in(row, generation) for row in rows], restored=restored)


def rank_acks(control: Control, *, generation: int, rows: int | None = None) -> list[RankAcks | None]:
    """Return what each row has published; None for a row of another generation (a dead previous owner)."""
    count = control.rows if rows is None else rows
    return [published_in(control.acks_bytes(index), generation) for index in range(count)]


def job_acks(control: Control | ControlView, generation: int) -> GroupAcks | None:
    """Return the record of the whole job in the control page; None where there is none of this generation."""
    raw = control.job_acks(generation)
    return None if raw is None else decode_group(raw)


def whole_job(path: Path, generation: int) -> GroupAcks | None:
    """Return the record of all ranks of a generation, by a control file; None unless all have published."""
    try:
        acks = job_acks(ControlView(path), generation)
    except (OSError, DamagedError):
        return None
    return acks if acks is not None and acks.is_whole else None


def combine_acks(held: Sequence[RankAcks | None], *, restored: SnapshotId | None = None) -> AckedSnapshots:
    """Return what follows from the published lists of all ranks; None stands for a rank that has not published.

    `restored` is the snapshot in memory that this generation began with: every rank agreed that it was common.
    """
    return node_acks(held).known(restored)


# -- The choice of the next slot: what of the memory tier may be overwritten (invariant M1) ------------------------


def choose_slot(
    headers: Sequence[SlotHeader],
    *,
    pinned: Collection[int],
    common: Collection[SnapshotId],
    unrecoverable: Collection[SnapshotId] = (),
    superseded: SnapshotId | None = None,
) -> int | None:
    """Return the slot that the next snapshot may overwrite, or None: skip it and count it (invariant M1).

    Called by the rank that owns the slots. Slots without a whole snapshot go first, then the oldest
    COMPLETE one for which every rank is known to hold a newer id.

    Args:
        headers: One per slot.
        pinned: Slots under a reader's lease or being written; never chosen.
        common: Ids that every rank of the job is known to hold COMPLETE.
        unrecoverable: Ids that can never become common (`AckedSnapshots`): they protect nothing.
        superseded: Id of a committed checkpoint this generation was restored from; COMPLETE
            slots at or before it are free.
    """
    free = [i for i, h in enumerate(headers) if i not in pinned and not h.is_complete]
    if free:
        return min(free, key=lambda i: (headers[i].sequence, i))
    newest_common = max(common, default=None)
    old = [
        (identity, i)
        for i, identity in enumerate([h.identity for h in headers])
        if i not in pinned
        and (
            (newest_common is not None and identity < newest_common)
            or identity in unrecoverable
            or (superseded is not None and identity <= superseded)
        )
    ]
    return min(old, default=(None, None))[1]


class GiveBackRate:
    """How fast the persister gives a slot back, so that a snapshot begins to follow behind it only where it will not have to wait.

    What is copied must be copied before the next optimizer step: a snapshot that comes to bytes that are still kept then
    is given up. Nothing is lost by it but the copy; training never waits for storage.
    """

    MARGIN = 0.5
    """Of the time until the fence, so much may pass until all is given back."""

    _since_s: float | None = None

    def whole(self, now_s: float) -> None:
        """Record that no slot is given back in part now."""
        self._since_s = now_s

    def reaches(self, kept: int, nbytes: int, *, now_s: float, window_s: float) -> bool:
        """Return whether the rest will be given back in time.

        Args:
            kept: Bytes that are still kept.
            nbytes: All bytes of the snapshot under persist.
            now_s: Seconds of a clock that never goes back.
            window_s: From now to the fence.
        """
        if self._since_s is None:
            self._since_s = now_s
        return kept * (now_s - self._since_s) <= (nbytes - kept) * window_s * self.MARGIN
