"""Copies of many runs of bytes at once, for boxes that do not lie in one piece. Pure, numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.planning.runs import Runs

Bytes = npt.NDArray[np.uint8]


class StridedBlock(NamedTuple):
    """So many runs of `nbytes` bytes, one distance apart on each side; starts and steps are in bytes."""

    source_start: int
    target_start: int
    runs: int
    source_step: int
    target_step: int
    nbytes: int


def scatter(held: Bytes, start: int, found: Runs, into: Bytes) -> int:
    """Copy the runs that lie in `held`, which begins at byte `start` of the row, to their places in `into`.

    Returns:
        The bytes copied.
    """
    copied = 0
    for block in strided_blocks(len(held), start, found):
        shape = (block.runs, block.nbytes)
        source = np.lib.stride_tricks.as_strided(held[block.source_start :], shape, (block.source_step, 1))
        target = np.lib.stride_tricks.as_strided(into[block.target_start :], shape, (block.target_step, 1))
        np.copyto(target, source)  # releases the GIL
        copied += block.runs * block.nbytes
    return copied


def strided_blocks(held_bytes: int, start: int, found: Runs) -> Iterator[StridedBlock]:
    """Yield the copies that `scatter` makes out of `held_bytes` bytes, which begin at byte `start` of the row."""
    starts, targets, nbytes = found.source_starts - start, found.target_starts, found.nbytes
    low, high = 0, len(starts)
    for k in sorted({0, len(starts) - 1}):  # only the first and the last run can reach over the ends
        skip, stop = max(-int(starts[k]), 0), min(nbytes, held_bytes - int(starts[k]))
        if skip or stop < nbytes:
            size = stop - skip
            if size > 0:
                yield StridedBlock(int(starts[k]) + skip, int(targets[k]) + skip, 1, size, size, size)
            low, high = (1, high) if k == 0 else (low, k)
    if low >= high:
        return
    for first, last in _uniform(starts[low:high], targets[low:high]):
        count = last - first
        source, target = starts[low + first : low + last], targets[low + first : low + last]
        steps = [int(side[1] - side[0]) if count > 1 else nbytes for side in (source, target)]
        yield StridedBlock(int(source[0]), int(target[0]), count, steps[0], steps[1], nbytes)


def _uniform(starts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut runs into groups of constant distance on both sides, as (first, past the last)."""
    count = len(starts)
    if count <= 2:
        yield 0, count
        return
    steps = np.stack((np.diff(starts), np.diff(targets)))
    changes = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1
    first = 0
    while first < count:
        k = int(np.searchsorted(changes, first, side="right"))
        last = int(changes[k]) + 1 if k < len(changes) else count
        yield first, last
        first = last
