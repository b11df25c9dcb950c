"""Which checkpoints stay, and the removal of the others; `sweeping` removes what is left over.

Deletion order, for up to BATCH checkpoints at a time: a claim takes the place of the keep mark of each, by one conditional
write, so that either the deleter finds a mark or `keep` finds the claim; their catalogue entries go, then MANIFEST is replaced by a
tombstone (the checkpoint stops existing, and a committer that wakes up late cannot bring it back), then leases are
checked once more, then the data and the claims are removed, and the tombstone last, after `TOMBSTONE_AGE_S`. A reader writes its lease
before it reads MANIFEST and checks MANIFEST again afterwards, so either the reader sees the tombstone or the deleter
sees the lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

from flashckpt.checkpoint.catalog import (
    CheckpointInfo,
    RootContents,
    entry_from,
    look_at,
    read_contents,
    verify_manifest,
)
from flashckpt.checkpoint.leases import leased_prefixes
from flashckpt.checkpoint.root_records import (
    MANIFEST,
    TOMBSTONE,
    CommittedEntry,
    RootNames,
    add_entries,
    encode_entry,
    newest_claim,
    parallel,
    read_generations,
)
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import (
    DamagedError,
    NoCheckpointError,
    ObjectMissingError,
)
from flashckpt.faults import crash_point
from flashckpt.storage.store import Objects, Store

_log = logging.getLogger(__name__)

KEEP = "keep/"
TOMBSTONE_AGE_S = 3600.0
"""Seconds a tombstone stays: longer than a committer can sleep between its checks and its commit."""

BATCH = 256
"""Checkpoints that are deleted together: one look at the leases for all of them, and their data in batches."""

_VERIFIED = 3
"""Newest checkpoints whose MANIFEST is verified whole before older ones are deleted: the last intact one must stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The rule by which checkpoints are kept.

    Attributes:
        keep_last: Number of newest checkpoints; None keeps all.
        keep_every: Also every checkpoint whose step is a multiple of this; None: no such rule.
        keep_last_s: Also all that are younger than this, in seconds; 0: no such rule.
        keep_every_s: Also the first one of each interval of this many seconds; 0: no such rule.
    """

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_last_s: int = 0
    keep_every_s: int = 0

    @classmethod
    def of(cls, config: object) -> Policy:
        """Return the rule in the fields of that name of a job's configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """The objects that a prune or sweep removed (or, as a dry run, would remove).

    Attributes:
        checkpoints: Folders of checkpoints that the policy does not keep.
        orphans: Folders of checkpoints that were never committed, or whose deletion was cut short.
        temporary: Temporary objects and unfinished uploads.
        nbytes: Bytes of the objects in those folders.
    """

    checkpoints: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    temporary: tuple[str, ...] = ()
    nbytes: int = 0


def choose_expired(
    infos: Sequence[CheckpointInfo],
    policy: Policy,
    *,
    abandoned: Collection[SnapshotId] = (),
    kept: Collection[str] = (),
    leased: Collection[str] = (),
    now_s: float = 0.0,
) -> list[CheckpointInfo]:
    """Return the checkpoints to delete, oldest first. Pure.

    The newest valid one that was not abandoned always stays, and so does what carries a keep mark or a
    reader's lease. Abandoned ones count as older than all others. Those in which numbers became non-finite take no
    place of others: as many clean ones stay as if there were none.

    Args:
        infos: All valid checkpoints of the root.
        policy: The checkpoints to keep.
        abandoned: Ids that a later generation rolled back.
        kept: Folders with a keep mark.
        leased: Folders under a lease that has not expired.
        now_s: Unix seconds, of which ages count back.
    """
    if policy.keep_last is None:
        return []
    firsts: dict[int, SnapshotId] = {}
    for info in sorted(infos, key=lambda info: info.identity, reverse=True) if policy.keep_every_s else ():
        if info.identity not in abandoned and not info.suspects:
            firsts[int(info.created_s // policy.keep_every_s)] = (
                info.identity
            )  # the oldest of its interval is the last here
    first = set(firsts.values())
    ordered = sorted(infos, key=lambda info: (info.identity not in abandoned, info.identity), reverse=True)
    expired, clean = [], 0
    last = max(1, policy.keep_last)
    for place, info in enumerate(ordered):
        clean += not info.suspects
        every = policy.keep_every and info.step % policy.keep_every == 0 and info.identity not in abandoned
        every = every or info.identity in first
        is_kept = place < last or (not info.suspects and clean <= last) or now_s - info.created_s < policy.keep_last_s
        if is_kept or every or info.prefix in kept or info.prefix in leased:
            continue
        expired.append(info)
    return expired[::-1]


def prune(store: Store, policy: Policy, *, dry_run: bool = False, now_s: float | None = None) -> Swept:
    """Delete the checkpoints that the policy does not keep; computed from storage alone.

    Reads names, and MANIFESTs only of the newest checkpoints and of those that the catalogue lacks, which are added.
    """
    now = time.time() if now_s is None else now_s
    contents = read_contents(store, verify=0)
    infos, newest = _expired(store, policy, contents, now)
    expired = [info.prefix for info in infos]
    if not dry_run:
        stay = {info.prefix for info in contents.infos}.difference(expired)
        store.delete_many(mistaken_entries(contents))
        add_entries(store, (one for one in missing_entries(contents) if one[0] in stay))
    if not expired:
        return Swept()
    crash_point("persist.before-prune")
    gone: list[str] = []
    nbytes = 0
    for start in range(0, len(expired), BATCH):
        done = delete(store, contents.names, expired[start : start + BATCH], dry_run=dry_run, now_s=now, newest=newest)
        gone += done.checkpoints
        nbytes += done.nbytes
    return Swept(checkpoints=tuple(gone), nbytes=nbytes)


def delete(
    store: Store,
    names: RootNames,
    batch: Sequence[str],
    *,
    dry_run: bool = False,
    now_s: float | None = None,
    newest: int | None = None,
) -> Swept:
    """Delete at most BATCH checkpoints in the order above; return those whose data went, or as a dry run would go.

    Args:
        store: The root.
        names: Those of the root, read before `batch` was chosen.
        batch: Their folders.
        dry_run: Delete nothing.
        now_s: Unix seconds.
        newest: The generation that `batch` was chosen by: nothing is deleted where another has begun since, perhaps with one
            of these; None: that does not matter.
    """
    now = time.time() if now_s is None else now_s
    if not dry_run:
        claimed = _claim(store, batch, now)
        if newest is not None and newest_claim(store) > newest:
            store.delete_many([KEEP + prefix for prefix in claimed])
            return Swept()
        batch = _bury(store, names, claimed, now)
    data = data_of(store, batch)
    if not dry_run:
        store.delete_many([*(entry.key for entry in data), *(KEEP + prefix for prefix in claimed)])
        crash_point("persist.after-prune")
        add_entries(store, ((prefix, None) for prefix in batch))
    return Swept(checkpoints=tuple(batch), nbytes=sum(entry.nbytes for entry in data))


def _claim(store: Store, batch: Sequence[str], now: float) -> list[str]:
    """Return the folders that nobody marked to be kept since the marks were read, and that nobody can mark any more."""
    raw = tombstone("pruned", now)

    def is_claimed(prefix: str) -> bool:  # by us now, or by a prune that was cut short
        return store.put_if_absent(KEEP + prefix, raw) or is_tombstone(store, KEEP + prefix)

    claimed = parallel(is_claimed, batch)
    crash_point("persist.after-claim")
    return [prefix for prefix, is_ours in zip(batch, claimed, strict=True) if is_ours]


def _bury(store: Store, names: RootNames, batch: Sequence[str], now: float) -> list[str]:
    """Put tombstones in place of MANIFESTs; return the folders whose data may be removed at once."""
    store.delete_many([key for prefix in batch for key in names.keys.get(prefix, ())])
    crash_point("persist.before-tombstone")
    parallel(lambda prefix: store.put(f"{prefix}/{MANIFEST}", tombstone("pruned", now)), batch)
    crash_point("persist.during-prune")
    held = leased_prefixes(store, now_s=now)
    return [prefix for prefix in batch if prefix not in held]  # a reader came in between: the sweep removes it later


def _expired(
    store: Store, policy: Policy, contents: RootContents, now: float
) -> tuple[list[CheckpointInfo], int | None]:
    """Return what the policy deletes, once the newest that it counts as kept were verified whole; and the newest generation.

    Names, and a valid summary, prove nothing about the rest: if a damaged checkpoint counted, the last intact one could
    be deleted.
    """
    infos = [info for info in contents.infos if not info.problem]
    if policy.keep_last is None or len(infos) <= 1:
        return [], None
    generations = read_generations(store)
    newest = max((one.number for one in generations), default=0)
    abandoned = {info.identity for info in infos if is_rolled_back(info.identity, generations)}
    kept, leased = kept_prefixes(store), leased_prefixes(store, now_s=now)
    if not choose_expired(infos, policy, abandoned=abandoned, kept=kept, leased=leased, now_s=now):
        return [], newest
    counted = (i for i in infos if i.identity not in abandoned and not i.suspects)
    bad = _damaged(store, counted, min(_VERIFIED, max(1, policy.keep_last)))
    infos = [info for info in infos if info.prefix not in bad]
    return choose_expired(infos, policy, abandoned=abandoned, kept=kept, leased=leased, now_s=now), newest


def _damaged(store: Store, newest_first: Iterable[CheckpointInfo], wanted: int) -> set[str]:
    """Return the checkpoints that do not count: all those passed over until `wanted` intact ones were found."""
    bad: set[str] = set()
    for info in newest_first:
        if wanted == 0:
            break
        if _is_whole(store, info):
            wanted -= 1
        else:
            bad.add(info.prefix)
    return bad


def _is_whole(store: Store, info: CheckpointInfo) -> bool:
    found = look_at(store, info.prefix, whole=True)
    if found is not None and found.problem:
        _log.warning(
            "%s cannot be used, and does not count as one of the checkpoints to keep: %s", info.prefix, found.problem
        )
    return found is not None and not found.problem


def missing_entries(contents: RootContents) -> list[tuple[str, CommittedEntry | None]]:
    """Return the catalogue's entries of valid checkpoints that were looked at because it lacks them.

    A suspect one has none: its MANIFEST says that it is, and is looked at.
    """
    named = contents.names.committed
    wanted = [one for one in contents.infos if not one.problem and not one.suspects and one.prefix not in named]
    return [(info.prefix, entry_from(info)) for info in wanted]


def mistaken_entries(contents: RootContents) -> list[str]:
    """Return the keys of the catalogue's deletions of folders that were looked at and hold a checkpoint."""
    return [encode_entry(info.prefix, None) for info in contents.infos if info.prefix in contents.names.deleted]


def data_of(store: Store, prefixes: Iterable[str]) -> Objects:
    """Return all objects in folders of checkpoints but MANIFEST: one listing for each folder, several at a time."""
    found = parallel(lambda prefix: store.list(f"{prefix}/"), prefixes)
    return [entry for entries in found for entry in entries if not entry.key.endswith(f"/{MANIFEST}")]


def tombstone(why: str, now_s: float) -> bytes:
    """Return what takes the place of a MANIFEST."""
    return TOMBSTONE + f" {why} at {now_s:.0f}\n".encode()


def keep(store: Store, prefix: str, name: bytes = b"") -> bool:
    """Mark a checkpoint to be kept whatever the policy says; return whether it had no mark. A name is in the first write.

    Raises:
        NoCheckpointError: There is none, or it is being deleted.
    """
    verify_manifest(store, prefix)
    is_new = store.put_if_absent(KEEP + prefix, name)
    if not is_new and is_tombstone(store, KEEP + prefix):
        raise NoCheckpointError(
            f"the checkpoint {prefix} of {store.url} cannot be kept any more",
            found="retention has begun to delete it",
            state="It is not marked.",
            remedy="mark a newer one; if it is still there in an hour, take the mark away (--remove) and mark it again",
        )
    try:
        verify_manifest(store, prefix)
    except NoCheckpointError:  # its deletion ended between our look and our mark
        unkeep(store, prefix)
        raise
    return is_new


def unkeep(store: Store, prefix: str) -> None:
    """Remove the keep mark."""
    store.delete(KEEP + prefix)


def kept_prefixes(store: Store) -> set[str]:
    """Return the folders with a keep mark."""
    infos = store.list(KEEP)
    claims = claims_among(store, infos)
    return {info.key[len(KEEP) :] for info in infos if info.key not in claims}


def claims_among(store: Store, marks: Objects) -> set[str]:
    """Return the keys of those marks that are claims of a deletion; a mark without a name is empty, and not read."""
    return {info.key for info in marks if info.nbytes and is_tombstone(store, info.key)}


def is_tombstone(store: Store, key: str) -> bool:
    """Return whether an object is a tombstone."""
    start = bytearray(len(TOMBSTONE))
    try:
        store.get_range(key, 0, memoryview(start))
    except (ObjectMissingError, DamagedError):
        return False
    return start == TOMBSTONE
