"""How long each phase of a restore took, and what no phase should pay for."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import defaultdict
from collections.abc import Iterator


class Phases:
    """Seconds by phase, of the clock and of the processor (all threads of this process). Call it around a phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count a `with` block under a name."""
        began, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
            self.cpu_seconds[name] += time.process_time() - cpu

    def report(self) -> dict[str, float]:
        """Return the seconds so far, with those since the start as `total`."""
        return {**self.seconds, "total": time.perf_counter() - self._started}


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from running.

    A hundred thousand new tensors wake it again and again, and each time it goes over everything that lives. What is no
    longer referenced is freed all the same.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
