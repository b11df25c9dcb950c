"""One segment on its way into use: made or adopted, its pages reserved by a thread beside training, given back in the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from flashckpt.logs import guarded
from flashckpt.shm.segment import Segment
from flashckpt.snapshot import device

_log = guarded(logging.getLogger("flashckpt"))


class Reservation:
    """A segment, and what of it may be written already.

    Args:
        pin_for: Index of the CUDA device to page-lock the slots for, or None.

    Attributes:
        segment: None while it is still to be made, and after the end.
        stop: Set to end the thread early.
        ready, first: Set once all of it, or one slot, is reserved; both where that failed.
        error: What the thread raised.
        seconds: How long the reservation took.
    """

    def __init__(self, *, pin_for: int | None) -> None:
        self.segment: Segment | None = None
        self.stop, self.ready, self.first = threading.Event(), threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.seconds = 0.0
        self._pin_for, self._registered = pin_for, 0
        self._reserved_bytes = 0
        self._thread: threading.Thread | None = None

    def start(self, obtain: Callable[[], Segment | None]) -> None:
        """Begin the thread.

        Args:
            obtain: Called there first; returns the segment, or None where it was stopped.
        """
        self._thread = threading.Thread(target=self._work, args=(obtain,), name="flashckpt-reserve", daemon=True)
        self._thread.start()

    def _work(self, obtain: Callable[[], Segment | None]) -> None:
        started = time.perf_counter()
        try:
            segment = obtain()
            if segment is not None:
                self.segment = segment
                self._reserve(segment)
        except Exception as error:  # noqa: BLE001 -- raised to the training thread at the next step()
            self.error = error
        self.seconds = time.perf_counter() - started
        self.ready.set()
        self.first.set()

    def _reserve(self, segment: Segment) -> None:
        segment.reserve(self.stop, progress=self._note)
        if self._pin_for is None or self.stop.is_set():
            return
        mapping = np.frombuffer(segment.buffer, np.uint8)  # the mapping itself is what CUDA page-locks
        if device.register(int(mapping.ctypes.data), mapping.nbytes, index=self._pin_for):
            self._registered = int(mapping.ctypes.data)
        else:
            _log.warning("the snapshots' memory could not be page-locked: copies from the device are slower")

    def _note(self, nbytes: int) -> None:
        self._reserved_bytes = nbytes
        assert self.segment is not None
        if self._pin_for is None and len(self.unreserved()) < self.segment.spec.slots:
            self.first.set()

    def unreserved(self) -> set[int]:
        """Return the slots whose memory is not whole yet."""
        if self.segment is None or self.ready.is_set():
            return set()
        spec = self.segment.spec
        return {slot for slot in range(spec.slots) if spec.data_at(slot) + spec.data_capacity > self._reserved_bytes}

    @property
    def is_ready(self) -> bool:
        """Whether all of it is reserved; raises what the thread raised."""
        if self.error is not None:
            raise self.error
        return self.ready.is_set()

    def end(self, *, unlink_unused: bool = False) -> None:
        """Stop reserving, wait for the thread and give the segment up.

        Args:
            unlink_unused: Remove its file if it never held a snapshot; otherwise file and snapshots stay.
        """
        self.stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._registered:
            device.unregister(self._registered)
            self._registered = 0
        segment, self.segment = self.segment, None
        if segment is not None:
            if unlink_unused and not any(header.is_complete for header in segment.headers()):
                segment.unlink()
            segment.close()
