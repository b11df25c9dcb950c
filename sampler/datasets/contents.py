"""The kind of a file by its first bytes, whatever its name says, and text that is UTF-8 or refused with the place."""

from __future__ import annotations

import ast
import codecs
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashckpt.errors import DataError

HEAD_BYTES = 1 << 16
_UNPACK, _RECODE = "decompress it first", "convert it first: iconv -f {0} -t UTF-8"
_MAGICS = (
    (b"\x28\xb5\x2f\xfd", "zstd", _UNPACK), (b"\xfd7zXZ\0", "xz", _UNPACK),
    (b"\x04\x22\x4d\x18", "lz4", _UNPACK), (b"7z\xbc\xaf\x27\x1c", "7z", "unpack it first"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"), (b"%PDF-", "PDF", "extract its text first"),
    (b"ARROW1\0\0", "an Arrow file", 'as text: kind = "datasets" or a Parquet file'), (b"PAR1", "Parquet", 'set kind = "parquet"'),
    (b"\x93NUMPY", "a NumPy array", 'set kind = "tokens"'), (b"MMIDIDX\0\0", "a Megatron index", 'set kind = "megatron", and name its prefix'),
    (b"\x89HDF\r\n\x1a\n", "HDF5", "write its text or tokens to a file of a known kind"),
    (b"SQLite format 3\0", "a SQLite database", "write its text to a file of a known kind"),
)  # fmt: skip
_MARKS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
_LLMC = {20240520: (2,), 20240801: (4,), 20251013: (1, 2, 4)}
"""Magic numbers of headers of 256 int32 (magic, version, number of tokens), and how many bytes a token may have."""
_LLMC_BYTES = 1024
_ALIKE = 512
"""Tokens from which on a pattern in them is no accident."""


def recognised(head: bytes) -> tuple[str, str] | None:
    """Return what a file that begins with `head` is, and what to do; None: nothing that is known here."""
    if head[:3] == b"\x1f\x8b\x08" and _inflates(head):
        return "gzip", "decompress it first"
    if head[:3] == b"BZh" and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return "bzip2", "decompress it first"
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it first"
    if len(head) > 10 and head[8:10] == b'{"' and 2 <= struct.unpack_from("<Q", head)[0] < 1 << 32:
        return "safetensors", "these are weights, no training data"
    return next(((name, remedy) for magic, name, remedy in _MAGICS if head.startswith(magic)), None)


def _inflates(head: bytes) -> bool:
    try:
        zlib.decompressobj(31).decompress(head)
    except zlib.error:
        return False
    return True


def refuse_other(url: str, head: bytes, expected: str, *, but: str = "") -> None:
    """Raise DataError if a file is recognised as something else than `but`."""
    found = recognised(head)
    if found is not None and found[0] != but:
        raise DataError(
            f"{url} holds something else than its kind says", found=found[0], expected=expected, remedy=found[1]
        )


def refuse_no_text(url: str, head: bytes, expected: str = "text in UTF-8") -> None:
    """Raise DataError if a file that begins with `head` is no text in UTF-8, as far as this can be seen there."""
    refuse_other(url, head, expected)
    coding = next((name for mark, name in _MARKS if head.startswith(mark)), "")
    if not coding and head.count(b"\0") * 8 > len(head):  # of a language in Latin letters, without a mark
        coding = "UTF-16"
    if coding:
        raise DataError(
            f"{url} holds something else than its kind says",
            found=coding,
            expected=expected,
            remedy=_RECODE.format(coding),
        )


def decoded(data: bytes, url: str, *, offset: int = 0) -> str:
    """Return text of a file whose byte `offset` is the first of `data`; a mark at the beginning of the file is dropped.

    Raises:
        DataError: it is not UTF-8; the first byte that is not is named.
    """
    mark = 3 if offset == 0 and data[:3] == b"\xef\xbb\xbf" else 0
    try:
        return data[mark:].decode()
    except UnicodeDecodeError as error:
        at = offset + mark + error.start
        line = f", in line {data[: mark + error.start].count(10) + 1}" if offset == 0 else ""
        raise DataError(
            f"{url} is not UTF-8 at byte {at}{line}",
            found=f"{data[mark + error.start :][:8].hex(' ')} ({error.reason})",
            expected="text in UTF-8",
            remedy="convert it first, from what it is in (iconv -f LATIN1 -t UTF-8), or repair the file",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBody:
    """Where tokens lie in a file: from byte `start` on, as `dtype`."""

    start: int
    dtype: np.dtype[Any]


def token_body(url: str, head: bytes, nbytes: int, dtype: np.dtype[Any]) -> TokenBody:
    """Return where the tokens of a file are: behind a header that is understood, with its type, or all of it as `dtype`.

    Raises:
        DataError: it is something else, its header does not fit its length, or its tokens have another width.
    """
    if head.startswith(b"\x93NUMPY"):
        return _of_numpy(url, head, nbytes)
    found = _of_llmc(url, head, nbytes)
    if found is None:
        refuse_other(url, head, f"tokens ({dtype.name}, little endian), .npy, or a shard with a header of llm.c")
        found = TokenBody(start=0, dtype=dtype)
        if dtype.itemsize > 1:
            _refuse_text(url, head, dtype)
    _refuse_wider(url, head[found.start :], found.dtype)
    return found


def _of_numpy(url: str, head: bytes, nbytes: int) -> TokenBody:
    try:
        size, at = struct.unpack_from("<H", head, 8)[0], 10
        if head[6] > 1:
            size, at = struct.unpack_from("<I", head, 8)[0], 12
        facts = ast.literal_eval(head[at : at + size].decode("latin-1"))
        dtype, shape, start = np.dtype(facts["descr"]), tuple(facts["shape"]), at + size
        wanted = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    except (ValueError, KeyError, TypeError, IndexError, SyntaxError, struct.error) as error:
        raise DataError(
            f"the header of {url} is damaged", found=f"{type(error).__name__}: {error}", expected="an array of np.save"
        ) from error
    if dtype.kind not in "iu" or len(shape) != 1:
        expected = "one row of integers"
        raise DataError(f"{url} holds no tokens", found=f"{dtype.name} of shape {shape}", expected=expected)
    _refuse_length(url, nbytes, wanted, f"its header says {shape[0]} tokens of {dtype.name}")
    return TokenBody(start=start, dtype=dtype)


def _of_llmc(url: str, head: bytes, nbytes: int) -> TokenBody | None:
    if len(head) < _LLMC_BYTES:
        return None
    magic, version, count = struct.unpack_from("<3i", head)
    if magic not in _LLMC or not 0 < version < 1000:
        return None
    size = next((size for size in _LLMC[magic] if nbytes == _LLMC_BYTES + size * count), _LLMC[magic][-1])
    _refuse_length(url, nbytes, _LLMC_BYTES + size * count, f"its header says {count} tokens")
    return TokenBody(start=_LLMC_BYTES, dtype=np.dtype(f"<u{size}"))


def _refuse_length(url: str, nbytes: int, wanted: int, why: str) -> None:
    if nbytes != wanted:
        raise DataError(
            f"{url} is not as long as its header says",
            found=f"{nbytes} bytes",
            expected=f"{wanted} bytes: {why}",
            remedy="the file is truncated or was appended to: copy it again",
        )


def _refuse_text(url: str, head: bytes, dtype: np.dtype[Any]) -> None:
    """Raise DataError if what is to be read as tokens is readable text: chance cannot write so much of it."""
    if len(head) >= _ALIKE and (_mostly_letters(head) or _is_readable(head)):
        raise DataError(
            f"{url} holds something else than its kind says",
            found=f"text: {head[:40]!r}",
            expected=f"tokens ({dtype.name}, little endian)",
            remedy='set kind = "text" or "jsonl", and prepare it',
        )


def _mostly_letters(head: bytes) -> bool:
    return 10 * len(head.translate(None, b"\t\n\r" + bytes(range(32, 127)))) < len(head)


def _is_readable(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(one.isprintable() or one.isspace() for one in text)


def _refuse_wider(url: str, body: bytes, dtype: np.dtype[Any]) -> None:
    """Raise DataError if every second token is as good as 0, as where tokens of twice the width are read as two."""
    tokens = np.frombuffer(body[: len(body) // dtype.itemsize * dtype.itemsize], dtype)
    low, high = tokens[0::2], tokens[1::2]
    usual = 32 if dtype.itemsize == 1 else 256  # less may be a small alphabet
    if len(tokens) >= _ALIKE and 0 <= int(high.min()) <= int(high.max()) < 16 and np.median(low) >= usual:
        raise DataError(
            f"the tokens of {url} are wider than {dtype.name}",
            found=f"every second one is below {int(high.max()) + 1}, the others are up to {int(low.max())}",
            expected=f"tokens of {8 * dtype.itemsize} bits",
            remedy='set dtype in data.sources to what the file holds, such as "uint32"',
        )
