"""Which checkpoints stay, readers' leases, and the removal of the others; `sweeping` removes what is left over.

Deletion order, for up to BATCH checkpoints at a time: a claim takes the place of the keep mark of each, by one conditional
write, so that either the deleter finds a mark or `keep` finds the claim; their catalogue entries go, then MANIFEST is replaced by a
tombstone (the checkpoint stops existing, and a committer that wakes up late cannot bring it back), then leases are
checked once more, then the data and the claims are removed, and the tombstone last, after `TOMBSTONE_AGE_S`. A reader writes its lease
before it reads MANIFEST and checks MANIFEST again afterwards, so either the reader sees the tombstone or the deleter
sees the lease.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from flashckpt.checkpoint.catalog import (
    CheckpointInfo,
    RootContents,
    entry_from,
    look_at,
    read_contents,
    read_manifest,
    verify_manifest,
)
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
from flashckpt.core.manifest import Manifest
from flashckpt.core.records import is_sealed, pack, seal, unpack, unseal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import (
    DamagedError,
    FormatVersionError,
    NoCheckpointError,
    ObjectMissingError,
    RootError,
    StoreError,
)
from flashckpt.faults import crash_point
from flashckpt.storage.store import ObjectInfo, Objects, Store

_log = logging.getLogger(__name__)

LEASES = "leases/"
KEEP = "keep/"
LEASE_S = 600.0
"""Seconds a reader's lease holds unless it is renewed."""

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
class LeaseRecord:
    """The object of a reader's lease.

    Attributes:
        expires_s: Unix seconds.
    """

    expires_s: float


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


def leased_prefixes(store: Store, *, now_s: float | None = None, delete_expired: bool = False) -> set[str]:
    """Return the folders under a reader's lease that has not expired; optionally remove the expired ones.

    A lease lasts at least LEASE_S seconds from its last write, as storage dates it: the reader's clock may be behind.
    """
    now = time.time() if now_s is None else now_s
    found, expired = set(), []
    infos = store.list(LEASES)
    for info, expires_s in zip(infos, parallel(lambda one: _expires_s(store, one), infos), strict=True):
        if expires_s is not None and expires_s >= now:
            found.add(info.key[len(LEASES) :].partition("/")[0])
        elif expires_s is not None:
            expired.append(info.key)
    if delete_expired:
        store.delete_many(expired)
    return found


def _expires_s(store: Store, info: ObjectInfo) -> float | None:
    try:
        return max(decode_lease(store.get(info.key), info.key), info.mtime + LEASE_S)
    except ObjectMissingError:
        return None
    except (ValueError, KeyError, DamagedError, FormatVersionError):
        return info.mtime + LEASE_S  # not ours or damaged: treated as one that was just taken


def encode_lease(expires_s: float) -> bytes:
    """Return the object of a reader's lease."""
    return seal(pack(LeaseRecord(expires_s=expires_s)))


def decode_lease(raw: bytes, name: str) -> float:
    """Return when a lease expires, unix seconds; before 1.2 it was that number as text.

    Raises:
        DamagedError, FormatVersionError, ValueError, KeyError: It cannot be used.
    """
    fields = unseal(raw, name) if is_sealed(raw) else {"expires_s": float(raw.decode())}
    return unpack(LeaseRecord, fields).expires_s


class ReadLease:
    """A reader's hold on one checkpoint: retention leaves its data alone until it is closed or expires."""

    def __init__(self, store: Store, prefix: str, *, seconds: float = LEASE_S) -> None:
        self._store, self._seconds = store, seconds
        self._key = f"{LEASES}{prefix}/{secrets.token_hex(8)}"
        self.prefix = prefix
        self.renew()

    def renew(self) -> None:
        """Hold on for another `seconds`."""
        self._store.put(self._key, encode_lease(time.time() + self._seconds))

    def close(self) -> None:
        """Let go."""
        self._store.delete(self._key)


@contextlib.contextmanager
def leased(store: Store, prefix: str, *, seconds: float = LEASE_S) -> Iterator[None]:
    """Hold a lease on a checkpoint, renewed by a thread. A root that may only be read is read without a lease.

    Read MANIFEST only after the lease is in place: a deletion that began before is then visible, and one that
    begins afterwards sees the lease.
    """
    try:
        lease = ReadLease(store, prefix, seconds=seconds)
    except (RootError, StoreError) as error:
        _log.info("%s is read without a lease: %s", prefix, error.problem)
        yield
        return
    stop = threading.Event()
    renewer = threading.Thread(target=_renew, args=(lease, seconds / 3, stop), name="flashckpt-lease", daemon=True)
    renewer.start()
    try:
        yield
    finally:
        stop.set()
        renewer.join()
        with contextlib.suppress(RootError, StoreError):  # then it expires
            lease.close()


@contextlib.contextmanager
def reading(store: Store, prefix: str, *, seconds: float = LEASE_S) -> Iterator[Manifest]:
    """Hold a lease on a checkpoint and give its MANIFEST; NoCheckpointError where it is gone."""
    with leased(store, prefix, seconds=seconds):
        yield read_manifest(store, prefix)


def _renew(lease: ReadLease, every_s: float, stop: threading.Event) -> None:
    while not stop.wait(every_s):
        try:
            lease.renew()
        except Exception as error:  # noqa: BLE001 -- unrenewed, what is being read may be deleted
            _log.warning("the lease on %s could not be renewed: %s", lease.prefix, str(error).partition("\n")[0])
