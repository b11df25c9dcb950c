"""Boxes as contiguous runs of bytes in row-major memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from flashckpt.core.shard import Box

Ints = npt.NDArray[np.int64]
_ORIGIN = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The contiguous byte runs of a read: all of `nbytes`, in increasing order on both sides.

    Args:
        source_starts: First byte of each run in the source shard, int64.
        target_starts: First byte of each run in the wanted shard, int64.
        nbytes: Bytes of every run.
    """

    source_starts: Ints
    target_starts: Ints
    nbytes: int

    def __len__(self) -> int:
        return len(self.source_starts)


def runs(source: Box, target: Box, box: Box, itemsize: int) -> Runs:
    """Return the contiguous byte runs of `box` in row-major shards `source` and `target`.

    All three boxes are in global indices, `box` lies inside both shards and is not empty. A run spans the
    trailing dimensions that `box` takes whole from both sides, so equal boxes give one run.
    """
    if source == target == box:  # the layout has not changed: nearly every tensor of nearly every restore
        return Runs(source_starts=_ORIGIN, target_starts=_ORIGIN, nbytes=prod(box[1]) * itemsize)
    first = len(box[1])
    nbytes = itemsize
    while first > 0:
        first -= 1
        nbytes *= box[1][first]
        if not box[1][first] == source[1][first] == target[1][first]:
            break
    starts = [_starts(shard, box, first, itemsize) for shard in (source, target)]
    return Runs(source_starts=starts[0], target_starts=starts[1], nbytes=nbytes)


def split_runs(box: Box, source: Box, target: Box, limit: int) -> Iterator[Box]:
    """Cut `box` along its dimensions until no part has more than `limit` runs (bounds the memory of `runs`)."""
    outer = len(box[1])
    while outer > 0:
        outer -= 1
        if not box[1][outer] == source[1][outer] == target[1][outer]:
            break
    if prod(box[1][:outer]) <= limit:
        yield box
        return
    dim = next(dim for dim in range(outer) if box[1][dim] > 1)
    half = box[1][dim] // 2
    for skip, length in ((0, half), (half, box[1][dim] - half)):
        yield from split_runs(box.cut(dim, box.offsets[dim] + skip, length), source, target, limit)


def _starts(shard: Box, box: Box, first: int, itemsize: int) -> Ints:
    """Bytes at which the runs of `box` start in `shard`; dimensions from `first` on belong to the run."""
    stride = itemsize
    strides = [0] * len(box[0])
    for dim in reversed(range(len(box[0]))):
        strides[dim] = stride
        stride *= shard[1][dim]
    base = sum((at - origin) * step for at, origin, step in zip(box[0], shard[0], strides, strict=True))
    starts = np.array([base], dtype=np.int64)
    for dim in range(first):
        starts = (starts[:, None] + np.arange(box[1][dim], dtype=np.int64) * strides[dim]).ravel()
    return starts
