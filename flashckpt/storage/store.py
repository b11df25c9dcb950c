"""One interface to every place where checkpoints can be stored; `factory.open_store` chooses the backend.

A store holds *objects* under *keys* (`step-000000120.g3/r00003.p0.fck`), relative to its root. The
checkpoint format needs few promises, and every backend passes the same conformance suite for them:

* `put` and `put_if_absent` publish small objects atomically: a reader sees nothing or all of it.
* `put_object` streams a large one with bounded memory; nothing is visible under its key before it is durable.
* `put_if_absent` lets exactly one of several writers win where `is_conditional` is true.
* nothing here trusts a size or a checksum of a server: readers verify our own digests.

Backends open their clients lazily in the process that uses them (never before a fork).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

PART_BYTES = 16 << 20
"""Bytes of one part in flight: an O_DIRECT extent, a multipart part, a ranged read."""

PARTS_IN_FLIGHT = 4
"""Parts in flight per object: memory of an upload is bounded by PART_BYTES x PARTS_IN_FLIGHT."""

DELETE_BATCH = 1000
"""Keys of one batch delete on S3, which is also the most that S3 takes."""

SWEEP_AGE_S = 3600.0
"""Age in seconds after which a temporary object or multipart upload counts as abandoned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One object of a store: its key relative to the root, size in bytes, time of writing (unix seconds)."""

    key: str
    nbytes: int
    mtime: float


Objects: TypeAlias = list[ObjectInfo]
Names: TypeAlias = list[str]
# aliases, because inside the classes below `list` is the method


@runtime_checkable
class Store(Protocol):
    """The operations that persist, restore, retention and the command line need from storage.

    Every method raises RootError where the root itself cannot be used (missing bucket, refused
    credentials, read-only directory) and StoreError where one operation failed after its retries.
    """

    url: str
    """The root as the user gave it, without credentials."""

    @property
    def is_conditional(self) -> bool:
        """Whether `put_if_absent` is atomic here (probed once per store object; may do I/O)."""
        ...

    def check(self, *, write: bool = True) -> None:
        """Raise RootError unless the root can be read and, with `write`, created and written."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Publish a small object atomically and durably, replacing what was there."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Publish a small object unless the key exists; return whether this call created it."""
        ...

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """Stream a large object, durable and visible only when this returns.

        Args:
            key: Its key; an object already there is replaced.
            parts: Its bytes in order. Must start over on each `iter()` (a list, not a generator), so
                that it can be sent again after a failure that leaves nothing to resume.
            nbytes: Their sum where it is known, so that room is reserved; None otherwise.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return a whole small object; ObjectMissingError where there is none."""
        ...

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start`; DamagedError where the object ends before."""
        ...

    def list(self, prefix: str = "") -> Objects:
        """Return all objects whose key starts with `prefix`, sorted by key, except temporary ones."""
        ...

    def folders(self, prefix: str = "") -> Names:
        """Return the names of the folders directly under `prefix` ("" or ending in "/"), sorted."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Return size and time of an object, None where there is none."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""
        ...

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects that exist, in as few requests as the service allows; durable when this returns.

        Where some cannot be removed, the others are. Their order is not that of their removal.

        Raises:
            RootError, StoreError: Some could not be removed; the error names them.
        """
        ...

    def sweep(self, *, older_than_s: float = SWEEP_AGE_S) -> Names:
        """Remove what dead writers left invisible (temporary files, multipart uploads); return their names."""
        ...

    def close(self) -> None:
        """Close connections; the store reopens when it is used again."""
        ...


def check_key(key: str) -> str:
    """Return `key` unchanged; ValueError if it is not a plain relative path (a programming error)."""
    if not key or key.startswith("/") or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise ValueError(f"not an object key: {key!r}")
    return key


class StoreType(Protocol):
    """A class of stores.

    Attributes:
        OPTIONS: Names of the storage options that it takes; any other is refused before the store is opened.

    It may have static methods that raise ConfigError: `check_url(url)` for a URL that cannot be a root, and
    `check_values(url, options)` for an option that cannot have its value.
    """

    OPTIONS: ClassVar[frozenset[str]]

    def __call__(self, url: str, options: dict[str, Any]) -> Store:
        """Return the store of a root, without touching it yet."""


# -- Names of temporary files, which say whose they are: a sweep removes those of dead writers -----------------------

TEMPORARY = ".tmp"


def temporary_name(name: str) -> str:
    """Return the name under which this process writes the object `name` before it is published."""
    return f"{name}.{machine_tag()}-{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}"


def is_orphan(name: str, age_s: float, older_than_s: float) -> bool:
    """Return whether a temporary file is old enough to be removed, or its writer died on this machine."""
    if age_s > older_than_s:
        return True
    machine, _, rest = name.removesuffix(TEMPORARY).rpartition(".")[2].partition("-")
    pid = rest.partition("-")[0]
    if machine != machine_tag() or not pid.isdigit():
        return False
    return not Path(f"/proc/{pid}").exists()


def machine_tag() -> str:
    """Return 8 hex digits that name this boot and process id space: a pid means something only inside it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return "00000000"
    return hashlib.sha256(f"{boot}{space}".encode()).hexdigest()[:8]
