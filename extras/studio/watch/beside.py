"""A thread for outputs that may be slow: importing, files, sockets. The step only hands points over."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
LIMIT = 1000
"""Calls that may wait; more are dropped and counted."""


class Beside:
    """Runs calls one after another in one thread. Close it before the process ends.

    Args:
        name: Of the thread and in the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(LIMIT)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)  # a hung server must not keep it
        self._thread.start()

    def do(self, call: Callable[[], object]) -> None:
        """Have `call` run soon; dropped where too many wait."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1

    def close(self, last: Callable[[], object], timeout_s: float) -> bool:
        """Run what waits, then `last`; return whether that was done in time, and log what was lost."""
        end = time.monotonic() + timeout_s
        for call in (last, None):
            try:
                self._calls.put(call, timeout=max(0.0, end - time.monotonic()))
            except queue.Full:
                break
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._dropped:
            logger.warning("%s: %d steps were left out, since it was too slow", self._name, self._dropped)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %g s: its last points may be missing", self._name, timeout_s)
            return False
        return True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("%s failed; training continues", self._name)
