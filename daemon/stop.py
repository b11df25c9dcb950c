"""Stopping together: which step to stop after, and signals that wait until the agent can act on them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Sequence

from flashckpt.control import ControlRow
from flashckpt.daemon.watch import JobWatch

MAX_AHEAD = 1000
"""Most steps between the highest one done and the one to stop after."""

_log = logging.getLogger("flashckpt.dlrun")


def stop_step(steps: Sequence[int], *, step_s: float, margin_s: float = 0.1) -> int:
    """Return the step after which every rank stops: beyond the highest one, so that none has passed it.

    Ranks read the number after they have published their step. One step beyond the highest is enough
    where a step takes longer than the write of the number; faster ones get `margin_s` seconds of steps.

    Args:
        steps: The step each rank completed last.
        step_s: Seconds per step; 0 where it is not known yet.
        margin_s: Seconds in which no rank may reach the chosen step.
    """
    ahead = 1 if step_s <= 0 else min(MAX_AHEAD, max(1, math.ceil(margin_s / max(step_s, 1e-6))))
    return max(steps) + ahead


class AgreedStop:
    """One stop of this node's ranks after one step, from the request to the exit code."""

    def __init__(self, watch: JobWatch, grace_s: float) -> None:
        self._watch, self._grace_s = watch, grace_s
        self._until: float | None = None
        self._step = -1

    @property
    def is_under_way(self) -> bool:
        """Whether the ranks were told to stop."""
        return self._until is not None

    @property
    def is_late(self) -> bool:
        """Whether the ranks have not stopped within the grace time."""
        return self._until is not None and time.monotonic() > self._until

    def begin(self, rows: Sequence[ControlRow], *, ranks: int, step_s: float) -> int | None:
        """Tell the ranks to stop; returns the step, or None if they cannot be told.

        Args:
            rows: The control rows of this node's live ranks.
            ranks: How many ranks this node has: one without a row knows nothing of flashckpt.
            step_s: Seconds per step, 0 where unknown.
        """
        control = self._watch.control()
        steps = [row.step for row in rows if row.step >= 0]
        if control is None or len(steps) < ranks:
            return None
        self._step = stop_step(steps, step_s=step_s)
        control.stop_after = self._step
        self._until = time.monotonic() + self._grace_s
        return self._step

    def has_stopped(self, rows: Sequence[ControlRow]) -> bool:
        """After a clean end: whether the ranks ended because they were asked to. Takes the request back."""
        control = self._watch.control()
        if self._until is None or control is None:
            return False
        control.stop_after = -1
        return max((row.step for row in rows), default=-1) >= self._step


class StopSignals:
    """Collects stop signals while the agent supervises; `fd` becomes readable with the first of them.

    Outside of supervision (a rendezvous that may last minutes) a signal is handed to `interrupt` at once,
    which raises. Signals after the first never interrupt anything: what is being flushed is flushed.
    """

    def __init__(self, names: str, interrupt: Callable[[int], None]) -> None:
        self._names, self._interrupt = names, interrupt
        self._old: dict[int, object] = {}
        self.fd, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.received: list[int] = []
        self.supervising = False

    def install(self) -> None:
        """Take over the named signals; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not handled: the agent does not run in the main thread")
            return
        for name in self._names.split(","):
            number = getattr(signal, name.strip(), None)
            if number is None:
                _log.warning("unknown signal %r in --signals-to-handle", name)
                continue
            try:
                self._old[number] = signal.signal(number, self._on_signal)
            except (OSError, ValueError) as error:
                _log.warning("signal %s cannot be handled: %s", name, error)

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        self.received.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"s")
        if len(self.received) == 1 and not self.supervising:
            self._interrupt(number)

    def drain(self) -> None:
        """Empty the wake pipe, so that the next wait sleeps again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned before
        self._old.clear()
        os.close(self.fd)
        os.close(self._wake)
