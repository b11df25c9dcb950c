"""A copy under way, which the training thread joins instead of waiting: on a full machine the copy thread has no core."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from flashckpt.native import SharedCopy


class Offer:
    """What the copy thread of one snapshot lets the training thread take part in.

    Attributes:
        joined_bytes: That the training thread copied.
        joined_cpu_s: That it took.
    """

    def __init__(self) -> None:
        self.joined_bytes, self.joined_cpu_s = 0, 0.0
        self._is_decided, self._copying = threading.Event(), threading.Lock()
        self._shared: SharedCopy | None = None

    @contextlib.contextmanager
    def open(self, shared: SharedCopy) -> Iterator[None]:
        """Let the other thread take rows within; at the end it has left, and what it took is copied."""
        self._shared = shared
        self._is_decided.set()
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Offer nothing more: the copy is done, or there is none to take part in. The other thread has left then."""
        with self._copying:
            self._shared = None
        self._is_decided.set()

    def join(self) -> None:
        """Wait until there is something to copy or nothing any more, and copy until all is taken."""
        self._is_decided.wait()
        with self._copying:
            if self._shared is not None:
                began = time.thread_time()
                self.joined_bytes += self._shared.join()
                self.joined_cpu_s += time.thread_time() - began
