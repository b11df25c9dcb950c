"""Index files: named integer arrays and facts about their data, with digests, written atomically.

Layout: magic (8 bytes), header length (u32, little endian), JSON header, then the arrays one after
another. The header holds the kind, the facts, the arrays' names, types and lengths, a digest of the arrays, and
a seal: a digest of all the other keys (files of earlier releases have none).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.errors import DataError
from flashckpt.sampler.datasets.remote_file import RemoteFile, is_remote, local_path

MAGIC = b"FCKIDX1\n"
_TYPES = {"<i8", "<i4"}
Array = npt.NDArray[Any]


def encode(kind: str, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """Return the bytes of an index file."""
    parts = {
        name: np.ascontiguousarray(a, dtype="<i4" if a.dtype.itemsize == 4 else "<i8") for name, a in arrays.items()
    }
    body = b"".join(part.tobytes() for part in parts.values())
    header = {
        "kind": kind,
        "facts": dict(facts),
        "arrays": [[name, part.dtype.str, len(part)] for name, part in parts.items()],
        "digest": _digest(body),
    }
    header["seal"] = _seal(json.loads(json.dumps(header)))  # as a reader decodes it: all keys are strings
    text = json.dumps(header, sort_keys=True).encode()
    return MAGIC + struct.pack("<I", len(text)) + text + body


def decode(data: bytes, kind: str, name: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return (facts, arrays) of an index file.

    Raises:
        DataError: it is not an index of this kind, truncated, or damaged.
    """
    try:
        return _parse(data, kind)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError, struct.error) as error:
        raise DataError(
            f"the index {name} cannot be used",
            found=str(error),
            expected=f"a whole index of kind {kind!r}",
            remedy="delete it and build it again",
        ) from error


def _parse(data: bytes, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    if data[:8] != MAGIC:
        raise ValueError("no index file")
    (length,) = struct.unpack_from("<I", data, 8)
    header, body = json.loads(data[12 : 12 + length]), data[12 + length :]
    if header["kind"] != kind:
        raise ValueError(f"an index of kind {header['kind']!r}")
    if "seal" in header and header["seal"] != _seal(header):
        raise ValueError("its header does not match its seal")
    if header["digest"] != _digest(body):
        raise ValueError("its bytes do not match its digest")
    arrays: dict[str, Array] = {}
    place = 0
    for label, dtype, count in header["arrays"]:
        if dtype not in _TYPES or type(count) is not int or count < 0:
            raise ValueError(f"an array of {count!r:.40} {dtype!r:.40}")
        arrays[str(label)] = np.frombuffer(body, dtype, count, place)
        place += arrays[str(label)].nbytes
    if place != len(body) or not isinstance(header["facts"], dict):
        raise ValueError(f"{len(body)} bytes of arrays where its header says {place}")
    return header["facts"], arrays


def write(url: str, data: bytes, storage_options: Mapping[str, Any] | None = None) -> None:
    """Write an index file whole or not at all: temporary name and rename, or one PUT."""
    if is_remote(url):
        import fsspec

        filesystem, key = fsspec.core.url_to_fs(url, **(storage_options or {}))
        filesystem.pipe_file(key, data)
        return
    path = local_path(url)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(
    url: str, kind: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read and check an index file; see `decode`."""
    blob = RemoteFile(url, storage_options=storage_options)
    return decode(b"".join(data for _, data in blob.chunks()), kind, url)


def check_facts(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse an index that was built for other data."""
    different = sorted(key for key in expected if found.get(key) != expected[key])
    if different:
        raise DataError(
            f"the index {name} does not fit its data",
            found=", ".join(f"{key} {expected[key]} in the data" for key in different),
            expected=", ".join(f"{key} {found.get(key)} as indexed" for key in different),
            remedy="the data changed since: delete the index and build it again",
        )


def _seal(header: Mapping[str, Any]) -> str:
    return _digest(json.dumps({k: v for k, v in header.items() if k != "seal"}, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
