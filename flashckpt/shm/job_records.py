"""The small records of a job directory: msgpack in a sealed frame (magic, digest). Torch-free.

They are written under a temporary name and renamed, so that a reader sees the old record or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.core.lineage import Generation
from flashckpt.core.records import Record, pack, seal, unpack, unseal
from flashckpt.core.snapshot_id import BEFORE_ALL, SnapshotId
from flashckpt.errors import DamagedError
from flashckpt.shm import capacity
from flashckpt.shm.private import read_file, replace

_LEFT = "It was left as it is; checkpoints on storage are not touched."
_LARGEST = 16 << 20
_ROOT_ONLY: dict[Any, tuple[str, ...]] = {Generation: ("created_s",)}
"""Fields that a kind of record carries on the root alone."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What the daemon must know of a job. Bytes, seconds and steps as named."""

    job: str
    root: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    keep_last: int | None = 3
    keep_every: int | None = None
    persist_every: int | None = None
    persist_s: int = 0
    keep_last_s: int = 0
    keep_every_s: int = 0
    compression: str = "off"
    world_size: int = 1
    node_count: int = 1
    node: int = 0
    replicate: int = 0
    replica_address: str = ""


@dataclass(frozen=True, kw_only=True)
class DaemonStatus:
    """What the daemon last did.

    Attributes:
        committed: (generation, step) of the newest MANIFEST it knows of.
        failures: Persists that failed, in all.
        error: Text of the last failure; "" once a persist succeeded again.
        lag: Persist steps that are COMPLETE and not committed.
        floor: (generation, step) up to which nothing is persisted any more: committed or given up.
        given_up: Why the last snapshot that was given up was; "" if none was.
        answered_ns: Time of the newest request to retry (`JobDirectory.ask`) before the last failed attempt began.
        replicated: Newest snapshot that the partners of all nodes hold; None where there is none, or no replication.
        replica_lag: Steps that the newest snapshot is ahead of it.
        replica_lag_s: Whole seconds since this node held a snapshot that was not replicated everywhere; 0 if there is none.
        replica_pending: Bytes of the snapshot under way that partners lack.
        replica_problem: Why no replica can be sent; "" where one can.
        pid: Of the daemon, for people.
        updated_ns: Nanoseconds since the epoch.
    """

    committed: SnapshotId | None = None
    failures: int = 0
    error: str = ""
    lag: int = 0
    floor: SnapshotId = field(default=BEFORE_ALL, metadata={"least": -1})
    given_up: str = ""
    answered_ns: int = 0
    replicated: SnapshotId | None = None
    replica_lag: int = 0
    replica_lag_s: int = 0
    replica_pending: int = 0
    replica_problem: str = ""
    pid: int = 0
    updated_ns: int = 0


def framed(record: Any) -> bytes:
    """Return the bytes of a record."""
    return seal(pack(record, leave_out=_ROOT_ONLY.get(type(record), ())), minor=0)


def write(path: Path, record: Any) -> None:
    """Write a record in one move.

    Raises:
        SharedMemoryError: There is no room for it.
    """
    write_raw(path, framed(record))


def write_raw(path: Path, raw: bytes) -> None:
    """Write the bytes of a record, as `write`."""
    try:
        _replace(path, raw)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        least = capacity.capacities(path.parent)[0]
        raise capacity.insufficient_memory(path.parent, len(raw), least, what=f"job {path.parent.name!r}") from error


def _replace(path: Path, raw: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
        replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, kind: type[Record]) -> Record | None:
    """Return the record of `kind` at `path`; None if there is none.

    Raises:
        DamagedError: Its digest does not hold, or a field is of another type.
    """
    try:
        raw = read_file(path, most=_LARGEST)
    except FileNotFoundError:
        return None
    with _explained(path):
        found = unseal(raw, str(path))
    try:
        return unpack(kind, found, leave_out=_ROOT_ONLY.get(kind, ()), partial=True)
    except (ValueError, KeyError) as error:
        raise DamagedError(
            f"{path} does not follow its schema",
            found=str(error)[:200],
            state=_LEFT,
            remedy=_way_out(path),
        ) from error


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say of a record that does not hold what to do about it."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(
            error.problem, found=error.found, expected=error.expected, state=_LEFT, remedy=_way_out(path)
        ) from error


def _way_out(path: Path) -> str:
    return (
        f"end the job and its daemon, then flashckpt forget --job {path.parent.name} --apply: "
        "the next start continues from storage"
    )
