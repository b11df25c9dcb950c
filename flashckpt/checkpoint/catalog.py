"""The contents of a root: committed checkpoints and uncommitted ones.

A checkpoint exists if and only if its MANIFEST exists and its digest holds. A listing takes what the catalogue names
(`root_records`), and reads the summary, which has its own digest, at the start of the newest MANIFESTs and of those
that the catalogue lacks; who uses a checkpoint, or deletes others because of it, reads MANIFEST whole. LATEST is never
read here.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from flashckpt.checkpoint.root_records import (
    MANIFEST,
    TOMBSTONE,
    CommittedEntry,
    RootNames,
    parallel,
    parse_prefix,
    prefix_of,
    read_generations,
    read_names,
)
from flashckpt.checkpoint.spread_reads import each_entry, read_rows, with_values
from flashckpt.checkpoint.writer import read_start
from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.manifest import Manifest, decode_manifest, header_of
from flashckpt.core.schema import ManifestHeader, decode_manifest_header
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.spread import Spread, decode_spread, is_spread
from flashckpt.errors import (
    DamagedError,
    FlashckptError,
    FormatVersionError,
    NoCheckpointError,
    ObjectMissingError,
    may_pass,
)
from flashckpt.planning.selection import RootSummary
from flashckpt.storage.factory import open_in_rank
from flashckpt.storage.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint.

    Attributes:
        prefix: Its folder under the root, "step-000000120.g3".
        parent: (generation, step) that its generation was restored from.
        nbytes: Bytes of tensors, each counted once.
        created_s: Time of the commit, unix seconds.
        writers: How many ranks wrote packs or values.
        suspects: Tensors in which numbers became non-finite.
        job: Job id; "" where only the catalogue was read.
        manifest_bytes: Size of MANIFEST; 0 where it cannot be used.
        problem: "" for a valid one; else why MANIFEST cannot be used (only listed where asked for).
        is_newer: Whether the problem is a format that this release does not know: nothing is damaged.
        is_whole: Whether the digest of the whole MANIFEST was verified, not only its summary's.
    """

    prefix: str
    generation: int
    step: int
    parent: SnapshotId | None = None
    nbytes: int = 0
    created_s: float = 0.0
    world_size: int = 0
    writers: int = 0
    tensors: int = 0
    suspects: int = 0
    job: str = ""
    manifest_bytes: int = 0
    problem: str = ""
    is_newer: bool = False
    is_whole: bool = False

    @property
    def identity(self) -> SnapshotId:
        """(generation, step)."""
        return SnapshotId(self.generation, self.step)


class Absent(enum.Enum):
    """Why a folder holds no checkpoint."""

    UNCOMMITTED = "there is no MANIFEST"
    DELETED = "there is a tombstone in its place"


@dataclass(frozen=True, kw_only=True, slots=True)
class RootContents:
    """The contents of a root, as `read_contents` found them.

    Attributes:
        names: The facts that the names give.
        infos: Checkpoints, newest first; damaged ones have a `problem`.
        tombstones: Folders that were looked at and hold a tombstone; others have an entry (`names.deleted`).
    """

    names: RootNames
    infos: tuple[CheckpointInfo, ...]
    uncommitted: tuple[str, ...]
    tombstones: tuple[str, ...]


VERIFIED_NEWEST = 32
"""Checkpoints whose header a listing reads although the catalogue names them: those that somebody may choose."""
_MAX_INFOS = 4096
_IN_BOTH = ("manifest_bytes", "nbytes", "world_size", "writers", "tensors", "parent")
"""Fields that an entry of the catalogue has as a `CheckpointInfo` has them."""
_log = logging.getLogger("flashckpt")

_infos: dict[tuple[str, str, int, float], CheckpointInfo] = {}
_infos_lock = threading.Lock()


def list_checkpoints(store: Store, *, damaged: bool = False, whole: bool = False) -> list[CheckpointInfo]:
    """Return the committed checkpoints of a root, newest (generation, step) first.

    Rolled-back ones are included: `newest_checkpoint` excludes them. A MANIFEST that this process has read
    is not read again while its size and time are the same.

    Args:
        store: The root.
        damaged: Also those whose MANIFEST is there but cannot be used, with `problem` set.
        whole: Verify each MANIFEST whole instead of its summary.

    Raises:
        RootError, StoreError: the root cannot be read.
    """
    return [info for info in read_contents(store, whole=whole).infos if damaged or not info.problem]


def read_contents(store: Store, *, whole: bool = False, verify: int = VERIFIED_NEWEST) -> RootContents:
    """Return what a root holds: from its names, and from the MANIFESTs that they do not tell enough of.

    Args:
        store: The root.
        whole: Read all MANIFESTs whole.
        verify: How many of the newest checkpoints that the catalogue names are looked at in spite of it.
    """
    names = read_names(store)
    _forget_gone(store.url, names)
    listed = sorted((_from_entry(*one) for one in names.committed.items()), key=lambda i: i.identity, reverse=True)
    trusted = [] if whole else listed[verify:]

    def look(ask: Sequence[str]) -> dict[str, CheckpointInfo | Absent]:
        return dict(zip(ask, parallel(lambda name: examine(store, name, whole=whole), ask), strict=True))

    found = look([*names.unknown, *(info.prefix for info in listed[: len(listed) - len(trusted)])])
    found |= look(_doubted(names, [*trusted, *_checkpoints(found)]))
    return RootContents(
        names=names,
        infos=tuple(sorted([*trusted, *_checkpoints(found)], key=lambda info: info.identity, reverse=True)),
        uncommitted=tuple(sorted(name for name, one in found.items() if one is Absent.UNCOMMITTED)),
        tombstones=tuple(sorted(n for n, one in found.items() if one is Absent.DELETED and n not in names.deleted)),
    )


def _forget_gone(url: str, names: RootNames) -> None:
    """Drop what this process knows of checkpoints that are gone: a daemon commits and deletes for months."""
    there = set(names.folders).difference(names.deleted)
    with _infos_lock:
        for key in [key for key in _infos if key[0] == url and key[1] not in there]:
            del _infos[key]


def _checkpoints(found: Mapping[str, CheckpointInfo | Absent]) -> list[CheckpointInfo]:
    return [one for one in found.values() if isinstance(one, CheckpointInfo)]


def _doubted(names: RootNames, infos: Iterable[CheckpointInfo]) -> list[str]:
    """Return the folders whose deletion is not believed: all that are newer than the newest checkpoint.

    Retention deletes older ones. Somebody who removed folders by hand, and not the catalogue, may have started over:
    such an entry would then hide the checkpoint that a restore has to find.
    """
    newest = max((info.identity for info in infos if not info.problem), default=None)
    identities = {name: parse_prefix(name) for name in names.deleted}
    return [name for name, found in identities.items() if newest is None or (found is not None and found > newest)]


@contextmanager
def open_root(root: str, options: Mapping[str, Any]) -> Iterator[Store]:
    """Open a root in a rank for the length of a `with` block."""
    store = open_in_rank(root, options)
    try:
        yield store
    finally:
        store.close()


def read_root(root: str, options: Mapping[str, Any]) -> RootSummary:
    """Read a root as rank 0 does at a cold start; for an unreachable one return a view with `error` set, since memory may suffice."""
    try:
        with open_root(root, options) as store:
            infos = sorted(list_checkpoints(store), key=lambda i: (i.generation, i.step), reverse=True)
            claims = read_generations(store)
            is_empty = not infos and not any(name.startswith("step-") for name in store.folders())
    except (FlashckptError, OSError) as error:
        _log.warning("the root %s cannot be read: %s", root, str(error).splitlines()[0])
        return RootSummary(error=str(error), may_pass=may_pass(error))
    return RootSummary(
        committed=tuple(SnapshotId(i.generation, i.step) for i in infos),
        prefixes=tuple(i.prefix for i in infos),
        claims=tuple(claims),
        is_empty=is_empty,
        suspects=tuple(i.identity for i in infos if i.suspects),
    )


def read_manifest(store: Store, info: CheckpointInfo | str, *, values: bool = True) -> Manifest:
    """Return the MANIFEST of a checkpoint, its digest verified.

    With `values` also those that it names by range; else they are left where they are.

    Raises:
        NoCheckpointError: It was never committed, or has been deleted.
        DamagedError: It, or such a value, is damaged; the message names it.
    """
    prefix = info if isinstance(info, str) else info.prefix
    manifest = whole_manifest(store, prefix, read_manifest_bytes(store, prefix))
    return with_values(store, prefix, manifest) if values else manifest


def read_manifest_bytes(store: Store, prefix: str) -> bytes:
    """Return the bytes of a MANIFEST, for `manifest_from`; NoCheckpointError if there is none."""
    try:
        return store.get(f"{prefix}/{MANIFEST}")
    except ObjectMissingError as error:
        raise _never_committed(store.url, prefix) from error


def whole_manifest(store: Store, prefix: str, raw: bytes) -> Manifest:
    """Return the MANIFEST in `raw` with all rows, of its indexes too where it names some; errors as `read_manifest`."""
    found = manifest_from(store.url, prefix, raw)
    return read_rows(store, prefix, found) if isinstance(found, Spread) else found


def verify_manifest(store: Store, prefix: str) -> ManifestHeader:
    """Return the summary of a checkpoint whose MANIFEST, and what it names in place of rows, is whole; errors as `read_manifest`."""
    found = manifest_from(store.url, prefix, read_manifest_bytes(store, prefix))
    if not isinstance(found, Spread):
        return header_of(found)
    for _ in each_entry(store, prefix, found, found.indexes, rows=False):
        pass
    return found.header


def manifest_from(url: str, prefix: str, raw: bytes) -> Manifest | Spread:
    """Return the MANIFEST in `raw`, which was read from `prefix` of the root `url`; errors as `read_manifest`."""
    if raw.startswith(TOMBSTONE):
        raise _deleted(url, prefix, raw)
    try:
        manifest = decode_spread(raw) if is_spread(raw) else decode_manifest(raw)
    except DamagedError as error:
        raise _damaged_manifest(url, prefix, error) from error
    _refuse_other(url, prefix, manifest.identity)
    return manifest


def newest_checkpoint(
    store: Store,
    *,
    generations: Sequence[Generation] | None = None,
    whole: bool = False,
) -> CheckpointInfo | None:
    """Return the newest checkpoint that no later generation rolled back; None if there is none.

    Args:
        store: The root.
        generations: Claims that determine what was rolled back; read from the root if None.
        whole: Its whole MANIFEST must be valid; older ones are tried until one is.
    """
    claims = read_generations(store) if generations is None else generations
    for info in list_checkpoints(store):
        if not is_rolled_back(info.identity, claims):
            verified = look_at(store, info.prefix, whole=whole)
            if verified is not None and not verified.problem:
                return verified
    return None


def look_at(store: Store, prefix: str, *, whole: bool = False) -> CheckpointInfo | None:
    """Return the checkpoint of one folder; None without a MANIFEST or with a tombstone; `problem` if it is damaged.

    Verified are the first HEAD_BYTES, where it has a summary, or with `whole` all of it.
    """
    found = examine(store, prefix, whole=whole)
    return None if isinstance(found, Absent) else found


def examine(store: Store, prefix: str, *, whole: bool = False) -> CheckpointInfo | Absent:
    """Return the checkpoint of one folder, as `look_at` does, or why there is none."""
    head = store.head(f"{prefix}/{MANIFEST}")
    identity = parse_prefix(prefix)
    if head is None or identity is None:
        return Absent.UNCOMMITTED
    cache_key = (store.url, prefix, head.nbytes, head.mtime)
    with _infos_lock:
        if (known := _infos.get(cache_key)) is not None and (known.is_whole or not whole):
            return known
    try:
        summary = None if whole else read_summary(store, prefix, head.nbytes)
        is_whole = summary is None
        if summary is None:
            summary = verify_manifest(store, prefix)
    except NoCheckpointError:
        return Absent.DELETED
    except (DamagedError, FormatVersionError) as error:
        return _broken(prefix, identity, head.mtime, error)
    info = CheckpointInfo(
        prefix=prefix, created_s=head.mtime, manifest_bytes=head.nbytes, is_whole=is_whole, **asdict(summary)
    )
    with _infos_lock:
        while len(_infos) >= _MAX_INFOS:
            del _infos[next(iter(_infos))]
        _infos[cache_key] = info
    return info


def _from_entry(prefix: str, entry: CommittedEntry) -> CheckpointInfo:
    identity = parse_prefix(prefix)
    assert identity is not None
    return CheckpointInfo(
        prefix=prefix,
        generation=identity.generation,
        step=identity.step,
        created_s=entry.created_ms / 1000,
        **{name: getattr(entry, name) for name in _IN_BOTH},
    )


def entry_from(info: CheckpointInfo) -> CommittedEntry:
    """Return the catalogue's entry of a valid checkpoint whose MANIFEST was read."""
    return CommittedEntry(created_ms=round(info.created_s * 1000), **{name: getattr(info, name) for name in _IN_BOTH})


def read_summary(store: Store, prefix: str, nbytes: int) -> ManifestHeader | None:
    """Return the verified summary of a MANIFEST of `nbytes` bytes; None where it has none (format 1.0).

    Raises:
        NoCheckpointError: It is a tombstone, or has just gone.
        DamagedError: Its first bytes are damaged, or its size is not what they say.
    """
    try:
        start = read_start(store, f"{prefix}/{MANIFEST}", nbytes)
    except ObjectMissingError as error:
        raise _never_committed(store.url, prefix) from error
    if start.startswith(TOMBSTONE):
        raise _deleted(store.url, prefix, start)
    try:
        summary = decode_manifest_header(start, nbytes)
    except DamagedError as error:
        raise _damaged_manifest(store.url, prefix, error) from error
    if summary is not None:
        _refuse_other(store.url, prefix, SnapshotId(summary.generation, summary.step))
    return summary


def _broken(prefix: str, identity: SnapshotId, mtime: float, error: FlashckptError) -> CheckpointInfo:
    problem = f"{error.problem} ({error.found})" if error.found else error.problem
    return CheckpointInfo(
        prefix=prefix,
        generation=identity[0],
        step=identity[1],
        created_s=mtime,
        problem=problem,
        is_newer=isinstance(error, FormatVersionError),
    )


def _never_committed(url: str, prefix: str) -> NoCheckpointError:
    return NoCheckpointError(f"{url} has no committed checkpoint {prefix}", remedy=f"flashckpt ls {url}")


def _deleted(url: str, prefix: str, raw: bytes) -> NoCheckpointError:
    return NoCheckpointError(
        f"the checkpoint {prefix} of {url} was deleted", found=raw.decode(errors="replace").strip()
    )


def _damaged_manifest(url: str, prefix: str, error: DamagedError) -> DamagedError:
    return DamagedError(
        f"the MANIFEST of {prefix} in {url} is damaged",
        found=error.found,
        expected=error.expected,
        state="Nothing was restored from it.",
        remedy=f"flashckpt ls {url} shows the checkpoints that are intact",
    )


def _refuse_other(url: str, prefix: str, identity: SnapshotId) -> None:
    if prefix_of(*identity) != prefix:
        raise DamagedError(
            f"the MANIFEST of {prefix} in {url} belongs to another checkpoint", found=prefix_of(*identity)
        )
