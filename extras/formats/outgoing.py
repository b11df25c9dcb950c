"""Whole tensors of a checkpoint as streams of bytes: bounded memory, every digest verified. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashckpt.core.shard import ITEMSIZE, Box, Shard
from flashckpt.interop.casting import cast
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource

BLOCK_BYTES = 32 << 20
"""Bytes of one tensor that are in memory at a time (plus what a cast makes of them)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """One tensor on its way out.

    Attributes:
        name: On the other side.
        stored, dtype: Dtype in the checkpoint, and the one it is written as.
        shape: Of what is written.
        index: Which slice of the first dimension of the held tensor is written; None: the whole tensor.
    """

    name: str
    held: str
    stored: str
    dtype: str
    shape: tuple[int, ...]
    index: int | None = None
    held_rows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes as it is written."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def parts(self, source: StorageSource) -> Iterator[memoryview]:
        """Yield its bytes in row-major order; DamagedError, ShardGapError as `execute_reads`."""
        count, size = math.prod(self.shape), ITEMSIZE[self.stored]
        step = BLOCK_BYTES // size
        whole, origin, lengths = self.shape, (0,) * len(self.shape), self.shape
        if self.index is not None:
            whole, origin, lengths = (self.held_rows, *whole), (self.index, *origin), (1, *lengths)
        for start in range(0, count, step):
            raw = np.empty((min(start + step, count) - start) * size, np.uint8)
            targets, at = [], 0
            for offsets, n in Box(origin, lengths).flat(start, min(start + step, count)):
                shard = Shard(fqn=self.held, dtype=self.stored, global_shape=whole, offsets=offsets, lengths=n)
                targets.append(Target(shard=shard, buffer=raw[at : at + shard.nbytes].data))
                at += shard.nbytes
            execute_reads(targets, [source])
            yield cast(raw, self.stored, self.dtype).data
