"""A root in memory that counts the requests which an S3 store would send, for roots of any size."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

from flashckpt.errors import ObjectMissingError
from flashckpt.storage.store import DELETE_BATCH, SWEEP_AGE_S, Names, ObjectInfo, Objects

PAGE = 1000
"""Names in one answer of a listing."""


class RequestStore:
    """Objects in a dict.

    Attributes:
        requests: Requests sent, by kind: "list", "head", "get", "put", "delete".
        most_pages: Pages of the longest listing: they follow one another, whatever else is in flight.
        read: Keys of which bytes or size were asked for.
    """

    url = "counted://root"
    is_conditional = True

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self._sorted: list[str] | None = None  # of all keys, until one comes or goes
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.requests: Counter[str] = Counter()
        self.most_pages = 0
        self.read: list[str] = []

    @property
    def total(self) -> int:
        """All requests."""
        return sum(self.requests.values())

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self.requests["put"] += 1
            self._sorted = None
            self.objects[key] = (bytes(data), time.time())

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            self.requests["put"] += 1
            self._sorted = None
            return self.objects.setdefault(key, (bytes(data), time.time()))[0] is data

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        del nbytes
        self.put(key, b"".join(parts))

    def get(self, key: str) -> bytes:
        with self._lock:
            self.requests["get"] += 1
            self.read.append(key)
            if key not in self.objects:
                raise ObjectMissingError(f"the object {key} is missing")
            return self.objects[key][0]

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        out[:] = self.get(key)[start : start + len(out)]

    def head(self, key: str) -> ObjectInfo | None:
        with self._lock:
            self.requests["head"] += 1
            self.read.append(key)
            return self._info(key) if key in self.objects else None

    def list(self, prefix: str = "") -> Objects:
        with self._lock:
            if self._sorted is None:
                self._sorted = sorted(self.objects)
            first = bisect_left(self._sorted, prefix)
            beyond = bisect_left(self._sorted, prefix + "\U0010ffff")
            found = [self._info(key) for key in self._sorted[first:beyond]]
            self._listed(len(found))
            return found

    def folders(self, prefix: str = "") -> Names:
        with self._lock:
            inside = (key[len(prefix) :] for key in self.objects if key.startswith(prefix))
            found = sorted({key.partition("/")[0] for key in inside if "/" in key})
            self._listed(len(found))
            return found

    def delete(self, key: str) -> None:
        with self._lock:
            self.requests["delete"] += 1
            self._sorted = None
            self.objects.pop(key, None)

    def delete_many(self, keys: Sequence[str]) -> None:
        with self._lock:
            self.requests["delete"] += ceil(len(keys) / DELETE_BATCH)
            self._sorted = None
            for key in keys:
                self.objects.pop(key, None)

    def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> Names:
        del older_than_s
        self.requests["list"] += 1
        return []

    def check(self, *, write: bool = True) -> None:
        del write

    def close(self) -> None:
        pass

    def _info(self, key: str) -> ObjectInfo:
        data, mtime = self.objects[key]
        return ObjectInfo(key=key, nbytes=len(data), mtime=mtime)

    def _listed(self, count: int) -> None:
        pages = max(1, ceil(count / PAGE))
        self.requests["list"] += pages
        self.most_pages = max(self.most_pages, pages)
