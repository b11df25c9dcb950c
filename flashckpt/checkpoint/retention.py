"""Which checkpoints stay, readers' leases, and the removal of everything else.

Deletion order: MANIFEST is replaced by a tombstone first (the checkpoint stops existing, and a
committer that wakes up late cannot bring it back), then leases are looked at once more, then the data
goes, and the tombstone last, after `TOMBSTONE_AGE_S`. A reader puts its lease before it reads MANIFEST
and looks again afterwards, so either the reader sees the tombstone or the deleter sees the lease.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from flashckpt.checkpoint.catalog import (
    CheckpointInfo,
    list_checkpoints,
    look_at,
    read_manifest,
    read_summary,
)
from flashckpt.checkpoint.generations import read_generations
from flashckpt.checkpoint.intents import INTENTS, list_intents
from flashckpt.checkpoint.writer import MANIFEST, TOMBSTONE, parse_prefix, prefix_of
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
from flashckpt.storage.store import SWEEP_AGE_S, Store

_log = logging.getLogger(__name__)

LEASES = "leases/"
KEEP = "keep/"
LEASE_S = 600.0
"""Seconds a reader's lease holds unless it is renewed."""

TOMBSTONE_AGE_S = 3600.0
"""Seconds a tombstone stays: longer than a committer can sleep between its checks and its commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What to keep.

    Attributes:
        keep_last: Number of newest checkpoints; None keeps all.
        keep_every: Also every checkpoint whose step is a multiple of this; None: no such rule.
    """

    keep_last: int | None = 3
    keep_every: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """The object of a reader's lease.

    Attributes:
        expires_s: Unix seconds.
    """

    expires_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """What a prune or sweep removed (or, as a dry run, would remove).

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
) -> list[CheckpointInfo]:
    """Return the checkpoints to delete, oldest first. Pure.

    The newest valid one that was not abandoned always stays, and so does what carries a keep mark or a
    reader's lease. Abandoned ones count as older than all others.

    Args:
        infos: All valid checkpoints of the root.
        policy: What to keep.
        abandoned: Identities that a later generation left behind.
        kept: Folders with a keep mark.
        leased: Folders under a lease that has not expired.
    """
    if policy.keep_last is None:
        return []
    ordered = sorted(infos, key=lambda info: (info.identity not in abandoned, info.identity), reverse=True)
    expired = []
    for place, info in enumerate(ordered):
        every = policy.keep_every and info.step % policy.keep_every == 0 and info.identity not in abandoned
        if place < max(1, policy.keep_last) or every or info.prefix in kept or info.prefix in leased:
            continue
        expired.append(info)
    return expired[::-1]


def prune(store: Store, policy: Policy, *, dry_run: bool = False, now_s: float | None = None) -> Swept:
    """Delete the checkpoints that the policy does not keep; computed from storage alone.

    Args:
        store: The root.
        policy: What to keep.
        dry_run: Delete nothing, only tell.
        now_s: Unix seconds (tests).
    """
    now = time.time() if now_s is None else now_s
    expired = _expired(store, policy, now)
    if not expired:
        return Swept()
    crash_point("persist.before-prune")
    gone, nbytes = [], 0
    for info in expired:
        if dry_run:
            nbytes += sum(entry.nbytes for entry in store.list(f"{info.prefix}/"))
            gone.append(info.prefix)
            continue
        store.put(f"{info.prefix}/{MANIFEST}", _tombstone("pruned", now))
        crash_point("persist.during-prune")
        if info.prefix in leased_prefixes(store, now_s=now):
            continue  # a reader came in between: it finishes, and the sweep removes the data later
        nbytes += _delete_data(store, info.prefix)
        gone.append(info.prefix)
    return Swept(checkpoints=tuple(gone), nbytes=nbytes)


def _expired(store: Store, policy: Policy, now: float) -> list[CheckpointInfo]:
    """Return what the policy deletes, once the MANIFESTs of those it counts as kept were verified whole.

    A summary that holds proves nothing of the rest: were a damaged checkpoint counted, the last intact one could go.
    """
    infos, generations = list_checkpoints(store), read_generations(store)
    abandoned = {info.identity for info in infos if is_rolled_back(info.identity, generations)}
    kept, leased = kept_prefixes(store), leased_prefixes(store, now_s=now)
    while True:
        expired = choose_expired(infos, policy, abandoned=abandoned, kept=kept, leased=leased)
        if not expired:
            return []
        stays = [info for info in infos if info not in expired and info.identity not in abandoned]
        bad = [info for info in stays[: max(1, policy.keep_last or 1)] if not _is_whole(store, info)]
        if not bad:
            return expired
        infos = [info for info in infos if info not in bad]


def _is_whole(store: Store, info: CheckpointInfo) -> bool:
    found = look_at(store, info.prefix, whole=True)
    if found is not None and found.problem:
        _log.warning("%s is not counted as a checkpoint that is kept: %s", info.prefix, found.problem)
    return found is not None and not found.problem


def sweep(
    store: Store, *, older_than_s: float = SWEEP_AGE_S, dry_run: bool = False, now_s: float | None = None
) -> Swept:
    """Remove what no commit will ever need: orphaned folders, temporary objects, expired leases, old tombstones.

    A folder without MANIFEST is an orphan when a newer checkpoint is committed, no intent is open for
    it, and nothing was written into it for `older_than_s` seconds.

    Args:
        store: The root.
        older_than_s: Age in seconds; 0 only where no writer is alive.
        dry_run: Remove nothing, only tell.
        now_s: Unix seconds (tests).
    """
    now = time.time() if now_s is None else now_s
    leased = leased_prefixes(store, now_s=now, delete_expired=not dry_run)
    newest = max((info.identity for info in list_checkpoints(store)), default=None)
    open_prefixes = {prefix_of(*intent.identity) for intent in list_intents(store)}
    orphans, nbytes = [], 0
    for prefix in store.folders():
        identity = parse_prefix(prefix)
        if identity is None or prefix in leased or prefix in open_prefixes:
            continue
        size = _sweep_folder(store, prefix, newest, older_than_s, now, dry_run=dry_run)
        if size is not None:
            orphans.append(prefix)
            nbytes += size
    if not dry_run:
        _sweep_intents(store, newest)
    temporary = () if dry_run else _sweep_temporary(store, older_than_s)
    return Swept(orphans=tuple(orphans), temporary=temporary, nbytes=nbytes)


def keep(store: Store, prefix: str) -> None:
    """Mark a checkpoint to be kept whatever the policy says."""
    read_manifest(store, prefix)
    store.put(KEEP + prefix, b"")


def unkeep(store: Store, prefix: str) -> None:
    """Take the keep mark away."""
    store.delete(KEEP + prefix)


def kept_prefixes(store: Store) -> set[str]:
    """Return the folders with a keep mark."""
    return {info.key[len(KEEP) :] for info in store.list(KEEP)}


def leased_prefixes(store: Store, *, now_s: float | None = None, delete_expired: bool = False) -> set[str]:
    """Return the folders under a reader's lease that has not expired; optionally remove the expired ones.

    A lease lasts at least LEASE_S seconds from its last write, as storage dates it: the reader's clock may be behind.
    """
    now = time.time() if now_s is None else now_s
    found = set()
    for info in store.list(LEASES):
        try:
            expires_s = max(decode_lease(store.get(info.key), info.key), info.mtime + LEASE_S)
        except ObjectMissingError:
            continue
        except (ValueError, KeyError, DamagedError, FormatVersionError):
            expires_s = info.mtime + LEASE_S  # not ours or damaged: treated as one that was just taken
        if expires_s >= now:
            found.add(info.key[len(LEASES) :].partition("/")[0])
        elif delete_expired:
            store.delete(info.key)
    return found


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

    MANIFEST is to be read after the lease is in place: a deletion that began before is seen, one that begins
    afterwards sees the lease.
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
        except (RootError, StoreError) as error:
            _log.warning("the lease on %s could not be renewed: %s", lease.prefix, error.problem)


def _sweep_folder(
    store: Store, prefix: str, newest: SnapshotId | None, older_than_s: float, now: float, *, dry_run: bool
) -> int | None:
    """Remove one folder if nobody can need it; return the bytes removed, None if it stays."""
    identity = parse_prefix(prefix)
    entries = store.list(f"{prefix}/")
    data = [entry for entry in entries if not entry.key.endswith(f"/{MANIFEST}")]
    age_s = now - max((entry.mtime for entry in entries), default=now)
    manifest_key = f"{prefix}/{MANIFEST}"
    if (head := store.head(manifest_key)) is not None:
        try:
            read_summary(store, prefix, head.nbytes)
        except NoCheckpointError:
            pass  # a tombstone: the data goes now, the stone itself when it is old
        except Exception:  # noqa: BLE001 -- damaged or newer than we are: not ours to delete
            return None
        else:
            return None
        if data and not dry_run:
            _delete_data(store, prefix)
        if age_s > TOMBSTONE_AGE_S and not dry_run:
            store.delete(manifest_key)
        return sum(entry.nbytes for entry in data) if data else None
    if newest is None or identity is None or identity >= newest or age_s < older_than_s:
        return None
    if not dry_run:
        if not store.put_if_absent(manifest_key, _tombstone("swept", now)):
            return None  # committed at this very moment
        _delete_data(store, prefix)
    return sum(entry.nbytes for entry in data)


def _sweep_temporary(store: Store, older_than_s: float) -> tuple[str, ...]:
    """Remove temporary objects and uploads; without the right to list uploads that is left to a lifecycle rule."""
    try:
        return tuple(store.sweep(older_than_s=older_than_s))
    except RootError as error:
        _log.warning("unfinished uploads of %s cannot be swept: %s", store.url, error.found or error.problem)
        return ()


def _sweep_intents(store: Store, newest: SnapshotId | None) -> None:
    """Remove intents and marks of snapshots that are committed or older than the newest checkpoint."""
    for info in store.list(INTENTS):
        name = info.key[len(INTENTS) :].partition(".")[0]
        generation, _, step = name.partition("-")
        if newest is not None and generation.isdigit() and step.isdigit() and (int(generation), int(step)) <= newest:
            store.delete(info.key)


def _delete_data(store: Store, prefix: str) -> int:
    """Delete all objects of a folder but MANIFEST; return their bytes."""
    nbytes = 0
    for entry in store.list(f"{prefix}/"):
        if not entry.key.endswith(f"/{MANIFEST}"):
            store.delete(entry.key)
            nbytes += entry.nbytes
    return nbytes


def _tombstone(why: str, now_s: float) -> bytes:
    return TOMBSTONE + f" {why} at {now_s:.0f}\n".encode()
