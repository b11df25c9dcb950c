"""A store that times every part that goes through it, for the tail of the distribution."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from flashckpt.storage.store import Store


@dataclass(frozen=True, slots=True)
class _TimedParts:
    parts: Iterable[memoryview]
    times: list[float]

    def __iter__(self) -> Iterator[memoryview]:
        asked = time.perf_counter()
        for part in self.parts:
            yield part
            now = time.perf_counter()
            self.times.append(now - asked)
            asked = now


class TimedStore:
    """Everything of the store behind it, with the seconds per part noted.

    Attributes:
        written_s: Between one part of an object being handed out and the next being asked for. Backends with parts in
            flight ask ahead, so single values may be near zero; a slow part holds up the one behind it.
        read_s: Of each ranged read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.written_s: list[float] = []
        self.read_s: list[float] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """See Store."""
        times: list[float] = []
        self._store.put_object(key, _TimedParts(parts, times), nbytes)
        with self._lock:
            self.written_s += times

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """See Store."""
        started = time.perf_counter()
        self._store.get_range(key, start, out)
        taken = time.perf_counter() - started
        with self._lock:
            self.read_s.append(taken)


def timed(store: Store) -> tuple[Store, TimedStore]:
    """Return the store as the rest of the program takes it, and the same object with its times."""
    wrapped = TimedStore(store)
    return cast("Store", wrapped), wrapped
