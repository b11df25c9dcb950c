"""Room on a full root: what the retention policy does not keep, and what no commit will need, is deleted at once.

Nothing is deleted that retention or a sweep would keep: the newest checkpoint, those that the policy counts, and those
with a keep mark or a reader's lease stay. Of snapshots that were never committed only those go whose intent was
abandoned: a tombstone takes the place of their MANIFEST first, so that a writer that wakes up late cannot commit them.
"""

from __future__ import annotations

import errno
import time

from flashckpt.checkpoint.catalog import read_contents
from flashckpt.checkpoint.catalog_entries import add_entries
from flashckpt.checkpoint.intents import read_intents
from flashckpt.checkpoint.retention import Policy, Swept, leased_prefixes, prune
from flashckpt.checkpoint.sweeping import claim, look_into
from flashckpt.checkpoint.writer import prefix_of
from flashckpt.errors import StoreError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store


def is_full(error: BaseException) -> bool:
    """Whether the root has no room: its disk is full, or its quota is used up."""
    cause = error.__cause__
    return isinstance(error, StoreError) and isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def make_room(store: Store, policy: Policy, *, now_s: float | None = None) -> Swept:
    """Delete what may be deleted now; return what it was.

    Args:
        store: The root.
        policy: Which checkpoints stay; where it keeps all of them, only parts of uncommitted ones go.
        now_s: Unix seconds (tests).
    """
    now = time.time() if now_s is None else now_s
    orphans, freed = _remove_abandoned(store, now)
    pruned = prune(store, policy, now_s=now)
    return Swept(checkpoints=pruned.checkpoints, orphans=orphans, nbytes=pruned.nbytes + freed)


def _remove_abandoned(store: Store, now: float) -> tuple[tuple[str, ...], int]:
    """Remove the data of abandoned snapshots, and of deleted checkpoints whose deletion was cut short."""
    intents, abandoned = read_intents(store)
    busy = leased_prefixes(store, now_s=now) | {prefix_of(*intent.identity) for intent in intents}
    given_up = {prefix_of(*identity) for identity in abandoned}
    folders = [one for one in look_into(store, read_contents(store, verify=0), busy, now) if one.data]
    orphans = claim(store, [one for one in folders if not one.is_deleted and one.prefix in given_up], now)
    removed = [one for one in folders if one.is_deleted] + orphans
    store.delete_many([entry.key for one in removed for entry in one.data])
    crash_point("room.after-abandoned")
    add_entries(store, ((one.prefix, None) for one in removed))
    return tuple(sorted(one.prefix for one in removed)), sum(entry.nbytes for one in removed for entry in one.data)
