"""Fill live state from whatever sources exist: plan, fetch, verify, copy; range by range, in parallel. Torch-free.

A range that turns out damaged, or whose source vanishes, is planned again without it: the next source
that holds these elements fills them, and the report names what happened. Only where no source is left
does the restore fail. Sources are only ever read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flashckpt.core.digest import CHUNK_BYTES
from flashckpt.core.shard import ITEMSIZE, Shard, intersect
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import DamagedError, FlashckptError, ShardGapError
from flashckpt.faults import crash_point
from flashckpt.logs import guarded
from flashckpt.planning.read_plan import Box, Read, Runs, flat_boxes, plan_box, plan_reads, runs, split_runs
from flashckpt.restore.sources import Source, Span

JOB_BYTES = 8 << 20
"""Most bytes one thread fetches at a time: bounds scratch memory to this per thread."""
GAP_BYTES = 64 << 10
"""Unwanted bytes between two ranges that are read along rather than asked for separately."""
MAX_RUNS = 1 << 16
"""Most runs of one piece: bounds the memory of its index arrays to about 1 MiB."""
INLINE_BYTES = 4 << 20
"""Below this a restore runs on the calling thread: starting threads would cost more."""

Bytes = npt.NDArray[np.uint8]
_log = guarded(logging.getLogger(__name__))


@dataclass(frozen=True, kw_only=True)
class Target:
    """A wanted shard and the memory it goes to.

    Args:
        shard: The wanted box.
        buffer: Its writable bytes, row-major, `shard.nbytes` of them.
    """

    shard: Shard
    buffer: memoryview


@dataclass(kw_only=True)
class RestoreCounts:
    """What a fill did. Seconds of read, verify and copy are summed over threads; `wall_s` is the clock's.

    Attributes:
        needed_bytes: Bytes that were copied into targets, by tier.
        read_bytes: Bytes that were read for them, by tier: rounded out to 1 MiB chunks, padding included.
        fallback_bytes: Bytes that had to come from another source than planned.
        damaged: One sentence per range that could not be used.
        threads: Threads that worked.
    """

    needed_bytes: dict[str, int] = field(default_factory=dict)
    read_bytes: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    fallback_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    plan_s: float = 0.0
    read_s: float = 0.0
    verify_s: float = 0.0
    copy_s: float = 0.0
    wall_s: float = 0.0
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one read that lies in one span of whole chunks."""

    target: int
    source: int
    span: Span
    box: Box
    runs: Runs
    place: tuple[int, int]
    """(object, byte in it) where the span starts: what neighbours are merged by."""
    without: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_direct(self) -> bool:
        """Whether the piece is one run that is the whole span: it can be read straight into the target."""
        start = int(self.runs.source_starts[0])
        return len(self.runs) == 1 and start <= self.span.start and self.span.stop <= start + self.runs.nbytes


@dataclass(frozen=True, slots=True)
class _Failure:
    pieces: Sequence[Piece]
    error: Exception


class RemoteFetcher(Protocol):
    """Brings the bytes of jobs that lie with other ranks, a bounded amount at a time (restore/peers.py)."""

    def is_far(self, job: Sequence[Piece]) -> bool:
        """Whether the bytes of a job are still to be brought."""
        ...

    def exchange(self, jobs: Sequence[Sequence[Piece]]) -> tuple[list[Sequence[Piece]], list[Sequence[Piece]]] | None:
        """Return (jobs that can be run now, jobs for the next call); None when no rank wants anything any more."""
        ...


def execute_reads(
    targets: Sequence[Target],
    sources: Sequence[Source],
    *,
    threads: int | None = None,
    far: RemoteFetcher | None = None,
) -> RestoreCounts:
    """Fill every target from the nearest source that holds its bytes intact.

    Args:
        targets: Wanted shards and their memory; all their bytes are overwritten.
        sources: Nearest first. Each is only read.
        threads: Threads to use; None chooses by cores (at most 16).
        far: What brings the bytes of sources that lie with other ranks; a collective then, once per round.

    Returns:
        Bytes per tier, seconds per phase, and what was damaged on the way.

    Raises:
        ShardGapError: Some element is in no source; nothing was written.
        DamagedError: Some range is damaged in its last source; targets hold a mixture and must not be used.
    """
    started = time.perf_counter()
    counts = RestoreCounts()
    shards = [target.shard for target in targets]
    tables = [source.manifest.table for source in sources]
    plan = plan_reads(shards, tables, names=[source.name for source in sources])
    fill_ = _Fill(targets, sources, counts)
    jobs = merge_pieces(piece for read in plan.reads for piece in fill_.pieces(read))
    counts.plan_s = time.perf_counter() - started
    in_place = all(sources[read.source].in_place for read in plan.reads)
    counts.threads = 1 if plan.nbytes < INLINE_BYTES else threads or thread_count(waits=not in_place)
    before = [(s.meter.read_bytes, s.meter.requests, s.meter.read_s, s.meter.verify_s) for s in sources]
    crash_point("restore.before-read")
    with ThreadPoolExecutor(counts.threads, thread_name_prefix="flashckpt-restore") as pool:
        run = map if counts.threads == 1 else pool.map
        away: list[Sequence[Piece]] = []
        while True:
            while jobs:
                if far is not None:
                    away += [job for job in jobs if far.is_far(job)]
                    jobs = [job for job in jobs if not far.is_far(job)]
                failures = [failure for failure in run(fill_.run, jobs) if failure is not None]
                jobs = [job for failure in failures for job in fill_.instead(failure)]
            if far is None or (brought := far.exchange(away)) is None:
                break
            jobs, away = brought
    for source, (read_bytes, requests, read_s, verify_s) in zip(sources, before, strict=True):
        meter, tier = source.meter, source.tier
        counts.read_bytes[tier] = counts.read_bytes.get(tier, 0) + meter.read_bytes - read_bytes
        counts.requests[tier] = counts.requests.get(tier, 0) + meter.requests - requests
        counts.read_s += meter.read_s - read_s
        counts.verify_s += meter.verify_s - verify_s
    counts.wall_s = time.perf_counter() - started
    return counts


def thread_count(*, waits: bool) -> int:
    """Return how many threads fill this rank's state, with the cores shared by the ranks of its node.

    Args:
        waits: Whether they wait for storage; threads that only copy would take each other's turns.
    """
    cores = len(os.sched_getaffinity(0))
    if waits:
        return min(16, cores * 2)
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


class _Fill:
    """The state of one `execute_reads`: buffers, sources and counters shared by its threads."""

    def __init__(self, targets: Sequence[Target], sources: Sequence[Source], counts: RestoreCounts) -> None:
        self._targets, self._sources, self._counts = targets, sources, counts
        self._lock = threading.Lock()
        # a view with a zero in its shape cannot be cast
        self._buffers = [
            memoryview(target.buffer).cast("B") if target.buffer.nbytes else memoryview(b"") for target in targets
        ]
        for target, buffer in zip(targets, self._buffers, strict=True):
            if len(buffer) != target.shard.nbytes or (buffer.readonly and len(buffer)):
                msg = f"buffer of {target.shard.fqn!r}: {len(buffer)} bytes, shard has {target.shard.nbytes}"
                raise ValueError(msg)

    def pieces(self, read: Read, without: frozenset[tuple[int, int]] = frozenset()) -> Iterable[Piece]:
        """Cut one read into pieces."""
        table = self._sources[read.source].manifest.table
        return cut_pieces(read, self._targets[read.target].shard, table, without)

    def run(self, job: Sequence[Piece]) -> _Failure | None:
        """Fetch, verify and copy one job; return what failed instead of raising, so that others go on."""
        source = self._sources[job[0].source]
        copy_s, copied = 0.0, 0
        try:
            rest = [piece for piece in job if not self._is_direct(piece, source, len(job))]
            for piece in [piece for piece in job if self._is_direct(piece, source, len(job))]:
                at = int(piece.runs.target_starts[0]) + piece.span.start - int(piece.runs.source_starts[0])
                nbytes = piece.span.stop - piece.span.start
                source.read(piece.span.row, piece.span.start, self._buffers[piece.target][at : at + nbytes])
                copied += nbytes
            views = source.views([piece.span for piece in rest]) if rest else []
            started = time.perf_counter()
            for piece, view in zip(rest, views, strict=True):
                copied += scatter(view, piece.span, piece.runs, self._buffers[piece.target])
            copy_s = time.perf_counter() - started
            source.check()
        except (FlashckptError, OSError) as error:
            return _Failure(job, error)
        self._count(source.tier, copied, copy_s)
        crash_point("restore.during-read")
        return None

    def instead(self, failure: _Failure) -> list[Sequence[Piece]]:
        """Return the jobs that replace a failed one: smaller ones first, to find the damage, then other sources."""
        job = failure.pieces
        if len(job) > 1:
            return [[piece] for piece in job]
        piece, error = job[0], failure.error
        if isinstance(error, DamagedError) and piece.span.stop - piece.span.start > CHUNK_BYTES:
            return [[part] for part in _by_chunk(piece)]
        return merge_pieces(self._elsewhere(piece, error))

    def _elsewhere(self, piece: Piece, error: Exception) -> list[Piece]:
        source = self._sources[piece.source]
        shard, held = self._targets[piece.target].shard, source.manifest.table.shard(piece.span.row)
        size = ITEMSIZE[shard.dtype]
        without = piece.without | {(piece.source, piece.span.row)}
        boxes = flat_boxes((held.offsets, held.lengths), piece.span.start // size, -(-piece.span.stop // size))
        found: list[Piece] = []
        try:
            for lost in boxes:
                if (box := intersect(*lost, *piece.box)) is not None:
                    tables = [other.manifest.table for other in self._sources]
                    for read in plan_box(piece.target, shard, box, tables, without=without):
                        found += self.pieces(read, without)
                        self._counts.fallback_bytes += read.nbytes
        except ShardGapError:
            raise _lost(error, shard) from error
        line = str(error).splitlines()[0]
        names = sorted({self._sources[other.source].name for other in found})
        message = f"{line}; bytes {piece.span.start} to {piece.span.stop} were read from {', '.join(names)} instead"
        self._counts.damaged.append(message)
        _log.warning("%s", message)
        return found

    @staticmethod
    def _is_direct(piece: Piece, source: Source, pieces: int) -> bool:
        """Whether to read straight into the target; one request for several pieces beats that on storage."""
        return (source.in_place or pieces == 1) and piece.is_direct

    def _count(self, tier: str, nbytes: int, copy_s: float) -> None:
        with self._lock:
            self._counts.needed_bytes[tier] = self._counts.needed_bytes.get(tier, 0) + nbytes
            self._counts.copy_s += copy_s


def cut_pieces(
    read: Read, shard: Shard, table: ShardTable, without: frozenset[tuple[int, int]] = frozenset()
) -> Iterable[Piece]:
    """Cut one read of `shard` from a row of `table` into pieces of at most JOB_BYTES of whole chunks. Pure.

    Each chunk that the read touches is in exactly one piece; no other chunk is in any.
    """
    held = table.shard(read.row)
    sides = (held.offsets, held.lengths), (shard.offsets, shard.lengths)
    place, end = (int(table.object_id[read.row]), int(table.byte_offset[read.row])), int(table.nbytes[read.row])
    for part in split_runs((read.offsets, read.lengths), *sides, MAX_RUNS):
        found = runs(*sides, part, ITEMSIZE[shard.dtype])
        for first, last in _chunk_groups(found, end):
            span = Span(row=read.row, start=first * CHUNK_BYTES, stop=min(last * CHUNK_BYTES, end))
            yield Piece(
                target=read.target,
                source=read.source,
                span=span,
                box=part,
                runs=_within(found, span),
                place=(place[0], place[1] + span.start),
                without=without,
            )


def merge_pieces(pieces: Iterable[Piece]) -> list[Sequence[Piece]]:
    """Group pieces into jobs: neighbours in one object within GAP_BYTES, at most JOB_BYTES from end to end."""
    jobs: list[list[Piece]] = []
    first = last = 0
    for piece in sorted(pieces, key=lambda p: (p.source, *p.place, p.target, p.box)):
        stop = piece.place[1] + piece.span.stop - piece.span.start
        previous = jobs[-1][-1] if jobs else None
        if (
            previous is not None
            and (previous.source, previous.place[0]) == (piece.source, piece.place[0])
            and piece.place[1] - last <= GAP_BYTES
            and max(stop, last) - first <= JOB_BYTES
        ):
            jobs[-1].append(piece)
            last = max(last, stop)
        else:
            jobs.append([piece])
            first, last = piece.place[1], stop
    return list(jobs)


def scatter(view: memoryview, span: Span, found: Runs, out: memoryview) -> int:
    """Copy the runs that lie in `view` (the bytes of `span`) to their places in `out`; return the bytes copied."""
    held, into = np.frombuffer(view, np.uint8), np.frombuffer(out, np.uint8)
    starts, targets, nbytes = found.source_starts - span.start, found.target_starts, found.nbytes
    low, high = 0, len(starts)
    copied = 0
    for k in sorted({0, len(starts) - 1}):  # only the first and the last run can reach over the span
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


def _uniform(starts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> Iterable[tuple[int, int]]:
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


def _chunk_groups(found: Runs, end: int) -> Iterable[tuple[int, int]]:
    """Return ranges of adjacent chunks that the runs touch, none above JOB_BYTES."""
    step = JOB_BYTES // CHUNK_BYTES
    for first, last in _touched(found, end):
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _touched(found: Runs, end: int) -> list[list[int]]:
    if len(found) == 1:  # nearly always: the box lies the same way on both sides
        start = int(found.source_starts[0])
        return [[start // CHUNK_BYTES, (start + found.nbytes - 1) // CHUNK_BYTES + 1]]
    touched = np.zeros(-(-end // CHUNK_BYTES) + 1, np.int64)
    np.add.at(touched, found.source_starts // CHUNK_BYTES, 1)
    np.add.at(touched, (found.source_starts + found.nbytes - 1) // CHUNK_BYTES + 1, -1)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (np.cumsum(touched) > 0).astype(np.int8), [0]))))
    pairs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return pairs


def _within(found: Runs, span: Span) -> Runs:
    """Return the runs that have a byte in the span, which has some."""
    if len(found) == 1:
        return found
    first = int(np.searchsorted(found.source_starts + found.nbytes, span.start, side="right"))
    last = int(np.searchsorted(found.source_starts, span.stop, side="left"))
    return replace(found, source_starts=found.source_starts[first:last], target_starts=found.target_starts[first:last])


def _by_chunk(piece: Piece) -> list[Piece]:
    parts = []
    for start in range(piece.span.start, piece.span.stop, CHUNK_BYTES):
        span = Span(row=piece.span.row, start=start, stop=min(start + CHUNK_BYTES, piece.span.stop))
        inside = _within(piece.runs, span)
        if len(inside):
            place = (piece.place[0], piece.place[1] + start - piece.span.start)
            parts.append(replace(piece, span=span, runs=inside, place=place))
    return parts


def _lost(error: Exception, shard: Shard) -> DamagedError:
    known = error if isinstance(error, FlashckptError) else None
    return DamagedError(
        known.problem if known else f"{shard.fqn!r} could not be read",
        found=f"{known.found if known else error}; no other source holds these bytes",
        expected=known.expected if known else "",
        state="The restore was stopped; live state is a mixture and must not be trained on.",
        remedy="restore an older step: flashckpt ls ROOT shows them, flashckpt verify ROOT which are intact",
    )
