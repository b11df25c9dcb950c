"""What happened lately: restores, commits, spikes, evaluations. Written by any thread, read by the display."""

from __future__ import annotations

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


class Events:
    """The newest events, at most KEPT."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)

    def add(self, step: int, text: str) -> None:
        """Note an event; unprintable characters of `text` are shown as escape sequences."""
        self._events.append(Event(step=step, text=printable(text), time_s=time.time()))  # atomic

    def newest(self, count: int) -> list[Event]:
        """Return the last `count` events, the newest one at the end."""
        events = self._events.copy()  # atomic, unlike iterating while another thread appends
        return list(events)[-count:] if count > 0 else []
