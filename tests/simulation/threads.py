"""What the product takes for threads, locks and pools: fibers of the process that makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from simulation.clock import CLOCK, Fiber, Process

FOR_EVER_S = 1e9
"""A time-out that nobody waits for."""


class Lock:
    """In place of `threading.Lock`, for fibers."""

    def __init__(self) -> None:
        self._holder: Fiber | None = None
        self._is_held = False
        self._queue: list[Fiber] = []

    def __enter__(self) -> Any:
        scheduler = CLOCK.scheduler
        while self._is_held:
            assert scheduler.fiber is not None
            self._queue.append(scheduler.fiber)
            scheduler.block()
        self._is_held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        queue, self._queue = self._queue, []
        for fiber in queue:
            CLOCK.scheduler.wake(fiber)


class Thread:
    """In place of `threading.Thread`: a fiber of the process that starts it."""

    def __init__(self, *, target: Callable[..., None], name: str = "", daemon: bool = True, args: Any = ()) -> None:
        del name, daemon
        self._target, self._args = target, args
        self._fiber: Fiber | None = None
        self._ended = Event()
        self._process = CLOCK.scheduler.process

    def start(self) -> None:
        """Begin."""
        assert self._process is not None
        self._fiber = CLOCK.scheduler.spawn(self._process, self._run)

    def _run(self) -> None:
        self._target(*self._args)
        self._ended.set()

    def join(self, limit_s: float = 1e9) -> None:
        """Wait for its end."""
        if CLOCK.scheduler.fiber is not None:
            self._ended.wait(limit_s)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._fiber is not None and not self._fiber.done


class Event:
    """In place of `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Fiber] = []

    def set(self) -> None:
        """Set it."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            CLOCK.scheduler.wake(fiber)

    def clear(self) -> None:
        """Take it back."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def wait(self, limit_s: float) -> bool:
        """Wait for it."""
        scheduler = CLOCK.scheduler
        scheduler.check()
        end, fiber = scheduler.now + limit_s, scheduler.fiber
        while not self._is_set and scheduler.now < end:
            assert fiber is not None, "only a fiber waits"
            self._waiting.append(fiber)
            if limit_s < FOR_EVER_S:
                scheduler.after(limit_s, lambda: self._late(fiber))
            scheduler.block()
        return self._is_set

    def _late(self, fiber: Fiber) -> None:
        if fiber in self._waiting:
            self._waiting.remove(fiber)
            CLOCK.scheduler.wake(fiber)


class Threading:
    """In place of the module `threading`."""

    Lock, Thread, Event = Lock, Thread, Event
    get_ident = staticmethod(threading.get_ident)


class Pool:
    """In place of `ThreadPoolExecutor`, for work that begins now and is waited for later: each piece is a fiber."""

    def __init__(self, *_: object, **__: object) -> None:
        self._process = CLOCK.scheduler.process
        self._open: set[Future[Any]] = set()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin."""
        future: Future[Any] = Future()
        self._open.add(future)
        assert self._process is not None

        def run() -> None:
            try:
                future.set_result(work(*arguments))
            except Exception as error:  # noqa: BLE001 -- as the real one
                future.set_exception(error)
            self._open.discard(future)
            wakers.get(self._process, lambda: None)()

        CLOCK.scheduler.spawn(self._process, run)
        return future

    def shutdown(self) -> None:
        """Wait for all of it."""
        while self._open and CLOCK.scheduler.fiber is not None:
            CLOCK.scheduler.sleep(0.05)


wakers: dict[Process | None, Callable[[], None]] = {}
"""What is to be told when background work of a process has ended."""


class Burst:
    """In place of `ThreadPoolExecutor` where all is waited for at once: requests that are under way together."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, work: Callable[[Any], Any], items: Any) -> list[Any]:
        """Do all of it; raise the first error."""
        return [one.result() for one in [self.submit(work, item) for item in items]]

    @staticmethod
    def submit(work: Callable[..., Any], *arguments: Any) -> Promise:
        """Begin."""
        return Promise(partial(work, *arguments))


class Promise:
    """In place of a `Future`: `result` waits for its fiber; where none runs, all is done at once."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._is_over = work, Event()
        self._found: tuple[Any, Exception | None] = None, None
        if CLOCK.scheduler.fiber is None:
            self._do()
        else:
            CLOCK.scheduler.spawn(CLOCK.scheduler.fiber.process, self._do)

    def _do(self) -> None:
        try:
            self._found = self._work(), None
        except Exception as error:  # noqa: BLE001 -- as the real one
            self._found = None, error
        self._is_over.set()

    def result(self) -> Any:
        """Wait for its end."""
        self._is_over.wait(1e9)
        found, error = self._found
        if error is not None:
            raise error
        return found
