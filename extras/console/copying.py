"""A committed checkpoint as the same checkpoint of another root: every chunk is verified on its way, MANIFEST is written last.

The write order is that of a persist: claims of the generations up to its own, packs one by one, MANIFEST by one conditional write.
Whoever is killed leaves nothing visible, and the next copy continues: a pack that is there is read back and kept where it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from flashckpt.checkpoint.catalog import newest_checkpoint, read_manifest_bytes, whole_manifest
from flashckpt.checkpoint.merging import refuse_gaps
from flashckpt.checkpoint.retention import leased
from flashckpt.checkpoint.root_records import (
    LATEST,
    MANIFEST,
    TOMBSTONE,
    claim_generation,
    parse_prefix,
    read_generations,
)
from flashckpt.checkpoint.spread_reads import copy_indexes, with_values
from flashckpt.commands.verify import Span, requests_of
from flashckpt.core.manifest import Manifest
from flashckpt.core.spread import decode_spread, is_spread
from flashckpt.errors import ConfigError, DamagedError, FencedError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.planning.packs import COMPRESSED_SUFFIX
from flashckpt.restore.sources import Spans, StorageSource
from flashckpt.storage.store import PART_BYTES, Store

THREADS = 4
"""Objects in flight."""


class Copied(NamedTuple):
    """What a copy did: bytes of all its objects, those that were there from an earlier one, and whether all of it was."""

    nbytes: int
    kept_bytes: int
    was_there: bool


class _Ends(NamedTuple):
    """Both ends of one copy."""

    source: Store
    target: Store
    prefix: str
    manifest: Manifest


def copy_checkpoint(
    source: Store, prefix: str, target: Store, advance: Callable[[int], None] = lambda _: None
) -> Copied:
    """Make the checkpoint `prefix` of one root exist on another one, with the same bytes and the same name.

    A lease keeps retention away meanwhile; `advance` is called with the bytes that are done, from several threads.

    Raises:
        DamagedError, ShardGapError: The source is damaged; nothing is visible on the target.
        ConfigError: Another run's generation, or another checkpoint, has that number on the target.
        FencedError: The checkpoint was deleted on the target.
        NoCheckpointError, RootError, StoreError: A root cannot be used; what was copied stays for the next try.
    """
    with leased(source, prefix):
        raw = read_manifest_bytes(source, prefix)
        manifest = whole_manifest(source, prefix, raw)
        refuse_gaps(manifest.table)
        ends = _Ends(source, target, prefix, manifest)
        if _is_committed(ends, raw):
            return Copied(0, 0, was_there=True)
        _claim(ends)
        sizes = [_size(source, f"{prefix}/{name}") for name in manifest.objects]
        spans = _by_object(ends)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="flashckpt-copy") as pool:
            work = pool.map(
                lambda number: _copy(ends, number, sizes[number], spans[number], advance), range(len(sizes))
            )
            kept = sum(work)
        with_values(target, prefix, manifest)  # those in ranges, verified where they are now
        if is_spread(raw):
            copy_indexes(source, target, prefix, decode_spread(raw))
        crash_point("copy.before-manifest")
        if not target.put_if_absent(f"{prefix}/{MANIFEST}", raw):
            _is_committed(ends, raw)
        crash_point("copy.after-manifest")
        if (newest := newest_checkpoint(target)) is not None and newest.prefix == prefix:
            target.put(LATEST, f"{prefix}\n".encode())
    return Copied(sum(sizes), kept, was_there=False)


def _is_committed(ends: _Ends, raw: bytes) -> bool:
    """Return whether the target has this very checkpoint; raise where it can never have it."""
    try:
        there = ends.target.get(f"{ends.prefix}/{MANIFEST}")
    except ObjectMissingError:
        return False
    if there == raw:
        return True
    if there.startswith(TOMBSTONE):
        raise FencedError(
            f"{ends.prefix} was deleted on {ends.target.url}, and its name is not used again",
            found=there.decode(errors="replace").strip(),
            remedy="copy to another root",
        )
    raise _other_run(ends, f"another checkpoint {ends.prefix}")


def _claim(ends: _Ends) -> None:
    """Let the target know the generations up to this one, and what they rolled back."""
    identity = parse_prefix(ends.prefix)
    for claim in read_generations(ends.source):
        if identity is not None and claim.number <= identity.generation and not claim_generation(ends.target, claim):
            raise _other_run(ends, f"generation {claim.number} of another run")


def _other_run(ends: _Ends, found: str) -> ConfigError:
    return ConfigError(
        f"{ends.target.url} belongs to another run",
        found=found,
        expected=f"an empty root, or one with checkpoints of {ends.source.url}",
        state="Nothing of it was changed.",
        remedy="copy to another root",
    )


def _size(store: Store, key: str) -> int:
    if (info := store.head(key)) is None:
        raise DamagedError(f"the object {key} of {store.url} is missing", state="Nothing was committed.")
    return info.nbytes


def _by_object(ends: _Ends) -> list[list[Sequence[Span]]]:
    """Return the requests that read each object's rows, by its number, in the order of their bytes."""
    found: list[list[Sequence[Span]]] = [[] for _ in ends.manifest.objects]
    for spans in requests_of(ends.manifest.table):
        found[int(ends.manifest.table.object_id[spans[0].row])].append(spans)
    return found


def _copy(
    ends: _Ends, number: int, nbytes: int, requests: Sequence[Sequence[Span]], advance: Callable[[int], None]
) -> int:
    """Copy one object; return its bytes where it was there already."""
    name = ends.manifest.objects[number]
    key = f"{ends.prefix}/{name}"
    there = StorageSource(ends.target, ends.manifest, ends.prefix)
    info = ends.target.head(key)
    if requests and info is not None and info.nbytes == nbytes and _is_whole(there, requests):
        advance(nbytes)
        return nbytes
    if not requests or name.endswith(COMPRESSED_SUFFIX):
        ends.target.put_object(key, _RawParts(ends.source, key, nbytes, advance), nbytes)
        _check(there, requests)
    else:
        held = StorageSource(ends.source, ends.manifest, ends.prefix)
        ends.target.put_object(key, _VerifiedParts(held, requests, nbytes, advance), nbytes)
    return 0


def _check(source: StorageSource, requests: Sequence[Sequence[Span]]) -> None:
    for spans in requests:
        source.verified(_columns(spans))


def _is_whole(source: StorageSource, requests: Sequence[Sequence[Span]]) -> bool:
    try:
        _check(source, requests)
    except DamagedError:
        return False
    return True


def _columns(spans: Sequence[Span]) -> Spans:
    return Spans([one.row for one in spans], [one.start for one in spans], [one.stop for one in spans])


class _RawParts:
    """The bytes of an object as they are; starts over on each `iter()`."""

    def __init__(self, store: Store, key: str, nbytes: int, advance: Callable[[int], None]) -> None:
        self._store, self._key, self._nbytes, self._advance = store, key, nbytes, advance

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, self._nbytes, PART_BYTES):
            part = memoryview(bytearray(min(PART_BYTES, self._nbytes - start)))
            self._store.get_range(self._key, start, part)
            yield part
            self._advance(len(part))


class _VerifiedParts:
    """The bytes of a pack, each chunk verified before it is handed out; what lies between rows is zero. Starts over as above."""

    def __init__(
        self, source: StorageSource, requests: Sequence[Sequence[Span]], nbytes: int, advance: Callable[[int], None]
    ) -> None:
        self._source, self._requests, self._nbytes, self._advance = source, requests, nbytes, advance

    def __iter__(self) -> Iterator[memoryview]:
        at = 0
        for spans in self._requests:
            found = self._source.verified(_columns(spans))
            first = self._place(spans[0])
            part = bytearray(first - at)
            low = int(found.offsets[0])
            stop = self._place(spans[-1]) + spans[-1].stop - spans[-1].start
            part += found.data[
                low : low + stop - first
            ].data  # a copy: the source reads the next ones into the same memory
            yield memoryview(part)
            self._advance(len(part))
            at = stop
            crash_point("copy.during-pack")
        yield memoryview(bytes(self._nbytes - at))

    def _place(self, span: Span) -> int:
        return int(self._source.manifest.table.byte_offset[span.row]) + span.start
