"""What the daemon removes from a root: checkpoints past retention, and what dead writers left."""

from __future__ import annotations

import logging

from flashckpt.checkpoint.proposals import clear_proposals
from flashckpt.checkpoint.retention import Policy, prune, sweep
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.storage.store import Store

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
