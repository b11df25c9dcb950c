"""The writes of this node for one intent, in the background: pinned slots into packs, then one index of them all."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from flashckpt.checkpoint.indexes import put_indexes
from flashckpt.checkpoint.retention import Policy
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.sweeping import is_full, make_room
from flashckpt.checkpoint.writer import PersistOptions, write_packs, write_together
from flashckpt.core.manifest import Manifest
from flashckpt.core.snapshot_id import MIN_SLOTS, SnapshotId
from flashckpt.daemon.machine.logs import log_context
from flashckpt.daemon.persister.protocol import Cause, WriteFailed, WriteFinished
from flashckpt.errors import DamagedError, DisagreementError, FlashckptError, PersistError, ShardGapError, StoreError
from flashckpt.faults import crash_point
from flashckpt.planning.packs import TOGETHER_BYTES, together
from flashckpt.shm.inventory import release
from flashckpt.shm.segment import Pin
from flashckpt.storage.store import Store

QUICK_S = 0.2
"""Seconds that a turn waits for a commit: nearly all end in this time, and their end is then not noticed a turn later."""
WRITERS_AT_ONCE = 4
"""Slots of one node that are streamed at the same time: bounds the parts in flight."""
OF_THE_DATA = (DamagedError, PersistError, ShardGapError, DisagreementError)
"""Errors that are of this snapshot, not of the storage."""
_log = logging.getLogger(__name__)
_Written = TypeVar("_Written")


class Flush:
    """The slots of one snapshot on their way to the root.

    Args:
        pins: Leases on the slots of this node's writers, by rank; may lack ranks whose index is already there.
        options: Passed to `persist_slot`.
        policy: Which checkpoints stay when the root is full: the others make room, once for this snapshot.
        wake: Called when work in the background has ended.

    Attributes:
        started_s: time.monotonic() when it was made.
        persisted_bytes: Bytes of tensors in packs that this node has written.
        error: The first error of the last attempt.
    """

    def __init__(
        self,
        identity: SnapshotId,
        pins: dict[int, Pin],
        options: PersistOptions,
        policy: Policy,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.identity, self.pins = identity, pins
        self.started_s = time.monotonic()
        self.persisted_bytes = 0
        self.error: Exception | None = None
        self._options, self._policy, self._wake = options, policy, wake
        self._freed: int | None = None
        self._futures: dict[int, Future[None]] | None = None
        self._indexes: dict[int, Manifest] = {}
        self._durable = {rank: dict[int, str]() for rank in pins}
        self._wanted = set[int]()
        self._is_claimed = self._is_indexed = False
        self._commit: Future[object] | None = None
        self._is_wanted = True
        self._pool = ThreadPoolExecutor(WRITERS_AT_ONCE, thread_name_prefix="flashckpt-persist")
        self._lock, self._room = threading.Lock(), threading.Lock()

    def start(self, store: Store, ranks: Iterable[int]) -> None:
        """Begin an attempt to write the slots of `ranks`; the one before it has ended.

        What is durable is not written again; where the index was written, it was found damaged.
        """
        ranks = tuple(ranks)
        if self._is_indexed:
            self._indexes = {rank: index for rank, index in self._indexes.items() if rank not in ranks}
            self._durable |= {rank: {} for rank in ranks}
        self._is_claimed = self._is_indexed = False
        self._wanted.update(ranks)
        self._futures = {}
        for group in self._groups(ranks):
            future = self._pool.submit(self._persist, store, group)
            self._futures |= dict.fromkeys(group, future)
            future.add_done_callback(lambda _: self._wake())

    def result(self) -> WriteFinished | WriteFailed | None:
        """Return how the present attempt ended, once; None while it is running, or where none was begun."""
        if self._futures is None or self._writes():
            return None
        futures, self._futures = self._futures, None
        failed = {rank: error for rank, future in futures.items() if (error := future.exception()) is not None}
        for error in failed.values():
            if not isinstance(error, Exception):
                raise error
            self.error = error
            return WriteFailed(self.cause_of(error), problem_of(error), tuple(failed))
        return WriteFinished(time.monotonic())

    def commits(self, work: Callable[[Callable[[], bool]], object]) -> bool:
        """Begin a commit where none works, and wait a moment for it; return whether it has ended. Raises what it raises.

        Args:
            work: The commit; it is given whether it is still wanted.
        """
        if self._commit is None:
            self._is_wanted, is_over = True, threading.Event()
            self._commit = self._pool.submit(self._work, work, is_over)
            self._commit.add_done_callback(lambda _: self._wake())
            is_over.wait(QUICK_S)
        if not self._commit.done():
            return False
        ended, self._commit = self._commit, None
        if self._is_wanted or ended.exception() is None:
            ended.result()
            return True
        return False

    def stop_commit(self) -> None:
        """Let a commit that works end before it creates MANIFEST."""
        self._is_wanted = False

    def _work(self, work: Callable[[Callable[[], bool]], object], is_over: threading.Event) -> None:
        try:
            work(lambda: self._is_wanted)
        finally:
            is_over.set()

    def cause_of(self, error: Exception) -> Cause:
        """Return what an error of a write or a commit means for further attempts."""
        if not isinstance(error, OF_THE_DATA):
            return Cause.STORAGE
        gone = not all(pinned.is_current() for pinned in self.pins.values())
        if gone or not isinstance(error, DamagedError | PersistError):
            return Cause.FINAL
        if isinstance(error, DamagedError):  # what was given back cannot be written again
            return Cause.DAMAGED if all(pinned.kept is None for pinned in self.pins.values()) else Cause.FINAL
        return Cause.INCOMPLETE

    @property
    def is_begun(self) -> bool:
        """Whether an attempt, or a commit, was begun whose result was not looked at yet."""
        return self._futures is not None or self._commit is not None

    @property
    def is_writing(self) -> bool:
        """Whether background work is running."""
        return self._writes() or (self._commit is not None and not self._commit.done())

    def _writes(self) -> bool:
        return any(not future.done() for future in (self._futures or {}).values())

    @property
    def sizes(self) -> tuple[float, float]:
        """Norm and largest magnitude of the finite numbers that this node has written."""
        found = [index.figures.sizes() for index in self._indexes.values() if index.figures is not None]
        return math.hypot(*(norm for norm, _ in found)), max((largest for _, largest in found), default=0.0)

    def close(self) -> None:
        """End the threads (after their current writes) and release the slots."""
        self.stop_commit()
        self._pool.shutdown()
        release(self.pins)

    def _persist(self, store: Store, ranks: list[int]) -> None:
        generation, step = self.identity
        prefix = prefix_of(*self.identity)
        with log_context(generation=generation, rank=ranks[0], step=step):
            for rank in ranks:
                if not self.pins[rank].is_current():
                    raise PersistError(f"the snapshot of rank {rank}, step {step}, was abandoned")
            if not self._indexes.keys() >= {*ranks}:
                self._write(store, prefix, ranks)
            if self._completes():
                self._with_room(store, lambda: put_indexes(store, prefix, self._indexes.values()))
                self._is_indexed = True

    def _write(self, store: Store, prefix: str, ranks: list[int]) -> None:
        """Write the packs of some ranks: those of several as one object."""
        pins, started = [self.pins[rank] for rank in ranks], time.monotonic()
        follows = [
            pin for pin in pins if pin.spec.slots <= MIN_SLOTS
        ]  # no other slot: training writes what is given back
        if len(pins) > 1:
            indexes = self._with_room(store, lambda: write_together(pins, store, prefix))
            for pin in follows:
                pin.keep_only(0, 0)
            crash_point("persist.after-pack")
        else:
            write = partial(write_packs, pins[0], store, prefix, options=self._options, done=self._durable[ranks[0]])
            write = partial(write, keep_only=pins[0].keep_only) if follows else write
            indexes = [self._with_room(store, write)]
        nbytes = sum(int(one.table.nbytes.sum()) for one in indexes)
        names = {name for one in indexes for name in one.objects}
        took_s = time.monotonic() - started
        _log.info("wrote %.1f MB of %d ranks in %d packs in %.2f s", nbytes / 1e6, len(ranks), len(names), took_s)
        with self._lock:
            self._indexes |= zip(ranks, indexes, strict=True)
            self.persisted_bytes += nbytes

    def _groups(self, ranks: Iterable[int]) -> list[list[int]]:
        """Return the ranks in groups that are written together: those with little, but compressed packs are of one rank."""
        if self._options.compression != "off":
            return [[rank] for rank in ranks]
        return together({rank: self._bytes_of(rank) for rank in ranks}, TOGETHER_BYTES)

    def _bytes_of(self, rank: int) -> int:
        """Return what a rank writes; where that cannot be known, more than is written together: its own write says why."""
        try:
            table = self.pins[rank].manifest().table
        except DamagedError:
            return TOGETHER_BYTES + 1
        return int(table.nbytes[table.replica == 0].sum())

    def _completes(self) -> bool:
        """Whether all packs of this node are written now; true once in an attempt."""
        with self._lock:
            completes = not self._is_claimed and self._indexes.keys() >= self._wanted
            self._is_claimed |= completes
        return completes

    def _with_room(self, store: Store, write: Callable[[], _Written]) -> _Written:
        """Write; where the root is full, make room and try once more."""
        try:
            return write()
        except StoreError as error:
            if not is_full(error) or not self._makes_room(store):
                raise
        crash_point("room.before-retry")
        return write()

    def _makes_room(self, store: Store) -> int:
        """Delete what need not stay, once; return how many bytes that freed."""
        with self._room:  # the slots of this node fail together: the others wait for what the first one does
            if self._freed is None:
                self._freed = 0  # what fails here is not tried again: the next snapshot does
                try:
                    swept = make_room(store, self._policy)
                except (FlashckptError, OSError) as error:
                    _log.warning("the root is full, and nothing could be deleted: %s", problem_of(error))
                    return 0
                self._freed = swept.nbytes
                if names := ", ".join((*swept.checkpoints, *swept.orphans)):
                    _log.warning("the root is full: deleted %s (%d bytes), writing again", names, swept.nbytes)
        return self._freed


def problem_of(error: Exception) -> str:
    """Return the problem in a few words."""
    return str(getattr(error, "problem", "") or error)
