"""Whether a core is free for the copy thread, by what the scheduler let it wait; where none is, copies are made inside `step()`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

_OWN = Path("/proc/thread-self/schedstat")


class CoreTime(NamedTuple):
    """What a thread has had so far, in ns.

    Attributes:
        ran: On a core.
        waited: Ready to run, without one.
    """

    ran: int
    waited: int

    @classmethod
    def now(cls) -> CoreTime | None:
        """Return that of the calling thread; None where the kernel does not count it."""
        try:
            waited = int(_OWN.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return cls(time.thread_time_ns(), waited)  # the file's own time on a core is that of the last tick


class Crowding:
    """Decides where the next snapshot is copied: beside training, or by the training thread where the machine is full.

    With as many computing threads as cores a copy beside them costs what a copy by the training thread costs, and more:
    the scheduler moves threads from core to core, and the slowest rank is the one that it moved last.

    Attributes:
        is_full: Whether the training thread is to copy.
    """

    LEAST_BYTES = 16 << 20
    """Smaller snapshots are over before it matters."""
    IN_A_ROW = 3
    TRIED_AGAIN = 32
    """One in so many snapshots is copied beside training on a machine that was full, to find out whether it still is."""

    def __init__(self) -> None:
        self.is_full = False
        self._crowded = self._since = 0

    def next_here(self, nbytes: int) -> bool:
        """Return whether the training thread copies the snapshot that is about to be copied."""
        if not self.is_full or nbytes < self.LEAST_BYTES:
            return False
        self._since += 1
        return self._since % self.TRIED_AGAIN != 0

    def saw(self, before: CoreTime | None, after: CoreTime | None, nbytes: int) -> bool:
        """Take note of a copy by the copy thread; True if from now on the training thread copies."""
        if before is None or after is None or nbytes < self.LEAST_BYTES:
            return False
        ran, waited = after.ran - before.ran, after.waited - before.waited
        self._crowded = self._crowded + 1 if waited > ran // 2 else 0
        was_full = self.is_full
        self.is_full = self._crowded >= self.IN_A_ROW
        return self.is_full and not was_full
