"""Snapshots in plain memory with a real manifest: what persist needs of a pinned slot, without shared memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from flashckpt.core.manifest import Manifest, ShardTable
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import Shard, place
from flashckpt.core.snapshot_id import SnapshotId


@dataclass
class FakePin:
    """A slot in anonymous memory, page-aligned as a real one."""

    manifest_: Manifest
    memory: mmap.mmap
    nbytes: int
    current: bool = True
    is_copied: bool = False
    spec: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(slots=3))

    @property
    def data(self) -> memoryview:
        return memoryview(self.memory)[: self.nbytes]

    def view(self) -> memoryview | None:
        return None if self.is_copied else self.data

    def check_whole(self) -> None:
        pass

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self.data[start : start + len(out)]

    def manifest(self) -> Manifest:
        return self.manifest_

    def is_current(self) -> bool:
        return self.current

    def row(self, row: int) -> memoryview:
        start = int(self.manifest_.table.byte_offset[row])
        return self.data[start : start + int(self.manifest_.table.nbytes[row])]


def make_pin(
    shards: Sequence[Shard],
    *,
    rank: int = 0,
    world_size: int = 1,
    generation: int = 1,
    step: int = 10,
    parent: SnapshotId | None = None,
    values: dict[str, Any] | None = None,
    seed: int = 0,
    smooth: bool = False,
) -> FakePin:
    """Return a snapshot of `shards` filled with random bytes (`smooth`: random normal float32)."""
    placement = place(shards)
    total = int(placement.total)
    memory = mmap.mmap(-1, max(4096, -(-total // 4096) * 4096))
    data = np.frombuffer(memory, np.uint8)
    rng = np.random.default_rng([seed, rank, step])
    if smooth:
        data[: len(data) // 4 * 4].view(np.float32)[:] = rng.normal(0, 0.02, len(data) // 4)
    else:
        data[:] = rng.integers(0, 256, len(data), dtype=np.uint8)
    del data
    table = ShardTable.from_shards(shards, placement.offsets)
    view = memoryview(memory)
    pieces = [
        chunk_digests(view[start : start + nbytes])
        for start, nbytes in zip(table.byte_offset.tolist(), table.nbytes.tolist(), strict=True)
    ]
    manifest = Manifest(
        job="test",
        generation=generation,
        step=step,
        parent=parent,
        world_size=world_size,
        rank=rank,
        writers=list(range(world_size)),
        coordinates={},
        table=table,
        digests=np.concatenate(pieces) if pieces else np.zeros(0, np.uint64),
        values=values or {"step": step},
    )
    return FakePin(manifest, memory, total)


def shard(
    fqn: str,
    shape: tuple[int, ...],
    *,
    dtype: str = "float32",
    offsets: tuple[int, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
    replica: int = 0,
) -> Shard:
    return Shard(
        fqn=fqn,
        dtype=dtype,
        global_shape=shape,
        offsets=offsets or (0,) * len(shape),
        lengths=lengths or shape,
        replica=replica,
    )
