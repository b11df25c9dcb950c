"""Skipped snapshots: counted, logged once per run of skips, and retried soon if memory was not ready."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.logs import guarded

_log = guarded(logging.getLogger("flashckpt"))
Identity = SnapshotId


class Skips:
    """The skipped snapshots of one rank in one session.

    Until the session has its first snapshot, a skipped one is retried 1, 2, 4, 8, ... steps later and not only at
    the next regular step: memory that is being prepared is ready soon. The steps are the same on all ranks, so
    that their snapshots are common; a rank that skipped nothing joins if it sees that another rank did.

    Args:
        generation: The session's generation.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._due: int | None = None  # the last regular step at which a snapshot was due
        self._missed = False  # by this rank, at the last attempt
        self._tried = 0
        self._is_common = False
        self._row = 0  # skipped in a row

    def is_retry(self, step: int, *, unrecoverable: Callable[[], Collection[Identity]]) -> bool:
        """Return whether a skipped snapshot is retried at `step`.

        Args:
            step: The step just done.
            unrecoverable: Returns the unrecoverable ids; called rarely.
        """
        if self._due is None or self._is_common:
            return False
        offset = step - self._due
        if offset & (offset - 1):
            return False
        return self._missed or (self._generation, self._tried) in unrecoverable()

    def tried(self, step: int, *, is_due: bool) -> None:
        """Record that a snapshot of `step` is attempted now."""
        self._tried, self._missed = step, False
        if is_due:
            self._due = step

    def saw(self, common: Collection[Identity]) -> None:
        """Record the ids that all ranks hold: once one is of this session, retries end."""
        self._is_common = self._is_common or any(generation == self._generation for generation, _ in common)

    def reopened(self) -> None:
        """Record that the state moved to another segment, whose memory is not ready yet."""
        self._is_common = False

    def skipped(self, step: int, why: str) -> None:
        """Count a skipped snapshot; log the first of several in a row."""
        self._missed = True
        self._row += 1
        if self._row == 1:
            _log.warning("no snapshot of step %d: %s; skipped ones are counted in ckpt.stats", step, why)

    def taken(self, step: int) -> None:
        """End a row of skipped snapshots."""
        if self._row:
            _log.info("snapshots are taken again from step %d on, %d were skipped", step, self._row)
        self._row = 0
