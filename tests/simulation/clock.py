"""Virtual time: events in their order, and processes whose synchronous code waits in it. One runs at a time.

Code of the product that waits (for storage, for a lock, for a thread) runs in a *fiber*: a greenlet, which goes back to the
events where it waits. Nothing depends on the machine: the order of events is that of their virtual times, and of their
numbers where these are equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from greenlet import greenlet

START_S = 1_750_000_000.0
"""Unix time at which every simulation begins."""


SPINS = 20_000
"""Waits of one process at one instant after which it is said to spin."""


class Killed(BaseException):
    """The process that runs here was killed: nothing of it happens any more."""


class Spins(BaseException):
    """A process waits again and again, and no time passes."""


class Process:
    """One process: what is killed, paused, and holds locks.

    Attributes:
        name: For people.
        node: Index of its node.
        alive: Until it is killed.
        paused_until: It does nothing before.
        held: What it does then.
        deadly_in: Crash points and requests until it is killed, or until `at_point` is called; None: never.
        on_death: Called once it is dead.
    """

    def __init__(self, name: str, node: int) -> None:
        self.name, self.node = name, node
        self.alive = True
        self.paused_until = 0.0
        self.held: list[Callable[[], None]] = []
        self.deadly_in: int | None = None
        self.at_point: Callable[[], None] | None = None
        self.on_death: list[Callable[[], None]] = []
        self.fibers: set[Fiber] = set()
        self._instant, self._waits = -1.0, 0

    def passes_point(self) -> None:
        """Count a crash point or a request."""
        if self.deadly_in is None:
            return
        self.deadly_in -= 1
        if self.deadly_in < 0:
            if (work := self.at_point) is None:
                raise Killed
            self.deadly_in = self.at_point = None
            work()

    def waits(self, now: float) -> None:
        """Count a wait that begins; Spins where too many begin at one instant."""
        self._waits = self._waits + 1 if now == self._instant else 1
        self._instant = now
        if self._waits > SPINS:
            raise Spins(f"{self.name} has waited {SPINS} times at one instant")


class Fiber:
    """Code of one process that may wait."""

    __slots__ = ("begun_s", "done", "greenlet", "process", "waiting", "work")

    def __init__(self, process: Process, work: Callable[[], None], begun_s: float) -> None:
        self.process, self.work, self.begun_s = process, work, begun_s
        self.greenlet: Any = None  # until it begins
        self.done = self.waiting = False


class Scheduler:
    """All events of one simulation.

    Attributes:
        now: Virtual seconds since its start.
        process: Whose code runs now; None for that of the world.
        events: How many were run.
    """

    def __init__(self) -> None:
        self.now, self.events = 0.0, 0
        self.process: Process | None = None
        self._heap: list[tuple[float, int, Callable[[], None] | Fiber]] = []
        self._number = 0
        self._until = 0.0
        self._fiber: Fiber | None = None

    # -- events ---------------------------------------------------------------------------------------------

    def after(self, delay_s: float, work: Callable[[], None], process: Process | None = None) -> None:
        """Call `work` later, as `process`: not at all where that is dead by then, after its pause where it is paused."""
        self._number += 1
        entry = (self.now + max(delay_s, 0.0), self._number, self._bound(work, process))
        heapq.heappush(self._heap, entry)

    def _resume_after(self, delay_s: float, fiber: Fiber) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(delay_s, 0.0), self._number, fiber))

    def _bound(self, work: Callable[[], None], process: Process | None) -> Callable[[], None]:
        if process is None:
            return work

        def run() -> None:
            if not process.alive:
                return
            if process.paused_until > self.now:
                process.held.append(run)
                return
            self.call_as(process, work)

        return run

    def call_as(self, process: Process, work: Callable[[], Any]) -> Any:
        """Call at once, as a process; None where it is killed meanwhile."""
        before, self.process = self.process, process
        try:
            return work()
        except Killed:
            if self._fiber is not None and self._fiber.process is process:
                raise
            self.kill(process)
            return None
        finally:
            self.process = before

    def run(self, until_s: float) -> None:
        """Run all events up to a time; raise what one of them raised."""
        self._until = until_s
        heap = self._heap
        try:
            while heap and heap[0][0] <= self._until:
                self.now, _, work = heapq.heappop(heap)
                self.events += 1
                if isinstance(work, Fiber):
                    if not work.done:
                        self._continue_fiber(work)
                else:
                    self.process = self._fiber = None
                    work()
        finally:
            self.process = self._fiber = None
        self.now = max(self.now, self._until)

    def stop(self) -> None:
        """End `run` behind the event that happens now."""
        self._until = self.now

    # -- fibers ---------------------------------------------------------------------------------------------

    def spawn(self, process: Process, work: Callable[[], None], delay_s: float = 0.0) -> Fiber:
        """Start code of a process that may wait."""
        fiber = Fiber(process, work, self.now)
        process.fibers.add(fiber)
        self._resume_after(delay_s, fiber)
        return fiber

    def sleep(self, delay_s: float) -> None:
        """Wait, in a fiber; raises Killed where its process dies meanwhile. Elsewhere time stands still."""
        fiber = self._fiber
        if fiber is None:
            return
        self.check()
        end = self.now + max(delay_s, 0.0)
        if (not self._heap or self._heap[0][0] > end) and end <= self._until:
            self.now = end  # nobody else has anything to do until then
        else:
            self._resume_after(delay_s, fiber)
            self._wait(fiber)
        self._stand_still(fiber)
        self.check()

    def block(self) -> None:
        """Wait until `wake`."""
        fiber = self._fiber
        assert fiber is not None, "only a fiber waits"
        self.check()
        fiber.waiting = True
        self._wait(fiber)
        self._stand_still(fiber)
        self.check()

    def pause(self, process: Process, seconds: float) -> None:
        """Let a process do nothing for some time; 0 ends its pause."""
        process.paused_until = self.now + seconds
        self.after(seconds, lambda: self._continue(process))

    def _continue(self, process: Process) -> None:
        if process.paused_until <= self.now:
            held, process.held = process.held, []
            for work in held:
                self.after(0.0, work)

    def _stand_still(self, fiber: Fiber) -> None:
        """Wait for the end of a pause."""
        while fiber.process.alive and fiber.process.paused_until > self.now:
            fiber.process.held.append(lambda: self._resume_after(0.0, fiber))
            self._wait(fiber)

    def wake(self, fiber: Fiber) -> None:
        """Continue a fiber that blocks."""
        if fiber.waiting:
            fiber.waiting = False
            self._resume_after(0.0, fiber)

    @property
    def fiber(self) -> Fiber | None:
        """The fiber that runs now."""
        return self._fiber

    def check(self) -> None:
        """Raise Killed where the process that runs is dead."""
        fiber = self._fiber
        process = self.process if fiber is None else fiber.process
        if process is not None and not process.alive:
            raise Killed
        if fiber is not None:
            fiber.process.waits(self.now)

    def kill(self, process: Process) -> None:
        """Kill a process: its fibers unwind without any effect, then its locks go."""
        if not process.alive:
            return
        process.alive = False
        process.paused_until = 0.0
        process.held.clear()
        for fiber in list(process.fibers):
            if fiber is not self._fiber:
                fiber.waiting = False
                self._resume_after(0.0, fiber)
        for work in process.on_death:
            work()

    def _wait(self, fiber: Fiber) -> None:
        """Let the others run until this fiber is due."""
        process = self.process
        fiber.greenlet.parent.switch()
        self._fiber, self.process = fiber, process

    def _continue_fiber(self, fiber: Fiber) -> None:
        """Run a fiber until it waits, or ends."""
        self._fiber, self.process = fiber, fiber.process
        if fiber.greenlet is None:
            fiber.greenlet = greenlet(self._perform)
            fiber.greenlet.switch(fiber)
        else:
            fiber.greenlet.switch()

    def _perform(self, fiber: Fiber) -> None:
        """Run a fiber to its end."""
        try:
            if fiber.process.alive:
                fiber.work()
        except Killed:
            self.kill(fiber.process)
        finally:
            fiber.done = True
            fiber.process.fibers.discard(fiber)

    def close(self, processes: list[Process]) -> None:
        """End all fibers."""
        for process in processes:
            process.on_death.clear()
            self.kill(process)
        self._heap = [one for one in self._heap if isinstance(one[2], Fiber)]
        heapq.heapify(self._heap)
        self.run(float("inf"))


# -- What the product takes for the standard library -----------------------------------------------------------------


class Clock:
    """In place of the module `time`: each node's own clock, which an operator may set."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.offset_s: dict[int, float] = {}

    def time(self) -> float:
        """Return unix seconds as the node that asks takes them."""
        process = self.scheduler.process
        return START_S + self.scheduler.now + (self.offset_s.get(process.node, 0.0) if process is not None else 0.0)

    def time_ns(self) -> int:
        """Return the same in nanoseconds."""
        return int(self.time() * 1e9)

    def monotonic(self) -> float:
        """Return seconds of a clock that nobody sets."""
        return 1000.0 + self.scheduler.now

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        """Return the same in nanoseconds."""
        return int(self.monotonic() * 1e9)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.scheduler.sleep(seconds)


CLOCK = Clock()
