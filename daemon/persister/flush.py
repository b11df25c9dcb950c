"""This node's work on one intent: persist the pinned slots, wait for the others, commit. Storage errors are raised.

A flush may be tried again as often as it takes: packs are written again, an index that is there is kept,
MANIFEST is created once. The pins are held until it is committed or given up.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from flashckpt.checkpoint.intents import Intent, abandoned_reason
from flashckpt.checkpoint.writer import MANIFEST, PersistOptions, commit, missing_writers, persist_slot
from flashckpt.daemon.machine.logs import log_context
from flashckpt.errors import DamagedError, FencedError, PersistError
from flashckpt.shm.inventory import release
from flashckpt.shm.segment import Pin
from flashckpt.storage.store import Store

WRITERS_AT_ONCE = 4
"""Slots of one node that are streamed at the same time: bounds the parts in flight."""
TAKEOVER_S = 5.0
"""Seconds that a node waits for the leader, times its place among the nodes, before it commits by itself."""

_log = logging.getLogger(__name__)
ATTEMPTS = 4
"""Times that damaged data is written again before the snapshot is given up."""


class FlushOutcome(enum.Enum):
    """Where a flush stands."""

    WRITING = "writing"
    WAITING = "waiting for other writers"
    COMMITTED = "committed"
    GIVEN_UP = "given up"


class Flush:
    """One intent on this node.

    Args:
        intent: What to persist.
        pins: Leases on the slots of this node's writers, by rank; may lack ranks whose index is already there.
        store: The root.
        options: Passed to `persist_slot`.

    Attributes:
        has_waited: Whether the other writers were not done when this node was.
        persisted_bytes: Bytes of tensors whose index this node has written.
    """

    def __init__(self, intent: Intent, pins: dict[int, Pin], store: Store, options: PersistOptions) -> None:
        self.intent, self.pins = intent, pins
        self.prefix = intent.prefix
        self.started_s = time.monotonic()
        self.has_waited = False
        self.persisted_bytes = 0
        self._options = options
        self._todo = sorted(pins)
        self._futures: dict[int, Future[object]] = {}
        self._pool = ThreadPoolExecutor(WRITERS_AT_ONCE, thread_name_prefix="flashckpt-persist")
        self._written_s: float | None = None
        self._attempts = 0
        self._lock = threading.Lock()
        self._store = store

    def use(self, store: Store) -> None:
        """Go on with another connection to the same root."""
        self._store = store

    def write(self) -> bool:
        """Persist the pinned slots in the background; True once all their indexes are durable.

        Raises:
            The first error of a writer, after the others have ended; call again to try again.
        """
        if self._written_s is not None:
            return True
        if not self._futures:
            self._futures = {rank: self._pool.submit(self._persist, rank) for rank in self._todo}
        if not all(future.done() for future in self._futures.values()):
            return False
        futures, self._futures = self._futures, {}
        self._todo = [rank for rank in self._todo if futures[rank].exception() is not None]
        for rank in self._todo:
            futures[rank].result()
        self._written_s = time.monotonic()
        return True

    def settle(self, *, place: int) -> FlushOutcome:
        """Look at the root and commit where that is this node's turn.

        Args:
            place: 0 for the node that commits at once; others wait for it `place` x TAKEOVER_S seconds.
        """
        assert self._written_s is not None, "write() first"
        prefix, writers = self.prefix, self.intent.writers
        committed = self._store.head(f"{prefix}/{MANIFEST}") is not None
        if not committed:
            if abandoned_reason(self._store, *self.intent.identity) is not None:
                return FlushOutcome.GIVEN_UP
            if self.waited_s < place * TAKEOVER_S or missing_writers(self._store, prefix, writers):
                self.has_waited = True
                return FlushOutcome.WAITING
        try:
            commit(self._store, prefix, writers)  # one that is there already is verified
        except FencedError:  # swept: a tombstone lies where MANIFEST would
            return FlushOutcome.GIVEN_UP
        except DamagedError:  # a pack or index that was durable is not: write ours again
            if not committed:
                self._todo, self._written_s = sorted(self.pins), None
            raise
        return FlushOutcome.COMMITTED

    def may_retry(self, error: Exception) -> bool:
        """Return whether it makes sense to go on after an error that is not the storage's."""
        self._attempts += 1
        gone = not all(pinned.is_current() for pinned in self.pins.values())
        return isinstance(error, DamagedError | PersistError) and not gone and self._attempts < ATTEMPTS

    @property
    def waited_s(self) -> float:
        """Seconds since this node's indexes were durable; 0 before."""
        return 0.0 if self._written_s is None else time.monotonic() - self._written_s

    @property
    def is_begun(self) -> bool:
        """Whether an attempt was begun whose result was not looked at yet."""
        return bool(self._futures)

    @property
    def is_writing(self) -> bool:
        """Whether background work is going on."""
        return any(not future.done() for future in self._futures.values())

    def close(self) -> None:
        """End the threads (after what they are writing) and give the slots back."""
        self._pool.shutdown()
        release(self.pins)

    def _persist(self, rank: int) -> object:
        pinned, started = self.pins[rank], time.monotonic()
        with log_context(generation=self.intent.generation, rank=rank, step=self.intent.step):
            if not pinned.is_current():
                raise PersistError(f"the snapshot of rank {rank}, step {self.intent.step}, was abandoned")
            index = persist_slot(pinned, self._store, self.prefix, options=self._options)
            nbytes = int(index.table.nbytes.sum())
            _log.info(
                "wrote %.1f MB in %d packs in %.2f s", nbytes / 1e6, len(index.objects), time.monotonic() - started
            )
        with self._lock:
            self.persisted_bytes += nbytes
        return index
