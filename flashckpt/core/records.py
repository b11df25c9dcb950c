"""Digests of byte ranges, and records that are sealed with one. Pure; docs/format.md, section 5.

A digest is xxh3 per chunk, taken right after the copy: it detects corruption, not tampering. A record is a frozen dataclass as
a msgpack map, in a frame (magic, version, digest).

`pack` and `unpack` go by the declared fields: the one place where a record becomes a map, and a map a record again.
A map is checked field by field against the annotations, for a digest proves that bytes are those that were written, not
that they make sense.

Records of the job directory are of version 1.0, whose digest is of the body. Those on a root are of version 1.2:
their digest covers the frame too, so that no single flipped bit of one goes unnoticed.
"""

from __future__ import annotations

import functools
import struct
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import xxhash

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError

if TYPE_CHECKING:
    import numpy as np

CHUNK_BYTES = 1 << 20
"""Bytes per digest: at 1 MiB a chunk is hashed while it is still in cache (1.2x a bare copy, 1.4x in a second pass)."""
NAME = "xxh3_64"


def digest(view: Any) -> int:
    """Return the u64 digest of one C-contiguous buffer (bytes, memoryview, ndarray). Releases the GIL."""
    return int(xxhash.xxh3_64_intdigest(view))


@functools.lru_cache
def mark_of(token: str) -> int:
    """Return 24 bits of a generation's token, never 0; 0 for no token. Memory holds it in each slot.

    A generation that begins without the root may take a number that others have taken, who are out of reach: what both
    call (g, s) are two states.
    """
    return digest(token.encode()) % 0xFFFFFF + 1 if token else 0


def digest_of(*views: Any) -> int:
    """Return the digest of several buffers one after another, without joining them."""
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return int(state.intdigest())


def chunk_count(nbytes: int) -> int:
    """Return how many digests a shard of `nbytes` has (0 for an empty one)."""
    return -(-nbytes // CHUNK_BYTES)


def chunk_digests(view: Any) -> np.ndarray:
    """Return np.uint64[chunk_count], one digest per CHUNK_BYTES of one shard's bytes; the last chunk may be short."""
    import numpy as np  # starts threads where no variable forbids it, and dlrun must have one when it forks its zygote

    raw = memoryview(view)
    if not raw.nbytes:  # cannot be cast
        return np.zeros(0, np.uint64)
    raw = raw.cast("B")
    starts = range(0, raw.nbytes, CHUNK_BYTES)
    return np.array([digest(raw[start : start + CHUNK_BYTES]) for start in starts], np.uint64)


MAGIC = b"FCKRECRD"
MAJOR = 1
MINOR_WHOLE = 2
"""From this minor version on the digest is of the first 16 bytes and the body."""
Record = TypeVar("Record")
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


def pack(record: Any, *, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the map of a record: each declared field, in the order of declaration, under its name.

    A field of another name in the map says so in its metadata (`{"key": ...}`).
    """
    kind: Any = type(record)
    return {key: getattr(record, name) for name, key, *_ in _schema(kind) if name not in leave_out}


def unpack(
    kind: type[Record], found: Mapping[str, Any], *, leave_out: Collection[str] = (), partial: bool = False
) -> Record:
    """Return the record in a map, each value checked against its field's annotation; unknown names are left out.

    Known are int, float (finite), str, bool, SnapshotId, `tuple[T, ...]`, `dict[str, Any]` and `T | None` of them. An
    integer is at least 0, or what the field's metadata says as `least`.

    Args:
        kind: The dataclass.
        found: The map, as msgpack gives it.
        leave_out: Fields that this kind of record does not carry: they keep their defaults.
        partial: A field that is not there keeps its default, if it has one.

    Raises:
        KeyError: A field is not there.
        ValueError: A value is of another type, or out of range; the message names the field.
    """
    values = {}
    for name, key, hint, least, has_default in _schema(typing.cast("Any", kind)):
        if name in leave_out or (partial and has_default and key not in found):
            continue
        try:
            values[name] = _checked(hint, found[key], least)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return kind(**values)


@functools.cache
def _schema(kind: Any) -> tuple[tuple[str, str, Any, int, bool], ...]:
    """Return (name, key in the map, type, least integer, whether it has a default) of each field."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            one.name,
            str(one.metadata.get("key", one.name)),
            hints[one.name],
            one.metadata.get("least", 0),
            one.default is not MISSING or one.default_factory is not MISSING,
        )
        for one in fields(kind)
    )


def _checked(hint: Any, value: Any, least: int) -> Any:
    """Return `value` as the annotation `hint` says; ValueError where it is not of that type."""
    if hint is int:
        return integer(value, least)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # only `T | None`
        return None if value is None else _checked(parts[parts[0] is type(None)], value, least)
    if origin is tuple:
        return tuple(_checked(parts[0], one, least) for one in (value if type(value) is tuple else _of(list, value)))
    if hint is SnapshotId:
        return snapshot_id(value, least)
    if hint is float:
        return number(value)
    return text(value) if hint is str else _of(origin or hint, value)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} where {kind.__name__} is expected")
    return value


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
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{value!r:.40} where [generation, step] is expected")
    return SnapshotId(integer(value[0], least), integer(value[1], least))
