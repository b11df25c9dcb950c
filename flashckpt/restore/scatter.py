"""Copies of many runs of bytes at once, for boxes that do not lie in one piece. Pure, numpy only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from flashckpt.planning.runs import Runs

Bytes = npt.NDArray[np.uint8]


def scatter(held: Bytes, start: int, found: Runs, into: Bytes) -> int:
    """Copy the runs that lie in `held`, which begins at byte `start` of the row, to their places in `into`.

    Returns:
        The bytes copied.
    """
    starts, targets, nbytes = found.source_starts - start, found.target_starts, found.nbytes
    low, high = 0, len(starts)
    copied = 0
    for k in sorted({0, len(starts) - 1}):  # only the first and the last run can reach over the ends
        skip, stop = max(-int(starts[k]), 0), min(nbytes, len(held) - int(starts[k]))
        if skip or stop < nbytes:
            a, b = int(starts[k]), int(targets[k])
            np.copyto(into[b + skip : b + stop], held[a + skip : a + stop])
            copied += stop - skip
            low, high = (1, high) if k == 0 else (low, k)
    if low < high:
        for first, last in _uniform(starts[low:high], targets[low:high]):
            _copy_block(held, into, starts[low + first : low + last], targets[low + first : low + last], nbytes)
        copied += (high - low) * nbytes
    return copied


def _copy_block(
    held: Bytes, into: Bytes, starts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], nbytes: int
) -> None:
    """Copy runs that have one distance on each side, as one strided copy (which releases the GIL)."""
    count = len(starts)
    steps = [int(side[1] - side[0]) if count > 1 else nbytes for side in (starts, targets)]
    views = [
        np.lib.stride_tricks.as_strided(array[int(side[0]) :], (count, nbytes), (step, 1))
        for array, side, step in ((held, starts, steps[0]), (into, targets, steps[1]))
    ]
    np.copyto(views[1], views[0])


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
