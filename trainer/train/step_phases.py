"""Where the time of a step goes, and that of a start until its first step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flashckpt import Checkpointer

PHASES = ("data", "forward", "backward", "sync", "clip", "optimizer", "snapshot", "log")
"""Of a step: see docs/watching.md."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Meeting(Protocol):
    """What a mark waits for while phases are profiled."""

    def settle(self) -> None:
        """Return when the device has done all that it was given."""

    def meet(self) -> None:
        """Return when all ranks are here. Collective."""


class PhaseTimer:
    """Splits a step into phases: the time since the last mark belongs to the phase that is reached.

    So the phases add up to the step. On a GPU the times are those of the training thread, which runs ahead of the device: it
    waits for it where it needs a number, in "sync".

    Attributes:
        meeting: While it is set, a phase is what this rank alone needed for it: the wait for others belongs to none.
    """

    meeting: Meeting | None = None

    def __init__(self) -> None:
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._carried = dict.fromkeys(PHASES, 0.0)
        self._at = time.perf_counter()

    def start(self) -> None:
        """Begin a step, with what was spent `beside` the one before."""
        self._sums, self._carried = self._carried, dict.fromkeys(PHASES, 0.0)
        if self.meeting is not None:
            self.meeting.meet()
        self._at = time.perf_counter()

    def reach(self, phase: str, *, alone: bool = False) -> None:
        """Count the time since the last mark as `phase`, one of PHASES.

        Args:
            phase: What ends here.
            alone: Other ranks reach this mark at other times, or not at all.
        """
        if self.meeting is not None:
            self.meeting.settle()
        now = time.perf_counter()
        self._sums[phase] += now - self._at
        if self.meeting is not None and not alone:
            self.meeting.meet()
            now = time.perf_counter()
        self._at = now

    @contextmanager
    def beside(self, phase: str) -> Iterator[None]:
        """Count what is done between steps as `phase` of the next one."""
        began = time.perf_counter()
        yield
        self._carried[phase] += time.perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase of this step so far."""
        return dict(self._sums)


class StartClock:
    """Measures a start from the first moment of this process to the end of its first step, by phase.

    A process that was forked from a warm one begins with its fork. Resolution of the first phase: 10 ms.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {"imports": process_age_s()}
        self._at: float | None = time.monotonic()

    def reach(self, phase: str) -> None:
        """Count the time since the last mark as `phase`; does nothing after `finish`."""
        if self._at is not None:
            now = time.monotonic()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._at
            self._at = now

    def finish(self, how: str) -> str | None:
        """End with the phase "first step" and return a line about all; None after the first time.

        Args:
            how: "cold", or what was restored.
        """
        if self._at is None:
            return None
        self.reach("first step")
        self._at = None
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._seconds.items())
        return f"first step {sum(self._seconds.values()):.2f} s after the process began ({how}): {parts} s"


class FenceClock:
    """Measures how long fences of a Checkpointer hold the training thread of this rank."""

    def __init__(self) -> None:
        self._seen_s = 0.0

    def begin(self) -> None:
        """Begin with another Checkpointer, which counts from zero."""
        self._seen_s = 0.0

    def ms(self, ckpt: Checkpointer) -> float:
        """Return the time since the last call, in ms."""
        before, self._seen_s = self._seen_s, ckpt.stats.get("fence_s", 0.0)
        return max(0.0, self._seen_s - before) * 1e3


def process_age_s() -> float:
    """Return the seconds since this process was started or forked; 0 where /proc does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 -- as in `figures`
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS)
    except (OSError, ValueError, IndexError):
        return 0.0
