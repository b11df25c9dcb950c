"""Names, small records and claims of generations on a root. Torch-free.

The records are sealed since format 1.2: what decides which checkpoint is chosen has its own digest. A claim is one small
object per generation, created once. Its token tells our own claim from another's of the same number; a newer claim fences
every older writer: only the newest generation of a root may persist there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from flashckpt.core.lineage import BEGINNING, Generation
from flashckpt.core.records import Record, is_sealed, mark_of, pack, seal, unpack, unseal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FencedError, FormatVersionError, ObjectMissingError, RootError
from flashckpt.faults import crash_point
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


# -- Generations of a job on its root: claimed once each, and read -------------------------------------------------


GENERATIONS = "generations/"
_LOCAL = ("claimed", "line")
"""Fields of a generation that only the job directory holds."""


def claim_generation(store: Store, claim: Generation) -> bool:
    """Claim a generation's number on the root; return whether it is ours (also when claimed by an earlier try).

    Exactly one of several claimers wins. On a store without conditional writes the claim is written,
    then read back after a pause; call `owns_generation` again before anything is persisted there.
    """
    crash_point("generation.before-claim")
    won = store.put_if_absent(_claim_key(claim.number), encode_claim(claim))
    if not won:  # an answer may have been lost: the token tells whether the object is ours
        won = owns_generation(store, claim)
    if won:
        crash_point("generation.after-claim")
    return won


def owns_generation(store: Store, claim: Generation) -> bool:
    """Return whether the claim on the root carries this claim's token."""
    try:
        return _read_claim(store, _claim_key(claim.number)).token == claim.token
    except ObjectMissingError:
        return False


def claimed_token(store: Store, number: int) -> str:
    """Return the token of the claim on a number; "" where nobody has claimed it."""
    try:
        return _read_claim(store, _claim_key(number)).token
    except ObjectMissingError:
        return ""


def read_generations(store: Store, above: int = 0) -> list[Generation]:
    """Return the claims of a root above a number, lowest first; one that cannot be read is an error (never skipped)."""
    keys = [_claim_key(number) for number in _claimed(store) if number > above]
    return sorted(parallel(lambda key: _read_claim(store, key), keys), key=lambda claim: claim.number)


def newest_claim(store: Store) -> int:
    """Return the highest number claimed on the root; 0 where there is none."""
    return max(_claimed(store), default=0)


def newest_generation(store: Store) -> int:
    """Return the highest number claimed on the root or used by a checkpoint folder; 0 where there is none."""
    used = [identity[0] for name in store.folders() if (identity := parse_prefix(name))]
    return max([*_claimed(store), *used], default=0)


def check_fence(
    store: Store, claim: Generation, *, on_missing: Callable[[], None] = lambda: None, is_known: bool = False
) -> None:
    """Raise unless the root's newest generation is `claim`; claim it where it is free, before anything is persisted.

    Args:
        store: The root.
        claim: This generation of the job.
        on_missing: Called before it is claimed where it is free.
        is_known: The claim on the root was found to be this one before, on a store where each is created once: then
            one listing is enough.

    Raises:
        FencedError: A newer generation is there, or this number belongs to another run.
    """
    claimed = {*_claimed(store)}
    if (newest := max(claimed, default=0)) > claim.number:
        raise _fenced(claim, f"generation {newest} was claimed on {store.url}")
    if claim.number not in claimed:
        on_missing()
        before = [number for number in claimed if claim.number - len(claim.line) <= number]
        if claim.is_overtaken(_marks_of_used(store, before)):
            raise _fenced(
                claim, f"others have claimed generation {max(before)} on {store.url}, and gone on from before it"
            )
    elif is_known:
        return
    if not claim_generation(store, claim):
        raise _fenced(claim, f"generation {claim.number} of {store.url} belongs to another run")


def _marks_of_used(store: Store, numbers: Iterable[int]) -> dict[int, int]:
    """Return number -> mark of the claims of which something came: a start that died behind its claim has overtaken nobody."""
    claims = parallel(lambda number: _read_claim(store, _claim_key(number)), numbers)
    have_parents = all(one.parent is not None for one in claims)
    written = set() if have_parents else {identity[0] for name in store.folders() if (identity := parse_prefix(name))}
    return {one.number: mark_of(one.token) for one in claims if one.parent is not None or one.number in written}


class ReplacedRoot:
    """Notices that a generation which was claimed on the root is there no more."""

    def __init__(self) -> None:
        self._seen: tuple[int, int | None] | None = None
        self._was_refused = False

    def note(self, store: Store, claim: Generation) -> None:
        """Remember where the claim is."""
        self._seen = claim.number, _device(store)

    def refuse(self, store: Store, claim: Generation) -> None:
        """Raise RootError if the claim was there before: once where the root was emptied, else until it is there again."""
        seen = self._seen if self._seen is not None and self._seen[0] == claim.number else None
        if (seen is None and not claim.claimed) or owns_generation(
            store, claim
        ):  # its first claim, or a listing that lags
            return
        is_elsewhere = seen is not None and seen[1] != _device(store)
        if self._was_refused and not is_elsewhere:
            return
        self._was_refused = True
        raise RootError(
            f"{store.url} is no longer the root that this job has written to",
            found=f"no record of generation {claim.number}" + (", and another file system" if is_elsewhere else ""),
            expected="what the job wrote there when it began",
            state="Nothing was written now; snapshots in memory continue. The checkpoints committed there are missing.",
            remedy="mount it again: persisting then resumes automatically"
            if is_elsewhere
            else "nothing, if it was emptied on purpose: the next attempt writes there",
        )


def _device(store: Store) -> int | None:
    """Return the number of the file system that a directory is on; None for another store."""
    root: Path | None = getattr(store, "root", None)
    while root is not None and not root.exists() and root != root.parent:
        root = root.parent
    return None if root is None else root.stat().st_dev


def encode_claim(claim: Generation) -> bytes:
    """Return the object that claims a generation."""
    return seal(pack(claim, leave_out=_LOCAL))


def decode_claim(raw: bytes, key: str, url: str) -> Generation:
    """Return the claim in `raw`, which was read from `key` of the root `url`; one without a digest was written before 1.2.

    Raises:
        DamagedError, FormatVersionError: It cannot be used; the message says how to continue.
    """
    with explaining(
        f"the generation claim {key} of {url} is damaged",
        state="Nothing was chosen: without it, it is not known which checkpoints that generation rolled back.",
        remedy=f"restore the object {key} from a backup or an older version of it; if that generation rolled back "
        "nothing (it began where the one before it ended), delete it",
    ):
        claim = open_record(Generation, raw, key, leave_out=_LOCAL)
        if claim.number < 1 or _claim_key(claim.number) != key:
            raise ValueError(f"the claim of generation {claim.number}")
        # the beginning of everything is a parent only in a sealed claim: an unsealed one is older than `restore(fresh=True)`
        begins = claim.parent == BEGINNING and is_sealed(raw)
        if claim.parent is not None and not begins and not 0 < claim.parent[0] < claim.number:
            raise ValueError(f"generation {claim.number} restored from generation {claim.parent[0]}")
        return claim


def _read_claim(store: Store, key: str) -> Generation:
    return decode_claim(store.get(key), key, store.url)


def _claimed(store: Store) -> list[int]:
    """Return the numbers that are claimed, from the names alone."""
    return [int(name) for info in store.list(GENERATIONS) if (name := info.key.rpartition("/")[2]).isdigit()]


def _claim_key(generation: int) -> str:
    return f"{GENERATIONS}{generation:06d}"


def _fenced(claim: Generation, found: str) -> FencedError:
    return FencedError(
        f"generation {claim.number} may no longer write to its root",
        found=found,
        expected=f"generation {claim.number} to be the newest, claimed with this run's token",
        state="Nothing was persisted; snapshots in memory are kept.",
        remedy="if two runs share this root, stop one of them or give it another root",
    )
