"""The first bytes of a manifest: its frame, and in a MANIFEST a summary with its own digest. Pure.

The summary answers what a listing asks without the whole MANIFEST, which may have 100 MB. It proves
itself, not what follows: whoever uses a checkpoint reads its MANIFEST whole and verifies that digest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack

from flashckpt.core.digest import digest
from flashckpt.core.records import pack, unpack
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError

MAGIC = b"FCKMANIF"
MAJOR, MAJOR_WITH_RANGES, MAJOR_WITH_INDEXES = 1, 2, 3
MINOR, MINOR_WITH_SUMMARY = 0, 1
HEADER = struct.Struct("<8sHHIQQ")  # magic, major, minor, zero, body bytes, digest of the 24 bytes before and the body
PREFIX = struct.Struct("<8sHHIQ")
HEAD_BYTES = 4096
"""Bytes that hold frame and summary whatever is in them: a job id has at most 256."""
KEY = "summary"
_DIGEST = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestHeader:
    """What a MANIFEST says of itself at its start.

    Attributes:
        job: Job id.
        generation, step: Identity.
        parent: (generation, step) its generation was restored from.
        world_size: Ranks of the worker group.
        writers: How many ranks wrote packs or values.
        tensors: Number of global tensors.
        nbytes: Bytes of tensors, each counted once.
        suspects: Tensors with numbers that are not finite, and were before; not there where it is 0.
    """

    job: str
    generation: int
    step: int
    parent: SnapshotId | None
    world_size: int
    writers: int
    tensors: int
    nbytes: int
    suspects: int = 0


def encode_manifest_header(summary: ManifestHeader) -> bytes:
    """Return the value of the first key of a MANIFEST: u64 digest and msgpack map."""
    packed: bytes = msgpack.packb(pack(summary, leave_out=() if summary.suspects else ("suspects",)))
    return _DIGEST.pack(digest(packed)) + packed


def read_frame(raw: memoryview, majors: Sequence[int] = (MAJOR, MAJOR_WITH_RANGES)) -> tuple[int, int]:
    """Return (bytes of the body, digest) that a manifest's frame names.

    Args:
        raw: Its first bytes.
        majors: The versions that the caller reads.

    Raises:
        DamagedError: Not a manifest.
        FormatVersionError: Written by another major version.
    """
    if len(raw) < HEADER.size or raw[:8] != MAGIC:
        damaged(f"{len(raw)} bytes starting {bytes(raw[:8])!r}", f"at least {HEADER.size} bytes starting {MAGIC!r}")
    _, major, minor, _, body_bytes, expected = HEADER.unpack_from(raw)
    if major not in majors:
        raise FormatVersionError(
            "a manifest was written in a format this program does not read",
            found=f"format version {major}.{minor}",
            expected=f"format version {' or '.join(f'{one}.x' for one in majors)}",
            state="Nothing was restored.",
            remedy="use the flashckpt release that wrote it, or a newer one",
        )
    return body_bytes, expected


def decode_manifest_header(start: Any, object_bytes: int) -> ManifestHeader | None:
    """Return the summary in the first HEAD_BYTES of a MANIFEST; None where it has none (format 1.0).

    Args:
        start: The first bytes of the object, all of it where it is smaller.
        object_bytes: Its size, compared with what the frame names.

    Raises:
        DamagedError: Not a MANIFEST, truncated, or the summary's digest does not hold.
        FormatVersionError: Written by another major version.
    """
    raw = memoryview(start).cast("B")
    body_bytes, _ = read_frame(raw, (MAJOR, MAJOR_WITH_RANGES, MAJOR_WITH_INDEXES))
    if object_bytes != HEADER.size + body_bytes:
        damaged(f"{object_bytes} bytes", f"{HEADER.size + body_bytes} bytes")
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(raw[HEADER.size :])
    try:
        if not unpacker.read_map_header() or unpacker.unpack() != KEY:
            return None
        packed = unpacker.unpack()
        (expected,) = _DIGEST.unpack_from(packed)
        if (found := digest(packed[_DIGEST.size :])) != expected:
            damaged(f"digest {found:016x} of its summary", f"digest {expected:016x}")
        return _summary_from(msgpack.unpackb(packed[_DIGEST.size :]))
    except DamagedError:
        raise
    except (msgpack.UnpackException, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
        broken_schema(error)


def _summary_from(fields: Any) -> ManifestHeader:
    if type(fields) is not dict:
        raise TypeError("the summary is not a map")
    return unpack(ManifestHeader, fields, partial=True)


def damaged(found: str, expected: str) -> NoReturn:
    """Raise the error of a manifest that is not what was written."""
    raise DamagedError("a manifest is damaged", found=found, expected=expected, state="Nothing was restored.")


def broken_schema(error: Exception) -> NoReturn:
    """Raise the error of a manifest whose digest holds and whose contents cannot be."""
    raise DamagedError(
        "a manifest does not follow its schema",
        found=f"{type(error).__name__}: {str(error)[:200]}",
        state="Nothing was restored.",
    ) from error
