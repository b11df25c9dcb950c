"""Snapshots that could not be taken: counted, logged once per row of them, and tried again soon where memory came late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.logs import guarded

_log = guarded(logging.getLogger("flashckpt"))
Identity = SnapshotId


class Skips:
    """What one rank skipped in one session.

    Until the session has its first snapshot, a missed one is tried again 1, 2, 4, 8, ... steps later and not only at
    the next regular step: memory that is still being made is there soon. The steps are the same on all ranks, so
    that what they take is common; a rank that missed nothing takes part where it sees that another one did.

    Args:
        generation: Of the session.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._due: int | None = None  # the last regular step at which a snapshot was due
        self._missed = False  # by this rank, at the last try
        self._tried = 0
        self._is_common = False
        self._row = 0  # skipped one after the other

    def is_retry(self, step: int, *, unrecoverable: Callable[[], Collection[Identity]]) -> bool:
        """Return whether a snapshot that was missed is tried again at `step`.

        Args:
            step: The step just done.
            unrecoverable: Returns the ids that some rank holds and that can never become common; asked rarely.
        """
        if self._due is None or self._is_common:
            return False
        offset = step - self._due
        if offset & (offset - 1):
            return False
        return self._missed or (self._generation, self._tried) in unrecoverable()

    def tried(self, step: int, *, is_due: bool) -> None:
        """Note that a snapshot of `step` is tried now."""
        self._tried, self._missed = step, False
        if is_due:
            self._due = step

    def saw(self, common: Collection[Identity]) -> None:
        """Note the ids that all ranks hold: once one is of this session there is nothing to hurry for."""
        self._is_common = self._is_common or any(generation == self._generation for generation, _ in common)

    def reopened(self) -> None:
        """Note that the state has moved to another segment, whose memory is still to be made."""
        self._is_common = False

    def skipped(self, step: int, why: str) -> None:
        """Count a skipped snapshot; log it if it is the first of a row."""
        self._missed = True
        self._row += 1
        if self._row == 1:
            _log.warning("no snapshot of step %d: %s; skipped ones are counted in ckpt.stats", step, why)

    def taken(self, step: int) -> None:
        """End a row of skipped snapshots."""
        if self._row:
            _log.info("snapshots are taken again from step %d on, %d were skipped", step, self._row)
        self._row = 0
