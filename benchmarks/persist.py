"""How fast and how cheaply a snapshot gets to a local disk and back, against the raw disk and the usual peers.

One process holds `--gb` of float32 state in 100 tensors, in a slot of shared memory and as torch tensors. Every round
writes it once by each way, in turns, each durable (fsync included), and reads it back cold (the file's pages are
dropped first; `mincore` says how many stayed). "raw" is the limit: the same bytes by O_DIRECT, 16 MiB
extents, two threads, fallocate and fsync; read back by O_DIRECT with as many threads as the restore takes.

    .venv/bin/python benchmarks/persist.py [--gb 0.2,1.5] [--rounds 5] [--dir DIR] [--json FILE] [--s3 ENDPOINT]

With --s3 (access key "test", secret "testtest") uploads by s3fs and obstore are compared with boto3's upload_file.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashckpt.bench.data import fill as fill_data
from flashckpt.bench.host import evict, peak_memory
from flashckpt.bench.measure import LoadWatch, Timing, document, interleave, summarise, write_json
from flashckpt.checkpoint.checkpoints import read_manifest
from flashckpt.checkpoint.persist import PersistOptions, commit, persist_slot, prefix_of
from flashckpt.core.digest import chunk_digests
from flashckpt.core.layout import Shard, layout_hash, place
from flashckpt.core.manifest import Manifest, ShardTable, encode_manifest
from flashckpt.memory.segment import Segment, SegmentSpec
from flashckpt.restore.fill import Target, fill
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.opening import open_store
from flashckpt.storage.store import Store

EXTENT = 16 << 20
TENSORS = 100


class State:
    """The same bytes twice: in a COMPLETE slot, and as torch tensors for the peers."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        size = max(1, nbytes // TENSORS // 4)
        self.shards = [
            Shard(fqn=f"state.{n:03}", dtype="float32", global_shape=(size,), offsets=(0,), lengths=(size,))
            for n in range(TENSORS)
        ]
        placement = place(self.shards)
        table = ShardTable.from_shards(self.shards, placement.offsets)
        self.tensors = {shard.fqn: torch.empty(size) for shard in self.shards}
        spec = SegmentSpec(
            job="bench",
            root_digest=0,
            rank=0,
            slots=2,
            manifest_capacity=1 << 20,
            data_capacity=int(placement.total),
            layout_hash=layout_hash(self.shards),
        )
        self.segment = Segment.create(folder / "bench.seg", spec)
        self.segment.reserve()
        writer = self.segment.begin(0, generation=1, step=1, world_size=1, persist=True, parent=None)
        digests = []
        for number, (shard, at) in enumerate(zip(self.shards, placement.offsets.tolist(), strict=True)):
            view = writer.data[at : at + shard.nbytes]
            fill_data(view, "float32", number)
            digests.append(chunk_digests(view))
            np.copyto(self.tensors[shard.fqn].numpy().view(np.uint8), np.frombuffer(view, np.uint8))
        manifest = Manifest(
            job="bench",
            generation=1,
            step=1,
            parent=None,
            world_size=1,
            rank=0,
            writers=[0],
            coordinates={},
            table=table,
            digests=np.concatenate(digests),
        )
        writer.commit(encode_manifest(manifest))
        pin = self.segment.pin(0)
        assert pin is not None
        self.pin = pin
        self.nbytes = sum(shard.nbytes for shard in self.shards)
        self.targets = [Target(shard=s, buffer=memoryview(mmap.mmap(-1, s.nbytes))) for s in self.shards]
        for target in self.targets:
            np.frombuffer(target.buffer, np.uint8)[:] = 1  # fault the pages in before anything is timed

    def close(self) -> None:
        """Remove the slot."""
        self.pin.close()
        self.segment.unlink()
        self.segment.close()


def run_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raw_write(path: Path, data: memoryview, threads: int = 2) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    os.posix_fallocate(fd, 0, len(data))
    whole = len(data) // 4096 * 4096

    def work(index: int) -> None:
        for at in range(index * EXTENT, whole, threads * EXTENT):
            os.pwrite(fd, data[at : min(at + EXTENT, whole)], at)

    run_threads(work, threads)
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path, out: mmap.mmap, threads: int = 4) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    view, whole = memoryview(out), os.fstat(fd).st_size // 4096 * 4096

    def work(index: int) -> None:
        for at in range(index * EXTENT, whole, threads * EXTENT):
            os.preadv(fd, [view[at : min(at + EXTENT, whole)]], at)

    run_threads(work, threads)
    view.release()
    os.close(fd)


def synced(path: Path) -> None:
    """Make a file or all files of a folder durable, as peers that skip it must be."""
    for one in [path, *path.rglob("*")] if path.is_dir() else [path, path.parent]:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Ways:
    """Every way to write the state and to read it back; each write goes to a new place, removed when the next begins."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.memory = mmap.mmap(-1, len(state.pin.data) + EXTENT)
        np.frombuffer(self.memory, np.uint8)[:] = 1
        self.cached: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}

    def writes(self) -> dict[str, Callable[[], Any]]:
        """Return the ways to write, by name; "raw" is the limit."""
        ways = {
            "raw": lambda path: raw_write(path, self.state.pin.data),
            "flashckpt": self._flashckpt,
            "flashckpt zstd": lambda path: self._flashckpt(path, "zstd"),
            "torch.save": self._torch_save,
            "safetensors": self._safetensors,
            "dcp.save": self._dcp_save,
        }
        return {name: self._fresh(name, way) for name, way in ways.items()}

    def reads(self) -> dict[str, Callable[[], Any]]:
        """Return the ways to read back what `writes` left."""
        ways: dict[str, Callable[[Path], Any]] = {
            "raw": lambda path: raw_read(path, self.memory),
            "flashckpt": self._restore,
            "flashckpt zstd": self._restore,
            "torch.save": lambda path: torch.load(path, weights_only=True),
            "safetensors": self._load_safetensors,
            "dcp.save": self._dcp_load,
        }
        return {name: lambda name=name, way=way: way(self.path(name)) for name, way in ways.items()}  # type: ignore[misc]  # late binding through defaults

    def path(self, name: str) -> Path:
        """Return where a way puts its files."""
        return self.folder / name.replace(" ", "-")

    def make_cold(self, name: str, _: int) -> None:
        """Drop the pages of a way's files from the cache."""
        path = self.path(name)
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        self.cached.setdefault(name, []).append(max(evict(file) for file in files))

    def remove(self, name: str, _: int) -> None:
        """Remove what a way wrote before."""
        path = self.path(name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _fresh(self, name: str, way: Callable[[Path], None]) -> Callable[[], None]:
        def run() -> None:
            with peak_memory() as peak:
                way(self.path(name))
            self.peaks[name] = max(self.peaks.get(name, 0), peak.extra_bytes)

        return run

    def _flashckpt(self, path: Path, compression: str = "off") -> None:
        store = open_store(path)
        persist_slot(self.state.pin, store, prefix_of(1, 1), options=PersistOptions(compression=compression))
        assert commit(store, prefix_of(1, 1), [0])

    def _restore(self, path: Path) -> None:
        store = open_store(path)
        source = StorageSource(store, read_manifest(store, prefix_of(1, 1)), prefix_of(1, 1))
        fill(self.state.targets, [source], threads=4)

    def _torch_save(self, path: Path) -> None:
        torch.save(self.state.tensors, path)
        synced(path)

    def _safetensors(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.state.tensors, path)
        synced(path)

    def _load_safetensors(self, path: Path) -> None:
        from safetensors.torch import load_file

        for tensor in load_file(path).values():
            tensor.sum()  # the file is mapped: this reads it

    def _dcp_save(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(path, thread_count=2)
        save({"state": self.state.tensors}, storage_writer=writer, no_dist=True)
        synced(path)

    def _dcp_load(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        into = {"state": {name: torch.empty_like(tensor) for name, tensor in self.state.tensors.items()}}
        load(into, storage_reader=FileSystemReader(path), no_dist=True)


def rows_of(found: dict[str, list[Timing]], nbytes: int) -> dict[str, Any]:
    """Return seconds, GB/s, CPU s/GB and the ratio to the raw limit of the same round, by way."""
    rows = {}
    for name, timings in found.items():
        ratios = [one.wall_s / raw.wall_s for one, raw in zip(timings, found["raw"], strict=True)]
        rows[name] = {
            "wall_s": summarise([t.wall_s for t in timings]),
            "gb_s": summarise([nbytes / 1e9 / t.wall_s for t in timings]),
            "cpu_s_per_gb": summarise([t.cpu_s / (nbytes / 1e9) for t in timings]),
            "x_raw": summarise(ratios),
        }
    return rows


def show(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    print(f"{'':16}{'seconds [min-max]':>26}{'GB/s':>8}{'x raw [min-max]':>24}{'CPU s/GB':>10}")
    for name, row in rows.items():
        print(
            f"{name:16}{row['wall_s'].text():>26}{row['gb_s'].median:>8.2f}{row['x_raw'].text():>24}"
            f"{row['cpu_s_per_gb'].median:>10.3f}"
        )


def measure_disk(gigabytes: float, folder: Path, rounds: int) -> dict[str, Any]:
    state = State(int(gigabytes * 1e9), folder_of_memory())
    try:
        ways = Ways(state, folder)
        written = rows_of(interleave(ways.writes(), rounds, warmup=1, on_run=ways.remove), state.nbytes)
        read = rows_of(interleave(ways.reads(), rounds, warmup=1, on_run=ways.make_cold), state.nbytes)
    finally:
        state.close()
    show(f"{gigabytes} GB, durable write", written)
    show(f"{gigabytes} GB, cold read", read)
    peaks = {name: round(value / 2**20) for name, value in ways.peaks.items()}
    cached = {name: round(max(shares), 3) for name, shares in ways.cached.items()}
    print(f"peak extra memory of the writes, MiB: {peaks}; share still cached before a read: {cached}")
    return {"bytes": state.nbytes, "write": written, "read_cold": read, "write_peak_mib": peaks, "cached_share": cached}


def measure_s3(gigabytes: float, endpoint: str, folder: Path, rounds: int) -> dict[str, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    settings = Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="testtest",
        region_name="us-east-1",
        config=settings,
    )
    bucket = f"flashckpt-bench-{os.getpid()}"
    client.create_bucket(Bucket=bucket)
    state = State(int(gigabytes * 1e9), folder_of_memory())
    file = folder / "for-boto3"
    raw_write(file, state.pin.data)
    options = {"endpoint_url": endpoint, "key": "test", "secret": "testtest"}
    peaks: dict[str, int] = {}
    count = iter(range(1_000_000))

    def by(backend: str) -> Callable[[], None]:
        def run() -> None:
            store: Store = open_store(f"s3://{bucket}/{next(count)}", backend=backend, **options)
            with peak_memory() as peak:
                persist_slot(state.pin, store, prefix_of(1, 1))
                commit(store, prefix_of(1, 1), [0])
            peaks[backend] = max(peaks.get(backend, 0), peak.extra_bytes)
            store.close()

        return run

    parts = TransferConfig(multipart_chunksize=EXTENT, max_concurrency=4)
    ways: dict[str, Callable[[], Any]] = {
        "raw": lambda: client.upload_file(str(file), bucket, f"boto3/{next(count)}", Config=parts),
        "s3fs": by("s3fs"),
        "obstore": by("obstore"),
    }
    try:
        rows = rows_of(interleave(ways, rounds, warmup=1), state.nbytes)
    finally:
        state.close()
    show(f"{gigabytes} GB, S3 upload (raw: boto3 upload_file, 16 MiB x 4)", rows)
    mib = {name: round(value / 2**20) for name, value in peaks.items()}
    print(f"peak extra memory, MiB: {mib}")
    return {"bytes": state.nbytes, "upload": rows, "peak_mib": mib}


def folder_of_memory() -> Path:
    return Path(os.environ["FLASHCKPT_SHM_DIR"])


@contextmanager
def scratch(where: str | None) -> Iterator[Path]:
    """A folder on the disk to measure, and one in memory for the slot; both are removed."""
    with (
        tempfile.TemporaryDirectory(dir=where, prefix="flashckpt-bench-") as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flashckpt-bench-") as memory,
    ):
        os.environ["FLASHCKPT_SHM_DIR"] = memory
        yield Path(disk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", default="0.2,1.5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--s3", metavar="ENDPOINT")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = LoadWatch()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with scratch(args.dir) as folder:
        for size in args.gb.split(","):
            if args.s3:
                results[f"s3 {size} GB"] = measure_s3(float(size), args.s3, folder, args.rounds)
            else:
                results[f"disk {size} GB"] = measure_disk(float(size), folder, args.rounds)
        made = document("persist", vars(args) | {"json": str(args.json)}, results, load=load, paths=[folder])
    report = made["load"]
    print(f"\nload average {report['load_before']} before, {report['other_cores']} cores used by others meanwhile")
    if args.json:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
