"""Our directories in shared memory: owned by this user, mode 0700, no links; and our files, which are regular ones. Torch-free.

`/dev/shm` is open to every user of the machine: a file there under our name may be another user's, or a link to
anywhere. A directory is therefore opened first, without following a link, and checked by its descriptor; operations
relative to the descriptor (`dir_fd`) then act on the checked directory, even if the path is swapped. In them, and on a root,
something else may stand in place of a file: a link may lead anywhere, a FIFO waits for ever, a device has no end.

The small records of a job directory are msgpack in a sealed frame. They are written under a temporary name and renamed, so
that a reader sees the old record or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.core.lineage import Generation
from flashckpt.core.records import Record, pack, seal, unpack, unseal
from flashckpt.core.snapshot_id import BEFORE_ALL, SnapshotId
from flashckpt.errors import ConfigError, DamagedError, SharedMemoryError
from flashckpt.shm import block

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something that is not our directory and was left untouched."""

    path: Path
    reason: str


@contextlib.contextmanager
def private_directory(path: Path, *, create: bool = False, within: int | None = None) -> Iterator[int]:
    """Open one of our directories for the duration of the body; yields its descriptor.

    Args:
        path: The directory.
        create: Create it and missing parents.
        within: Descriptor of its parent, itself checked; then only the last part of `path` is looked up.

    Raises:
        FileNotFoundError: It does not exist and `create` is False, or it was removed in this instant.
        ConfigError: It is a link or no directory, another user's, or open to other users.
        SharedMemoryError: The system refuses to create or open it.
    """
    name = path if within is None else Path(path.name)
    try:
        if create:
            _make(name, within)
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refusal(path, reason) if (reason := _why_not(path)) else _impossible(path, error) from error
    try:
        if reason := _reason(os.fstat(fd)):
            raise _refusal(path, reason)
        yield fd
    finally:
        os.close(fd)


def private_directories(base: Path) -> tuple[list[Path], list[Skipped]]:
    """Return our directories directly in `base`, by name, and the foreign entries there, which are not opened.

    A missing `base` is empty; a `base` that is not ours is itself the foreign entry.
    """
    found: list[Path] = []
    skipped: list[Skipped] = []
    try:
        with private_directory(base) as fd:
            for name in sorted(os.listdir(fd)):  # noqa: PTH208 -- by the descriptor, not by the path
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if reason := _reason(status):
                        skipped.append(Skipped(path=base / name, reason=reason))
                    else:
                        found.append(base / name)
    except FileNotFoundError:
        return [], []
    except (ConfigError, SharedMemoryError) as error:
        return [], [Skipped(path=base, reason=error.found)]
    return found, skipped


def open_file(
    path: str | Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None, follow: bool = False
) -> int:
    """Return a descriptor of one of our files; never waits, and never opens anything but a regular file.

    Args:
        path: The file.
        flags: As of `os.open`; O_CLOEXEC is added.
        mode: Of a new file.
        dir_fd: Descriptor of its directory.
        follow: Whether it may be reached through a link.

    Raises:
        DamagedError: Something else stands in its place.
        OSError: As `os.open`.
    """
    given = flags | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, given | os.O_NONBLOCK, mode, dir_fd=dir_fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            status = os.stat(path, dir_fd=dir_fd, follow_symlinks=follow)
            if not stat.S_ISREG(status.st_mode):
                raise _displaced(path, status) from error
            if error.errno == errno.EAGAIN:  # of a regular file: another host holds a lease on it, which is waited for
                return os.open(path, given, mode, dir_fd=dir_fd)
        if error.errno == errno.ELOOP:
            raise _displaced(path, os.stat(path, dir_fd=dir_fd, follow_symlinks=False)) from error
        raise
    if not stat.S_ISREG((status := os.fstat(fd)).st_mode):
        os.close(fd)
        raise _displaced(path, status)
    return fd


def read_file(path: str | Path, *, most: int, follow: bool = False) -> bytes:
    """Return the bytes of one of our files. Raises as `open_file`; DamagedError also where it has more than `most` bytes."""
    with os.fdopen(open_file(path, os.O_RDONLY, follow=follow), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise DamagedError(f"the file {path} is too large", found=f"{size} bytes", expected=f"at most {most} bytes")
        return file.read()


def mark_file(path: Path) -> None:
    """Set the time of one of our files to now, and make it where it is missing; whatever stands there is not opened."""
    try:
        os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        os.close(open_file(path, os.O_WRONLY | os.O_CREAT))


def write_durably(path: Path, parts: Iterable[memoryview]) -> None:
    """Create `path` with the bytes of `parts`, and fsync it; the caller removes one that could not be written completely."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for part in parts:
            left = part if part.ndim == 1 and part.format == "B" else part.cast("B")
            while left:
                left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(temporary: Path, path: Path) -> None:
    """Move a new file to its place; what stands there is replaced. DamagedError where that is a directory."""
    try:
        temporary.replace(path)
    except IsADirectoryError as error:
        raise _displaced(path, path.lstat()) from error


def remove_file(path: Path) -> None:
    """Remove one of our files, or what stands in its place, if it is there. DamagedError where that is a directory."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError as error:
        raise _displaced(path, path.lstat()) from error


def _displaced(path: str | Path, status: os.stat_result) -> DamagedError:
    return DamagedError(
        f"something else stands in place of the file {path}",
        found={"l": "a link", "d": "a directory", "p": "a FIFO", "s": "a socket"}.get(
            stat.filemode(status.st_mode)[0], "a device"
        ),
        expected="a regular file",
        state="It was left as it is.",
        remedy="remove it",
    )


def create_file(path: Path, *, flags: int = os.O_WRONLY) -> int:
    """Return a descriptor of a new empty file, mode 0600, in one of our directories; replaces a file of that name.

    Raises:
        ConfigError: The directory is not ours.
        OSError: The file cannot be created, or another process created one in the same instant.
    """
    with private_directory(path.parent) as fd:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=fd)
        return os.open(path.name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)


def remove_tree(name: str, within: int) -> bool:
    """Remove the directory `name` below a checked descriptor, following no link; returns whether it is gone."""
    if not shutil.rmtree.avoids_symlink_attacks:
        raise SharedMemoryError(f"{name} cannot be removed safely", found="a platform without openat")
    place = Path(f"/proc/self/fd/{within}", name)  # rmtree takes no dir_fd before Python 3.11
    shutil.rmtree(place, ignore_errors=True)
    return not os.path.lexists(place)


def _make(name: Path, within: int | None) -> None:
    if within is None:
        try:
            name.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # $FLASHCKPT_SHM_DIR, which may be for all users
        except FileNotFoundError as error:  # such as in /proc: waiting would not help
            raise _impossible(name, error) from error
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=within)


def _reason(status: os.stat_result) -> str:
    """Return why this is not our directory, "" if it is."""
    if stat.S_ISLNK(status.st_mode):
        return f"a symbolic link, uid {status.st_uid}"
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return ""
    return f"mode {stat.filemode(status.st_mode)}, uid {status.st_uid}"


def _why_not(path: Path) -> str:
    """Return why `path` could not be opened as our directory; "" if the reason is unknown."""
    try:
        return _reason(path.lstat())
    except OSError:
        return ""


def _impossible(path: Path, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(
        f"{path} cannot be made or opened",
        found=error.strerror or str(error),
        expected="a directory on a tmpfs in which this user may write",
        state="Nothing was written.",
        remedy="mount it writable, or set FLASHCKPT_SHM_DIR to another tmpfs",
    )


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a private directory of this user",
        found=reason,
        expected=f"a directory of uid {os.getuid()} with mode drwx------",
        state="Nothing was written.",
        remedy="remove it, or set FLASHCKPT_SHM_DIR to another tmpfs",
    )


# -- The small records of a job directory: msgpack in a sealed frame (magic, digest) -------------------------------


_LEFT = "It was left as it is; checkpoints on storage are not touched."
_LARGEST, _SMALL = 16 << 20, 4096
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
        once_committed: The same, or of what earlier daemons here knew, if the root has lost it.
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
    once_committed: SnapshotId | None = None
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


def write_record(path: Path, record: Any) -> None:
    """Write a record in one move.

    Raises:
        SharedMemoryError: There is no room for it.
    """
    write_raw(path, framed(record))


def write_raw(path: Path, raw: bytes) -> None:
    """Write the bytes of a record, as `write_record`."""
    try:
        _replace(path, raw)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        least = block.capacities(path.parent)[0]
        raise block.insufficient_memory(path.parent, len(raw), least, what=f"job {path.parent.name!r}") from error


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


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """Return the record of `kind` at `path`; None if there is none.

    Raises:
        DamagedError: Its digest does not hold, or a field is of another type.
    """
    try:
        raw = read_file(path, most=_LARGEST)
    except FileNotFoundError:
        return None
    decoded: Any = _decoded if len(raw) <= _SMALL else _decoded.__wrapped__
    found: Record | None = decoded(path, kind, raw)
    return found


@functools.lru_cache(maxsize=64)  # a persister reads the same records at each of its turns
def _decoded(path: Path, kind: type[Record], raw: bytes) -> Record:
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
