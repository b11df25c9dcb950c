"""What a group of ranks (a node, the whole job) has acknowledged, in one record of bounded size. Pure.

Records of groups that do not overlap merge into the record of all of them, in any order and by any number of levels: the
result says what the ranks' own lists would say. Where a list has to be cut, the record says less, never something else:
a snapshot that is known too late costs a skip, one that is believed to be common too early is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashckpt.core.snapshot_id import NEVER, SnapshotId
from flashckpt.shm.control import MAX_COMPLETE, RankAcks

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
    return merge_acks(NOBODY if one is None else GroupAcks.of_rank(one) for one in published)


def encode_group(what: GroupAcks) -> bytes:
    """Return 16 bytes per pair: two ids, the counts, then the lists."""
    counts = (int(what.is_whole), len(what.common)), (len(what.lacked), len(what.open))
    pairs = (what.low_watermark, what.listed_above, *counts, *what.common, *what.lacked, *what.open)
    return b"".join(struct.pack("<qq", *pair) for pair in pairs)


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
    found = tuple(map(SnapshotId.of, ids))
    return GroupAcks(
        is_whole=bool(whole),
        common=found[:common],
        lacked=found[common : common + lacked],
        open=found[common + lacked :],
        low_watermark=SnapshotId(*low),
        listed_above=SnapshotId(*above),
    )
