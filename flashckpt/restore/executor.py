"""Execute a read plan: fetch, verify, copy; range by range, in parallel. Torch-free.

A range that turns out damaged, or whose source vanishes, is planned again without it: the next source
that holds these elements fills them, and the report names what happened. Only where no source is left
does the restore fail. Sources are only ever read.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.shard import ITEMSIZE, Box, Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.environment import env
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.faults import crash_point
from flashckpt.native.descriptors import DescriptorError
from flashckpt.planning.box_match import Gap, SourceRow
from flashckpt.planning.pieces import JOB_BYTES, Job, Pieces, cut_pieces, distinct, join_jobs, merge_pieces
from flashckpt.planning.read_plan import ReadPlan, as_table, plan_gaps, plan_reads
from flashckpt.report import guarded
from flashckpt.restore.destinations import Destinations, Target, copy_bytes, memory_at, scatter
from flashckpt.restore.lanes import SAMPLE_JOBS, Lanes
from flashckpt.restore.sources import Located, Source, Spans, copy_verified, verify_spans
from flashckpt.shm.segment_file import FreshMemory, address_of

# -- How long each phase of a restore took, and what no phase should pay for ---------------------------------------


class Phases:
    """Seconds by phase, of the clock and of the processor (all threads of this process). Call it around a phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count a `with` block under a name."""
        began, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
            self.cpu_seconds[name] += time.process_time() - cpu

    def report(self) -> dict[str, float]:
        """Return the seconds so far, with those since the start as `total`."""
        return {**self.seconds, "total": time.perf_counter() - self._started}


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from running.

    A hundred thousand new tensors wake it again and again, and each time it goes over every object. What is no
    longer referenced is freed all the same.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = [
    "JOB_BYTES",
    "Phases",
    "RemoteFetcher",
    "RestoreCounts",
    "Target",
    "collector_paused",
    "execute",
    "execute_reads",
    "thread_count",
]

INLINE_BYTES = 4 << 20
"""Below this a restore runs on the calling thread: starting threads would cost more."""
DIRECT_BYTES = 64 << 10
"""From this size on bytes in memory are hashed in their new place right behind the copy, one range at a time."""
_FEEDERS = 8
"""Most threads that fill blocks for a device from memory: with more they wait for the GIL, and nothing crosses the bus sooner (H200)."""

_log = guarded(logging.getLogger(__name__))


@dataclass(kw_only=True)
class RestoreCounts:
    """What a restore read. Seconds of read, verify and copy are summed over threads; `wall_s` is the clock's.

    Attributes:
        needed_bytes: Bytes that were copied into targets, by tier.
        read_bytes: Bytes that were read for them, by tier: rounded out to 1 MiB chunks, padding included.
        requests: Reads that were asked of sources, by tier.
        fallback_bytes: Bytes that had to come from another source than planned.
        damaged: One sentence per range that could not be used.
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


class _Failure(NamedTuple):
    job: Job
    error: Exception


_Map = Callable[[Callable[[Job], _Failure | None], list[Job]], Iterable[_Failure | None]]
_NOTHING = as_table([])


class RemoteFetcher(Protocol):
    """Brings the bytes of jobs that come from other ranks, a bounded amount at a time (restore/peers.py, shared_reads.py)."""

    def jobs(self, plan: ReadPlan) -> list[Job]:
        """Return what a plan is made of."""
        ...

    def is_far(self, job: Job) -> bool:
        """Whether the bytes of a job are still to be brought."""
        ...

    def is_again(self, job: Job) -> bool:
        """Whether a job that failed is to be run once more as it is, now without what other ranks have sent."""
        ...

    def near(self, job: Job) -> int | None:
        """Return the source that has the bytes of a far job as well; None where none has."""
        ...

    def exchange(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]] | None:
        """Return (jobs that can be run now, jobs for the next call); None when no rank wants anything any more."""
        ...


def execute_reads(targets: Sequence[Target], sources: Sequence[Source], *, threads: int | None = None) -> RestoreCounts:
    """Plan, then fill every target from the nearest source that holds its bytes intact.

    Args:
        targets: Wanted shards and their memory; all their bytes are overwritten.
        sources: Nearest first. Each is only read.
        threads: Threads to use; None chooses by cores (at most 16).

    Raises:
        ShardGapError: Some element is in no source; nothing was written.
        DamagedError: Some range is damaged in its last source; targets hold a mixture and must not be used.
        ValueError: A buffer does not fit its shard.
    """
    return execute_table(as_table([t.shard for t in targets]), Destinations.of(targets), sources, threads=threads)


def execute_table(
    wanted: ShardTable, destinations: Destinations, sources: Sequence[Source], *, threads: int | None = None
) -> RestoreCounts:
    """Do the same for the rows of a table, whose memory `destinations` has in their order; no object is made per row."""
    started = time.perf_counter()
    names = [source.name for source in sources]
    plan = plan_reads(wanted, [source.manifest.table for source in sources], names=names)
    plan.require_complete(names)
    plan_s = time.perf_counter() - started
    counts = execute(plan, destinations, sources, threads=threads)
    counts.plan_s += plan_s
    counts.wall_s += plan_s
    return counts


def execute(
    plan: ReadPlan,
    destinations: Destinations,
    sources: Sequence[Source],
    *,
    threads: int | None = None,
    remote: RemoteFetcher | None = None,
) -> RestoreCounts:
    """Fill the wanted shards of a plan.

    Args:
        plan: Without gaps.
        destinations: Memory of each wanted shard.
        sources: What the plan counts its sources in.
        threads: Threads to use; None chooses by cores (at most 16).
        remote: What brings the bytes of sources that lie with other ranks; a collective then, once per round.

    Returns:
        Bytes per tier, seconds per phase, and what was damaged on the way.

    Raises:
        DamagedError: Some range is damaged in its last source; targets hold a mixture and must not be used.
    """
    started = time.perf_counter()
    counts = RestoreCounts()
    executor = _Executor(plan, destinations, sources, counts)
    jobs = merge_pieces(cut_pieces(plan)) if remote is None else remote.jobs(plan)
    in_place = {source for source in distinct(plan.source) if sources[source].in_place}
    if destinations.writer is not None:
        jobs = join_jobs(jobs, {source for source in in_place if sources[source].tier == "memory"})
    counts.plan_s = time.perf_counter() - started
    waits = len(in_place) < len(distinct(plan.source))
    most = 16 if waits or destinations.writer is None else _FEEDERS
    counts.threads = 1 if plan.needed_bytes < INLINE_BYTES else threads or min(most, thread_count(waits=waits))
    before = [(s.meter.read_bytes, s.meter.requests, s.meter.read_s, s.meter.verify_s) for s in sources]
    crash_point("restore.before-read")
    executor.run_all(jobs, remote)
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
    return max(1, min(16, cores // env.LOCAL_WORLD_SIZE))


class _Executor:
    """One execution of a plan: memory, sources and counters shared by its threads."""

    def __init__(
        self, plan: ReadPlan, destinations: Destinations, sources: Sequence[Source], counts: RestoreCounts
    ) -> None:
        self._plan, self._destinations, self._sources, self._counts = plan, destinations, sources, counts
        self._fresh = FreshMemory(destinations.addresses, destinations.nbytes)
        self._lock = threading.Lock()

    @functools.cached_property
    def _lanes(self) -> Lanes:
        return Lanes()

    def run_all(self, jobs: list[Job], remote: RemoteFetcher | None) -> None:
        """Run jobs, and those that replace failed ones, until none is left on any rank."""
        threads = self._counts.threads
        with ThreadPoolExecutor(threads, thread_name_prefix="flashckpt-restore") as pool:
            run = map if threads == 1 else pool.map
            away: list[Job] = []
            while True:
                while jobs:
                    if remote is not None:
                        away += [job for job in jobs if remote.is_far(job)]
                        jobs = [job for job in jobs if not remote.is_far(job)]
                    failures = [failure for failure in run(self._run, jobs) if failure is not None]
                    again = [one.job for one in failures if remote is not None and remote.is_again(one.job)]
                    failures = [one for one in failures if one.job not in again]
                    jobs = [*again, *(job for failure in failures for job in self._replacement(failure))]
                # other ranks may still want something of this one: rounds end for all together
                began = time.perf_counter()
                if remote is None or (arrived := remote.exchange(away)) is None:
                    return
                jobs, away = arrived
                self._lanes.far.add(sum(map(_bytes_of, jobs)), time.perf_counter() - began)
                jobs, away = self._by_the_faster(run, jobs, away, remote)

    def _by_the_faster(
        self, run: _Map, jobs: list[Job], away: list[Job], remote: RemoteFetcher
    ) -> tuple[list[Job], list[Job]]:
        """Return what is run now, and what still comes from other ranks: nothing, where storage has it and is faster."""
        if not self._lanes.is_choice_due(sum(map(_bytes_of, away))):
            return jobs, away
        if not self._lanes.near.nbytes:
            sample, away = away[-SAMPLE_JOBS:], away[:-SAMPLE_JOBS]
            found = [job for one in sample for job in self._nearer(one, remote)]
            if any(map(remote.is_far, found)):  # storage does not have it all
                self._lanes.far.is_only = True
                return jobs, [*away, *sample]
            began = time.perf_counter()
            failures = [failure for failure in run(self._run, found) if failure is not None]
            jobs += [job for failure in failures for job in self._replacement(failure)]
            self._lanes.near.add(0 if failures else sum(map(_bytes_of, found)), time.perf_counter() - began)
        if not self._lanes.is_near_faster():
            return jobs, away
        return [*jobs, *(job for one in away for job in self._nearer(one, remote))], []

    def _nearer(self, job: Job, remote: RemoteFetcher) -> list[Job]:
        """Return jobs that bring the same from storage; the job itself where that does not have all of it."""
        pieces, near = job.pieces, remote.near(job)
        if near is None:
            return [job]
        gaps = [gap for piece in range(job.first, job.last) for gap in self._gaps(pieces, piece)]
        tables = [table if source == near else _NOTHING for source, table in enumerate(self._plan.sources)]
        plan = plan_gaps(self._plan.wanted, gaps, tables, without=pieces.without)
        if plan.gaps:
            return [job]
        return merge_pieces(cut_pieces(replace(plan, sources=self._plan.sources), pieces.without))

    def _gaps(self, pieces: Pieces, piece: int) -> list[Gap]:
        """Return which boxes of a wanted shard a piece fills."""
        target, start, stop = int(pieces.target[piece]), int(pieces.start[piece]), int(pieces.stop[piece])
        held = self._plan.sources[int(pieces.source[piece])].shard(int(pieces.row[piece]))
        size = ITEMSIZE[held.dtype]
        found = Box(held.offsets, held.lengths).flat(start // size, -(-stop // size))
        return [Gap(target, part) for one in found if (part := one.intersection(pieces.box(piece))) is not None]

    def _run(self, job: Job) -> _Failure | None:
        """Fetch, verify and copy one job; return what failed instead of raising, so that others continue."""
        source, pieces = self._sources[job.source], job.pieces
        try:
            is_direct = self._direct(job, source)
            copied = 0
            for piece in (np.flatnonzero(is_direct) + job.first).tolist():
                copied += self._read_direct(pieces, piece, source)
            rest = np.flatnonzero(~is_direct) + job.first
            if len(rest):
                copied += self._read_rest(pieces, rest, source)
            source.check()
        except (FlashckptError, OSError) as error:
            return _Failure(job, error)
        self._count(source.tier, copied)
        crash_point("restore.during-read")
        return None

    def _read_rest(self, pieces: Pieces, which: np.ndarray, source: Source) -> int:
        """Read pieces that are too small for one call each, or go to a device; return the bytes copied."""
        rows, starts, stops = pieces.row[which], pieces.start[which], pieces.stop[which]
        data, found = source.located(Spans(rows, starts, stops))
        offsets, targets = np.asarray(found, np.int64), pieces.target[which]
        at = pieces.target_start[which] + starts - pieces.source_start[which]

        def spans(own: np.ndarray) -> tuple[Spans, Located]:
            return Spans(rows[own], starts[own], stops[own]), Located(data, offsets[own])

        addresses, is_left = self._destinations.addresses[targets], ~_is_whole(pieces, which)
        if len(host := np.flatnonzero(~is_left & (addresses != 0))):
            try:
                copy_verified(source, *spans(host), addresses[host] + at[host])
            except DescriptorError:  # live tensors may be views of each other: one after another then
                is_left[host] = True
        if (writer := self._destinations.writer) is not None:
            away, sizes = np.flatnonzero(~is_left & (addresses == 0)), stops - starts
            for own in (away[share] for share in writer.shares(targets[away], sizes[away])):
                with writer.filling(targets[own], at[own], sizes[own]) as memory:
                    copy_verified(source, *spans(own), memory)
        copied = int((stops - starts)[~is_left].sum())
        return copied + self._read_parts(pieces, which[is_left], source, *spans(is_left)) if is_left.any() else copied

    def _read_parts(self, pieces: Pieces, which: np.ndarray, source: Source, spans: Spans, found: Located) -> int:
        """Verify pieces, then copy what is wanted of them; return the bytes copied."""
        started = time.perf_counter()
        verify_spans(source, spans, found)
        verified = time.perf_counter()
        source.meter.add(0, 0.0, verified - started, requests=0)
        copied = self._copy(pieces, which, found.data, np.asarray(found.offsets, np.int64))
        with self._lock:
            self._counts.copy_s += time.perf_counter() - verified
        return copied

    def _direct(self, job: Job, source: Source) -> np.ndarray:
        """Return which pieces to read straight into their target; one request for several beats that on storage.

        Where the target lies so that storage could only fill it by way of a buffer, the bytes are digested on their way out of
        one of ours. Device memory is filled by way of page-locked memory, which lies right; out of a slot, with a whole job.
        """
        pieces, rows = job.pieces, job.rows
        start = pieces.start[rows]
        addresses = self._destinations.addresses[pieces.target[rows]]
        at = addresses + pieces.target_start[rows] + start - pieces.source_start[rows]
        lies_right = (addresses == 0) | (at % source.page_bytes == 0)
        sizes = pieces.stop[rows] - start
        on_host = sizes >= DIRECT_BYTES
        worth_it = on_host & (addresses != 0) if source.in_place else np.full(len(job), len(job) == 1)
        found: np.ndarray = _is_whole(pieces, rows) & worth_it & lies_right
        return found

    def _read_direct(self, pieces: Pieces, piece: int, source: Source) -> int:
        start, nbytes = int(pieces.start[piece]), int(pieces.stop[piece] - pieces.start[piece])
        at = int(pieces.target_start[piece]) + start - int(pieces.source_start[piece])
        target, row = int(pieces.target[piece]), int(pieces.row[piece])
        if (writer := self._destinations.writer_of(target)) is not None:
            with writer.filling(*np.array([[target], [at], [nbytes]])) as (address,):
                source.read(row, start, memory_at(int(address), nbytes, writer).data)
        else:
            if source.in_place:
                self._fresh.make(int(self._destinations.addresses[target]) + at, nbytes)
            source.read(row, start, self._destinations.view(target)[at : at + nbytes].data)
        return nbytes

    def _copy(self, pieces: Pieces, which: np.ndarray, data: np.ndarray, offsets: np.ndarray) -> int:
        """Copy verified bytes to where they belong; return how many."""
        is_run = pieces.part[which] < 0
        at, first = which[is_run], offsets[is_run]
        begin = pieces.source_start[at]
        low = np.maximum(begin, pieces.start[at])
        sizes = np.minimum(begin + pieces.nbytes[at], pieces.stop[at]) - low
        sources = address_of(data) + first + low - pieces.start[at]
        self._copy_runs(pieces.target[at], pieces.target_start[at] + low - begin, sources, sizes)
        copied = int(sizes.sum())
        for piece, offset in zip(which[~is_run].tolist(), offsets[~is_run].tolist(), strict=True):
            start, target = int(pieces.start[piece]), int(pieces.target[piece])
            held, found = data[offset : offset + int(pieces.stop[piece]) - start], pieces.parts[pieces.part[piece]].runs
            if (writer := self._destinations.writer_of(target)) is not None:
                copied += writer.scatter(target, held, start, found)
            else:
                copied += scatter(held, start, found, self._destinations.view(target))
        return copied

    def _copy_runs(self, targets: np.ndarray, at: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        """Copy runs of host memory, by address, to bytes `at` of their targets."""
        addresses, writer = self._destinations.addresses[targets], self._destinations.writer
        if writer is not None and not addresses.all():
            away = (addresses == 0) & (sizes > 0)
            writer.write(targets[away], at[away], sources[away], sizes[away])
            addresses, at, sources, sizes = addresses[~away], at[~away], sources[~away], sizes[~away]
        copy_bytes(addresses + at, sources, sizes)

    def _count(self, tier: str, nbytes: int) -> None:
        with self._lock:
            self._counts.needed_bytes[tier] = self._counts.needed_bytes.get(tier, 0) + nbytes

    # -- damage ------------------------------------------------------------------------------------------

    def _replacement(self, failure: _Failure) -> list[Job]:
        """Return the jobs that replace a failed one: smaller ones first, to find the damage, then other sources."""
        (pieces, first, last), error = failure
        if last - first > 1:
            middle = (first + last) // 2
            return [Job(pieces, first, middle), Job(pieces, middle, last)]
        if isinstance(error, DamagedError) and int(pieces.stop[first] - pieces.start[first]) > CHUNK_BYTES:
            chunks = pieces.by_chunk(first)
            return [Job(chunks, k, k + 1) for k in range(len(chunks))]
        return self._elsewhere(pieces, first, error)

    def _elsewhere(self, pieces: Pieces, piece: int, error: Exception) -> list[Job]:
        """Plan what one piece brings again, without the row that failed."""
        failed = SourceRow(int(pieces.source[piece]), int(pieces.row[piece]))
        start, stop = int(pieces.start[piece]), int(pieces.stop[piece])
        without = pieces.without | {failed}
        plan = plan_gaps(self._plan.wanted, self._gaps(pieces, piece), self._plan.sources, without=without)
        if plan.gaps:
            raise _lost(error, self._plan.wanted.shard(int(pieces.target[piece]))) from error
        self._counts.fallback_bytes += int(plan.nbytes.sum())
        line = str(error).splitlines()[0]
        names = sorted({self._sources[source].name for source in plan.source.tolist()})
        message = f"{line}; bytes {start} to {stop} were read from {', '.join(names)} instead"
        self._counts.damaged.append(message)
        _log.warning("%s", message)
        return merge_pieces(cut_pieces(plan, without))


def _bytes_of(job: Job) -> int:
    pieces, at = job.pieces, job.rows
    return int((pieces.stop[at] - pieces.start[at]).sum())


def _is_whole(pieces: Pieces, which: slice | np.ndarray) -> np.ndarray:
    """Return which pieces are wanted byte for byte, in one run: their chunks can be read straight into their place."""
    start, stop, begin = pieces.start[which], pieces.stop[which], pieces.source_start[which]
    found: np.ndarray = (pieces.part[which] < 0) & (begin <= start) & (stop <= begin + pieces.nbytes[which])
    return found


def _lost(error: Exception, shard: Shard) -> DamagedError:
    known = error if isinstance(error, FlashckptError) else None
    return DamagedError(
        known.problem if known else f"{shard.fqn!r} could not be read",
        found=f"{known.found if known else error}; no other source holds these bytes",
        expected=known.expected if known else "",
        state="The restore was stopped; live state is a mixture and must not be trained on.",
        remedy="restore an older step: flashckpt ls ROOT shows them, flashckpt verify ROOT which are intact",
    )
