"""Whole tensors of a checkpoint as streams of bytes: bounded memory, every digest verified. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashckpt.core.shard import ITEMSIZE, Box, Shard
from flashckpt.errors import ConfigError
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import StorageSource

FLOATS = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Types that are cast and that may be cast to; bfloat16 has no numpy type and is held as its bits."""


def parse_dtype(name: str | None) -> str | None:
    """Return the dtype's name; ConfigError for one that is not cast to."""
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    if name is None:
        return None
    found = short.get(name, name)
    if found not in FLOATS:
        raise ConfigError("tensors cannot be cast to this dtype", found=name, expected=", ".join(FLOATS))
    return found


def target_dtype(dtype: str, wanted: str | None) -> str:
    """Return the dtype a tensor gets: `wanted` for floating-point ones of 16 bits and more, its own for all others."""
    return wanted if wanted is not None and dtype in FLOATS else dtype


def cast(raw: npt.NDArray[np.uint8], dtype: str, wanted: str) -> npt.NDArray[np.uint8]:
    """Return the elements of `raw` (bytes of `dtype`) as bytes of `wanted`; both keys of FLOATS, or equal."""
    if dtype == wanted:
        return raw
    numbers = raw.view(FLOATS[dtype])
    if dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if wanted != "bfloat16":
            return np.ascontiguousarray(numbers.astype(FLOATS[wanted])).view(np.uint8)
        bits = numbers.astype(np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    rounded[np.isnan(bits.view(np.float32))] = 0x7FC0
    return rounded.view(np.uint8)


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
