"""Names and small records on a root. The records are sealed since format 1.2: what decides which checkpoint is chosen has its own digest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack

from flashckpt.core.records import Record, is_sealed, unpack, unseal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError
from flashckpt.storage.store import Store

MANIFEST = "MANIFEST"
LATEST = "LATEST"
TOMBSTONE = b"FCKABANDONED"
"""Content of a tombstone: this must not be committed any more, its data is being deleted."""
_PREFIX = re.compile(r"^step-(\d{9,})\.g(\d+)$")

IN_FLIGHT = 64
"""Requests in flight at a time where many small ones are made: the connections that an S3 client keeps open."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def prefix_of(generation: int, step: int) -> str:
    """Return the folder of a checkpoint under the root, e.g. "step-000000120.g3"."""
    return f"step-{step:09d}.g{generation}"


def parse_prefix(name: str) -> SnapshotId | None:
    """Return (generation, step) of a checkpoint's folder name; None for any other name."""
    match = _PREFIX.match(name.strip("/"))
    return SnapshotId(int(match.group(2)), int(match.group(1))) if match else None


@contextlib.contextmanager
def explaining(problem: str, *, state: str, remedy: str) -> Iterator[None]:
    """Turn whatever is wrong with one record into a DamagedError with this problem, state and remedy."""
    try:
        yield
    except FormatVersionError as error:
        raise FormatVersionError(
            error.problem, found=error.found, expected=error.expected, state=state, remedy=error.remedy
        ) from error
    except DamagedError as error:
        raise DamagedError(problem, found=error.found, expected=error.expected, state=state, remedy=remedy) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise DamagedError(
            problem, found=found, expected="a record as docs/format.md says", state=state, remedy=remedy
        ) from error


def open_record(kind: type[Record], raw: bytes, name: str, *, leave_out: Collection[str] = ()) -> Record:
    """Return the record in the bytes of the object `name`; one without a digest was written before format 1.2.

    Raises:
        DamagedError, FormatVersionError, ValueError, KeyError: As `unseal` and `unpack`.
    """
    return unpack(kind, _fields_of(raw, name), leave_out=leave_out)


def _fields_of(raw: bytes, name: str) -> dict[str, Any]:
    """Return the fields of a record; before 1.2 it was the msgpack map alone, as msgpack writes it and no other way."""
    if is_sealed(raw):
        return unseal(raw, name)
    fields = msgpack.unpackb(raw)
    if type(fields) is not dict or msgpack.packb(fields) != raw:
        raise ValueError(f"{len(raw)} bytes starting {raw[:16]!r}")
    return fields


def parallel(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Return `work(item)` for each item in order, IN_FLIGHT requests at a time."""
    todo = list(items)
    if len(todo) < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(max_workers=min(IN_FLIGHT, len(todo)), thread_name_prefix="flashckpt-root") as pool:
        return list(pool.map(work, todo))


# -- The catalogue of a root: empty objects whose names say what a folder holds, so that a listing reads no MANIFEST
#
# catalog/step-000000120.g3_4213_1732260000123_123456789_8_8_345_2-110   committed
# catalog/step-000000100.g3_deleted                                       a tombstone, whose data is gone
#
# The numbers are: bytes of MANIFEST, its time (ms), bytes of tensors, ranks, writers, tensors, parent (generation-step).
# An entry only saves requests. A folder without one is looked at; housekeeping adds what is missing and removes what is
# left over. The entry of a committed checkpoint goes before its MANIFEST does, so that none promises what is not there.

CATALOG = "catalog/"
_DELETED = "deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedEntry:
    """The facts that an entry gives of a committed checkpoint.

    Attributes:
        manifest_bytes: Size of its MANIFEST.
        created_ms: Time of its commit, unix milliseconds.
        nbytes, world_size, writers, tensors, parent: As in `ManifestHeader`.
    """

    manifest_bytes: int
    created_ms: int
    nbytes: int
    world_size: int
    writers: int
    tensors: int
    parent: SnapshotId | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RootNames:
    """The facts that the names of a root give, without a single object read.

    Attributes:
        folders: Folders of checkpoints, sorted by name.
        committed: Those with an entry of a commit.
        deleted: Those with an entry of a deletion, and when that was written (unix seconds).
        keys: The keys of the entries of each folder that is there.
        left_over: Keys of entries without a folder, or which a deletion has overtaken.
    """

    folders: tuple[str, ...]
    committed: Mapping[str, CommittedEntry] = field(default_factory=dict)
    deleted: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_over: tuple[str, ...] = ()

    @property
    def unknown(self) -> list[str]:
        """Folders without an entry: their MANIFEST has to be looked at."""
        return [name for name in self.folders if name not in self.committed and name not in self.deleted]


def encode_entry(prefix: str, entry: CommittedEntry | None) -> str:
    """Return the key of an entry; None: the folder holds a tombstone and nothing else."""
    if entry is None:
        return f"{CATALOG}{prefix}_{_DELETED}"
    parent = f"{entry.parent[0]}-{entry.parent[1]}" if entry.parent is not None else "-"
    numbers = (entry.manifest_bytes, entry.created_ms, entry.nbytes, entry.world_size, entry.writers, entry.tensors)
    return CATALOG + "_".join((prefix, *map(str, numbers), parent))


def decode_entry(key: str) -> tuple[str, CommittedEntry | None] | None:
    """Return folder and entry of a key, as `encode_entry` takes them; None for a name that is not an entry."""
    prefix, *fields = key[len(CATALOG) :].split("_")
    if parse_prefix(prefix) is None:
        return None
    if fields == [_DELETED]:
        return prefix, None
    if len(fields) != 7 or not all(one.isascii() and one.isdigit() for one in fields[:6]):
        return None
    generation, _, step = fields[6].partition("-")
    has_parent = generation.isdigit() and step.isdigit()
    if not has_parent and fields[6] != "-":
        return None
    manifest_bytes, created_ms, nbytes, world_size, writers, tensors = map(int, fields[:6])
    return prefix, CommittedEntry(
        manifest_bytes=manifest_bytes,
        created_ms=created_ms,
        nbytes=nbytes,
        world_size=world_size,
        writers=writers,
        tensors=tensors,
        parent=SnapshotId(int(generation), int(step)) if has_parent else None,
    )


def read_names(store: Store) -> RootNames:
    """List the folders and the catalogue, at the same time: one request per 1,000 of each."""
    with ThreadPoolExecutor(1, "flashckpt-list") as beside:
        listing = beside.submit(store.folders)
        objects = store.list(CATALOG)
        names = sorted(name for name in listing.result() if parse_prefix(name) is not None)
    there = set(names)
    committed: dict[str, CommittedEntry] = {}
    deleted: dict[str, float] = {}
    keys: dict[str, tuple[str, ...]] = {}
    left_over = []
    for info in objects:
        if (found := decode_entry(info.key)) is None:
            continue  # of a later release
        prefix, entry = found
        if prefix not in there:
            left_over.append(info.key)
            continue
        keys[prefix] = (*keys.get(prefix, ()), info.key)
        if entry is None:
            deleted[prefix] = info.mtime
        else:
            committed[prefix] = entry
    for prefix in committed.keys() & deleted.keys():  # no commit follows a tombstone: written by somebody who was late
        left_over += [key for key in keys[prefix] if key != encode_entry(prefix, None)]
        del committed[prefix]
    return RootNames(
        folders=tuple(names), committed=committed, deleted=deleted, keys=keys, left_over=tuple(sorted(left_over))
    )


def add_entries(store: Store, entries: Iterable[tuple[str, CommittedEntry | None]]) -> None:
    """Write entries; what is there already is written again."""
    parallel(lambda one: store.put(encode_entry(*one), b""), entries)
