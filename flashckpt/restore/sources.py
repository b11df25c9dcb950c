"""Where restores read byte ranges from: a pinned slot in memory, or packs on storage. Torch-free.

Every source verifies the digest of each 1 MiB chunk that it touches, so a byte that reaches live
state has been proved equal to what was hashed behind the staging copy. Threads may share a source.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flashckpt.checkpoint.compression import PackedObjects
from flashckpt.core.manifest import Manifest
from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.shard_table import ShardTable, chunk_counts, ranges
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError
from flashckpt.native import copy_and_digest, digest_ranges
from flashckpt.native.descriptors import Digests
from flashckpt.restore.destinations import Bytes
from flashckpt.shm import segment_file
from flashckpt.shm.segment import Pin, Segment
from flashckpt.shm.segment_file import address_of
from flashckpt.storage.store import Store

Ints = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Ranges of whole chunks, one entry per range: `starts` are multiples of CHUNK_BYTES, `stops` too or the row's end."""

    rows: Sequence[int] | Ints
    starts: Sequence[int] | Ints
    stops: Sequence[int] | Ints


class Located(NamedTuple):
    """Bytes, and where ranges lie in them.

    Attributes:
        data: np.uint8, holds them all.
        offsets: Where each range starts in it.
    """

    data: Bytes
    offsets: Sequence[int] | Ints


class Meter:
    """What a source did so far: bytes read (rounded out to chunks) and thread-seconds of reading and verifying."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.requests = 0
        self.read_s = 0.0
        self.verify_s = 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: int, read_s: float, verify_s: float, requests: int = 1) -> None:
        """Count one read; safe from any thread."""
        with self._lock:
            self.read_bytes += nbytes
            self.requests += requests
            self.read_s += read_s
            self.verify_s += verify_s


class Source(Protocol):
    """Something that holds the bytes of a manifest.

    Attributes:
        tier: "memory", "peer" or "storage": what the report counts under.
        name: What an error calls it.
        manifest: What it holds; `table.byte_offset` counts from the start of its data.
        in_place: Whether `located` costs no copy (a slot mapped into this process).
        page_bytes: `read` copies on the way into memory that does not begin at a multiple of it.
        meter: Counters.
    """

    tier: str
    name: str
    manifest: Manifest
    in_place: bool
    page_bytes: int
    meter: Meter

    def read(self, row: int, start: int, out: memoryview) -> None:
        """Fill `out` with verified bytes of row `row` from byte `start` on.

        Raises:
            DamagedError: Bytes do not match their digest, or the source changed under the read.
            StoreError: The storage failed.
        """
        ...

    def located(self, spans: Spans) -> Located:
        """Return the bytes of ranges that follow each other closely in one object, not yet compared with their digests.

        They are only read, and hold until this thread's next call. Raises as `read`.
        """
        ...

    def verified(self, spans: Spans) -> Located:
        """Return the same once they match their digests."""
        ...

    def check(self) -> None:
        """Raise DamagedError where what was read may have been another snapshot's."""
        ...

    def close(self) -> None:
        """Give up the lease or connection. No view may be used after it."""
        ...


class MemorySource:
    """One slot of a segment on this node, pinned while this object exists.

    Args:
        segment: An attached segment; it may be closed afterwards.
        identity: (generation, step) that the slot must hold; any if None.
        owner: The same segment where this process owns it: its mapping is read, which later snapshots need anyway. It stays
            open for as long as this object is.

    Raises:
        DamagedError: The slot is not COMPLETE (any more), or its manifest is broken.
    """

    tier = "memory"
    in_place = True
    page_bytes = 1

    def __init__(
        self, segment: Segment, slot: int, *, identity: SnapshotId | None = None, owner: Segment | None = None
    ) -> None:
        self._pin: Pin | None = segment.pin(slot)
        self._slot, self._owner = slot, owner
        self.meter = Meter()
        self.name = f"rank {segment.spec.rank} (memory)"
        if self._pin is None:
            raise self._gone("it holds no complete snapshot any more")
        try:
            self.manifest = self._pin.manifest()
        except BaseException:
            self.close()
            raise
        self._mapped: Bytes | None = None
        self._lock = threading.Lock()
        if identity is not None and self.manifest.identity != identity:
            self.close()
            raise self._gone(f"it holds step {self.manifest.step} of generation {self.manifest.generation}")

    def read(self, row: int, start: int, out: memoryview) -> None:
        """See Source: one call copies, and digests the slot's bytes right behind the copy (counted as reading)."""
        table = self.manifest.table
        end, stop = int(table.nbytes[row]), start + len(out)
        begin = start // CHUNK_BYTES * CHUNK_BYTES
        held = self._held(row, begin, begin + _rounded(start, stop, end))
        t0 = time.perf_counter()
        into = np.frombuffer(out, np.uint8)
        rows, first_chunks = _rows_of_read(address_of(held) - begin, address_of(into) - start, (start, stop, end))
        # `held` lies within a file that was long enough when it was mapped, `out` is memory of this restore
        found = copy_and_digest(rows, first_chunks=first_chunks, check=False)
        first = int(table.first_chunk[row]) + begin // CHUNK_BYTES
        expected = self.manifest.digests[first : first + len(found)]
        if len(wrong := np.flatnonzero(found != expected)):
            bad = int(wrong[0])
            raise damaged_chunk(self, row, begin // CHUNK_BYTES + bad, int(found[bad]), int(expected[bad]))
        self.check()
        self.meter.add(len(held), time.perf_counter() - t0, 0.0)

    def located(self, spans: Spans) -> Located:
        """See Source: the slot's own bytes, where they lie."""
        t0 = time.perf_counter()
        mapped = self._map()
        places, low, high = _extent(self.manifest, spans)
        segment_file.map_held(address_of(mapped) + low, high - low)
        nbytes = int((np.asarray(spans.stops, np.int64) - np.asarray(spans.starts, np.int64)).sum())
        self.meter.add(nbytes, time.perf_counter() - t0, 0.0)
        return Located(mapped, places)

    def verified(self, spans: Spans) -> Located:
        """See Source."""
        return _verified(self, spans)

    def check(self) -> None:
        """See Source: the header is read again (a pin holds writers off, but is never the proof)."""
        if self._pin is None or not self._pin.is_current():
            raise self._gone("it was overwritten while it was read")

    def close(self) -> None:
        """Release the pin."""
        if self._pin is not None:
            self._mapped = None
            self._pin.close()
            self._pin = None

    def _map(self) -> Bytes:
        """Return the slot's data; only pages that are read are ever mapped."""
        with self._lock:
            if self._mapped is None:
                if self._pin is None:
                    raise self._gone("the pin was given up")
                whole = None if self._owner is None else self._owner.buffer
                self._mapped = np.frombuffer(self._pin.map(populate=False, within=whole), np.uint8)
            return self._mapped

    def _held(self, row: int, start: int, stop: int) -> Bytes:
        """Return bytes [start, stop) of a row where they lie in the slot."""
        base = int(self.manifest.table.byte_offset[row])
        held = self._map()[base + start : base + stop]
        segment_file.map_held(address_of(held), len(held))
        return held

    def _gone(self, what: str) -> DamagedError:
        return DamagedError(
            f"a snapshot in memory is no longer there: {self.name}, slot {self._slot}",
            found=what,
            state="Nothing that was read from it afterwards is used.",
        )


class SentOn:
    """Ranges of objects that another rank has read, or this one for others; each is taken once, in place of a read."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], tuple[int, memoryview]] = {}

    def add(self, name: str, start: int, block: memoryview) -> None:
        """Have the bytes of an object from `start` on."""
        self._blocks[name, start + len(block)] = start, block

    def take(self, name: str, start: int, out: memoryview) -> bool:
        """Fill `out` with the bytes from `start` on, where they are there; safe from any thread."""
        first, block = self._blocks.get((name, start + len(out)), (0, None))
        if block is None or start < first or self._blocks.pop((name, start + len(out)), None) is None:
            return False
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(block, np.uint8)[start - first :])
        return True

    def clear(self) -> None:
        """Give all up."""
        self._blocks.clear()


class StorageSource:
    """A committed checkpoint, or one writer's packs of it, on storage.

    Args:
        manifest: A MANIFEST, or the index of one writer; its `objects` are keys below `prefix`.
        prefix: Folder of the checkpoint, e.g. "step-000000120.g3".
    """

    tier = "storage"
    in_place = False

    def __init__(self, store: Store, manifest: Manifest, prefix: str) -> None:
        self._packs, self._prefix = PackedObjects(store), prefix
        self.page_bytes = getattr(store, "page_bytes", 1)
        self.manifest = manifest
        self.meter = Meter()
        self.name = f"{prefix} (ranks {_ranks(manifest.writers)})"
        self.sent = SentOn()
        self._scratch = threading.local()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each once for every writer that wrote it."""
        return int(self.manifest.table.nbytes.sum())

    def bring(self, wanted: ShardTable | None) -> None:
        """Know the rows that meet these boxes (None: all rows) before a plan is made: here all are known."""

    def bring_both(self, aliases: Mapping[str, str]) -> None:
        """Know all rows where two names of one live tensor are two tensors here: then their digests are compared."""

    def read(self, row: int, start: int, out: memoryview) -> None:
        """See Source: whole chunks are read straight into `out`, parts through a scratch buffer."""
        end = int(self.manifest.table.nbytes[row])
        stop = start + len(out)
        first, last = start // CHUNK_BYTES * CHUNK_BYTES, min(-(-stop // CHUNK_BYTES) * CHUNK_BYTES, end)
        if (first, last) == (start, stop):
            self._fetch(row, start, out)
            t0 = time.perf_counter()
            verify_spans(self, Spans([row], [start], [stop]), Located(np.frombuffer(out, np.uint8), [0]))
            self.meter.add(0, 0.0, time.perf_counter() - t0, requests=0)
            return
        data, (at,) = self.verified(Spans([row], [first], [last]))
        np.copyto(np.frombuffer(out, np.uint8), data[at + start - first : at + stop - first])

    def located(self, spans: Spans) -> Located:
        """See Source: one request for all ranges."""
        places, base, end = _extent(self.manifest, spans)
        base -= base % self.page_bytes
        scratch, row = self._buffer(end - base), int(spans.rows[0])
        self._fetch(row, base - int(self.manifest.table.byte_offset[row]), scratch)
        return Located(np.frombuffer(scratch, np.uint8), places - base)

    def verified(self, spans: Spans) -> Located:
        """See Source."""
        return _verified(self, spans)

    def check(self) -> None:
        """See Source: objects are written once and never changed."""

    def close(self) -> None:
        """See Source: the store belongs to the caller."""

    def read_range(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of an object from `start` on, which nothing is compared with yet; raises as `read`."""
        t0 = time.perf_counter()
        self._packs.get_range(f"{self._prefix}/{name}", start, out)
        self.meter.add(len(out), time.perf_counter() - t0, 0.0)

    def _fetch(self, row: int, start: int, out: memoryview) -> None:
        table = self.manifest.table
        name, place = self.manifest.objects[int(table.object_id[row])], int(table.byte_offset[row]) + start
        if not self.sent.take(name, place, out):
            self.read_range(name, place, out)

    def _buffer(self, nbytes: int) -> memoryview:
        """Return this thread's scratch, grown to `nbytes` (bounded by the size of a job in planning/pieces.py)."""
        if len(getattr(self._scratch, "data", b"")) < nbytes:
            self._scratch.data = mmap.mmap(-1, nbytes)  # page-aligned, so that the disk can fill it without a copy
        return memoryview(self._scratch.data)[:nbytes]


def _extent(manifest: Manifest, spans: Spans) -> tuple[Ints, int, int]:
    """Return where ranges begin in their object, and from where to where all of them reach."""
    places = manifest.table.byte_offset[np.asarray(spans.rows, np.int64)] + np.asarray(spans.starts, np.int64)
    ends = places + np.asarray(spans.stops, np.int64) - np.asarray(spans.starts, np.int64)
    return places, int(places.min()), int(ends.max())


def _verified(source: Source, spans: Spans) -> Located:
    found = source.located(spans)
    t0 = time.perf_counter()
    verify_spans(source, spans, found)
    source.meter.add(0, 0.0, time.perf_counter() - t0, requests=0)
    return found


def copy_verified(source: Source, spans: Spans, found: Located, targets: Ints) -> None:
    """Copy each range to an address and compare with the digests what was copied: the bytes are read once.

    Raises:
        DamagedError: A chunk does not match; the targets hold it.
        DescriptorError: Two targets lie over each other; nothing was copied.
        ValueError: A range is not in the bytes.
    """
    t0 = time.perf_counter()
    offsets, sizes = np.asarray(found.offsets, np.int64), np.asarray(spans.stops) - np.asarray(spans.starts)
    if offsets.min() < 0 or (offsets + sizes).max() > found.data.nbytes:
        raise ValueError(f"ranges to byte {(offsets + sizes).max()} of {found.data.nbytes} bytes")
    rows = np.column_stack((address_of(found.data) + offsets, targets, sizes))
    # the source is a slot that is mapped to its end, or memory of this restore, and so are the targets
    _compare(source, spans, copy_and_digest(rows, check=False))
    source.meter.add(0, 0.0, time.perf_counter() - t0, requests=0)


def verify_spans(source: Source, spans: Spans, found: Located) -> None:
    """Compare bytes with the digests of their manifest; DamagedError names the first bad chunk."""
    sizes = np.asarray(spans.stops, np.int64) - np.asarray(spans.starts, np.int64)
    _compare(source, spans, digest_ranges(found.data, found.offsets, sizes))


def _compare(source: Source, spans: Spans, actual: Digests) -> None:
    manifest = source.manifest
    rows, starts, stops = (np.asarray(column, np.int64) for column in spans)
    first, counts = manifest.table.first_chunk[rows] + starts // CHUNK_BYTES, chunk_counts(stops - starts)
    expected = manifest.digests[first if (counts == 1).all() else ranges(first, counts)]
    if len(wrong := np.flatnonzero(actual != expected)):
        at, ends = int(wrong[0]), np.cumsum(counts)
        span = int(np.searchsorted(ends, at, side="right"))
        chunk = int(starts[span]) // CHUNK_BYTES + at - int(ends[span] - counts[span])
        raise damaged_chunk(source, int(rows[span]), chunk, int(actual[at]), int(expected[at]))


def damaged_chunk(source: Source, row: int, chunk: int, found: int, expected: int) -> DamagedError:
    """Return the error that names tensor, byte range, place and both digests."""
    table = source.manifest.table
    start = chunk * CHUNK_BYTES
    stop = min(start + CHUNK_BYTES, int(table.nbytes[row]))
    objects = source.manifest.objects
    place = f", object {objects[int(table.object_id[row])]}" if objects else ""
    return DamagedError(
        f"{table.fqn(row)!r} is damaged in {source.name}{place}",
        found=f"digest {found:016x} of its bytes {start} to {stop}",
        expected=f"digest {expected:016x} (xxh3_64, step {source.manifest.step})",
        state="These bytes were not used.",
        remedy="flashckpt verify ROOT lists everything that is damaged",
    )


def _rows_of_read(source: int, target: int, at: tuple[int, int, int]) -> tuple[Ints, Ints]:
    """Return the rows of a native copy, and the index of each one's first digest, for one range of a row of a table.

    Whole chunks are one row. Of a chunk that is needed in part the whole has a digest: it is digested, and the part copied.

    Args:
        source: Address that byte 0 of the row of the table has, or would have.
        target: The same where it goes.
        at: The range's start and stop, and the end of the row.
    """
    start, stop, end = at
    first_byte = start // CHUNK_BYTES * CHUNK_BYTES
    whole_until = stop if stop == end else stop // CHUNK_BYTES * CHUNK_BYTES
    rows: list[tuple[int, int, int]] = []
    first: list[int] = []
    while start < stop:
        chunk = start // CHUNK_BYTES * CHUNK_BYTES
        number = (chunk - first_byte) // CHUNK_BYTES
        if start == chunk and start < whole_until:
            high = whole_until
        else:
            rows.append((source + chunk, 0, min(CHUNK_BYTES, end - chunk)))
            first.append(number)
            high, number = min(chunk + CHUNK_BYTES, stop), -1
        rows.append((source + start, target + start, high - start))
        first.append(number)
        start = high
    return np.array(rows, np.int64).reshape(-1, 3), np.array(first, np.int64)


def _rounded(start: int, stop: int, end: int) -> int:
    """Bytes of the whole chunks that [start, stop) touches."""
    return min(-(-stop // CHUNK_BYTES) * CHUNK_BYTES, end) - start // CHUNK_BYTES * CHUNK_BYTES


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as ranges: "0-3, 6"."""
    runs = itertools.groupby(enumerate(sorted(ranks)), key=lambda at: at[1] - at[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(one) for _, one in runs)]
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in ends)
