"""A root for all nodes of a simulation, with everything that object storage does to its clients."""

from __future__ import annotations

import errno
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Any

from flashckpt.errors import DamagedError, ObjectMissingError, RootError, StoreError
from flashckpt.storage.store import DELETE_BATCH, SWEEP_AGE_S, Names, ObjectInfo, Objects
from simulation import memory
from simulation.clock import CLOCK, START_S, Process

_PAGE = 1000


class BrokenSimulation(BaseException):
    """A mistake in the simulation itself."""


@dataclass
class Trouble:
    """What the storage does at present to requests.

    Attributes:
        refuses: Share of requests that fail without effect.
        forgets: Share of changes that take effect and are reported as failed.
        lies: Share of conditional writes that take effect and whose repetition says that the object was there.
        slowness: Factor of latency.
        is_gone: Nothing answers.
        is_denied: Credentials are refused.
        is_full: Nothing can be written.
        lag_s: Seconds that a listing may lag behind.
        room: Bytes that it holds; 0: any number.
        cut: Nodes that cannot reach it.
    """

    refuses: float = 0.0
    forgets: float = 0.0
    lies: float = 0.0
    slowness: float = 1.0
    is_gone: bool = False
    is_denied: bool = False
    is_full: bool = False
    lag_s: float = 0.0
    room: int = 0
    cut: set[int] = field(default_factory=set)


class Bucket:
    """The objects, and what happened to them.

    Attributes:
        objects: Key -> bytes and time of writing.
        trouble: What it does to requests now.
        on_change: Called with (kind, key, bytes before, bytes after) for each change.
        requests: Requests by node.
    """

    def __init__(self, random: Random, latency_s: float) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.shown: dict[str, tuple[tuple[bytes, float], ObjectInfo]] = {}  # as a listing shows each
        self.keys: list[str] = []
        self.trouble = Trouble()
        self.on_change: Callable[[str, str, bytes | None, bytes | None], None] = lambda *_: None
        self.requests: Counter[int] = Counter()
        self.random, self.latency_s = random, latency_s
        self._changed: list[tuple[float, str, bytes | None, float]] = []  # time, key, what was there before

    def set(self, key: str, data: bytes) -> None:
        """Write an object."""
        before = self.objects.get(key)
        self._note(key, before)
        if before is None:
            insort(self.keys, key)
        self.objects[key] = data, CLOCK.scheduler.now
        self._tell("put", key, None if before is None else before[0], data)

    def drop(self, key: str) -> None:
        """Remove an object if it is there."""
        if (before := self.objects.get(key)) is None:
            return
        self._note(key, before)
        del self.objects[key]
        self.shown.pop(key, None)
        del self.keys[bisect_left(self.keys, key)]
        self._tell("delete", key, before[0], None)

    def drop_all(self, prefix: str) -> None:
        """Remove all objects below a prefix."""
        for key in self.below(prefix):
            self.drop(key)

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(len(raw) for raw, _ in self.objects.values())

    def _tell(self, *change: Any) -> None:
        try:
            self.on_change(*change)
        except Exception as error:  # a mistake of the simulation: the product must not take it for its own
            raise BrokenSimulation(repr(error)) from error

    def below(self, prefix: str) -> list[str]:
        """Return the keys below a prefix, as they are."""
        first = bisect_left(self.keys, prefix)
        return self.keys[first : bisect_left(self.keys, prefix + "\U0010ffff", first)]

    def listed(self, prefix: str) -> dict[str, tuple[bytes, float]]:
        """Return the objects below a prefix as a listing shows them: perhaps as they were a moment ago."""
        found = {key: self.objects[key] for key in self.below(prefix)}
        if self.trouble.lag_s:
            since = CLOCK.scheduler.now - self.random.uniform(0.0, self.trouble.lag_s)
            for time_s, key, data, mtime in reversed(self._changed):
                if time_s <= since:
                    break
                if key.startswith(prefix):
                    if data is None:
                        found.pop(key, None)
                    else:
                        found[key] = data, mtime
        return found

    def _note(self, key: str, before: tuple[bytes, float] | None) -> None:
        if self.trouble.lag_s:
            data, mtime = before or (None, 0.0)
            self._changed.append((CLOCK.scheduler.now, key, data, mtime))
        elif self._changed:
            self._changed.clear()


class SimStore:
    """One process's connection to the root: the product's `Store`."""

    is_conditional = True

    def __init__(self, bucket: Bucket, process: Process, is_reachable: Callable[[int], bool]) -> None:
        self.bucket, self._process, self._is_reachable = bucket, process, is_reachable
        self.asked = 0  # requests of this connection
        self.url = f"sim://root/{memory.pid_of(process)}"  # what a process remembers of it goes with the process

    # -- what every request goes through ---------------------------------------------------------------------

    def _ask(self, *, count: int = 1, writes: bool = False) -> bool:
        """Travel there; raise what fails without effect; return whether the answer gets lost after the effect."""
        bucket, trouble, random = self.bucket, self.bucket.trouble, self.bucket.random
        bucket.requests[self._process.node] += count
        self.asked += count
        self._step()
        CLOCK.scheduler.sleep(bucket.latency_s * trouble.slowness * (0.5 + random.random()))
        if trouble.is_gone or self._process.node in trouble.cut:
            CLOCK.scheduler.sleep(random.choice((0.5, 10.0)))
            raise StoreError("the storage does not answer", found="time-out")
        if trouble.is_denied:
            raise RootError("the root cannot be used", found="403")
        if random.random() < trouble.refuses:
            raise StoreError("the storage refuses", found="503 SlowDown")
        if writes and (trouble.is_full or 0 < trouble.room <= bucket.nbytes):
            raise StoreError("no room", found="ENOSPC") from OSError(errno.ENOSPC, "no space left")
        return writes and random.random() < trouble.forgets

    def _step(self) -> None:
        self._process.passes_point()
        CLOCK.scheduler.check()

    def _answer(self, *, lost: bool = False) -> None:
        self._step()
        trouble = self.bucket.trouble
        CLOCK.scheduler.sleep(self.bucket.latency_s * trouble.slowness * (0.5 + self.bucket.random.random()))
        if lost:
            raise StoreError("the storage did not answer", found="time-out after the request was sent")

    # -- the interface ---------------------------------------------------------------------------------------

    def check(self, *, write: bool = True) -> None:
        self._ask(writes=write)

    def put(self, key: str, data: bytes) -> None:
        lost = self._ask(writes=True)
        self.bucket.set(key, bytes(data))
        self._answer(lost=lost)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        lost = self._ask(writes=True)
        created = key not in self.bucket.objects
        if created:
            self.bucket.set(key, bytes(data))
        self._answer(lost=lost)
        return created and self.bucket.random.random() >= self.bucket.trouble.lies

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        del nbytes
        lost = self._ask(writes=True)
        whole = b""
        for part in parts:
            self._step()
            CLOCK.scheduler.sleep(self.bucket.latency_s * self.bucket.trouble.slowness)
            whole += bytes(part)
        self.bucket.set(key, whole)
        self._answer(lost=lost)

    def get(self, key: str) -> bytes:
        self._ask()
        if key not in self.bucket.objects:
            raise ObjectMissingError(f"the object {key} is missing")
        found = self.bucket.objects[key][0]
        self._answer()
        return found

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        raw = self.get(key)[start : start + len(out)]
        if len(raw) != len(out):
            raise DamagedError(f"the object {key} is truncated")
        out[:] = raw

    def list(self, prefix: str = "") -> Objects:
        self._ask()
        found = self.bucket.listed(prefix)
        self._count(len(found))
        self._answer()
        return [self._info(key, found[key]) for key in sorted(found)]

    def folders(self, prefix: str = "") -> Names:
        self._ask()
        inside = (key[len(prefix) :] for key in self.bucket.listed(prefix))
        found = sorted({key.partition("/")[0] for key in inside if "/" in key})
        self._count(len(found))
        self._answer()
        return found

    def head(self, key: str) -> ObjectInfo | None:
        self._ask()
        found = self.bucket.objects.get(key)
        info = None if found is None else self._info(key, found)
        self._answer()
        return info

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        lost = self._ask(count=ceil(len(keys) / DELETE_BATCH), writes=False)
        for key in keys:
            self.bucket.drop(key)
        self._answer(lost=lost)

    def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> Names:
        del older_than_s
        self._ask()
        return []

    def close(self) -> None:
        pass

    def _info(self, key: str, found: tuple[bytes, float]) -> ObjectInfo:
        known = self.bucket.shown.get(key)  # many nodes list the same objects
        if known is None or known[0] is not found:
            self.bucket.shown[key] = known = found, ObjectInfo(key=key, nbytes=len(found[0]), mtime=START_S + found[1])
        return known[1]

    def _count(self, found: int) -> None:
        pages = max(0, ceil(found / _PAGE) - 1)
        self.bucket.requests[self._process.node] += pages
        self.asked += pages
