"""Random access to the bytes of a file or an fsspec URL, in any process.

Local files are memory-mapped. URLs are read in aligned blocks through a small cache: a block is the
read-ahead, and the number of blocks bounds the memory. Nothing is opened before the first read, and a
forked or unpickled copy opens its own handles: handles and event loops do not survive a fork.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flashckpt.errors import DataError
from flashckpt.sampler.datasets.reaching import reach

EDGE_BYTES = 1 << 16  # bytes that a fingerprint reads at either end


def is_remote(url: str) -> bool:
    """Return whether `url` has a scheme other than file."""
    return urlsplit(url).scheme not in {"", "file"}


def local_path(url: str) -> Path:
    """Return the path of a local `url`."""
    return Path(urlsplit(url).path if url.startswith("file:") else url)


class RemoteFile:
    """Read-only bytes of one file.

    Args:
        url: A path, or anything fsspec opens (s3://bucket/key).
        storage_options: For fsspec.
        block_bytes: Bytes of one ranged read of a URL.
        cache_blocks: Blocks kept; block_bytes * cache_blocks bounds the memory per process.

    Raises:
        DataError: on first use: the file is missing or cannot be read.
        StoreError: its storage could not be reached; see `reach`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        block_bytes: int = 1 << 20,
        cache_blocks: int = 16,
    ) -> None:
        self.url = os.fspath(url)
        self._options = dict(storage_options or {})
        self._block_bytes, self._cache_blocks = block_bytes, cache_blocks
        self._nbytes: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._map: mmap.mmap | bytes | None = None
        self._filesystem: Any = None
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self.fetches = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without handles and cached blocks: a loader sends its data set to workers."""
        hidden = {"_map", "_filesystem", "_blocks", "_process", "fetches"}
        return {name: value for name, value in self.__dict__.items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        if self._nbytes is None:
            self._nbytes = self._size()
        return self._nbytes

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop).

        Raises:
            DataError: the range leaves the file, or the file shrank or cannot be read.
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise DataError(
                f"a read goes beyond the end of {self.url}",
                found=f"bytes {start} to {stop} of {self.nbytes}",
                expected="a range inside the file",
                remedy="the file is truncated, or an index belongs to another file: build the index again",
            )
        if self._process != os.getpid():
            self._forget()
        data = self._read_blocks(start, stop) if is_remote(self.url) else self._mapped()[start:stop]
        if len(data) != stop - start:
            raise self._unreadable(f"{len(data)} of {stop - start} bytes; the file changed while it was read")
        return data

    def chunks(self, nbytes: int = 8 << 20) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of the whole file in order, past the cache."""
        for start in range(0, self.nbytes, nbytes):
            stop = min(start + nbytes, self.nbytes)
            yield start, self._fetch(start, stop) if is_remote(self.url) else self.read(start, stop)

    def identity(self) -> str:
        """Return size and a digest of both ends: equal for copies of a file in any place."""
        head = self.read(0, min(EDGE_BYTES, self.nbytes))
        tail = self.read(max(0, self.nbytes - EDGE_BYTES), self.nbytes)
        return f"{self.nbytes}:{hashlib.blake2b(head + tail, digest_size=8).hexdigest()}"

    def _size(self) -> int:
        def size() -> int:
            return int(self._remote().size(self._key())) if is_remote(self.url) else local_path(self.url).stat().st_size

        return reach(self.url, size, forget=self._drop)

    def _drop(self) -> None:
        """Let go of what a failed read may have left behind: an answer that was kept, a dead connection."""
        if self._filesystem is not None:
            self._filesystem.invalidate_cache()
        self._filesystem = None

    def _mapped(self) -> mmap.mmap | bytes:
        def opened() -> mmap.mmap | bytes:
            with local_path(self.url).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

        if self._map is None:
            self._map = reach(self.url, opened)
        return self._map

    def _remote(self) -> Any:
        if self._filesystem is None or self._process != os.getpid():
            import fsspec

            self._forget()
            protocol = urlsplit(self.url).scheme
            self._filesystem = fsspec.filesystem(protocol, **self._options)
        return self._filesystem

    def _key(self) -> str:
        return str(self._remote()._strip_protocol(self.url))  # noqa: SLF001 - fsspec's way to ask for a path

    def _read_blocks(self, start: int, stop: int) -> bytes:
        size = self._block_bytes
        pieces = []
        for block in range(start // size, -(-stop // size)):
            data = self._block(block)
            pieces.append(data[max(0, start - block * size) : stop - block * size])
        return b"".join(pieces)

    def _block(self, block: int) -> bytes:
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return self._blocks[block]
        data = self._fetch(block * self._block_bytes, min((block + 1) * self._block_bytes, self.nbytes))
        while len(self._blocks) >= self._cache_blocks:
            self._blocks.popitem(last=False)
        self._blocks[block] = data
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        def fetch() -> bytes:
            data = bytes(self._remote().cat_file(self._key(), start=start, end=stop))
            if len(data) < stop - start and int(self._remote().size(self._key())) == self.nbytes:
                raise ConnectionError(f"{len(data)} of {stop - start} bytes from byte {start}")  # an answer cut short
            return data

        self._remote()
        self.fetches += 1
        return reach(self.url, fetch, f"bytes {start} to {stop} of a readable file", forget=self._drop)

    def _unreadable(self, why: str) -> DataError:
        return DataError(
            f"{self.url} cannot be read", found=why, expected="a readable file", remedy="check the path and the access"
        )
