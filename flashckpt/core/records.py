"""Small msgpack maps in a sealed frame: magic, version, digest. Pure: bytes in, bytes out; docs/format.md, section 5.

Records of the job directory are of version 1.0, whose digest is of the body. Those on a root are of version 1.2:
their digest covers the frame too, so that no single flipped bit of one goes unnoticed.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from flashckpt.core.digest import digest, digest_of
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError

MAGIC = b"FCKRECRD"
MAJOR = 1
MINOR_WHOLE = 2
"""From this minor version on the digest is of the first 16 bytes and the body."""
_PREFIX = struct.Struct("<8sHHI")  # magic, major, minor, zero
FRAME = struct.Struct("<8sHHIQ")


def seal(fields: dict[str, Any], *, minor: int = MINOR_WHOLE) -> bytes:
    """Return the record of `fields`, msgpack types."""
    body: bytes = msgpack.packb(fields)
    prefix = _PREFIX.pack(MAGIC, MAJOR, minor, 0)
    return prefix + struct.pack("<Q", digest_of(prefix, body) if minor >= MINOR_WHOLE else digest(body)) + body


def is_sealed(raw: bytes) -> bool:
    """Return whether `raw` begins as a record does; a map written before 1.2 never does."""
    return raw[: len(MAGIC)] == MAGIC


def unseal(raw: bytes, name: str) -> dict[str, Any]:
    """Return the fields of the record `name`, which is what error texts call it.

    Raises:
        DamagedError: Not a record, cut short, its digest does not hold, or it holds no map.
        FormatVersionError: Whole, and written by another major version.
    """
    if len(raw) < FRAME.size or not is_sealed(raw):
        raise DamagedError(
            f"{name} is not a record", found=f"{len(raw)} bytes starting {bytes(raw[:8])!r}", expected=repr(MAGIC)
        )
    _, major, minor, _, expected = FRAME.unpack_from(raw)
    body = raw[FRAME.size :]
    whole = digest_of(raw[: _PREFIX.size], body)
    found = digest(body) if minor < MINOR_WHOLE and major == MAJOR else whole
    if major != MAJOR and expected in (whole, digest(body)):
        raise FormatVersionError(
            f"{name} was written in a format this program does not read",
            found=f"format version {major}.{minor}",
            expected=f"format version {MAJOR}.x",
            state="It was left as it is.",
            remedy="use the flashckpt release that wrote it, or a newer one",
        )
    if found != expected:
        raise DamagedError(f"{name} is damaged", found=f"digest {found:016x}", expected=f"digest {expected:016x}")
    try:
        fields = msgpack.unpackb(body)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{name} is damaged", found=f"{type(error).__name__}: {error}") from error
    if not isinstance(fields, dict):
        raise DamagedError(f"{name} is damaged", found=type(fields).__name__, expected="a map")
    return fields


def integer(value: Any, least: int = 0) -> int:
    """Return `value`, an int of at least `least` that fits 64 bits; ValueError otherwise (a bool is none)."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} where an integer of at least {least} is expected")
    return value


def text(value: Any) -> str:
    """Return `value`, a str; ValueError otherwise."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} where text is expected")
    return value


def number(value: Any) -> float:
    """Return `value`, a finite int or float, as a float; ValueError otherwise."""
    if type(value) not in (int, float) or not abs(value) < float("inf"):
        raise ValueError(f"{value!r:.40} where a number is expected")
    return float(value)


def snapshot_id(value: Any, least: int = 0) -> SnapshotId:
    """Return (generation, step) of a list of exactly two, none below `least`; ValueError otherwise."""
    if type(value) not in (list, tuple) or len(value) != 2:
        raise ValueError(f"{value!r:.40} where [generation, step] is expected")
    return SnapshotId(integer(value[0], least), integer(value[1], least))
