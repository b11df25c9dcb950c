"""A read plan cut into pieces of whole chunks, and neighbouring pieces grouped into requests. Pure, numpy only.

Boxes become bytes here. Nearly every read is one run of bytes on both sides, and all of those are cut at once; a read
of several runs (a column of a matrix) is cut one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.shard import ITEMSIZE, Box
from flashckpt.core.shard_table import ShardTable, ranges
from flashckpt.planning.box_match import SourceRow
from flashckpt.planning.read_plan import ReadPlan

JOB_BYTES = 8 << 20
"""Most bytes one thread fetches at a time: bounds scratch memory to this per thread."""
WIDE_JOB_BYTES = 32 << 20
"""The same where bytes lie in memory and go to a device: there each job costs turns of the GIL rather than memory."""
GAP_BYTES = 64 << 10
"""Unwanted bytes between two ranges that are read along rather than asked for separately."""
MAX_RUNS = 1 << 16
"""Most runs of one piece: bounds the memory of its index arrays to about 1 MiB."""

Ints = npt.NDArray[np.int64]
_COLUMNS = (
    "read", "target", "source", "row", "start", "stop", "place", "object_id", "source_start", "target_start",
    "nbytes", "part",
)  # fmt: skip


class Part(NamedTuple):
    """A box that makes several runs, and those of them that lie in one piece."""

    box: Box
    runs: Runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Parts of reads, each in whole chunks of one row: one entry per piece in each column, all int64.

    Attributes:
        read: Place of the read in the plan.
        target, source, row: As in the plan.
        start, stop: The chunks in the row: `start` is a multiple of CHUNK_BYTES, `stop` too or the end of the row.
        object_id, place: Object, and byte in it where `start` lies: what neighbours are merged by.
        source_start, target_start, nbytes: The run of bytes that the read is, in row and target; where `part` is not
            -1, that of its first run.
        part: Place in `parts` of a piece of several runs, else -1.
        parts: Box and runs of those.
        without: Rows that may not be used in place of these.
    """

    plan: ReadPlan
    read: Ints
    target: Ints
    source: Ints
    row: Ints
    start: Ints
    stop: Ints
    place: Ints
    object_id: Ints
    source_start: Ints
    target_start: Ints
    nbytes: Ints
    part: Ints
    parts: Sequence[Part] = ()
    without: frozenset[SourceRow] = frozenset()

    def __len__(self) -> int:
        return len(self.read)

    def take(self, which: Ints) -> Pieces:
        """Return some of them, in the order given."""
        return replace(self, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def box(self, piece: int) -> Box:
        """Return the box that a piece is a part of."""
        part = int(self.part[piece])
        return self.parts[part].box if part >= 0 else self.plan.box(int(self.read[piece]))

    def by_chunk(self, piece: int) -> Pieces:
        """Return one piece cut into its chunks; those that it has no byte of are left out."""
        start, stop = int(self.start[piece]), int(self.stop[piece])
        starts = np.arange(start, stop, CHUNK_BYTES)
        found = self.take(np.full(len(starts), piece, np.int64))
        found = replace(
            found, start=starts, stop=np.minimum(starts + CHUNK_BYTES, stop), place=found.place + starts - start
        )
        if (part := int(self.part[piece])) < 0:
            end = found.source_start + found.nbytes
            return found.take(np.flatnonzero((found.source_start < found.stop) & (end > found.start)))
        box, whole = self.parts[part]
        cut = [_within(whole, a, b) for a, b in zip(found.start.tolist(), found.stop.tolist(), strict=True)]
        kept = np.array([k for k, one in enumerate(cut) if len(one)], np.int64)
        parts = [Part(box, cut[k]) for k in kept]
        return replace(found.take(kept), part=np.arange(len(kept)), parts=parts)


class Job(NamedTuple):
    """Pieces `first` to `last` of one source that are fetched together: neighbours in one object."""

    pieces: Pieces
    first: int
    last: int

    @property
    def source(self) -> int:
        """Index of the source."""
        return int(self.pieces.source[self.first])

    @property
    def rows(self) -> slice:
        """Where its pieces stand in the columns."""
        return slice(self.first, self.last)

    def __len__(self) -> int:
        return self.last - self.first


def cut_pieces(plan: ReadPlan, without: frozenset[SourceRow] = frozenset(), *, max_runs: int = MAX_RUNS) -> Pieces:
    """Cut all reads of a plan into pieces of at most JOB_BYTES of whole chunks.

    Each chunk that a read touches is in exactly one piece of it; no other chunk is in any.

    `without` are rows that may not be used in place of these.
    """
    is_run, source_start, target_start = _single_runs(plan)
    single = _cut_single(plan, np.flatnonzero(is_run), source_start, target_start)
    columns = dict(zip(_COLUMNS, single, strict=True))
    parts: list[Part] = []
    rows = [row for read in np.flatnonzero(~is_run).tolist() for row in _cut_runs(plan, read, parts, max_runs)]
    if rows:
        more = np.array(rows, np.int64).T
        columns = {name: np.concatenate((columns[name], more[k])) for k, name in enumerate(_COLUMNS)}
    return Pieces(plan=plan, parts=parts, without=without, **columns)


def merge_pieces(pieces: Pieces) -> list[Job]:
    """Group pieces into jobs: neighbours in one object within GAP_BYTES, at most JOB_BYTES from end to end."""
    pieces = pieces.take(_in_order(pieces))
    stops = pieces.place + pieces.stop - pieces.start
    other = np.flatnonzero(np.diff(pieces.source) | np.diff(pieces.object_id)) + 1
    bounds: list[int] = []
    for low, high in itertools.pairwise([0, *other.tolist(), len(pieces)]):
        bounds += _job_starts(pieces.place[low:high], stops[low:high], low)
    return [Job(pieces, a, b) for a, b in itertools.pairwise([*bounds, len(pieces)])]


def join_jobs(jobs: Iterable[Job], sources: Container[int]) -> list[Job]:
    """Join jobs of these sources that follow each other, up to WIDE_JOB_BYTES from end to end; others stay as they are."""
    joined: list[Job] = []
    for job in jobs:
        if joined and job.source in sources and _follows(joined[-1], job):
            joined[-1] = Job(job.pieces, joined[-1].first, job.last)
        else:
            joined.append(job)
    return joined


def _follows(before: Job, job: Job) -> bool:
    pieces, first = job.pieces, before.first
    if before.pieces is not pieces or before.last != job.first or before.source != job.source:
        return False
    rows = slice(first, job.last)  # one before the last may reach further than it
    nbytes = int((pieces.place[rows] + pieces.stop[rows] - pieces.start[rows]).max() - pieces.place[first])
    return bool(pieces.object_id[first] == pieces.object_id[job.first]) and nbytes <= WIDE_JOB_BYTES


def _in_order(pieces: Pieces) -> Ints:
    """Return the pieces by source, object and place; those of one place as they were cut."""
    columns = (pieces.place, pieces.object_id, pieces.source)
    keys = [column for column in columns if len(column) and (column != column[0]).any()]
    order: Ints = np.lexsort(keys) if keys else np.arange(len(pieces))
    return order


def _job_starts(places: Ints, stops: Ints, first: int) -> Iterator[int]:
    """Yield where the jobs of one object begin; its pieces stand from `first` on, in the order of their places."""
    reached = np.maximum.accumulate(stops)
    gaps = np.append(np.flatnonzero(places[1:] - reached[:-1] > GAP_BYTES) + 1, len(places))
    begin = 0
    while begin < len(places):
        yield first + begin
        full = int(np.searchsorted(reached, places[begin] + JOB_BYTES, side="right"))
        gap = int(gaps[np.searchsorted(gaps, begin, side="right")])
        begin = max(begin + 1, min(full, gap))


def _single_runs(plan: ReadPlan) -> tuple[npt.NDArray[np.bool_], Ints, Ints]:
    """Return which reads are one run on both sides, and where the runs start in row and target, in bytes."""
    count, width = plan.offsets.shape
    held_at, held_n = np.zeros((count, width), np.int64), np.ones((count, width), np.int64)
    for source in distinct(plan.source):
        which, table = np.flatnonzero(plan.source == source), plan.sources[source]
        held_at[which] = table.dims(table.offsets, plan.row[which], width, 0)
        held_n[which] = table.dims(table.lengths, plan.row[which], width, 1)
    wanted = plan.wanted
    wanted_at = wanted.dims(wanted.offsets, plan.target, width, 0)
    wanted_n = wanted.dims(wanted.lengths, plan.target, width, 1)
    is_run, is_whole = np.ones(count, np.bool_), np.ones(count, np.bool_)
    if bool((plan.lengths == held_n).all() and (plan.lengths == wanted_n).all()):  # nothing is cut: rows as they are
        return is_run, np.zeros(count, np.int64), np.zeros(count, np.int64)
    for dim in reversed(range(width)):
        # behind a dimension that is not taken whole on both sides, every one before it must be a single element
        is_run &= is_whole | (plan.lengths[:, dim] == 1)
        is_whole &= (plan.lengths[:, dim] == held_n[:, dim]) & (plan.lengths[:, dim] == wanted_n[:, dim])
    starts = []
    sizes = np.array([ITEMSIZE[dtype] for dtype in wanted.dtypes], np.int64)
    for at, n in ((held_at, held_n), (wanted_at, wanted_n)):
        stride = sizes[wanted.dtype_id[plan.target]] if count else np.zeros(0, np.int64)
        start = np.zeros(count, np.int64)
        for dim in reversed(range(width)):
            start += (plan.offsets[:, dim] - at[:, dim]) * stride
            stride = stride * n[:, dim]
        starts.append(start)
    return is_run, starts[0], starts[1]


def _cut_single(plan: ReadPlan, reads: Ints, source_start: Ints, target_start: Ints) -> list[Ints]:
    """Return the columns of the pieces of reads that are one run each."""
    begin, nbytes = source_start[reads], plan.nbytes[reads]
    first, last = begin // CHUNK_BYTES, (begin + nbytes - 1) // CHUNK_BYTES + 1
    step = JOB_BYTES // CHUNK_BYTES
    counts = -(-(last - first) // step)
    which = np.repeat(np.arange(len(reads)), counts)
    chunk = first[which] + step * ranges(np.zeros(len(reads), np.int64), counts)
    read = reads[which]
    end, base, object_id = (_of_rows(plan, read, name) for name in ("nbytes", "byte_offset", "object_id"))
    start = chunk * CHUNK_BYTES
    stop = np.minimum(np.minimum(chunk + step, last[which]) * CHUNK_BYTES, end)
    place, part = base + start, np.full(len(read), -1, np.int64)
    rows = [read, plan.target[read], plan.source[read], plan.row[read], start, stop, place, object_id]
    return [*rows, begin[which], target_start[read], nbytes[which], part]


def _of_rows(plan: ReadPlan, reads: Ints, column: str) -> Ints:
    """Return a column of the source tables, for the rows of some reads."""
    found = np.zeros(len(reads), np.int64)
    sources = plan.source[reads]
    for source in distinct(sources):
        which = np.flatnonzero(sources == source)
        found[which] = getattr(plan.sources[source], column)[plan.row[reads[which]]]
    return found


def distinct(numbers: Ints) -> list[int]:
    """Return the numbers that occur, ascending: as a rule it is one, and nothing has to be sorted to see that."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [int(numbers[0])]
    found: list[int] = np.unique(numbers).tolist()
    return found


def _cut_runs(plan: ReadPlan, read: int, parts: list[Part], max_runs: int) -> Iterator[tuple[int, ...]]:
    """Yield the columns of the pieces of one read of several runs; boxes and runs are added to `parts`."""
    source, row, target = int(plan.source[read]), int(plan.row[read]), int(plan.target[read])
    table: ShardTable = plan.sources[source]
    held, shard = table.shard(row), plan.wanted.shard(target)
    sides = Box(held.offsets, held.lengths), Box(shard.offsets, shard.lengths)
    place, end, object_id = int(table.byte_offset[row]), int(table.nbytes[row]), int(table.object_id[row])
    for box in split_runs(plan.box(read), *sides, max_runs):
        found = runs(*sides, box, ITEMSIZE[shard.dtype])
        for first, last in _chunk_groups(found, end):
            start, stop = first * CHUNK_BYTES, min(last * CHUNK_BYTES, end)
            inside = _within(found, start, stop)
            begins = int(inside.source_starts[0]), int(inside.target_starts[0])
            ids = read, target, source, row
            yield (*ids, start, stop, place + start, object_id, *begins, inside.nbytes, len(parts))
            parts.append(Part(box, inside))


def _chunk_groups(found: Runs, end: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of adjacent chunks that the runs touch, none above JOB_BYTES."""
    step = JOB_BYTES // CHUNK_BYTES
    touched = np.zeros(-(-end // CHUNK_BYTES) + 1, np.int64)
    np.add.at(touched, found.source_starts // CHUNK_BYTES, 1)
    np.add.at(touched, (found.source_starts + found.nbytes - 1) // CHUNK_BYTES + 1, -1)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (np.cumsum(touched) > 0).astype(np.int8), [0]))))
    for first, last in edges.reshape(-1, 2).tolist():
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _within(found: Runs, start: int, stop: int) -> Runs:
    """Return the runs that have a byte in [start, stop) of the row."""
    first = int(np.searchsorted(found.source_starts + found.nbytes, start, side="right"))
    last = int(np.searchsorted(found.source_starts, stop, side="left"))
    return replace(found, source_starts=found.source_starts[first:last], target_starts=found.target_starts[first:last])


# -- Boxes as contiguous runs of bytes in row-major memory. Pure ---------------------------------------------------

_ORIGIN = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The contiguous byte runs of a read: all of `nbytes`, in increasing order on both sides.

    Args:
        source_starts: First byte of each run in the source shard, int64.
        target_starts: First byte of each run in the wanted shard, int64.
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
