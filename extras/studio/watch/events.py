"""What happened lately: restores, commits, spikes, evaluations. Written by any thread, read by the display."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from flashckpt.printable import printable

KEPT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line: the step that it is about, and when it was noted, in seconds since the epoch."""

    step: int
    text: str
    time_s: float
    kind: str = ""


class Events:
    """The newest events, at most KEPT."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._turn = threading.Lock()

    def add(self, step: int, text: str, *, kind: str = "") -> None:
        """Note an event; unprintable characters of `text` are shown as escape sequences.

        Args:
            step: That it is about.
            text: One line.
            kind: Of what happens often: the one before it is forgotten.
        """
        event = Event(step=step, text=printable(text), time_s=time.time(), kind=kind)
        with self._turn:
            earlier = [one for one in self._events if kind and one.kind == kind]
            for one in earlier:
                self._events.remove(one)
            self._events.append(event)

    def newest(self, count: int) -> list[Event]:
        """Return the last `count` events, the newest one at the end."""
        with self._turn:
            return list(self._events)[-count:] if count > 0 else []
