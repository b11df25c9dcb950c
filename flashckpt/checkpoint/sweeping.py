"""The sweep of a root: what no commit and no reader will ever need, found by names and removed in batches.

A folder is looked at once: what it is found to hold is noted in the catalogue (`root_records`). A tombstone is read
once more before it is removed. A sweep that is killed anywhere is finished by the next one.
"""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass

from flashckpt.checkpoint.catalog import RootContents, read_contents
from flashckpt.checkpoint.intents import INTENTS, list_intents, read_intents
from flashckpt.checkpoint.retention import (
    KEEP,
    TOMBSTONE_AGE_S,
    Policy,
    Swept,
    claims_among,
    is_tombstone,
    leased_prefixes,
    missing_entries,
    mistaken_entries,
    prune,
    tombstone,
)
from flashckpt.checkpoint.root_records import MANIFEST, add_entries, parallel, parse_prefix, prefix_of
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import RootError, StoreError
from flashckpt.faults import crash_point
from flashckpt.storage.store import SWEEP_AGE_S, Objects, Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class UncommittedFolder:
    """A folder without a checkpoint.

    Attributes:
        data: Its objects but MANIFEST.
        age_s: Seconds since something was written into it.
    """

    prefix: str
    data: Objects
    age_s: float
    is_deleted: bool


def sweep(
    store: Store, *, older_than_s: float = SWEEP_AGE_S, dry_run: bool = False, now_s: float | None = None
) -> Swept:
    """Remove what no commit will ever need: orphaned folders, temporary objects, expired leases, old tombstones.

    A folder without MANIFEST is an orphan when a newer checkpoint is committed, no intent is open for
    it, and nothing was written into it for `older_than_s` seconds.

    Args:
        store: The root.
        older_than_s: Age in seconds; 0 only where no writer is alive.
        dry_run: Remove nothing, only report.
        now_s: Unix seconds (tests).
    """
    now = time.time() if now_s is None else now_s
    leased = leased_prefixes(store, now_s=now, delete_expired=not dry_run)
    contents = read_contents(store, verify=0)
    newest = max((info.identity for info in contents.infos if not info.problem), default=None)
    busy = leased | {prefix_of(*intent.identity) for intent in list_intents(store)}
    folders = look_into(store, contents, busy, now)
    orphans = [one for one in folders if _is_orphan(one, newest, older_than_s)]
    if not dry_run:
        orphans = claim(store, orphans, now)
    removed = [one for one in folders if one.is_deleted and one.data] + orphans
    if not dry_run:
        store.delete_many([entry.key for one in removed for entry in one.data])
        empty = [one for one in folders if one.is_deleted] + orphans
        old = {one.prefix for one in empty if one.is_deleted and one.age_s > TOMBSTONE_AGE_S}
        crash_point("sweep.before-entries")
        entries = [(one.prefix, None) for one in empty if one.prefix not in old]
        store.delete_many(mistaken_entries(contents))
        add_entries(store, [*missing_entries(contents), *entries])
        _remove_tombstones(store, contents, old, leased, now)
        _sweep_intents(store, newest)
        _sweep_claims(store, contents, now)
    temporary = () if dry_run else _sweep_temporary(store, older_than_s)
    return Swept(
        orphans=tuple(sorted(one.prefix for one in removed)),
        temporary=temporary,
        nbytes=sum(entry.nbytes for one in removed for entry in one.data),
    )


def look_into(store: Store, contents: RootContents, busy: set[str], now: float) -> list[UncommittedFolder]:
    """List the folders that hold no checkpoint and that nobody uses, several at a time."""
    states = dict.fromkeys(contents.uncommitted, False) | dict.fromkeys(contents.tombstones, True)
    names = sorted(states.keys() - busy)
    found = parallel(lambda prefix: store.list(f"{prefix}/"), names)
    return [
        UncommittedFolder(
            prefix=prefix,
            data=[entry for entry in entries if not entry.key.endswith(f"/{MANIFEST}")],
            age_s=now - max((entry.mtime for entry in entries), default=now),
            is_deleted=states[prefix],
        )
        for prefix, entries in zip(names, found, strict=True)
    ]


def _is_orphan(folder: UncommittedFolder, newest: SnapshotId | None, older_than_s: float) -> bool:
    identity = parse_prefix(folder.prefix)
    assert identity is not None
    return not folder.is_deleted and newest is not None and identity < newest and folder.age_s >= older_than_s


def claim(store: Store, orphans: list[UncommittedFolder], now: float) -> list[UncommittedFolder]:
    """Put tombstones into folders that were never committed; return those that were not committed at this very moment."""
    won = parallel(lambda one: store.put_if_absent(f"{one.prefix}/{MANIFEST}", tombstone("swept", now)), orphans)
    return [one for one, is_ours in zip(orphans, won, strict=True) if is_ours]


def _remove_tombstones(store: Store, contents: RootContents, old: set[str], leased: set[str], now: float) -> None:
    """Remove old tombstones: those looked at in this sweep, and of those in the catalogue the ones that are still there.

    Entries go first: one that outlived its tombstone could hide a later commit of the same step.
    """
    names = contents.names
    due = [one for one, mtime in names.deleted.items() if now - mtime > TOMBSTONE_AGE_S and one not in leased]
    are_there = parallel(lambda prefix: is_tombstone(store, f"{prefix}/{MANIFEST}"), due)
    checked = [prefix for prefix, is_there in zip(due, are_there, strict=True) if is_there]
    store.delete_many([*names.left_over, *(key for prefix in due for key in names.keys[prefix])])
    crash_point("sweep.before-tombstones")
    store.delete_many([f"{prefix}/{MANIFEST}" for prefix in (*checked, *sorted(old))])


def _sweep_claims(store: Store, contents: RootContents, now: float) -> None:
    """Remove claims of deletions that ended, or that were cut short behind the tombstone."""
    there = {info.prefix for info in contents.infos}
    old = [m for m in store.list(KEEP) if m.key[len(KEEP) :] not in there and now - m.mtime > TOMBSTONE_AGE_S]
    store.delete_many(sorted(claims_among(store, old)))


def _sweep_temporary(store: Store, older_than_s: float) -> tuple[str, ...]:
    """Remove temporary objects and uploads; where that fails, e.g. for want of the right to list uploads, they stay."""
    try:
        return tuple(store.sweep(older_than_s=older_than_s))
    except (RootError, StoreError) as error:
        _log.warning("unfinished uploads of %s cannot be swept: %s", store.url, error.found or error.problem)
        return ()


def _sweep_intents(store: Store, newest: SnapshotId | None) -> None:
    """Remove intents and marks of snapshots that are committed or older than the newest checkpoint."""
    if newest is not None:
        store.delete_many([info.key for info in store.list(INTENTS) if _is_decided(info.key, newest)])


def _is_decided(key: str, newest: SnapshotId) -> bool:
    generation, _, step = key[len(INTENTS) :].partition(".")[0].partition("-")
    return generation.isdigit() and step.isdigit() and (int(generation), int(step)) <= newest


# -- Room on a full root: what the retention policy does not keep, and what no commit will need, is deleted at once
#
# Nothing is deleted that retention or a sweep would keep: the newest checkpoint, those that the policy counts,
# and those with a keep mark or a reader's lease stay. Of snapshots that were never committed only those go whose
# intent was abandoned: a tombstone takes the place of their MANIFEST first, so that a writer that wakes up late
# cannot commit them.


def is_full(error: BaseException) -> bool:
    """Whether the root has no room: its disk is full, or its quota is used up."""
    cause = error.__cause__
    return isinstance(error, StoreError) and isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def make_room(store: Store, policy: Policy) -> Swept:
    """Delete what may be deleted now; return what it was. Where the policy keeps all, only parts of uncommitted ones go."""
    now = time.time()
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
