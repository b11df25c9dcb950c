"""What the checkpoint engine does meanwhile, by its callbacks and counters: no message, no file, no collective. And what happened lately."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.environment import env
from flashckpt.printable import printable

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.report import RestoreReport

KEPT = 16


class EngineWatch:
    """Follows the snapshots and checkpoints of a run, on the rank that reports.

    Attributes:
        snapshot: Step of the newest snapshot of this rank in memory; 0: none.
        committed: Step of the newest checkpoint on storage; 0: none, None: not known yet.
        restarts: How often the run began again, rollbacks included.
        restored: What the last restore did, as an event; "" if the run began without one.

    Args:
        events: Where commits and discarded snapshots are noted.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._known = 0
        self.snapshot = 0
        self.committed: int | None = 0
        self.restarts = env.FLASHCKPT_RESTART
        self.restored = ""

    def attach(self, ckpt: Checkpointer) -> None:
        """Have `ckpt` call this object; before its `restore()`."""
        ckpt.on_snapshot = self._on_snapshot
        ckpt.on_commit = self._on_commit
        ckpt.on_failure = self._on_failure

    def began(self, report: RestoreReport | None) -> None:
        """Take up what `restore()` returned."""
        if report is None:
            return
        self.snapshot = self._known = report.step
        self.committed = report.step if report.tier_bytes.get("storage") else None
        self.restarts = max(self.restarts, report.life - 1)
        self.restored = f"restored from {report.tier}: generation {report.life} begins"

    @property
    def lag(self) -> int | None:
        """Steps that are in memory and not in a checkpoint: what losing the nodes would cost. None: not known yet."""
        return None if self.committed is None else max(0, self.snapshot - self.committed)

    def _on_snapshot(self, step: int) -> None:  # called in the copy thread
        self.snapshot = step

    def _on_commit(self, generation: int, step: int) -> None:
        self.committed = step
        if step > self._known:  # older ones were committed before this restart
            self._events.add(step, f"checkpoint of generation {generation} committed", kind="commit")

    def _on_failure(self, error: Exception) -> None:  # called in the copy thread
        self._events.add(self.snapshot, f"a later snapshot was discarded: {getattr(error, 'problem', error)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line: the step that it is about, and when it was noted, in seconds since the epoch."""

    step: int
    text: str
    time_s: float
    kind: str = ""


class Events:
    """The newest events, at most KEPT: written by any thread, read by the display."""

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
