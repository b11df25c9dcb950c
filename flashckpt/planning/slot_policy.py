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
