"""From a pinned slot to a committed checkpoint: packs, then this writer's index, then MANIFEST.

Write order per node: packs (durable one by one), index (`indexes`). The leader of the job commits when all
indexes are there: it verifies them, merges them, and creates MANIFEST, the one write that makes the
checkpoint exist. Every step may be repeated after a crash: packs and indexes are written again, a second
MANIFEST is refused by the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flashckpt.checkpoint.compression import (
    Codec,
    compressed_parts,
    measure,
    parse_compression,
    plan_frames,
    worth_compressing,
)
from flashckpt.checkpoint.indexes import check_packs, needed_bytes, put_indexes
from flashckpt.checkpoint.merging import encoded_manifest
from flashckpt.checkpoint.root_records import LATEST, MANIFEST, TOMBSTONE
from flashckpt.checkpoint.slot_parts import Buffers, PinnedSlot, SlotParts, parts_of, read
from flashckpt.core.manifest import Manifest, decode_manifest
from flashckpt.core.schema import HEAD_BYTES, decode_manifest_header
from flashckpt.errors import (
    DamagedError,
    FencedError,
    FlashckptError,
    ObjectMissingError,
    PersistError,
    RootError,
    StoreError,
)
from flashckpt.faults import crash_point
from flashckpt.planning.packs import (
    COMPRESSED_SUFFIX,
    PACK_BYTES,
    PACK_SUFFIX,
    PAGE_BYTES,
    Pack,
    index_manifest,
    index_name,
    pack_name,
    plan_packs,
)
from flashckpt.storage.store import Store

_upload_bytes_s: dict[str, float] = {}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistOptions:
    """How packs are written.

    Attributes:
        pack_bytes: Size at which a pack is closed, bytes.
        compression: "off", "zstd", "zstd:LEVEL" or "auto" (decided from measured bandwidth).
    """

    pack_bytes: int = PACK_BYTES
    compression: str = "off"
    threads: int = 2


def persist_slot(pin: PinnedSlot, store: Store, prefix: str, *, options: PersistOptions | None = None) -> Manifest:
    """Write the packs of one pinned slot, then its index; return the index, which is kept where it is there already.

    Args and errors as `write_packs`.
    """
    if (there := _existing_index(store, prefix, pin.manifest())) is not None:
        return there
    index = write_packs(pin, store, prefix, options=options)
    put_indexes(store, prefix, [index])
    return index


def write_packs(
    pin: PinnedSlot,
    store: Store,
    prefix: str,
    *,
    options: PersistOptions | None = None,
    done: dict[int, str] | None = None,
    keep_only: Callable[[int, int], None] = lambda _start, _stop: None,
) -> Manifest:
    """Write the rows of one pinned slot that this rank writes (replica 0); return its index, for `put_indexes`.

    The last pack is written first: the small rows at a slot's end are those that the next snapshot writes at once.

    Args:
        pin: The leased slot.
        store: The root.
        prefix: Folder of the checkpoint, `step-000000120.g3`.
        options: Sizes and compression.
        done: Names of the packs that an earlier attempt made durable, by number; those of this one are added.
        keep_only: Called after each pack with the bytes of the slot that are still needed, [start, stop): the others are durable.

    Raises:
        DamagedError: A byte of the slot does not match its digest; no index is written.
        PersistError: The slot was abandoned meanwhile.
        StoreError, RootError: The storage failed; may be called again.
    """
    options = options or PersistOptions()
    manifest = pin.manifest()
    packs = plan_packs(manifest.table, pin.nbytes, options.pack_bytes)
    writer = _PackWriter(store, prefix, manifest, pin, options)
    names = {} if done is None else done

    def durable(number: int, name: str) -> None:
        pin.check_whole()
        names[number] = name
        left = [pack.runs for other, pack in enumerate(packs) if other not in names]
        keep_only(min((runs[0][0] for runs in left), default=0), max((runs[-1][1] for runs in left), default=0))
        crash_point("persist.after-pack")

    try:
        _write_each(
            writer, [(number % len(packs), packs[number]) for number in range(-1, len(packs) - 1)], names, durable
        )
    except (RootError, StoreError):
        pin.check_whole()  # where memory went away under a write, the storage only knows of a bad address
        raise
    _refuse_abandoned(pin, manifest)
    return index_manifest(manifest, packs, [names[number] for number in range(len(packs))])


def write_together(pins: Sequence[PinnedSlot], store: Store, prefix: str) -> list[Manifest]:
    """Write the rows of several slots into one object, uncompressed; return their indexes, for `put_indexes`.

    For ranks that follow each other and have little: all of them are one request, or one file to sync. Readers go by name
    and place in an index, whose ranks they are they do not ask. All of it becomes durable at once, or nothing.

    Args:
        pins: The leased slots, by rank.
        store: The root.
        prefix: Folder of the checkpoint.

    Errors as `write_packs`.
    """
    manifests = [pin.manifest() for pin in pins]
    name, buffers = pack_name(manifests[0].rank, 0, last=manifests[-1].rank), Buffers()
    parts: list[SlotParts] = []
    indexes, end = [], 0
    for pin, manifest in zip(pins, manifests, strict=True):
        packs = plan_packs(manifest.table, pin.nbytes, pin.nbytes)
        parts += [SlotParts(pin, manifest, pack, parts_of(pack, pin), buffers) for pack in packs]
        moved = [replace(pack, offsets=tuple(at + end for at in pack.offsets)) for pack in packs]
        indexes.append(index_manifest(manifest, moved, [name] * len(packs)))
        end += sum(_whole_pages(pack.nbytes) for pack in packs)
    if parts:
        try:
            store.put_object(f"{prefix}/{name}", _OneBehindAnother(parts), end)
        finally:
            for pin in pins:
                pin.check_whole()
    for pin, manifest in zip(pins, manifests, strict=True):
        _refuse_abandoned(pin, manifest)
    return indexes


def _refuse_abandoned(pin: PinnedSlot, manifest: Manifest) -> None:
    if not pin.is_current():
        raise PersistError(
            f"the snapshot of step {manifest.step} was abandoned while rank {manifest.rank} was being persisted",
            state="No index was written; its packs are swept later.",
        )


def commit(
    store: Store,
    prefix: str,
    writers: Sequence[int],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
    token: str = "",
) -> bool:
    """Make the checkpoint exist: verify every writer's index and packs, merge, create MANIFEST.

    May be called by several processes, and again after a crash: exactly one creates MANIFEST.

    Args:
        store: The root.
        prefix: Folder of the checkpoint.
        writers: Ranks whose indexes make it up.
        is_wanted: Asked before MANIFEST is created: that of many ranks takes long, and another may have taken it over.
        token: The token in the claim of its generation; "" where there is none.

    Returns:
        True where this call created MANIFEST; False where an equal checkpoint was already committed.

    Raises:
        PersistError: A writer has not written its index, or the index belongs to another snapshot or run; or it is not wanted.
        DamagedError: An index or pack is damaged, missing or truncated.
        ShardGapError: The writers together do not cover a tensor.
        FencedError: The checkpoint was given up and swept.
    """
    if _committed(store, prefix):
        return False
    crash_point("persist.before-manifest")
    encoded = encoded_manifest(store, prefix, writers, token)
    if not is_wanted():
        raise PersistError(f"the checkpoint {prefix} is not committed here any more", state="MANIFEST was not written.")
    if not store.put_if_absent(f"{prefix}/{MANIFEST}", encoded):
        if _committed(store, prefix):
            return False
        raise PersistError(
            f"the checkpoint {prefix} could not be committed",
            found="its MANIFEST existed when it was to be created, and was gone when it was read",
            state="Packs and indexes are durable.",
            remedy="it is retried; if this persists, look for another program that deletes in the root",
        )
    crash_point("persist.after-manifest")
    try:
        store.put(LATEST, f"{prefix}\n".encode())
    except FlashckptError:
        _log.debug("LATEST was not written; it is a hint only", exc_info=True)
    return True


def _write_each(
    writer: _PackWriter,
    packs: Sequence[tuple[int, Pack]],
    done: Collection[int],
    durable: Callable[[int, str], None],
) -> None:
    """Write packs, the next one begun when all bytes of one are read: its fsync, or the end of its upload, costs no time."""
    todo = [(number, pack) for number, pack in packs if number not in done]
    if len(todo) == 1:
        number, pack = todo[0]
        durable(number, writer.write(number, pack, threading.Event()))
        return
    with ThreadPoolExecutor(2, thread_name_prefix="flashckpt-pack") as pool:
        under_way: deque[tuple[int, Future[str]]] = deque()
        for number, pack in todo:
            while len(under_way) == 2 or (under_way and under_way[0][1].done()):
                first, future = under_way.popleft()
                durable(first, future.result())
            is_read = threading.Event()
            future = pool.submit(writer.write, number, pack, is_read)
            future.add_done_callback(partial(_release, is_read))
            under_way.append((number, future))
            is_read.wait()
        for number, future in under_way:
            durable(number, future.result())


def _release(event: threading.Event, _: Future[str]) -> None:
    event.set()


@dataclass(frozen=True, slots=True)
class _ThenSet:
    """Parts, and an event that is set behind the last one."""

    parts: Iterable[memoryview]
    event: threading.Event

    def __iter__(self) -> Iterator[memoryview]:
        yield from self.parts
        self.event.set()


@dataclass(frozen=True, slots=True)
class _OneBehindAnother:
    """The packs of several slots, each from a page on."""

    packs: Sequence[SlotParts]

    def __iter__(self) -> Iterator[memoryview]:
        for parts in self.packs:
            yield from parts
            if gap := _whole_pages(parts.pack.nbytes) - parts.pack.nbytes:
                yield memoryview(bytes(gap))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class _PackWriter:
    """Writes the packs of one slot, and remembers how fast the store takes them (for compression="auto")."""

    def __init__(
        self, store: Store, prefix: str, manifest: Manifest, slot: PinnedSlot, options: PersistOptions
    ) -> None:
        self._store, self._prefix, self._manifest, self._slot = store, prefix, manifest, slot
        self._buffers = Buffers()
        self._options = options
        self._codec = parse_compression(options.compression)

    def write(self, number: int, pack: Pack, is_read: threading.Event) -> str:
        """Write one pack; return its object name. Sets `is_read` when nothing more of the slot is to be read."""
        codec = self._choose(pack) if self._options.compression == "auto" else self._codec
        name = pack_name(self._manifest.rank, number, COMPRESSED_SUFFIX if codec else PACK_SUFFIX)
        key = f"{self._prefix}/{name}"
        if codec is None:
            stream = SlotParts(self._slot, self._manifest, pack, parts_of(pack, self._slot), self._buffers)
            begin = time.monotonic()
            self._store.put_object(key, _ThenSet(stream, is_read), pack.nbytes)
            _upload_bytes_s[self._store.url] = pack.nbytes / max(time.monotonic() - begin, 1e-6)
        else:
            frames = plan_frames(self._manifest.table, pack)
            ranges = tuple((frame.start, frame.stop) for frame in frames)
            stream = SlotParts(self._slot, self._manifest, pack, ranges, self._buffers)
            parts = compressed_parts(stream, frames, codec, threads=self._options.threads)
            self._store.put_object(key, _ThenSet(parts, is_read))
        return name

    def _choose(self, pack: Pack) -> Codec | None:
        """Decide by the rate of the last uncompressed pack, and a sample of this one."""
        rate = _upload_bytes_s.get(self._store.url)
        if rate is None or not pack.nbytes:
            return None  # the first pack is the measurement
        codec, frames = Codec(), plan_frames(self._manifest.table, pack)
        frame = max(frames, key=lambda f: f.stop - f.start)
        sample = read(self._slot, self._buffers, frame.start, frame.stop)
        encode, ratio = measure(codec, sample, frame.itemsize)
        threads = self._options.threads
        fast = worth_compressing(upload_bytes_s=rate, encode_bytes_s=encode, ratio=ratio, threads=threads)
        return codec if fast else None


def _existing_index(store: Store, prefix: str, manifest: Manifest) -> Manifest | None:
    """Return this writer's index where an earlier attempt finished it with the same content."""
    key = f"{prefix}/{index_name(manifest.rank)}"
    if store.head(key) is None:
        return None
    try:
        there = decode_manifest(store.get(key))
        check_packs(store, prefix, needed_bytes(there), {})
    except (DamagedError, ObjectMissingError):
        return None
    same = there.identity == manifest.identity and there.job == manifest.job
    wanted = index_manifest(manifest, plan_packs(manifest.table, 1 << 62), [])
    return there if same and np.array_equal(there.digests, wanted.digests) else None


def read_start(store: Store, key: str, nbytes: int) -> bytes:
    """Return the first HEAD_BYTES of a MANIFEST of `nbytes` bytes; ObjectMissingError where it has gone."""
    start = bytearray(min(nbytes, HEAD_BYTES))
    store.get_range(key, 0, memoryview(start))
    return bytes(start)


def _committed(store: Store, prefix: str) -> bool:
    """Return whether a MANIFEST with a valid summary is there; FencedError where the checkpoint was given up.

    Every node asks this of every commit, so that only 4 KiB are read; a MANIFEST of format 1.0 is read whole.
    """
    key = f"{prefix}/{MANIFEST}"
    if (there := store.head(key)) is None:
        return False
    try:
        start = read_start(store, key, there.nbytes)
        if start.startswith(TOMBSTONE):
            raise FencedError(
                f"the checkpoint {prefix} was abandoned and can no longer be committed",
                found=start.decode(errors="replace").strip(),
                state="Its data is deleted by the sweep; other checkpoints are as they were.",
            )
        if decode_manifest_header(start, there.nbytes) is None:
            decode_manifest(store.get(key))
    except ObjectMissingError:
        return False
    return True
