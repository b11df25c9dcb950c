"""One segment on its way into use: made or adopted, its pages reserved by a thread beside training, given back in the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flashckpt import accelerator
from flashckpt.logs import guarded
from flashckpt.shm.segment import Segment

_log = guarded(logging.getLogger("flashckpt"))


class Reservation:
    """A segment, and what of it may be written already.

    Args:
        pin_for: Index of the CUDA device to page-lock the slots for, or None.

    Attributes:
        segment: None while it is still to be made, and after the end.
        stop: Set to end the thread early.
        ready, first: Set once all of it, or one slot, is reserved and page-locked; both where that failed.
        error: What the thread raised.
        seconds: How long the reservation took.
    """

    def __init__(self, *, pin_for: int | None) -> None:
        self.segment: Segment | None = None
        self.stop, self.ready, self.first = threading.Event(), threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.seconds = 0.0
        self._pin_for = pin_for
        self._page_locked: list[tuple[int, int]] = []  # address, index of the device
        self._usable: set[int] = set()
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
        view: Any = np.frombuffer(segment.buffer, np.uint8)
        address, spec = int(view.ctypes.data), segment.spec

        def note(nbytes: int) -> None:
            """Page-lock each slot as soon as it is reserved: the first snapshot waits for no other slot."""
            for slot in sorted({*range(spec.slots)} - self._usable):
                if spec.data_at(slot) + spec.data_capacity <= nbytes and not self.stop.is_set():
                    self._page_lock(address + spec.data_at(slot), spec.data_capacity)
                    self._usable.add(slot)
                    self.first.set()

        segment.reserve(self.stop, progress=note)

    def _page_lock(self, address: int, nbytes: int) -> None:
        if self._pin_for is None:
            return
        if accelerator.register(address, nbytes, index=self._pin_for):
            self._page_locked.append((address, self._pin_for))
        else:
            _log.warning("the snapshots' memory could not be page-locked: copies from the device are slower")
            self._pin_for = None  # the limit that refused this slot refuses the others

    def unreserved(self) -> set[int]:
        """Return the slots whose memory is not whole, or not page-locked, yet."""
        if self.segment is None or self.ready.is_set():
            return set()
        return {*range(self.segment.spec.slots)} - self._usable

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
        while self._page_locked:
            address, index = self._page_locked.pop()
            accelerator.unregister(address, index=index)
        segment, self.segment = self.segment, None
        if segment is not None:
            if unlink_unused and not any(header.is_complete for header in segment.headers()):
                segment.unlink()
            segment.close()
