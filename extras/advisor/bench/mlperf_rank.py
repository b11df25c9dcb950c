"""One process of `flashckpt bench job --like mlperf`: streams its part of a checkpoint to a store, and reads it back.

Run as `python -m flashckpt.bench.mlperf_rank` by `flashckpt.bench.mlperf_run`. Nothing of a checkpoint is held: the
bytes are made as they go, other ones in every page and in every checkpoint, and each page is looked at as it comes back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.bench.data import fill
from flashckpt.bench.host import drop_caches, evict
from flashckpt.bench.worker import Command, serve
from flashckpt.errors import DamagedError
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import PART_BYTES, PARTS_IN_FLIGHT, Store

_CACHESTAT = 451  # the same number on every architecture
_PAGE = 4096


class PageStream:
    """The bytes of one object, made again by every iteration: a store may send them twice.

    Args:
        ring: Memory for more parts than a store has in flight.
        nbytes: Of the object.
        seed: Which object this is.
        noted: Receives the size of each part that was taken.
    """

    def __init__(self, ring: memoryview, nbytes: int, seed: int, noted: Callable[[int], None]) -> None:
        self._ring, self._nbytes, self._seed, self._noted = ring, nbytes, seed, noted

    def __iter__(self) -> Iterator[memoryview]:
        slots = len(self._ring) // PART_BYTES
        for number, at in enumerate(range(0, self._nbytes, PART_BYTES)):
            part = self._ring[number % slots * PART_BYTES :][: min(PART_BYTES, self._nbytes - at)]
            stamps(part)[:] = _stamp(self._seed, number)
            yield part
            self._noted(len(part))


def stamps(part: memoryview) -> Any:
    """Return the first word of each whole page of a part."""
    return np.frombuffer(part[: len(part) // _PAGE * _PAGE], np.uint64)[:: _PAGE // 8]


def _stamp(seed: int, part: int) -> Any:
    return np.uint64(seed << 24 | part)


def unsynced_bytes(path: Path) -> int | None:
    """Return the bytes of a file that the kernel has not written to its device; None where it does not say."""
    with path.open("rb") as file:
        span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(_CACHESTAT, file.fileno(), ctypes.byref(span), ctypes.byref(found), 0):
            if ctypes.get_errno() in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                return None
            raise OSError(ctypes.get_errno(), "cachestat", str(path))
    return int(found[1] + found[2]) * mmap.PAGESIZE


def device_bytes() -> int:
    """Return what this process has had read from devices and servers so far, by the kernel's count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


class StorageRank:
    """Writes and reads the part of one rank.

    Args:
        store: Where.
        directory: The same as a directory, None where it is none.
        rank: Which.
        nbytes: Of its part of each checkpoint.
        clock: For tests: the seconds that everything is measured with.
    """

    def __init__(
        self,
        store: Store,
        directory: Path | None,
        rank: int,
        nbytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.directory, self.rank, self.nbytes, self._clock = store, directory, rank, nbytes, clock
        slots = min(2 * PARTS_IN_FLIGHT, -(-nbytes // PART_BYTES))
        self._ring = memoryview(mmap.mmap(-1, slots * PART_BYTES))
        fill(self._ring, "float32", rank)

    def commands(self) -> dict[str, Command]:
        """Return what the parent may order."""
        return {"write": self.write, "make_cold": self.make_cold, "read": self.read}

    def key(self, number: int) -> str:
        """Return the name of this rank's object of a checkpoint."""
        return f"checkpoint-{number:02d}/rank-{self.rank:05d}"

    def write(self, number: int) -> Mapping[str, Any]:
        """Write its part of a checkpoint until the store says that it is durable."""
        parts: list[tuple[float, int]] = []
        began = self._clock()
        stream = PageStream(
            self._ring, self.nbytes, self._seed(number), lambda n: parts.append((self._clock() - began, n))
        )
        self.store.put_object(self.key(number), stream, self.nbytes)
        seconds = self._clock() - began
        unsynced = None if self.directory is None else unsynced_bytes(self.directory / self.key(number))
        return {"seconds": seconds, "nbytes": self.nbytes, "parts": parts, "unsynced_bytes": unsynced}

    def make_cold(self, checkpoints: int, drop: bool) -> Mapping[str, Any]:
        """Put what this rank wrote out of the page cache; return the largest share that is left."""
        if self.directory is None:
            return {"cached_share": None, "dropped": False}
        left = max(evict(self.directory / self.key(number)) for number in range(checkpoints))
        return {"cached_share": left, "dropped": drop and drop_caches()}

    def read(self, number: int) -> Mapping[str, Any]:
        """Read its part back, several ranges at once, and look at every page.

        Raises:
            DamagedError: The store gave back other bytes.
        """
        parts = list(enumerate(range(0, self.nbytes, PART_BYTES)))
        buffers = [memoryview(mmap.mmap(-1, PART_BYTES)) for _ in range(PARTS_IN_FLIGHT)]
        before, began = device_bytes(), self._clock()

        def one(worker: int) -> None:
            for index, at in parts[worker::PARTS_IN_FLIGHT]:
                part = buffers[worker][: min(PART_BYTES, self.nbytes - at)]
                self.store.get_range(self.key(number), at, part)
                if (stamps(part) != _stamp(self._seed(number), index)).any():
                    raise DamagedError(
                        f"{self.store.url} gave back other bytes of {self.key(number)} than were written"
                    )

        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            list(pool.map(one, range(PARTS_IN_FLIGHT)))
        seconds = self._clock() - began
        got = None if self.directory is None else device_bytes() - before
        return {"seconds": seconds, "nbytes": self.nbytes, "device_bytes": got}

    def _seed(self, number: int) -> int:
        return number << 16 | self.rank


def _rank(config: Mapping[str, Any]) -> Mapping[str, Command]:
    store = open_store(config["url"], **config["options"])
    directory = None if config["directory"] is None else Path(config["directory"])
    return StorageRank(store, directory, int(config["rank"]), int(config["nbytes"])).commands()


if __name__ == "__main__":
    serve(_rank)
