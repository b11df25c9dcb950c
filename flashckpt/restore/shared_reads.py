"""Bytes of a checkpoint that several ranks want: one of them reads each range and sends it on, all in the same order.

The members of a range form a tree with its reader at the root. What arrives is taken in place of a read, and verified like one:
what was damaged on the way, or could not be read by its reader, each member reads itself. The first ranges of a set of ranks
show what a byte costs from storage and from a neighbour; where sending on is not faster, each reads the rest itself. A rank that
fails goes through the order to its end, so that nobody waits for it. Memory: a range per reading thread, as many as without
this, and BATCH that arrived.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgpack
import numpy as np

from flashckpt import collectives
from flashckpt.collectives import HostGroup
from flashckpt.errors import FlashckptError
from flashckpt.faults import crash_point
from flashckpt.planning.peer_index import owner_of
from flashckpt.planning.pieces import Job, cut_pieces, merge_pieces
from flashckpt.planning.read_plan import ReadPlan
from flashckpt.planning.wanted_alike import Ints, Keys, Members, SendingPace, Shared, keys_of, members_of, shared_jobs
from flashckpt.restore.executor import thread_count
from flashckpt.restore.sources import SentOn, StorageSource

LEAST_BYTES = 64 << 20
"""What all ranks together must want more than once, for anything to be sent on."""
TRIED = 8
"""Ranges of a set that are sent on before it is asked whether that is worth it."""
BATCH = 4
"""Ranges that are sent on before those that arrived are verified."""
_PAGE = 4096
_NO_STORAGE = -(1 << 50)


class SharedReads:
    """What `execute` does about ranges that several ranks want; see RemoteFetcher. `join` and `exchange` are collectives."""

    def __init__(
        self, group: HostGroup, rank: int, source: StorageSource, shared: list[Shared], own: list[Job]
    ) -> None:
        self._group, self._rank, self._source = group, rank, source
        self._left, self._own = deque(shared), own
        self._far, self._came = {one.job for one in shared}, set[Job]()
        self._paces: dict[Members, SendingPace] = {}
        self._counts: defaultdict[Members, int] = defaultdict(int)
        self._away_ns = self._away_bytes = 0
        self._reader = _Reader(source, [one for one in shared if one.members[0] == rank])
        self._blocks: list[memoryview] = []
        source.sent = SentOn()

    @classmethod
    def join(
        cls, plan: ReadPlan, sources: Sequence[object], rank: int, stack: contextlib.ExitStack
    ) -> SharedReads | None:
        """Find what several ranks want; None, on all ranks, where that is too little. Collective."""
        storage = next((k for k, one in enumerate(sources) if isinstance(one, StorageSource)), -1)
        source = sources[storage] if storage >= 0 else None
        wanted = plan.nbytes_of(storage) if isinstance(source, StorageSource) else _NO_STORAGE
        more = collectives.total(wanted) - (source.nbytes if isinstance(source, StorageSource) else 0)
        if more < LEAST_BYTES or not isinstance(source, StorageSource):
            return None
        group = HostGroup()
        stack.callback(group.close)
        pieces, objects = cut_pieces(plan), source.manifest.objects
        which = np.flatnonzero(pieces.source == storage)
        candidates = pieces.take(which)
        numbers, sets = _ask(group, keys_of(candidates, objects))
        shared = shared_jobs(candidates, numbers, sets, objects)
        is_own = np.ones(len(pieces), np.bool_)
        is_own[which[numbers > 0]] = False
        found = cls(group, rank, source, shared, merge_pieces(pieces.take(np.flatnonzero(is_own))))
        stack.callback(found.close)
        return found

    def jobs(self, plan: ReadPlan) -> list[Job]:  # noqa: ARG002 -- the one that this was made for
        """See RemoteFetcher."""
        return [*self._own, *self._far]

    def is_far(self, job: Job) -> bool:
        """See RemoteFetcher."""
        return job in self._far

    def is_again(self, job: Job) -> bool:
        """See RemoteFetcher: once, what was damaged on the way lies on storage whole."""
        if job not in self._came:
            return False
        self._came.remove(job)
        return True

    def near(self, job: Job) -> int | None:  # noqa: ARG002 -- it is storage that all this is read from
        """See RemoteFetcher."""
        return None

    def exchange(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]] | None:
        """Send on, or receive, the next ranges; what came in the call before is given up. Collective of their members."""
        self._source.sent.clear()
        self._reader.give_back(self._blocks)
        self._blocks = []
        if not self._left:
            return None
        sending: list[Callable[[], object]] = []
        for _ in range(min(BATCH, len(self._left))):
            one = self._left.popleft()
            self._far.discard(one.job)
            self._came.add(one.job)
            if self._is_worth_it(one.members):
                sending += self._pass_on(one)
            elif one.members[0] == self._rank and (block := self._reader.next()) is not None:  # read ahead already
                self._have(one, block)
        for wait in sending:
            wait()
        crash_point("shared.after-batch")
        return [job for job in jobs if job not in self._far], [job for job in jobs if job in self._far]

    def drain(self) -> None:
        """Go through the order to its end without wanting anything."""
        while self.exchange([]) is not None:
            pass

    def close(self) -> None:
        """Give up what was read ahead."""
        self._reader.close()

    def _is_worth_it(self, members: Members) -> bool:
        ranks = tuple(sorted(members))
        self._counts[ranks] += 1
        pace = self._paces.setdefault(ranks, SendingPace(len(ranks)))
        return self._counts[ranks] <= TRIED or pace.is_worth_it()

    def _pass_on(self, one: Shared) -> list[Callable[[], object]]:
        """Read or receive one range, and send it on; return what waits until it has left."""
        parent, children = one.neighbours(self._rank)
        head = np.zeros(5, np.int64)
        block: memoryview | None = None
        if parent is None:
            block = self._reader.next()
            head[:] = [block is not None, *self._reader.spent(), self._away_ns, self._away_bytes]
        else:
            self._group.receive(head, parent)
        start = one.start - one.start % _PAGE
        if parent is not None and head[0]:
            block, began = self._reader.block(one.stop - start), time.perf_counter_ns()
            self._group.receive(np.frombuffer(block, np.uint8), parent)
            self._away_ns += time.perf_counter_ns() - began
            self._away_bytes += len(block)
        self._paces[tuple(sorted(one.members))].hear(one.members[0], head[1:].tolist())
        crash_point("shared.before-send")
        sending = [self._group.send(head, child) for child in children]
        if block is not None:
            sending += [self._group.send(np.frombuffer(block, np.uint8), child) for child in children]
            self._have(one, block)
        return sending

    def _have(self, one: Shared, block: memoryview) -> None:
        self._source.sent.add(one.name, one.start - one.start % _PAGE, block)
        self._blocks.append(block)


class _Reader:
    """Reads ahead what this rank is to read, in the order in which it is sent on; has the memory for it."""

    def __init__(self, source: StorageSource, ranges: Sequence[Shared]) -> None:
        self._source, self._ranges = source, deque(ranges)
        self._threads = thread_count(waits=True)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="flashckpt-ahead")
        self._ahead: deque[Future[memoryview | None]] = deque()
        self._free: list[mmap.mmap] = []
        self._lock, self._running, self._since = threading.Lock(), 0, 0
        self._spent_ns = self._read_bytes = 0
        self._fill()

    def next(self) -> memoryview | None:
        """Return the next range once it is read; None if it could not be."""
        found = self._ahead.popleft().result()
        self._fill()
        return found

    def spent(self) -> tuple[int, int]:
        """Return nanoseconds in which something was read, and bytes."""
        with self._lock:
            return self._spent_ns, self._read_bytes

    def block(self, nbytes: int) -> memoryview:
        """Return memory that begins at a page."""
        with self._lock:
            fitting = [one for one in self._free if len(one) >= nbytes]
            if fitting:
                self._free.remove(fitting[0])
        return memoryview(fitting[0] if fitting else mmap.mmap(-1, nbytes))[:nbytes]

    def give_back(self, blocks: Sequence[memoryview]) -> None:
        """Have memory back for what comes next."""
        with self._lock:
            self._free += [block.obj for block in blocks if isinstance(block.obj, mmap.mmap)]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        while self._ranges and len(self._ahead) < self._threads:
            self._ahead.append(self._pool.submit(self._read, self._ranges.popleft()))

    def _read(self, one: Shared) -> memoryview | None:
        start = one.start - one.start % _PAGE
        block = self.block(one.stop - start)
        try:
            with self._counted(len(block)):
                self._source.read_range(one.name, start, block)
        except (FlashckptError, OSError):
            return None  # each member tries for itself, and says what it finds
        return block

    @contextlib.contextmanager
    def _counted(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._since = time.perf_counter_ns()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._read_bytes += nbytes
                now = time.perf_counter_ns()
                self._spent_ns += now - self._since
                self._since = now


def _ask(group: HostGroup, keys: Keys) -> tuple[Ints, list[Members]]:
    """Ask the rank that each key belongs to who wants it: a number of a set of ranks for each key, and the sets. Collective."""
    owners = owner_of(keys, group.ranks)
    asked = group.all_to_all([[keys[owners == owner].tobytes()] for owner in range(group.ranks)])
    answers, known = members_of([np.frombuffer(part, np.uint64) for part in asked])
    parts = []
    for numbers in answers:
        used, places = np.unique(numbers, return_inverse=True)
        sets = [list(known[number]) for number in used.tolist()]
        parts.append([msgpack.packb([sets, places.astype("<u4").tobytes()])])
    found, every = np.zeros(len(keys), np.int64), {(): 0}
    for owner, part in enumerate(group.all_to_all(parts)):
        sets, places = msgpack.unpackb(part)
        numbers = np.array([every.setdefault(tuple(one), len(every)) for one in sets], np.int64)
        found[owners == owner] = numbers[np.frombuffer(places, "<u4")] if len(numbers) else 0
    return found, list(every)
