"""The choice of the next slot: what of the memory tier may be overwritten (invariant M1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.superblock import SlotHeader


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
        i
        for i, h in enumerate(headers)
        if i not in pinned
        and (
            (newest_common is not None and h.identity < newest_common)
            or h.identity in unrecoverable
            or (superseded is not None and h.identity <= superseded)
        )
    ]
    return min(old, key=lambda i: (headers[i].identity, i), default=None)
