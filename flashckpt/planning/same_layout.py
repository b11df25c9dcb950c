"""Whether two tables hold the same elements of their tensors, however these are cut into rows. Pure, numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flashckpt.core.shard_table import ShardTable
from flashckpt.planning.box_match import fingerprints


def has_same_regions(wanted: ShardTable, held: ShardTable, *, common_only: bool = False) -> bool:
    """Return whether `held` has exactly the elements of every tensor in `wanted`, as rows that do not overlap.

    Args:
        wanted: The tensors that are looked at.
        held: Other tensors in it do not count.
        common_only: Tensors that `held` does not have at all do not count either.
    """
    here = held.places(wanted.fqns)
    if not common_only and (here < 0).any():
        return False
    kept = np.flatnonzero(here >= 0)
    if _are_same_rows(wanted, held, kept, here[kept]):
        return True
    width = max(int(wanted.ndim.max(initial=0)), int(held.ndim.max(initial=0)))
    mine, theirs = (_region_sums(table, width) for table in (wanted, held))
    return bool((mine[kept] == theirs[here[kept]]).all())


def _are_same_rows(
    wanted: ShardTable, held: ShardTable, mine: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]
) -> bool:
    """Return whether each tensor is one row on both sides, and the same one: nearly always, and quick to see."""
    firsts, width = [], max(int(wanted.ndim.max(initial=0)), int(held.ndim.max(initial=0)))
    for table, tensors in ((wanted, mine), (held, theirs)):
        order, starts = table.rows_by_tensor
        if (starts[tensors + 1] - starts[tensors] != 1).any():
            return False
        firsts.append(order[starts[tensors]])
    for name in ("offsets", "lengths"):
        own, other = (
            table.dims(getattr(table, name), rows, width, -1)
            for table, rows in zip((wanted, held), firsts, strict=True)
        )
        if not np.array_equal(own, other):
            return False
    return True


def _region_sums(table: ShardTable, width: int) -> npt.NDArray[np.uint64]:
    """Return for each tensor 64 bits that depend on the elements its rows hold, and not on how they are cut."""
    rows = np.arange(len(table))
    low = table.dims(table.offsets, rows, width, 0)
    high = low + table.dims(table.lengths, rows, width, 1)
    order, starts = table.rows_by_tensor
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(fingerprints(low, high)[order])))
    found: npt.NDArray[np.uint64] = sums[starts[1:]] - sums[starts[:-1]]
    return found
