"""How a start waits for storage that cannot be reached now: all ranks together, with growing pauses, for a bounded time."""

from __future__ import annotations

import contextlib
import logging
import time

from flashckpt import collectives
from flashckpt.logs import guarded
from flashckpt.shm.agent_folder import agent_folder, note_waiting

PATIENCE_S = 60.0
"""Seconds of waiting in one start; then it ends with exit code 41, and dlrun starts the ranks again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0

_log = guarded(logging.getLogger("flashckpt"))


class Patience:
    """The waits of one start. Rank 0's clock counts, so that all ranks decide the same."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None

    def again(self, *, may_pass: bool, why: str) -> bool:
        """Wait a moment and return True where some rank's failure may pass and time is left. Collective.

        Args:
            may_pass: Whether this rank failed by something that may pass.
            why: What to log.
        """
        until = self._until or time.monotonic() + PATIENCE_S
        votes = collectives.all_gather([may_pass, until - time.monotonic()])
        left_s = float(votes[0][1])
        if left_s <= 0 or not any(vote[0] for vote in votes):
            return False
        if may_pass and self._until is None:
            _log.warning("storage cannot be reached, trying again for %.0f s: %s", left_s, why.partition("\n")[0])
        self._until = until
        if (folder := agent_folder()) is not None:
            with contextlib.suppress(OSError):
                note_waiting(folder)
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True
