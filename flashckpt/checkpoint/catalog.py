"""What a root holds: committed checkpoints and uncommitted ones.

A checkpoint exists if and only if its MANIFEST exists and its digest holds. A listing reads the summary at the
start of each MANIFEST, which has its own digest; who uses a checkpoint, or deletes others because of it,
reads MANIFEST whole. LATEST is never read here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flashckpt.checkpoint.generations import read_generations
from flashckpt.checkpoint.root_records import parallel
from flashckpt.checkpoint.writer import MANIFEST, TOMBSTONE, parse_prefix, prefix_of, read_start
from flashckpt.core.generation import Generation
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.manifest import Manifest, decode_manifest, header_of
from flashckpt.core.manifest_header import ManifestHeader, decode_manifest_header
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FlashckptError, FormatVersionError, NoCheckpointError, ObjectMissingError
from flashckpt.storage.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint.

    Attributes:
        prefix: Its folder under the root, "step-000000120.g3".
        generation, step: Its identity.
        parent: (generation, step) that its generation was restored from.
        nbytes: Bytes of tensors, each counted once.
        created_s: Time of the commit, unix seconds.
        world_size: Ranks of the worker group.
        writers: How many ranks wrote packs or values.
        tensors: Number of global tensors.
        job: Job id.
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
    job: str = ""
    problem: str = ""
    is_newer: bool = False
    is_whole: bool = False

    @property
    def identity(self) -> SnapshotId:
        """(generation, step)."""
        return SnapshotId(self.generation, self.step)


_infos: dict[tuple[str, str, int, float], CheckpointInfo] = {}
_infos_lock = threading.Lock()


def list_checkpoints(store: Store, *, damaged: bool = False, whole: bool = False) -> list[CheckpointInfo]:
    """Return the committed checkpoints of a root, newest (generation, step) first.

    Abandoned ones are included: `newest_checkpoint` leaves them out. A MANIFEST that this process has looked at
    is not read again while its size and time are the same.

    Args:
        store: The root.
        damaged: Also those whose MANIFEST is there but cannot be used, with `problem` set.
        whole: Verify each MANIFEST whole instead of its summary.

    Raises:
        RootError, StoreError: the root cannot be read.
    """
    names = [name for name in store.folders() if parse_prefix(name)]
    found = [info for info in parallel(lambda name: look_at(store, name, whole=whole), names) if info is not None]
    return sorted((i for i in found if damaged or not i.problem), key=lambda i: i.identity, reverse=True)


def list_uncommitted(store: Store) -> list[str]:
    """Return the folders of checkpoints without a MANIFEST (being written, given up, or being deleted)."""
    names = [name for name in store.folders() if parse_prefix(name)]
    heads = parallel(lambda name: store.head(f"{name}/{MANIFEST}"), names)
    return [name for name, head in zip(names, heads, strict=True) if head is None]


def read_manifest(store: Store, info: CheckpointInfo | str) -> Manifest:
    """Return the MANIFEST of a checkpoint, its digest verified.

    Raises:
        NoCheckpointError: It was never committed, or has been deleted.
        DamagedError: It is damaged; the message names it.
    """
    prefix = info if isinstance(info, str) else info.prefix
    return manifest_from(store.url, prefix, read_manifest_bytes(store, prefix))


def read_manifest_bytes(store: Store, prefix: str) -> bytes:
    """Return a MANIFEST as it lies there, for `manifest_from`; NoCheckpointError where there is none."""
    try:
        return store.get(f"{prefix}/{MANIFEST}")
    except ObjectMissingError as error:
        raise _never_committed(store.url, prefix) from error


def manifest_from(url: str, prefix: str, raw: bytes) -> Manifest:
    """Return the MANIFEST in `raw`, which was read from `prefix` of the root `url`; errors as `read_manifest`."""
    if raw.startswith(TOMBSTONE):
        raise _deleted(url, prefix, raw)
    try:
        manifest = decode_manifest(raw)
    except DamagedError as error:
        raise _damaged_manifest(url, prefix, error) from error
    _refuse_other(url, prefix, manifest.identity)
    return manifest


def newest_checkpoint(
    store: Store,
    *,
    generations: Sequence[Generation] | None = None,
    below: SnapshotId | None = None,
    whole: bool = False,
) -> CheckpointInfo | None:
    """Return the newest checkpoint that no later generation abandoned; None where there is none.

    Args:
        store: The root.
        generations: Claims that tell what was abandoned; read from the root if None.
        below: Only those before this identity (to offer the next older one when the newest is damaged).
        whole: Its MANIFEST must hold whole; older ones are looked at until one does.
    """
    claims = read_generations(store) if generations is None else generations
    for info in list_checkpoints(store):
        if (below is None or info.identity < below) and not is_rolled_back(info.identity, claims):
            verified = look_at(store, info.prefix, whole=True) if whole else info
            if verified is not None and not verified.problem:
                return verified
    return None


def look_at(store: Store, prefix: str, *, whole: bool = False) -> CheckpointInfo | None:
    """Return what the MANIFEST of one folder says; None where it has none or a tombstone; `problem` where it is damaged.

    Args:
        store: The root.
        prefix: The folder.
        whole: Verify it whole; else the first HEAD_BYTES, where it has a summary.
    """
    head = store.head(f"{prefix}/{MANIFEST}")
    identity = parse_prefix(prefix)
    if head is None or identity is None:
        return None
    cache_key = (store.url, prefix, head.nbytes, head.mtime)
    with _infos_lock:
        if (known := _infos.get(cache_key)) is not None and (known.is_whole or not whole):
            return known
    try:
        summary = None if whole else read_summary(store, prefix, head.nbytes)
        is_whole = summary is None
        if summary is None:
            summary = header_of(read_manifest(store, prefix))
    except NoCheckpointError:
        return None
    except (DamagedError, FormatVersionError) as error:
        return _broken(prefix, identity, head.mtime, error)
    fields = asdict(summary)
    info = CheckpointInfo(prefix=prefix, created_s=head.mtime, is_whole=is_whole, **fields)
    with _infos_lock:
        _infos[cache_key] = info
    return info


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
