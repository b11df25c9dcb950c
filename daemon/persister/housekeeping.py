"""What the daemon removes from a root: checkpoints past retention, and what dead writers left."""

from __future__ import annotations

import logging
import time

from flashckpt.checkpoint.retention import Policy, prune, sweep
from flashckpt.daemon.persister.proposals import Identity, clear_proposals
from flashckpt.storage.store import Store

SWEEP_EVERY_S = 1800.0
_log = logging.getLogger(__name__)


class Housekeeping:
    """Keeps one root tidy.

    Args:
        policy: Which checkpoints stay.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._swept_s = policy, 0.0

    def retain(self, store: Store) -> None:
        """Apply retention; what fails here is tried again after the next commit."""
        done = prune(store, self._policy)
        if done.checkpoints:
            _log.info("pruned %s (%d bytes)", ", ".join(done.checkpoints), done.nbytes)

    def turn(self, store: Store, committed: Identity | None) -> None:
        """Remove what dead writers left, at the start and now and then.

        Args:
            store: The root.
            committed: The newest checkpoint on it.
        """
        if time.monotonic() - self._swept_s < SWEEP_EVERY_S and self._swept_s:
            return
        self._swept_s = time.monotonic()
        sweep(store)
        if committed is not None:
            self.retain(store)  # a daemon before us may have died between its commit and this
            clear_proposals(store, committed[0])
