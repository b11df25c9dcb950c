"""Packs that are compressed frame by frame, so that any range of them can still be read.

A `.fcz` object holds the bytes of a `.fck` pack in frames of at most 1 MiB that start where digest
chunks start: byte-shuffled for items wider than a byte, zstd, or as they are where that is not
smaller. A directory and a footer follow the frames. Offsets in manifests count *uncompressed* bytes,
so nothing above this module knows whether a pack is compressed. Byte tables are in docs/format.md.
"""

from __future__ import annotations

import struct
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import zstandard

from flashckpt.core.records import CHUNK_BYTES, digest
from flashckpt.core.settings import compression_level
from flashckpt.core.shard import ITEMSIZE, SMALL_BYTES
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import DamagedError, FormatVersionError
from flashckpt.planning.packs import COMPRESSED_SUFFIX, Pack
from flashckpt.storage.store import Store

FRAME_BYTES = CHUNK_BYTES
DEFAULT_LEVEL = 1
"""zstd level: 3 is never smaller than 1 on shuffled training state and half as fast."""

_MAGIC = b"FCKFRAME"
_VERSION = 1
_FOOTER = struct.Struct("<8sIIQQQ")  # magic, version, frames, directory bytes, uncompressed bytes, directory digest
_RAW = 0
_ZSTD_HEADER_BYTES = 18

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Codec:
    """Shuffle and zstd at one level."""

    level: int = DEFAULT_LEVEL

    def encode(self, view: memoryview, itemsize: int) -> tuple[bytes, int]:
        """Return (stored bytes, flag): flag 0 means stored as they are, else the item size of the shuffle."""
        packed = _compressor(self.level).compress(shuffle(view, itemsize))
        return (packed, itemsize) if len(packed) < len(view) else (bytes(view), _RAW)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame before it is compressed: a range of the slot's data area and the size of its items."""

    start: int
    stop: int
    itemsize: int


def parse_compression(name: str) -> Codec | None:
    """Return the codec of a setting; None for "off" and "auto" (which chooses per pack, see `worth_compressing`).

    Raises:
        ConfigError: not "off", "auto", "zstd" or "zstd:LEVEL" with a level from 1 to 19.
    """
    level = compression_level(name)
    return None if level is None else Codec(level or DEFAULT_LEVEL)


def worth_compressing(*, upload_bytes_s: float, encode_bytes_s: float, ratio: float, threads: int) -> bool:
    """Return whether compressing makes a persist at least 5 % faster.

    Compressed, the pipeline moves min(threads x encode rate, upload rate / ratio) uncompressed bytes
    per second; as they are, it moves the upload rate.
    """
    return min(threads * encode_bytes_s, upload_bytes_s / max(ratio, 1e-3)) > 1.05 * upload_bytes_s


def measure(codec: Codec, view: memoryview, itemsize: int) -> tuple[float, float]:
    """Return (bytes per second of one thread, compressed / original) for a sample."""
    begin = time.thread_time()
    stored = sum(len(codec.encode(view[at : at + FRAME_BYTES], itemsize)[0]) for at in range(0, len(view), FRAME_BYTES))
    return len(view) / max(time.thread_time() - begin, 1e-6), stored / max(len(view), 1)


def shuffle(view: memoryview, itemsize: int) -> bytes | memoryview:
    """Return the bytes with all first bytes of the items first, then all second ones, ...; a rest stays at the end."""
    if itemsize < 2:
        return view
    data = np.frombuffer(view, np.uint8)
    whole = len(data) - len(data) % itemsize
    return data[:whole].reshape(-1, itemsize).T.tobytes() + data[whole:].tobytes()


def unshuffle(data: bytes, itemsize: int) -> np.ndarray:
    """Return what `shuffle` was given."""
    flat = np.frombuffer(data, np.uint8)
    if itemsize < 2:
        return flat
    whole = len(flat) - len(flat) % itemsize
    out = np.empty(len(flat), np.uint8)
    out[:whole].reshape(-1, itemsize)[:] = flat[:whole].reshape(itemsize, -1).T
    out[whole:] = flat[whole:]
    return out


def plan_frames(table: ShardTable, pack: Pack) -> list[Frame]:
    """Return the frames of a pack: large rows are cut at their own chunks, what lies between in one item size."""
    sizes = [ITEMSIZE[name] for name in table.dtypes]
    large = {
        int(table.byte_offset[row]): (int(table.nbytes[row]), sizes[int(table.dtype_id[row])])
        for row in pack.rows
        if int(table.nbytes[row]) > SMALL_BYTES
    }
    frames = []
    places = sorted(large)
    for start, stop in pack.runs:
        at = start
        for place in [*places[bisect_left(places, start) : bisect_left(places, stop)], stop]:
            frames += _cut(at, place, 1)
            if place < stop:
                nbytes, itemsize = large[place]
                frames += _cut(place, place + nbytes, itemsize)
                at = place + nbytes
    return frames


def compressed_parts(
    stream: Iterable[memoryview], frames: Sequence[Frame], codec: Codec, *, threads: int
) -> FrameStream:
    """Return the bytes of the compressed object; `stream` must yield exactly the frames and start over each time."""
    return FrameStream(stream, frames, codec, threads)


@dataclass(frozen=True, slots=True)
class FrameStream:
    """Compresses frames in threads, in order, with at most 2 frames per thread in memory."""

    stream: Iterable[memoryview]
    frames: Sequence[Frame]
    codec: Codec
    threads: int

    def __iter__(self) -> Iterator[memoryview]:
        sizes: list[int] = []
        flags: list[int] = []
        waiting: deque[Future[tuple[bytes, int]]] = deque()

        def take() -> memoryview:
            data, flag = waiting.popleft().result()
            sizes.append(len(data))
            flags.append(flag)
            return memoryview(data)

        with ThreadPoolExecutor(max_workers=self.threads, thread_name_prefix="flashckpt-compress") as pool:
            for frame, view in zip(self.frames, self.stream, strict=True):
                waiting.append(pool.submit(self.codec.encode, view, frame.itemsize))
                if len(waiting) > 2 * self.threads:
                    yield take()
            while waiting:
                yield take()
        lengths = [frame.stop - frame.start for frame in self.frames]
        directory = _directory(lengths, sizes, flags)
        footer = _FOOTER.pack(_MAGIC, _VERSION, len(sizes), len(directory), sum(lengths), digest(directory))
        yield memoryview(directory + footer)


class PackedObjects:
    """Ranged reads of packs by places in uncompressed bytes, whatever the packs are compressed with.

    Directories of compressed packs are read once and kept. Threads may share one of these.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._directories: dict[str, _Directory] = {}
        self._lock = threading.Lock()

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` of the uncompressed pack.

        Raises:
            DamagedError: the object is truncated, or a frame cannot be read.
        """
        if not key.endswith(COMPRESSED_SUFFIX):
            self._store.get_range(key, start, out)
            return
        directory = self._directory(key)
        stop = start + len(out)
        if stop > directory.nbytes:
            raise _damaged(self._store, key, f"{directory.nbytes} uncompressed bytes", f"at least {stop}")
        if start == stop:
            return
        first = int(np.searchsorted(directory.place, start, side="right")) - 1
        last = int(np.searchsorted(directory.place, stop, side="left"))
        low, high = int(directory.stored[first]), int(directory.stored[last])
        block = memoryview(bytearray(high - low))
        self._store.get_range(key, low, block)
        target = np.frombuffer(out, np.uint8)
        for number in range(first, last):
            begin, end = int(directory.place[number]), int(directory.place[number + 1])
            stored = block[int(directory.stored[number]) - low : int(directory.stored[number + 1]) - low]
            data = self._decode(key, stored, end - begin, int(directory.flags[number]))
            a, b = max(start, begin), min(stop, end)
            np.copyto(target[a - start : b - start], data[a - begin : b - begin])

    def _decode(self, key: str, stored: memoryview, nbytes: int, flag: int) -> np.ndarray:
        if flag == _RAW:
            return np.frombuffer(stored, np.uint8)
        try:
            says = zstandard.frame_content_size(bytes(stored[:_ZSTD_HEADER_BYTES]))
            if says not in (-1, nbytes):  # zstd would allocate that much, whatever it is
                raise _damaged(self._store, key, f"a frame that says {says} bytes", f"{nbytes} bytes")
            data = _decompressor().decompress(stored, max_output_size=nbytes)
        except zstandard.ZstdError as error:
            raise _damaged(self._store, key, f"a frame that zstd cannot read ({error})", "a whole frame") from error
        if len(data) != nbytes:
            raise _damaged(self._store, key, f"a frame of {len(data)} bytes", f"{nbytes} bytes")
        return unshuffle(data, flag)

    def _directory(self, key: str) -> _Directory:
        with self._lock:
            if (known := self._directories.get(key)) is not None:
                return known
        info = self._store.head(key)
        size = info.nbytes if info else 0
        footer = bytearray(_FOOTER.size)
        if size < _FOOTER.size:
            raise _damaged(self._store, key, f"{size} bytes", f"at least {_FOOTER.size} bytes")
        self._store.get_range(key, size - _FOOTER.size, memoryview(footer))
        magic, version, frames, nbytes, uncompressed, expected = _FOOTER.unpack(footer)
        if magic != _MAGIC:
            raise _damaged(self._store, key, f"footer {magic!r}", f"footer {_MAGIC!r}")
        if version != _VERSION:
            raise FormatVersionError(
                f"{key} is compressed in a newer format", found=str(version), expected=str(_VERSION)
            )
        raw = bytearray(nbytes) if nbytes <= size - _FOOTER.size else bytearray()
        self._store.get_range(key, max(0, size - _FOOTER.size - nbytes), memoryview(raw))
        if digest(raw) != expected or len(raw) != frames * _ROW_BYTES:
            raise _damaged(self._store, key, "a directory that does not match its digest", f"digest {expected:016x}")
        directory = _parse(bytes(raw), frames, uncompressed)
        if (wrong := directory.contradiction(size - _FOOTER.size - nbytes)) is not None:
            raise _damaged(self._store, key, wrong, "a directory that fits its object")
        with self._lock:
            self._directories[key] = directory
        return directory


@dataclass(frozen=True, kw_only=True, slots=True)
class _Directory:
    """place: uncompressed start of each frame and the end; stored: the same in the object; flags per frame."""

    place: np.ndarray
    stored: np.ndarray
    flags: np.ndarray
    nbytes: int

    def contradiction(self, stored_bytes: int) -> str | None:
        """Return what does not fit together in an object with `stored_bytes` in front of its directory; None if all does."""
        lengths, sizes = np.diff(self.place), np.diff(self.stored)
        if int(self.place[-1]) != self.nbytes or int(self.stored[-1]) != stored_bytes:
            return f"frames of {int(self.place[-1])} bytes, stored in {int(self.stored[-1])}"
        if lengths.max(initial=0) > FRAME_BYTES or (sizes != lengths)[self.flags == _RAW].any():
            return "a frame that is too long, or stored in another size than its own"
        return None


_ROW_BYTES = 4 + 4 + 1


def _directory(lengths: Sequence[int], sizes: Sequence[int], flags: Sequence[int]) -> bytes:
    columns = (np.array(lengths, "<u4"), np.array(sizes, "<u4"), np.array(flags, "<u1"))
    return b"".join(column.tobytes() for column in columns)


def _parse(raw: bytes, frames: int, nbytes: int) -> _Directory:
    lengths = np.frombuffer(raw, "<u4", frames)
    sizes = np.frombuffer(raw, "<u4", frames, 4 * frames)
    flags = np.frombuffer(raw, "<u1", frames, 8 * frames)
    place = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    stored = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    return _Directory(place=place, stored=stored, flags=flags, nbytes=nbytes)


def _cut(start: int, stop: int, itemsize: int) -> list[Frame]:
    return [
        Frame(start=at, stop=min(at + FRAME_BYTES, stop), itemsize=itemsize) for at in range(start, stop, FRAME_BYTES)
    ]


def _damaged(store: Store, key: str, found: str, expected: str) -> DamagedError:
    return DamagedError(
        f"the object {key} of {store.url} is damaged",
        found=found,
        expected=expected,
        remedy=f"flashckpt verify {store.url}",
    )


def _compressor(level: int) -> zstandard.ZstdCompressor:
    made: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in made:
        made[level] = zstandard.ZstdCompressor(level=level, write_checksum=False)
    return made[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor = _local.__dict__.setdefault("decompressor", zstandard.ZstdDecompressor())
    return found
