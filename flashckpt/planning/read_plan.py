"""Which bytes of which source fill a wanted shard: box intersection. Pure, no I/O, deterministic.

Both sides describe boxes in one global index space (ARCHITECTURE.md section 3), so any layout
restores under any other. Sources are asked in the order they are given, nearest first: what the
first one covers is never planned from the second. Boxes become bytes only in `runs`, so a plan
costs the same for a large tensor as for a small one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from flashckpt.core.shard import ITEMSIZE, Shard, intersect
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import ShardGapError, TensorMismatchError

Ints = npt.NDArray[np.int64]
Dims = tuple[int, ...]
Box = tuple[Dims, Dims]
"""(offsets, lengths), in elements, one entry per dimension."""

_FEW_ROWS = 4
"""Up to this many candidate rows plain tuples are quicker than arrays (the memory tier: 1 row per source)."""
_MANY_HITS = 16
"""From this many intersections on, an exact grid is looked for before boxes are cut one by one."""
_ORIGIN = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One box that is read from one row of one source into one wanted shard.

    Args:
        target: Index of the wanted shard.
        source: Index of the source table.
        row: Row of that table.
        offsets: First element of the box, in the index space of the global tensor.
        lengths: Elements of the box per dimension.
        nbytes: Bytes of the box.
    """

    target: int
    source: int
    row: int
    offsets: Dims
    lengths: Dims
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The contiguous byte runs of a read: all of `nbytes`, at increasing places on both sides.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """All reads that fill the wanted shards, in the order of the wanted shards.

    Args:
        reads: The reads; boxes of one wanted shard never overlap and together cover it.
        nbytes: Bytes wanted, which is also the sum of the bytes of the reads.
    """

    reads: Sequence[Read]
    nbytes: int

    def nbytes_of(self, source: int) -> int:
        """Return the bytes that come from source `source`."""
        return sum(read.nbytes for read in self.reads if read.source == source)


def plan_reads(wanted: Sequence[Shard], sources: Sequence[ShardTable], *, names: Sequence[str] = ()) -> ReadPlan:
    """Return the reads that fill `wanted` from shards that were written under any other layout.

    Args:
        wanted: The boxes this rank needs. Empty boxes need nothing.
        sources: Tables to read from, nearest first. Boxes within one may overlap (replicas).
        names: What to call each source in an error ("rank 3", "step 1200 (ranks 0-7)").

    Returns:
        The plan. The same arguments give the same plan in every process.

    Raises:
        ShardGapError: An element of a wanted shard is in no source, or is there under another
            dtype or global shape; names the tensor, the first missing index and the sources present.
    """
    reads: list[Read] = []
    for target, shard in enumerate(wanted):
        reads += plan_box(target, shard, (shard.offsets, shard.lengths), sources, names=names)
    return ReadPlan(reads=reads, nbytes=sum(shard.nbytes for shard in wanted))


def plan_box(
    target: int,
    shard: Shard,
    box: Box,
    sources: Sequence[ShardTable],
    *,
    names: Sequence[str] = (),
    without: Collection[tuple[int, int]] = (),
) -> list[Read]:
    """Return the reads that fill one box of wanted shard `target` (used again when a range is damaged).

    Args:
        target: Index of the wanted shard, copied into the reads.
        shard: The wanted shard.
        box: The part of it that is needed, in global indices.
        sources: Tables to read from, nearest first.
        names: What to call each source in an error.
        without: (source, row) pairs that may not be used.

    Raises:
        ShardGapError: As in `plan_reads`.
    """
    reads, left = _plan(target, shard, box, sources, names=names, without=without)
    if left:
        raise _gap(shard, left, sources, names)
    return reads


def coverage(wanted: Sequence[Shard], sources: Sequence[ShardTable]) -> tuple[list[int], int]:
    """Return the bytes of `wanted` that each source would give, nearest first, and the bytes that are in none."""
    given, missing = [0] * len(sources), 0
    for target, shard in enumerate(wanted):
        reads, left = _plan(target, shard, (shard.offsets, shard.lengths), sources)
        for read in reads:
            given[read.source] += read.nbytes
        missing += sum(prod(box[1]) for box in left) * ITEMSIZE[shard.dtype]
    return given, missing


def uncovered(wanted: Sequence[Shard], sources: Sequence[ShardTable]) -> list[tuple[int, Box]]:
    """Return the boxes that are in no source, each with the index of the wanted shard it is a part of.

    Raises:
        TensorMismatchError: A source has a tensor of the name with another dtype or global shape.
    """
    return [
        (target, box)
        for target, shard in enumerate(wanted)
        for box in _plan(target, shard, (shard.offsets, shard.lengths), sources)[1]
    ]


def _plan(
    target: int,
    shard: Shard,
    box: Box,
    sources: Sequence[ShardTable],
    *,
    names: Sequence[str] = (),
    without: Collection[tuple[int, int]] = (),
) -> tuple[list[Read], list[Box]]:
    """Return the reads that fill as much of `box` as there is, and the boxes that are in no source."""
    left = [] if 0 in box[1] else [box]
    reads: list[Read] = []
    size = ITEMSIZE[shard.dtype]
    for source, table in enumerate(sources):
        if not left:
            break
        rows = table.rows(shard.fqn)
        if without:
            rows = [row for row in rows if (source, row) not in without]
        if not rows:
            continue
        _check_kind(shard, table.shard(rows[0]), _name(source, names))
        found, left = _cover(left, table, rows)
        reads += [
            Read(target=target, source=source, row=row, offsets=at, lengths=n, nbytes=prod(n) * size)
            for row, (at, n) in found
        ]
    return reads, left


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
        at = (*box[0][:dim], box[0][dim] + skip, *box[0][dim + 1 :])
        yield from split_runs((at, (*box[1][:dim], length, *box[1][dim + 1 :])), source, target, limit)


def flat_boxes(shard: Box, start: int, stop: int) -> list[Box]:
    """Return the boxes (global indices) of elements `start` to `stop` of a row-major shard: at most 2d-1."""
    return [
        (tuple(a + b for a, b in zip(shard[0], at, strict=True)), lengths)
        for at, lengths in _flat(shard[1], start, stop)
    ]


def _flat(lengths: Dims, start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not lengths:
        return [((), ())]
    inner = prod(lengths[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)

    def within(index: int, a: int, b: int) -> list[Box]:
        return [((index, *at), (1, *n)) for at, n in _flat(lengths[1:], a, b)]

    if first == last:
        return within(first, head, tail)
    boxes = within(first, head, inner) if head else []
    first += head > 0
    if last > first:
        boxes.append(((first, *(0 for _ in lengths[1:])), (last - first, *lengths[1:])))
    return boxes + within(last, 0, tail)


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


def _cover(left: list[Box], table: ShardTable, rows: Sequence[int]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Cover as much of `left` as the rows hold; return ((row, box) pairs, what is still left)."""
    if len(rows) <= _FEW_ROWS:
        shards = [table.shard(row) for row in rows]
        return _cut(left, [(row, (shard.offsets, shard.lengths)) for row, shard in zip(rows, shards, strict=True)])
    found: list[tuple[int, Box]] = []
    still: list[Box] = []
    ids = np.asarray(rows, dtype=np.int64)
    offsets, lengths = _boxes(table, ids)
    for box in left:
        part, rest = _cover_one(box, ids, offsets, lengths)
        found += part
        still += rest
    return found, still


def _boxes(table: ShardTable, rows: Ints) -> tuple[Ints, Ints]:
    """Offsets and lengths of rows of one tensor, both int64[len(rows), dimensions]."""
    dims = table.dim_start[rows][:, None] + np.arange(int(table.ndim[rows[0]]))
    return table.offsets[dims], table.lengths[dims]


def _cover_one(box: Box, ids: Ints, offsets: Ints, lengths: Ints) -> tuple[list[tuple[int, Box]], list[Box]]:
    start, stop = np.array(box[0], dtype=np.int64), np.array(box[0], dtype=np.int64) + np.array(box[1], dtype=np.int64)
    lo, hi = np.maximum(offsets, start), np.minimum(offsets + lengths, stop)
    hit = np.flatnonzero((hi > lo).all(axis=1))
    lo, hi, ids = lo[hit], hi[hit], ids[hit]
    exact = np.flatnonzero(((lo == start) & (hi == stop)).all(axis=1))
    if len(exact):
        return [(int(ids[exact[0]]), box)], []
    if len(hit) >= _MANY_HITS and (cells := _grid(lo, hi, start, stop)) is not None:
        return [(int(ids[k]), _box(lo[k], hi[k])) for k in cells], []
    return _cut([box], [(int(ids[k]), _box(lo[k], hi[k])) for k in range(len(ids))])


def _box(lo: Ints, hi: Ints) -> Box:
    return tuple(lo.tolist()), tuple((hi - lo).tolist())


def _grid(lo: Ints, hi: Ints, start: Ints, stop: Ints) -> Ints | None:
    """Return one hit per cell where the hits form a full grid over [start, stop), else None.

    Sharded tensors nearly always do (FSDP x TP, even or uneven); cutting 2,048 boxes one by one would
    take milliseconds per tensor. Replicas of a cell are dropped, the lowest row stays.
    """
    cell = np.zeros(len(lo), dtype=np.int64)
    cells = 1
    for dim in range(lo.shape[1]):
        edges = np.unique(np.concatenate((lo[:, dim], hi[:, dim])))
        if edges[0] != start[dim] or edges[-1] != stop[dim]:
            return None
        at = np.searchsorted(edges, lo[:, dim])
        if not np.array_equal(edges[at + 1], hi[:, dim]):
            return None
        cell = cell * (len(edges) - 1) + at
        cells *= len(edges) - 1
    unique, first = np.unique(cell, return_index=True)
    return np.sort(first) if len(unique) == cells else None


def _cut(left: list[Box], candidates: list[tuple[int, Box]]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Cut candidate boxes out of `left` in the order given, an exact one first."""
    found: list[tuple[int, Box]] = []
    exact = [pair for pair in candidates if pair[1] in left]
    if exact and len(left) == 1:
        return exact[:1], []
    for row, box in exact + candidates if exact else candidates:
        if not left:
            break
        rest: list[Box] = []
        for whole in left:
            part = intersect(*whole, *box)
            if part is None:
                rest.append(whole)
            else:
                found.append((row, part))
                rest += _remainder(whole, part)
        left = rest
    return found, left


def _remainder(whole: Box, part: Box) -> list[Box]:
    """Return `whole` without `part` (which lies in it) as at most 2d boxes, in row-major order of their corners."""
    before: list[Box] = []
    after: list[Box] = []
    at, lengths = list(whole[0]), list(whole[1])
    for dim, (first, count) in enumerate(zip(*part, strict=True)):
        stop, end = first + count, at[dim] + lengths[dim]
        if first > at[dim]:
            before.append(_with(at, lengths, dim, at[dim], first - at[dim]))
        if end > stop:
            after.append(_with(at, lengths, dim, stop, end - stop))
        at[dim], lengths[dim] = first, count
    return before + after[::-1]


def _with(at: list[int], lengths: list[int], dim: int, first: int, count: int) -> Box:
    return (*at[:dim], first, *at[dim + 1 :]), (*lengths[:dim], count, *lengths[dim + 1 :])


def _name(source: int, names: Sequence[str]) -> str:
    return names[source] if source < len(names) else f"source {source}"


def _check_kind(shard: Shard, held: Shard, name: str) -> None:
    for word, wanted, found in (
        ("dtype", shard.dtype, held.dtype),
        ("global shape", shard.global_shape, held.global_shape),
    ):
        if wanted != found:
            raise TensorMismatchError(
                f"The state holds {shard.fqn!r} with another {word} than the running model",
                found=f"{found} in {name}",
                expected=str(wanted),
                state="Nothing was read.",
                remedy="change the model back, restore an older step (flashckpt ls ROOT), or leave this tensor out with "
                "restore(only=...)",
            )


def _gap(shard: Shard, left: list[Box], sources: Sequence[ShardTable], names: Sequence[str]) -> ShardGapError:
    missing = sum(prod(box[1]) for box in left)
    index = min(box[0] for box in left)
    present = [_name(k, names) for k, table in enumerate(sources) if len(table.rows(shard.fqn))]
    holders = ", ".join(present) if present else "no source"
    others = f" (sources present: {', '.join(_name(k, names) for k in range(len(sources))) or 'none'})"
    return ShardGapError(
        f"Part of {shard.fqn!r} is in no shard that can be reached",
        found=f"{missing} of {shard.nbytes // ITEMSIZE[shard.dtype]} elements of this rank's shard are missing, first "
        f"index {list(index)}; parts of it are in {holders}{others}",
        expected=f"offsets {list(shard.offsets)}, lengths {list(shard.lengths)} of shape {list(shard.global_shape)}",
        state="Nothing was changed by this tensor.",
        remedy="restore an older step (flashckpt ls ROOT), or leave the tensor out with restore(only=...)",
    )
