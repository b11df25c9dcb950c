"""Wanted boxes against the rows of one table, all at once in numpy. Pure.

Three cases need no look at single boxes, and are nearly all there is: a row is the wanted box, a row contains it, or
the rows that meet it tile it without overlapping (what FSDP, TP and their product make, even or uneven).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.schema import mixed_coordinates
from flashckpt.core.shard import Box, Shard
from flashckpt.core.shard_table import ShardTable, ranges
from flashckpt.errors import TensorMismatchError

# -- Reads as values: one box from one row of one source, and many of them as columns. Pure ------------------------


class SourceRow(NamedTuple):
    """A row of one of the tables that are read from."""

    source: int
    row: int


class Gap(NamedTuple):
    """A part of a wanted shard that is in no source."""

    target: int
    box: Box


class Read(NamedTuple):
    """One box that is read from one row of one source into one wanted shard.

    Attributes:
        target: Row of the wanted table.
        source: Index of the source table.
        box: In the index space of the global tensor.
    """

    target: int
    source: int
    row: int
    box: Box


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """Reads as columns; see `ReadPlan`."""

    target: Ints
    source: Ints
    row: Ints
    offsets: Ints
    lengths: Ints

    def of(self, source: int) -> Reads:
        """Return the same reads as those of source `source`."""
        return replace(self, source=np.full(len(self.target), source, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Reads], width: int) -> Reads:
        """Return several one after another."""
        flat = {
            name: np.concatenate([np.zeros(0, np.int64), *map(operator.attrgetter(name), parts)])
            for name in ("target", "row", "source")
        }
        wide = {
            name: np.concatenate([np.zeros((0, width), np.int64), *map(operator.attrgetter(name), parts)])
            for name in ("offsets", "lengths")
        }
        return cls(**flat, **wide)

    @classmethod
    def of_single(cls, reads: Sequence[Read], width: int) -> Reads:
        """Return single reads as columns."""
        offsets, lengths = np.zeros((len(reads), width), np.int64), np.ones((len(reads), width), np.int64)
        for k, read in enumerate(reads):
            ndim = len(read.box.offsets)
            offsets[k, :ndim], lengths[k, :ndim] = read.box
        columns = np.array([read[:3] for read in reads], np.int64).reshape(-1, 3)
        return cls(target=columns[:, 0], source=columns[:, 1], row=columns[:, 2], offsets=offsets, lengths=lengths)


Ints = npt.NDArray[np.int64]
FEW_ROWS = 8
"""Rows of a tensor up to which each is looked at."""
MOST_PAIRS = 1 << 16
"""Pairs of a wanted box and a row that are looked at together: bounds memory to about 15 MB."""


class Match(NamedTuple):
    """What one table has of the wanted boxes.

    Attributes:
        reads: Those of boxes that it covers.
        left: Wanted rows of which it has nothing.
        partial: Boxes that it covers in part, or with overlapping rows: to be cut one by one.
    """

    reads: Reads
    left: Ints
    partial: list[Gap]


class _Pairs(NamedTuple):
    """Wanted boxes (by their place in a block) and rows of the same tensor that share an element with them."""

    wanted: Ints
    row: Ints
    low: Ints
    high: Ints
    start: Ints
    stop: Ints


def match(wanted: ShardTable, left: Ints, held: ShardTable, *, name: str) -> Match:
    """Return what table `held` has of rows `left` of `wanted`.

    `left` ascend, and none of them is empty.

    Raises:
        TensorMismatchError: A tensor has another dtype or global shape there.
    """
    ids = _ids(wanted, left, held)
    here = np.flatnonzero(ids >= 0)
    _check_kinds(wanted, left[here], held, ids[here], name)
    width = int(wanted.ndim.max(initial=0))
    decided = np.zeros(len(left), np.int8)  # 0: nothing found, 1: covered, 2: in part
    alike, parts = _match_alike(wanted, left[here], held, ids[here], width)
    decided[here[alike]] = 1
    first, last = _candidates(wanted, left, held, ids, here[~alike])
    for block in _blocks(here[~alike], last - first):
        pairs = _pairs(wanted, left[block], held, (first[block], last[block]), width)
        chosen, is_covered, is_met = _choose(pairs, len(block))
        decided[block[is_met]] = 2
        decided[block[is_covered]] = 1
        parts.append(
            Reads(
                target=left[block[pairs.wanted[chosen]]],
                row=pairs.row[chosen],
                offsets=pairs.low[chosen],
                lengths=(pairs.high - pairs.low)[chosen],
                source=np.zeros(len(chosen), np.int64),
            )
        )
    partial = [Gap(row, box_of(wanted, row)) for row in left[decided == 2].tolist()]
    return Match(reads=Reads.joined(parts, width), left=left[decided == 0], partial=partial)


def _match_alike(
    wanted: ShardTable, rows: Ints, held: ShardTable, ids: Ints, width: int
) -> tuple[npt.NDArray[np.bool_], list[Reads]]:
    """Return which wanted boxes are the only row that the table has of their tensor, and the reads of those.

    Nearly every tensor of a layout that has not changed: no pairs have to be made for it.
    """
    order, starts = held.rows_by_tensor
    row = order[starts[ids]]
    alike = starts[ids + 1] - starts[ids] == 1
    offsets, lengths = wanted.dims(wanted.offsets, rows, width, 0), wanted.dims(wanted.lengths, rows, width, 1)
    alike &= (offsets == held.dims(held.offsets, row, width, 0)).all(axis=1)
    alike &= (lengths == held.dims(held.lengths, row, width, 1)).all(axis=1)
    source = np.zeros(int(alike.sum()), np.int64)
    reads = Reads(target=rows[alike], source=source, row=row[alike], offsets=offsets[alike], lengths=lengths[alike])
    return alike, [reads]


def row_boxes(table: ShardTable, rows: Sequence[int], box: Box) -> list[tuple[int, Box]]:
    """Return the rows (of one tensor) that meet a box, each with its own box."""
    ids = np.asarray(rows, np.int64)
    ndim = len(box.offsets)
    offsets, lengths = table.dims(table.offsets, ids, ndim, 0), table.dims(table.lengths, ids, ndim, 1)
    low, stop = np.array(box.offsets, np.int64), np.array(box.offsets, np.int64) + np.array(box.lengths, np.int64)
    hits = (np.minimum(offsets + lengths, stop) > np.maximum(offsets, low)).all(axis=1)
    return [(int(ids[k]), Box(tuple(offsets[k].tolist()), tuple(lengths[k].tolist()))) for k in np.flatnonzero(hits)]


def refuse_other_kind(shard: Shard, held: Shard, name: str) -> None:
    """Raise TensorMismatchError where a source's tensor has another dtype or global shape than the wanted one."""
    for word, wanted, found in (("dtype", shard.dtype, held.dtype), ("shape", shard.global_shape, held.global_shape)):
        if wanted != found:
            raise TensorMismatchError(
                f"the state holds {shard.fqn!r} with another {word} than the running model",
                found=f"{found} in {name}",
                expected=str(wanted),
                state="Nothing was read.",
                remedy="change the model back, restore an older step (flashckpt ls ROOT), or leave this tensor out with "
                "restore(only=...)",
            )


def _ids(wanted: ShardTable, left: Ints, held: ShardTable) -> Ints:
    """Return where the names of wanted rows stand in the other table's `fqns`; -1 for none."""
    found: Ints = held.places(wanted.fqns)[wanted.fqn_id[left]]
    return found


def _check_kinds(wanted: ShardTable, rows: Ints, held: ShardTable, ids: Ints, name: str) -> None:
    """Compare dtype and global shape of wanted rows with those of the tensors' first rows."""
    if not len(rows):
        return
    order, starts = held.rows_by_tensor
    first = order[starts[ids]]
    dtypes = {dtype: i for i, dtype in enumerate(wanted.dtypes)}
    other = np.array([dtypes.get(dtype, -1) for dtype in held.dtypes], np.int64)
    wrong = (other[held.dtype_id[first]] != wanted.dtype_id[rows]) | (held.ndim[first] != wanted.ndim[rows])
    alike = np.flatnonzero(~wrong)
    width = int(wanted.ndim[rows].max(initial=0))
    shapes = [table.dims(table.global_shape, at[alike], width, 1) for table, at in ((wanted, rows), (held, first))]
    wrong[alike] = (shapes[0] != shapes[1]).any(axis=1)
    for k in np.flatnonzero(wrong)[:1].tolist():
        refuse_other_kind(wanted.shard(int(rows[k])), held.shard(int(first[k])), name)


def _candidates(wanted: ShardTable, left: Ints, held: ShardTable, ids: Ints, here: Ints) -> tuple[Ints, Ints]:
    """Return, for each wanted box, the range of `rows_by_tensor` outside of which no row meets it; for those not `here` nothing.

    Of a tensor that thousands of ranks hold a part of, cut along the first dimension, that is a row or two.
    """
    _, starts = held.rows_by_tensor
    first, last = np.zeros((2, len(ids)), np.int64)
    first[here], last[here] = starts[ids[here]], starts[ids[here] + 1]
    many = here[last[here] - first[here] > FEW_ROWS]
    if not len(many):
        return first, last
    begins, follow = held.ascending
    many = many[follow[ids[many]] & (wanted.ndim[left[many]] > 0)]
    at = wanted.dim_start[left[many]]
    low, high = wanted.offsets[at], wanted.offsets[at] + wanted.lengths[at]
    for place, start, stop in zip(many.tolist(), low.tolist(), high.tolist(), strict=True):
        rows = begins[first[place] : last[place]]
        last[place] = first[place] + np.searchsorted(rows, stop, side="left")
        first[place] += max(0, int(np.searchsorted(rows, start, side="right")) - 1)
    return first, np.maximum(first, last)


def _blocks(here: Ints, counts: Ints) -> Iterator[Ints]:
    """Cut the wanted boxes into blocks of about MOST_PAIRS pairs."""
    ends = np.cumsum(counts[here])
    first = 0
    while first < len(here):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + MOST_PAIRS, side="right")))
        yield here[first:last]
        first = last


def _pairs(wanted: ShardTable, rows: Ints, held: ShardTable, near: tuple[Ints, Ints], width: int) -> _Pairs:
    """Return the pairs that share an element, by wanted box, then by row: each box with its own range of rows."""
    order, _ = held.rows_by_tensor
    first, counts = near[0], near[1] - near[0]
    which = np.repeat(np.arange(len(rows)), counts)
    other = order[ranges(first, counts)]
    offsets, lengths = wanted.dims(wanted.offsets, rows, width, 0), wanted.dims(wanted.lengths, rows, width, 1)
    start, stop = offsets[which], (offsets + lengths)[which]
    held_start = held.dims(held.offsets, other, width, 0)
    low = np.maximum(held_start, start)
    high = np.minimum(held_start + held.dims(held.lengths, other, width, 1), stop)
    hit = np.flatnonzero((high > low).all(axis=1))
    return _Pairs(which[hit], other[hit], low[hit], high[hit], start[hit], stop[hit])


def _choose(pairs: _Pairs, count: int) -> tuple[Ints, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return (pairs to read, which of the `count` wanted boxes they cover, which boxes any row meets)."""
    is_met, is_covered = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    is_met[pairs.wanted] = True
    whole = np.flatnonzero(((pairs.low == pairs.start) & (pairs.high == pairs.stop)).all(axis=1))
    boxes, first = np.unique(pairs.wanted[whole], return_index=True)
    is_covered[boxes] = True
    chosen = whole[first]
    rest = np.flatnonzero(~is_covered[pairs.wanted])
    for drop_replicas in (False, True):
        rest = _without_replicas(pairs, rest) if drop_replicas else rest
        if len(rest):
            is_covered[_tiled(pairs, rest)] = True
            chosen = np.concatenate((chosen, rest[is_covered[pairs.wanted[rest]]]))
            rest = rest[~is_covered[pairs.wanted[rest]]]
    return chosen, is_covered, is_met


def _tiled(pairs: _Pairs, rest: Ints) -> Ints:
    """Return the wanted boxes that their pairs among `rest` tile, none overlapping another."""
    owner, firsts = np.unique(pairs.wanted[rest], return_index=True)
    parts = fingerprints(pairs.low[rest], pairs.high[rest])
    wholes = fingerprints(pairs.start[rest][firsts], pairs.stop[rest][firsts])
    found: Ints = owner[np.add.reduceat(parts, firsts) == wholes]
    return found


def _without_replicas(pairs: _Pairs, rest: Ints) -> Ints:
    """Return `rest` with one pair, that of the lowest row, of those that share the same elements."""
    if not len(rest):
        return rest
    keys = np.column_stack((pairs.wanted[rest], pairs.low[rest], pairs.high[rest]))
    _, first = np.unique(keys, axis=0, return_index=True)
    return rest[np.sort(first)]


def fingerprints(low: Ints, high: Ints) -> npt.NDArray[np.uint64]:
    """Return 64 bits per box, of which those of boxes that tile another add up to its own (see core/schema.py)."""
    dims = np.broadcast_to(np.arange(low.shape[1]), low.shape)
    found: npt.NDArray[np.uint64] = (mixed_coordinates(high, dims) - mixed_coordinates(low, dims)).prod(axis=1)
    return found


def box_of(table: ShardTable, row: int) -> Box:
    """Return the box of a row."""
    shard = table.shard(row)
    return Box(shard.offsets, shard.lengths)


# -- Whether two tables hold the same elements of their tensors, however these are cut into rows. Pure, numpy only -


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
