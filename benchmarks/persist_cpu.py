"""CPU seconds per GB that a persister takes for a slot, against a bare durable write of the same bytes, in turns in one process.

The slot lies in shared memory and is pinned, read, verified and written by the persister's own functions, as in each persist of a
running job; the bare write has its bytes mapped already: O_DIRECT, fallocate, fsync, as many threads. CPU of the whole process,
which other work on the machine changes little. "digest" and "map" are what the two stages take alone.

    .venv/bin/python benchmarks/persist_cpu.py [--mb 256] [--rounds 9] [--folder DIR] [--shm DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from flashckpt.bench.measure import LoadWatch, document, write_json
from flashckpt.checkpoint.writer import write_packs
from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.core.records import CHUNK_BYTES, chunk_digests
from flashckpt.core.shard import Shard, layout_hash, place
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.native import GuardedMap, digest_ranges
from flashckpt.shm import lease
from flashckpt.shm.segment import Segment, SegmentSpec
from flashckpt.storage.direct_io import write_durable
from flashckpt.storage.factory import open_store

TENSORS = 16
PART = 16 << 20


def made(path: Path, nbytes: int) -> Segment:
    """Return a segment with one COMPLETE snapshot."""
    size = nbytes // TENSORS
    shards = [
        Shard(fqn=f"t{n}", dtype="uint8", global_shape=(size,), offsets=(0,), lengths=(size,)) for n in range(TENSORS)
    ]
    placed = place(shards)
    spec = SegmentSpec(
        job="bench", root_digest=0, rank=0, slots=2, manifest_capacity=1 << 20, data_capacity=placed.total,
        layout_hash=layout_hash(shards),
    )  # fmt: skip
    segment, number = Segment.create(path, spec), SnapshotId(1, 1)
    request = SnapshotRequest(id=number, job="bench", rank=0, world_size=1, coordinates={}, parent=None, persist=True)
    writer = segment.begin(0, request)
    target = np.frombuffer(writer.data, np.uint8)
    target[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), len(target))
    digests = [chunk_digests(target[at : at + size]) for at in placed.offsets.tolist()]
    del target
    manifest = Manifest(
        job="bench", generation=1, step=1, parent=None, world_size=1, rank=0, writers=[0], coordinates={},
        table=ShardTable.from_shards(shards, placed.offsets), digests=np.concatenate(digests), values={},
    )  # fmt: skip
    writer.commit(encode_manifest(manifest))
    return segment


class Ways:
    """What is measured, each on the same bytes."""

    def __init__(self, segment: Segment, folder: Path) -> None:
        self.segment, self.folder, self.store = segment, folder, open_store(str(folder))
        at, size = segment.spec.data_at(0), segment.header(0).data_bytes
        self.held = memoryview(segment.buffer)[at : at + size]
        self.nbytes = size
        bytes(self.held[:: mmap.PAGESIZE])  # every page is mapped here: of the bare write and of the digest

    def persist(self) -> None:
        """A persist of the product."""
        reader = Segment.attach(self.segment.path)
        pin = reader.pin(0)
        reader.close()
        assert pin is not None
        with pin:
            write_packs(pin, self.store, "c")
        shutil.rmtree(self.folder / "c")

    def mapped_each_time(self) -> None:
        """The same where a slot is mapped again for each persist."""
        with mock.patch.object(lease, "kept_maps", GuardedMap):
            self.persist()

    def raw(self) -> None:
        """The bare write."""
        path = self.folder / "raw"
        write_durable(path, [self.held[at : at + PART] for at in range(0, self.nbytes, PART)], self.nbytes)
        path.unlink()

    def digest(self) -> None:
        """All chunks, as they are verified."""
        starts = list(range(0, self.nbytes, CHUNK_BYTES))
        digest_ranges(self.held, starts, [min(CHUNK_BYTES, self.nbytes - at) for at in starts])

    def map(self) -> None:
        """The pages of a slot mapped by an access to each 64 KiB, and unmapped."""
        with Path(self.segment.path).open("rb") as file:
            at = self.segment.spec.data_at(0)
            found = mmap.mmap(file.fileno(), self.nbytes, prot=mmap.PROT_READ, offset=at)
        bytes(found[:: 64 << 10])
        found.close()


def cpu(work: Callable[[], None], nbytes: int) -> dict[str, float]:
    """Return what a call took."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    faults = after.ru_minflt - before.ru_minflt
    return {"cpu_s_per_gb": (user + system) / nbytes * 1e9, "wall_s": wall, "faults": float(faults)}


def main() -> None:
    """Measure in turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shm", default="/dev/shm", help="a tmpfs: with huge pages, or without")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = LoadWatch()
    rows: dict[str, list[dict[str, float]]] = {}
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        tempfile.TemporaryDirectory(dir=arguments.shm) as shm,
    ):
        segment = made(Path(shm) / "bench.seg", arguments.mb << 20)
        ways = Ways(segment, Path(folder))
        for number in range(arguments.rounds + 1):
            for name in ("persist", "mapped_each_time", "raw", "digest", "map"):
                found = cpu(getattr(ways, name), ways.nbytes)
                if number:  # the first round warms everything up
                    rows.setdefault(name, []).append(found)
    medians = {k: {key: statistics.median(one[key] for one in v) for key in v[0]} for k, v in rows.items()}
    ratios = {
        name: statistics.median(
            a["cpu_s_per_gb"] / b["cpu_s_per_gb"] for a, b in zip(rows[name], rows["raw"], strict=True)
        )
        for name in ("persist", "mapped_each_time", "digest")
    }
    for name, row in medians.items():
        print(f"{name:17} {row['cpu_s_per_gb']:.3f} CPU s/GB {row['wall_s']:.2f} s {row['faults']:.0f} faults")
    print("x raw, CPU, median of rounds: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    if arguments.json:
        given = {"mb": arguments.mb, "rounds": arguments.rounds, "shm": arguments.shm}
        write_json(
            arguments.json,
            document("persist_cpu", given, {"medians": medians, "ratios": ratios, "rounds": rows}, load=load),
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
