"""A copy that follows behind the persist of the snapshot before it, in the same slot: with two slots there is no other one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from flashckpt.errors import FlashckptError

Ints = npt.NDArray[np.int64]
_POLL_S = 0.002


class StillPersistedError(FlashckptError):
    """The fence came while bytes of the slot were still being persisted: the snapshot is skipped, as if there were no slot."""


class Following:
    """What of a slot may be written while the persister still keeps some of it.

    Args:
        still_read: Returns what is kept, as (start, stop): less each time.
    """

    def __init__(self, still_read: Callable[[], tuple[int, int]]) -> None:
        self._still_read = still_read
        self._is_due = threading.Event()

    def hurry(self) -> None:
        """Give the snapshot up where something is still kept: training is at its fence, and never waits for storage."""
        self._is_due.set()

    def parts(self, offset: Ints, nbytes: Ints) -> Iterator[Ints]:
        """Yield numbers of ranges whose bytes were given back, until all were; at the end nothing of the slot is kept.

        Raises:
            StillPersistedError: It was time for the fence before.
        """
        left = np.arange(len(offset))
        while len(left) or self._still_read() != (0, 0):
            start, stop = self._still_read()
            free = are_free(offset[left], nbytes[left], start, stop)
            if free.any():
                yield left[free]
                left = left[~free]
            elif self._is_due.wait(_POLL_S) and self._still_read() == (start, stop):
                raise StillPersistedError(
                    "the slot is still being persisted",
                    found=f"{stop - start} bytes of it are not durable at the fence",
                    state="That snapshot was skipped; the one before it is intact and training continues.",
                )


def are_free(offset: Ints, nbytes: Ints, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """Return which ranges lie outside [start, stop)."""
    return (offset + nbytes <= start) | (offset >= stop)
