"""`flashckpt bench store`: one process, one place: raw, as flashckpt writes, cold reads, small publishes, commits.

Everything goes through `flashckpt.storage.store`, so the figures are those of the backend that a run would use; only the
floor (plain buffered writes of a file) does not.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.bench.data import fill
from flashckpt.bench.host import drop_caches, evict, peak_memory
from flashckpt.bench.layouts import uniform
from flashckpt.bench.measure import cpu_seconds, interleave, median, summarise
from flashckpt.bench.probe import capabilities, fsync_verdict, timed
from flashckpt.bench.scratch import Scratch
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import PersistOptions, commit, persist_slot
from flashckpt.core.manifest import Manifest, ShardTable
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import place
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.store import PART_BYTES, PARTS_IN_FLIGHT

GENERATION = 1


class FakePinnedSlot:
    """One rank's snapshot of `nbytes` bytes; `change` makes it the next one."""

    def __init__(self, nbytes: int) -> None:
        self.shards = uniform(nbytes, 0, 1)
        placement = place(self.shards)
        self.offsets: list[int] = placement.offsets.tolist()
        self._map = mmap.mmap(-1, placement.total)
        self.data = memoryview(self._map)
        self._table = ShardTable.from_shards(self.shards, placement.offsets)
        self._step = 0
        fill(self.data, "float32", 1)

    @property
    def nbytes(self) -> int:
        """Used bytes."""
        return len(self.data)

    def view(self) -> memoryview:
        """The bytes where they lie."""
        return self.data

    def check_whole(self) -> None:
        """Nobody else can take a page of it."""

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy from byte `start` into `out`."""
        out[:] = self.data[start : start + len(out)]

    def change(self) -> None:
        """Become another snapshot: another step, and one other byte on every page."""
        self._step += 1
        np.frombuffer(self.data, np.uint8)[::4096] += 1
        rows = zip(self._table.byte_offset.tolist(), self._table.nbytes.tolist(), strict=True)
        self._digests = np.concatenate([chunk_digests(self.data[at : at + size]) for at, size in rows])

    @property
    def step(self) -> int:
        """The step of the snapshot that is held."""
        return self._step

    def manifest(self) -> Manifest:
        """Return what is held now."""
        return Manifest(
            job="bench",
            generation=GENERATION,
            step=self._step,
            parent=None,
            world_size=1,
            rank=0,
            writers=[0],
            coordinates={},
            table=self._table,
            digests=self._digests,
        )

    def is_current(self) -> bool:
        """Nobody else writes to it."""
        return True


Progress = Callable[[str, int, int | None], None]
"""Called with the current phase, the bytes so far, and the total."""
SMALL_BYTES = 4096


class RetryCounter(logging.Handler):
    """Warnings of the stores, and how often they tried again."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.warnings: list[str] = []
        self.retries = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what matters of one record."""
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())
        elif "attempt" in str(record.msg):
            self.retries += 1


@contextmanager
def listening() -> Iterator[RetryCounter]:
    """Listen to what the stores log meanwhile."""
    said, logger = RetryCounter(), logging.getLogger("flashckpt")
    level = logger.level
    logger.addHandler(said)
    logger.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        logger.removeHandler(said)
        logger.setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeasurement:
    """What a run brought.

    Attributes:
        object_bytes: Bytes of one object.
        seconds: Values by name, one per round (small publishes: one each).
        parts: Seconds of each part written and read.
        cold: How caches were emptied before reads, and the largest share that was still cached.
        capabilities: What the place can do, see `probe.capabilities`.
        backend: Class of the store.
        warnings: What the stores said; retries: how often they tried again.
    """

    object_bytes: int
    seconds: Mapping[str, Sequence[float]]
    parts: Mapping[str, Sequence[float]]
    cold: Mapping[str, Any]
    capabilities: Mapping[str, Any]
    backend: str
    warnings: Sequence[str]
    retries: int


def results(run: StoreMeasurement) -> dict[str, Any]:
    """Return the document of a run."""
    seconds, size = run.seconds, run.object_bytes
    rates = {
        name: summarise([size / value for value in seconds[key]])
        for name, key in (
            ("floor write", "floor_write_s"),
            ("raw write", "raw_write_s"),
            ("flashckpt durable", "durable_s"),
            ("floor read", "floor_read_s"),
            ("raw read", "raw_read_s"),
            ("flashckpt restore", "restored_s"),
        )
        if key in seconds
    }
    return {
        "object_bytes": size,
        "bytes_per_s": rates,
        "summary_s": {name: summarise(values) for name, values in seconds.items() if name.endswith("_s")},
        "publishes_per_s": 1 / median(seconds["publish_s"]),
        "parts_ms": {
            name: summarise([1e3 * value for value in values]) for name, values in run.parts.items() if values
        },
        "parts_s": run.parts,
        "write_cpu_s_per_gb": summarise([1e9 * value / size for value in seconds["write_cpu_s"]]),
        "read_cpu_s_per_gb": summarise([1e9 * value / size for value in seconds["read_cpu_s"]]),
        "peak_extra_bytes": max(seconds["peak_extra_bytes"]),
        "cold": dict(run.cold),
        "capabilities": dict(run.capabilities),
        "backend": run.backend,
        "warnings": list(run.warnings),
        # obstore tries again inside its own library and does not say how often
        "retries": None if run.backend == "ObstoreStore" else run.retries,
        "rates": {
            "write_bytes_per_s": size / median(seconds["durable_s"]),
            "read_bytes_per_s": size / median(seconds["restored_s"]),
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRun:
    """What to run: bytes per object, measured rounds, small objects per round, compression, caches of the machine.

    `keep` leaves the objects of the last round.
    """

    size_bytes: int
    rounds: int = 5
    small: int = 20
    compression: str = "off"
    drop_caches: bool = False
    keep: bool = False


def need_bytes(run: StoreRun) -> int:
    """Return the most bytes that lie on the storage at any time."""
    return 3 * run.size_bytes + run.small * SMALL_BYTES * 4 + (16 << 20)


class StoreBench:
    """The cases of one run; each method that `cases` names is one case.

    Args:
        run: What to run.
        scratch: Where.
        progress: Receives the current phase and the bytes so far.
    """

    def __init__(self, run: StoreRun, scratch: Scratch, progress: Progress) -> None:
        self.run, self.scratch, self._progress = run, scratch, progress
        self.store, self.times = timed(scratch.open())
        self.slot = FakePinnedSlot(run.size_bytes)
        self.seconds: dict[str, list[float]] = {}
        self.parts: dict[str, list[float]] = {"write": [], "read": []}
        self.cached: list[float] = []
        self.how = "not possible: caches are the server's"
        self._out = memoryview(mmap.mmap(-1, len(self.slot.data)))
        self._blank()  # touched once, here: page faults are not the storage's
        self._round = self._bytes = 0
        self._total = run.rounds * len(self.slot.data) * (2 if scratch.directory is None else 3)

    def cases(self) -> dict[str, Callable[[], Any]]:
        """Return the cases that this place allows, by name."""
        cases: dict[str, Callable[[], Any]] = {"raw": self.raw, "flashckpt": self.flashckpt, "small": self.small}
        return {**cases, "floor": self.floor} if self.scratch.directory is not None else cases

    def raw(self) -> None:
        """One object, streamed and read back in ranges by several threads, without digests."""
        key = f"raw-{self._next('raw')}"
        data, parts = self.slot.data, range(0, len(self.slot.data), PART_BYTES)
        views = [data[at : at + PART_BYTES] for at in parts]
        with self._clock("raw_write_s"):
            self.store.put_object(key, views, len(data))
        self._cool()
        self._progress("raw read", self._bytes, self._total)
        with self._clock("raw_read_s"), ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            done = pool.map(lambda at: self.store.get_range(key, at, self._out[at : at + PART_BYTES]), parts)
            for _ in done:
                pass
        self._compare(key, len(self.slot.data))
        if not self._stays("raw_write_s"):
            self.store.delete(key)

    def flashckpt(self) -> None:
        """One checkpoint of one rank: verified packs, index, commit; list, manifest, verified read."""
        self._next("flashckpt write")
        self.slot.change()
        prefix = prefix_of(GENERATION, self.slot.step)
        self.times.written_s, self.times.read_s = [], []
        cpu = cpu_seconds()
        with peak_memory() as peak, self._clock("durable_s"):
            with self._clock("persist_s"):
                persist_slot(self.slot, self.store, prefix, options=PersistOptions(compression=self.run.compression))
            with self._clock("commit_s"):
                commit(self.store, prefix, [0])
        self._note("write_cpu_s", cpu_seconds() - cpu)
        self._note("peak_extra_bytes", peak.extra_bytes)
        self._cool()
        self._progress("flashckpt read", self._bytes, self._total)
        targets = [
            Target(shard=shard, buffer=self._out[at : at + shard.nbytes])
            for shard, at in zip(self.slot.shards, self.slot.offsets, strict=True)
        ]
        cpu = cpu_seconds()
        with self._clock("restored_s"):
            with self._clock("list_s"):
                self.store.folders()
            with self._clock("manifest_s"):
                manifest = read_manifest(self.store, prefix)
            counts = execute_reads(targets, [StorageSource(self.store, manifest, prefix)])
        self._note("read_cpu_s", cpu_seconds() - cpu)
        self._compare(prefix, sum(shard.nbytes for shard in self.slot.shards))
        for name in ("read_s", "verify_s", "copy_s"):
            self._note(f"restore_{name}", getattr(counts, name))
        self.parts["write"] += self.times.written_s
        self.parts["read"] += self.times.read_s
        if not self._stays("durable_s"):
            for info in self.store.list(f"{prefix}/"):
                self.store.delete(info.key)

    def small(self) -> None:
        """Small durable publishes, conditional ones, and a listing of them."""
        number = self._next("small publishes")
        body = os.urandom(SMALL_BYTES)
        for i in range(self.run.small):
            with self._clock("publish_s"):
                self.store.put(f"small-{number}/p{i:05d}", body)
        for i in range(max(1, self.run.small // 2)):
            with self._clock("commit_small_s"):
                created = self.store.put_if_absent(f"small-{number}/c{i:05d}", body)
            if not created:
                raise FlashckptError(f"{self.store.url} refused a conditional write of a name that was free")
        with self._clock("list_small_s"):
            found = self.store.list(f"small-{number}/")
        for info in found:
            self.store.delete(info.key)

    def floor(self) -> None:
        """A plain file: buffered writes of 16 MiB, fsync of file and folder; the same read back cold."""
        assert self.scratch.directory is not None
        path = self.scratch.directory / f"floor-{self._next('floor')}"
        with self._clock("floor_write_s"), path.open("xb", buffering=0) as file:
            for at in range(0, len(self.slot.data), PART_BYTES):
                file.write(self.slot.data[at : at + PART_BYTES])
            os.fsync(file.fileno())
            _sync(path.parent)
        self._cool()
        with self._clock("floor_read_s"), path.open("rb", buffering=0) as file:
            for at in range(0, len(self._out), PART_BYTES):
                file.readinto(self._out[at : at + PART_BYTES])
        path.unlink()

    def _next(self, what: str) -> int:
        self._round += 1
        self._progress(what, self._bytes, self._total)
        return self._round

    def _stays(self, name: str) -> bool:
        """Tell whether what the case that notes `name` wrote in this round is kept."""
        return self.run.keep and len(self.seconds[name]) == self.run.rounds

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._note(name, time.perf_counter() - started)

    def _note(self, name: str, value: float) -> None:
        self.seconds.setdefault(name, []).append(value)

    def _cool(self) -> None:
        """Put what was written out of the page cache; note what share of it is still there."""
        self._bytes += len(self.slot.data)
        if self.scratch.directory is None:
            return
        files = [path for path in self.scratch.directory.rglob("*") if path.is_file()]
        self.cached.append(max((evict(path) for path in files), default=0.0))
        dropped = self.run.drop_caches and drop_caches()
        self.how = "files evicted by posix_fadvise, checked by mincore" + (
            ", caches of the machine dropped" if dropped else ""
        )

    def _blank(self) -> None:
        np.frombuffer(self._out, np.uint8)[:] = 0

    def _compare(self, key: str, nbytes: int) -> None:
        """Check what was read, bit for bit, and forget it."""
        if self._out[:nbytes] != self.slot.data[:nbytes]:  # the last page is padded
            raise DamagedError(f"{self.store.url} gave back other bytes of {key} than were written")
        self._blank()


def run_store(run: StoreRun, scratch: Scratch, progress: Progress) -> dict[str, Any]:
    """Run every case in turns and return the results."""
    bench = StoreBench(run, scratch, progress)
    with listening() as said:
        found = capabilities(bench.store, scratch)
        bench.slot.change()
        interleave(bench.cases(), run.rounds, warmup=0)
    bench.store.close()
    size = len(bench.slot.data)
    return results(
        StoreMeasurement(
            object_bytes=size,
            seconds=bench.seconds,
            parts=bench.parts,
            cold={"how": bench.how, "cached_share": max(bench.cached, default=None)},
            capabilities={**found, "fsync": fsync_verdict(scratch.directory, bench.seconds, size)},
            backend=type(scratch.open()).__name__,
            warnings=said.warnings,
            retries=said.retries,
        )
    )


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
