"""One rank of `persist.py`: the same bytes in a COMPLETE slot and as torch tensors over it, written and read on command.

The rank processes write and read for the peers; rank 0's process also plays flashckpt's daemon, which writes the slots of all ranks
of its node, and the raw limit with the same number of threads.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashckpt.bench.data import fill as fill_data
from flashckpt.bench.host import evict
from flashckpt.bench.measure import timed
from flashckpt.bench.worker import serve
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import PersistOptions, commit, persist_slot
from flashckpt.core.manifest import Manifest, ShardTable, encode_manifest
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import Shard, layout_hash, place
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.shm.segment import Pin, Segment, SegmentSpec
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

EXTENT = 16 << 20
TENSORS = 100
WRITERS_AT_ONCE = 4  # as in the daemon
WRITE_THREADS = 2  # per file, as flashckpt writes
READ_THREADS = 4
PAGE = 4096
PREFIX = prefix_of(1, 1)


class State:
    """One rank's share: a COMPLETE slot, tensors that are views of it, and touched memory to read into."""

    def __init__(self, nbytes: int, rank: int, ranks: int, folder: Path) -> None:
        size = max(1, nbytes // TENSORS // 4)
        self.shards = [
            Shard(fqn=f"rank{rank}.{n:03}", dtype="float32", global_shape=(size,), offsets=(0,), lengths=(size,))
            for n in range(TENSORS)
        ]
        placement = place(self.shards)
        spec = SegmentSpec(
            job="bench",
            root_digest=0,
            rank=rank,
            slots=2,
            manifest_capacity=1 << 20,
            data_capacity=int(placement.total),
            layout_hash=layout_hash(self.shards),
        )
        self.segment = Segment.create(folder / f"r{rank}.seg", spec)
        offsets = placement.offsets.tolist()
        request = SnapshotRequest(
            id=SnapshotId(1, 1), job="bench", rank=rank, world_size=ranks, coordinates={}, parent=None, persist=True
        )
        writer = self.segment.begin(0, request)
        digests = []
        for number, (shard, at) in enumerate(zip(self.shards, offsets, strict=True)):
            view = writer.data[at : at + shard.nbytes]
            fill_data(view, "float32", rank * TENSORS + number)
            digests.append(chunk_digests(view))
        manifest = Manifest(
            job="bench",
            generation=1,
            step=1,
            parent=None,
            world_size=ranks,
            rank=rank,
            writers=list(range(ranks)),
            coordinates={},
            table=ShardTable.from_shards(self.shards, placement.offsets),
            digests=np.concatenate(digests),
        )
        writer.commit(encode_manifest(manifest))
        pin = self.segment.pin(0)
        assert pin is not None
        self.pin, self.nbytes = pin, sum(shard.nbytes for shard in self.shards)
        self.tensors = {
            shard.fqn: torch.frombuffer(pin.data, dtype=torch.float32, count=size, offset=at)
            for shard, at in zip(self.shards, offsets, strict=True)
        }
        self.memory = mmap.mmap(-1, len(pin.data) + EXTENT)
        np.frombuffer(self.memory, np.uint8)[:] = 1  # fault the pages in before anything is timed
        whole = memoryview(self.memory)
        self.targets = [
            Target(shard=shard, buffer=whole[at : at + shard.nbytes])
            for shard, at in zip(self.shards, offsets, strict=True)
        ]

    def is_restored(self) -> bool:
        """Whether the memory that is read into holds the bytes of the slot."""
        wanted = memoryview(self.pin.data)
        offsets = place(self.shards).offsets.tolist()
        return all(
            np.array_equal(
                np.frombuffer(target.buffer, np.uint8), np.frombuffer(wanted[at : at + len(target.buffer)], np.uint8)
            )
            for target, at in zip(self.targets, offsets, strict=True)
        )


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work(0)` to `work(count - 1)` at once; an error of one is raised."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def raw_write(paths: list[Path], areas: list[memoryview]) -> None:
    """Write each file by O_DIRECT in extents, with as many threads as flashckpt, fallocated and synced."""

    def one(number: int) -> None:
        data, whole = areas[number], len(areas[number]) // PAGE * PAGE
        fd = os.open(paths[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        os.posix_fallocate(fd, 0, len(data))

        def work(index: int) -> None:
            for at in range(index * EXTENT, whole, WRITE_THREADS * EXTENT):
                os.pwrite(fd, data[at : min(at + EXTENT, whole)], at)

        run_threads(work, WRITE_THREADS)
        os.fsync(fd)
        os.close(fd)

    run_threads(one, min(WRITERS_AT_ONCE, len(paths))) if len(paths) > 1 else one(0)


def raw_read(path: Path, out: mmap.mmap, *, direct: bool) -> None:
    """Read a file in extents by as many threads as a restore takes."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    view, whole = memoryview(out), os.fstat(fd).st_size // PAGE * PAGE

    def work(index: int) -> None:
        for at in range(index * EXTENT, whole, READ_THREADS * EXTENT):
            os.preadv(fd, [view[at : min(at + EXTENT, whole)]], at)

    run_threads(work, READ_THREADS)
    view.release()
    os.close(fd)


def synced(path: Path) -> None:
    """Make a file or all files of a folder durable, as peers that skip it must be."""
    for one in [path, *path.rglob("*")] if path.is_dir() else [path, path.parent]:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def warm(path: Path) -> None:
    """Read all files once, so that they lie in the page cache."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(EXTENT):
                    pass


class Rank:
    """What the parent may order."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.rank, self.ranks = config["rank"], config["ranks"]
        self.folder, self.shm = Path(config["folder"]), Path(config["shm"])
        self.state = State(int(config["bytes"] / self.ranks), self.rank, self.ranks, self.shm)
        self.pins: list[Pin] = []
        self.stores: dict[Path, Store] = {}

    def nbytes(self) -> int:
        """Bytes of this rank's tensors."""
        return self.state.nbytes

    def ready(self) -> None:
        """All ranks have their slots: the daemon's part opens them."""
        if self.rank == 0 and not self.pins:
            for rank in range(self.ranks):
                segment = Segment.attach(self.shm / f"r{rank}.seg")
                pin = segment.pin(0)
                segment.close()
                assert pin is not None
                self.pins.append(pin)

    # -- ways --------------------------------------------------------------------------------------------

    def path(self, way: str) -> Path:
        """Where a way puts this rank's files; what the daemon writes is one folder for all."""
        name = way.replace(" ", "-")
        return self.folder / (name if way.startswith("flashckpt") else f"{name}.{self.rank}")

    def writer(self, way: str) -> Callable[[], None] | None:
        """Return the write of a way; None where this rank has no part in it."""
        path, tensors = self.path(way), self.state.tensors
        if way.startswith("flashckpt"):
            return (lambda: self._persist(path, way.partition(" ")[2] or "off")) if self.rank == 0 else None
        if way == "raw":
            paths = [self.folder / f"raw.{rank}" for rank in range(self.ranks)]
            return (lambda: raw_write(paths, [pin.data for pin in self.pins])) if self.rank == 0 else None

        def run() -> None:
            _PEERS[way][0](tensors, path)
            synced(path)

        return run

    def reader(self, way: str, *, cold: bool) -> Callable[[], Any]:
        """Return the read of a way."""
        path = self.path(way)
        if way.startswith("flashckpt"):
            return lambda: self._restore(path)
        if way == "raw":
            return lambda: raw_read(path, self.state.memory, direct=cold)
        return lambda: _PEERS[way][1](self.state.tensors, path)

    def _persist(self, path: Path, compression: str) -> None:
        # kept, as the daemon does: what a root can do is probed once
        store = self.stores.setdefault(path, open_store(path))
        options = PersistOptions(compression=compression)
        with ThreadPoolExecutor(WRITERS_AT_ONCE) as pool:
            list(pool.map(lambda pin: persist_slot(pin, store, PREFIX, options=options), self.pins))
        assert commit(store, PREFIX, list(range(self.ranks)))

    def _restore(self, path: Path) -> None:
        store = open_store(path)
        source = StorageSource(store, read_manifest(store, PREFIX), PREFIX)
        execute_reads(self.state.targets, [source], threads=READ_THREADS)

    # -- orders ------------------------------------------------------------------------------------------

    def write(self, way: str) -> dict[str, float] | None:
        """Write by a way; wall and CPU seconds."""
        run = self.writer(way)
        return timing(run) if run else None

    def read(self, way: str, cold: bool) -> dict[str, float]:
        """Read back by a way."""
        found = timing(self.reader(way, cold=cold))
        if way.startswith("flashckpt") and not self.state.is_restored():
            raise AssertionError(f"{way}: restored bytes differ")
        return found

    def prepare(self, way: str, cold: bool) -> float:
        """Put the files of a way out of the page cache, or into it; the share that is cached."""
        path = self.path(way)
        if not cold:
            warm(path)
            return 1.0
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        return max(evict(file) for file in files)

    def remove(self, way: str) -> None:
        """Remove what a way wrote."""
        path = self.path(way)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the slot."""
        self.state.segment.path.unlink(missing_ok=True)


def timing(run: Callable[[], Any]) -> dict[str, float]:
    """Run once; wall and CPU seconds."""
    found = timed(run)
    return {"wall_s": found.wall_s, "cpu_s": found.cpu_s, "ended": time.monotonic()}


def _torch_save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    torch.save(dict(tensors), path)


def _torch_load(_: Mapping[str, torch.Tensor], path: Path) -> None:
    torch.load(path, weights_only=True)


def _safetensors_save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), path)


def _safetensors_load(_: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import load_file

    for tensor in load_file(path).values():
        tensor.sum()  # the file is mapped: this reads it


def _dcp_save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"state": dict(tensors)}, storage_writer=FileSystemWriter(path, thread_count=WRITE_THREADS), no_dist=True)


def _dcp_load(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    into = {"state": {name: torch.empty_like(tensor) for name, tensor in tensors.items()}}
    load(into, storage_reader=FileSystemReader(path), no_dist=True)


_PEERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "torch.save": (_torch_save, _torch_load),
    "safetensors": (_safetensors_save, _safetensors_load),
    "dcp.save": (_dcp_save, _dcp_load),
}


def commands(config: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make the state; return what the parent may order."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = Rank(config)
    return {n: getattr(rank, n) for n in ("ready", "write", "read", "prepare", "remove", "nbytes", "close")}


if __name__ == "__main__":
    serve(commands)
