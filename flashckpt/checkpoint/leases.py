"""Readers' leases: a deletion looks at them between its tombstone and the data, a reader takes one before it reads MANIFEST."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.root_records import parallel
from flashckpt.core.manifest import Manifest
from flashckpt.core.records import is_sealed, pack, seal, unpack, unseal
from flashckpt.errors import DamagedError, FormatVersionError, ObjectMissingError, RootError, StoreError
from flashckpt.storage.store import ObjectInfo, Store

_log = logging.getLogger(__name__)
LEASES = "leases/"
LEASE_S = 600.0
"""Seconds a reader's lease holds unless it is renewed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """The object of a reader's lease.

    Attributes:
        expires_s: Unix seconds.
    """

    expires_s: float


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
