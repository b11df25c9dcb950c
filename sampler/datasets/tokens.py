"""Token files: flat .bin and Megatron's .bin/.idx, read as fixed-length windows or as documents."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.datasets.contents import HEAD_BYTES, token_body
from flashckpt.sampler.datasets.index_file import Array
from flashckpt.sampler.datasets.remote_file import RemoteFile

Tokens = npt.NDArray[np.int64]

_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document boundaries
_TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class TokenFile:
    """Fixed-length windows over a flat file of tokens (.bin), as a map-style data set.

    Sample i holds the tokens [i * window, i * window + window + extra): with extra=1 inputs and the next
    tokens overlap by one, and every token is predicted once per epoch.

    Args:
        url: A path or fsspec URL.
        window: Tokens of a sample.
        dtype: uint8, uint16, uint32, int32 or int64, little endian; files of np.save and of llm.c say it themselves.
        extra: Tokens after the window that come with it (1 for next-token targets).
        header_bytes: Bytes to skip at the start of the file, whatever they are; 0: a header that is known is skipped.
        storage_options: For fsspec.
        block_bytes: See `RemoteFile`.
        cache_blocks: See `RemoteFile`.

    Raises:
        DataError: the file is missing, cut inside a token, shorter than one window, or holds something else than such tokens.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        window: int,
        dtype: str = "uint16",
        extra: int = 1,
        header_bytes: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        block_bytes: int = 1 << 20,
        cache_blocks: int = 16,
    ) -> None:
        if dtype not in _TOKEN_TYPES or window < 1 or extra < 0:
            raise ConfigError(
                "token windows cannot be cut like this",
                found=f"dtype {dtype!r}, window {window}, extra {extra}",
                expected=f"one of {', '.join(_TOKEN_TYPES)}; a window of 1 or more",
            )
        self._blob = RemoteFile(
            url, storage_options=storage_options, block_bytes=block_bytes, cache_blocks=cache_blocks
        )
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if not header_bytes:
            head = self._blob.read(0, min(HEAD_BYTES, self._blob.nbytes))
            body_of = token_body(self._blob.url, head, self._blob.nbytes, self._dtype)
            header_bytes, self._dtype = body_of.start, body_of.dtype
            dtype = dtype if not header_bytes else self._dtype.str
        self._header, self.window, self.extra = header_bytes, window, extra
        body = self._blob.nbytes - header_bytes
        if body < 0 or body % self._dtype.itemsize:
            raise DataError(
                f"{self._blob.url} is cut inside a token",
                found=f"{self._blob.nbytes} bytes, {header_bytes} of them header",
                expected=f"whole tokens of {self._dtype.itemsize} bytes ({dtype})",
                remedy="the file is truncated, or has another dtype",
            )
        self.tokens = body // self._dtype.itemsize
        self._length = (self.tokens - extra) // window
        if self._length < 1:
            raise DataError(
                f"{self._blob.url} is shorter than one window",
                found=f"{self.tokens} tokens",
                expected=f"at least {window + extra}",
            )
        self.fingerprint = f"tokens:{dtype}:{window}:{extra}:{self._blob.identity()}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> Tokens:
        if not 0 <= sample < self._length:
            raise IndexError(f"window {sample} of {self._length}")
        return self.slice(sample * self.window, (sample + 1) * self.window + self.extra)

    def slice(self, first: int, last: int) -> Tokens:
        """Return the tokens [first, last) as int64."""
        size = self._dtype.itemsize
        data = self._blob.read(self._header + first * size, self._header + last * size)
        return np.frombuffer(data, self._dtype).astype(np.int64)


class MegatronFile:
    """A Megatron-LM indexed data set (prefix.bin and prefix.idx), as documents or as fixed-length windows.

    Args:
        prefix: Path or fsspec URL without .bin and .idx.
        window: Tokens of a sample, cut from the concatenated documents; None gives one
            sequence per sample, at full length.
        extra: Tokens after the window that come with it.
        storage_options: For fsspec.
        block_bytes: See `RemoteFile`.
        cache_blocks: See `RemoteFile`.

    Raises:
        DataError: a file is missing, damaged or truncated, or the index does not fit its data.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        window: int | None = None,
        extra: int = 1,
        storage_options: Mapping[str, Any] | None = None,
        block_bytes: int = 1 << 20,
        cache_blocks: int = 16,
    ) -> None:
        name = os.fspath(prefix)
        index = RemoteFile(f"{name}.idx", storage_options=storage_options)
        self._blob = RemoteFile(
            f"{name}.bin", storage_options=storage_options, block_bytes=block_bytes, cache_blocks=cache_blocks
        )
        self._dtype, self.lengths, self._pointers, documents = _decode_index(index, self._blob)
        self.window, self.extra = window, extra
        self.tokens = self._blob.nbytes // self._dtype.itemsize
        first_token = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self._document_starts = first_token[documents]
        self._length = len(self.lengths) if window is None else (self.tokens - extra) // window
        if self._length < 1:
            raise DataError(
                f"{name} holds no sample", found=f"{self.tokens} tokens", expected=f"at least {(window or 0) + extra}"
            )
        self.fingerprint = f"megatron:{window}:{extra}:{self._blob.identity()}:{index.identity()}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> Tokens:
        if not 0 <= sample < self._length:
            raise IndexError(f"sample {sample} of {self._length}")
        if self.window is None:
            return self._read(int(self._pointers[sample]), int(self.lengths[sample]))
        start = sample * self.window
        return self._read(start * self._dtype.itemsize, self.window + self.extra)

    def document_starts(self, sample: int) -> Tokens:
        """Return where documents begin inside window `sample` (for attention masks), excluding the window's start."""
        if self.window is None:
            return np.zeros(0, np.int64)
        first = sample * self.window
        begin = np.searchsorted(self._document_starts, first, side="right")
        end = np.searchsorted(self._document_starts, first + self.window + self.extra)
        return np.asarray(self._document_starts[begin:end] - first, np.int64)

    def _read(self, start: int, count: int) -> Tokens:
        data = self._blob.read(start, start + count * self._dtype.itemsize)
        return np.frombuffer(data, self._dtype).astype(np.int64)


def _decode_index(index: RemoteFile, data: RemoteFile) -> tuple[np.dtype[Any], Array, Array, Array]:
    """Return (token type, sequence lengths, byte pointers, document boundaries), checked against the data."""
    content = index.read(0, index.nbytes)
    if len(content) < _HEADER.size or content[:9] != _MAGIC:
        raise _misfit(index, "no Megatron index", f"{_MAGIC!r} at its start")
    _, version, code, sequences, boundaries = _HEADER.unpack_from(content)
    if version != 1 or code not in _CODES or _CODES[code][-2] == "f":
        raise _misfit(index, f"version {version}, type code {code}", "version 1 and an integer type")
    dtype = np.dtype(_CODES[code])
    sizes = (4 * sequences, 8 * sequences, 8 * boundaries)
    if len(content) - _HEADER.size not in {sum(sizes), sum(sizes) + sequences}:  # modes, one byte each, may follow
        raise _misfit(index, f"{len(content)} bytes", f"{_HEADER.size + sum(sizes)} for {sequences} sequences")
    at = _HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at)
    pointers = np.frombuffer(content, "<i8", sequences, at + sizes[0])
    documents = np.frombuffer(content, "<i8", boundaries, at + sizes[0] + sizes[1])
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if boundaries and documents[0] != 0:
        raise _misfit(index, f"a first document at sequence {documents[0]}", "0")
    if (lengths < 0).any() or not np.array_equal(pointers[1:], ends[:-1]) or (sequences and pointers[0] != 0):
        raise _misfit(index, "pointers that do not follow from the lengths", "sequences one after another")
    if boundaries and (documents.min() < 0 or documents.max() > sequences or (np.diff(documents) < 0).any()):
        raise _misfit(index, "document boundaries out of range", f"0 to {sequences}, ascending")
    if (total := int(ends[-1]) if sequences else 0) != data.nbytes:
        raise _misfit(index, f"{data.nbytes} bytes in {data.url}", f"{total} bytes as indexed")
    return dtype, lengths, pointers, documents


def _misfit(index: RemoteFile, found: str, expected: str) -> DataError:
    return DataError(
        f"the index {index.url} is damaged or does not fit its data",
        found=found,
        expected=expected,
        remedy="copy both files again, or preprocess the data again",
    )
