"""A slot in the memory of one process, as `persist_slot` sees it: what `bench store` persists."""

from __future__ import annotations

import mmap

import numpy as np

from flashckpt.bench.data import fill
from flashckpt.bench.layouts import uniform
from flashckpt.core.manifest import Manifest, ShardTable
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import place

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
