"""What the daemon removes from a root: checkpoints past retention, and what dead writers left. In its own thread.

Nothing waits for it: neither the commit, nor the next snapshot to be persisted. What it did not finish, because storage
failed or the process was killed, the next run finishes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flashckpt.checkpoint.intents import clear_proposals
from flashckpt.checkpoint.retention import Policy, prune
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.storage.store import Store

CLOSE_S = 30.0
"""Seconds that a daemon waits at its end for what is being deleted."""
_log = logging.getLogger(__name__)


def apply_retention(store: Store, policy: Policy) -> None:
    """Delete what the policy does not keep; what fails here is tried again after the next commit."""
    done = prune(store, policy)
    if done.checkpoints:
        _log.info("pruned %s (%d bytes)", ", ".join(done.checkpoints), done.nbytes)


def sweep_root(store: Store, policy: Policy, committed: SnapshotId | None) -> None:
    """Remove what dead writers left.

    Args:
        store: The root.
        policy: Which checkpoints stay: a daemon before us may have died between its commit and its retention.
        committed: The newest checkpoint on it.
    """
    sweep(store)
    if committed is not None:
        apply_retention(store, policy)
        clear_proposals(store, committed[0])


class Housekeeper:
    """Retention and sweep of one root, on request; requests that come while one of their kind waits are one.

    The thread exists only while there is something to do, and has a connection to itself.
    """

    def __init__(self, connect: Callable[[], Store], policy: Policy) -> None:
        self._connect, self._policy = connect, policy
        self._lock = threading.Lock()
        self._retention_is_due = False
        self._sweep_of: tuple[SnapshotId | None] | None = None
        self._thread: threading.Thread | None = None
        self._problem = ""

    def retain(self) -> None:
        """Apply the policy soon."""
        with self._lock:
            self._retention_is_due = True
            self._start()

    def sweep(self, committed: SnapshotId | None) -> None:
        """Sweep the root soon; `committed` as in `sweep_root`."""
        with self._lock:
            self._sweep_of = (committed,)
            self._start()

    @property
    def is_busy(self) -> bool:
        """Whether something is left to do."""
        with self._lock:
            return self._thread is not None

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until all is done; what takes longer than the limit, or hangs, is left to the next run."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(limit_s)
            if thread.is_alive():
                _log.warning("retention is not finished: the next run of the job continues it")

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="flashckpt-housekeeping", daemon=True)
            try:
                thread.start()  # it waits for the lock
            except RuntimeError as error:  # a limit on threads: the commit counts all the same
                self._report(str(error))
            else:
                self._thread = thread

    def _next(self) -> Callable[[Store], None] | None:
        """Take the next request; None: the thread ends, and another request starts another one."""
        with self._lock:
            if self._sweep_of is not None:
                (committed,) = self._sweep_of
                self._sweep_of, self._retention_is_due = None, False  # a sweep includes retention
                return lambda store: sweep_root(store, self._policy, committed)
            if self._retention_is_due:
                self._retention_is_due = False
                return lambda store: apply_retention(store, self._policy)
            self._thread = None
            return None

    def _work(self) -> None:
        store: Store | None = None
        while (task := self._next()) is not None:
            try:
                store = store or self._connect()
                task(store)
                self._problem = ""
            except (FlashckptError, OSError) as error:
                self._report(str(error))
                if store is not None:
                    store.close()
                store = None  # the next attempt reads the credentials again
            except Exception:  # noqa: BLE001 -- commits continue without it
                _log.exception("retention failed")
        if store is not None:
            store.close()

    def _report(self, problem: str) -> None:
        """Log a failure, once as long as it stays the same."""
        if problem != self._problem:
            _log.warning("nothing more is deleted from the root until the next commit: %s", problem)
        self._problem = problem
