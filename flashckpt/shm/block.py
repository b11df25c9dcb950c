"""Blocks of host memory that segments are made of: `multiprocessing.shared_memory` in /dev/shm, else a file on tmpfs.

A block in /dev/shm has two names. Its durable name is a hard link in the job directory (`r00003-<layout>.seg`): the
segment exists as long as that link. Its POSIX name, `flashckpt-<uid>-<job>-r00003-<layout>`, lets any Python
process attach with the standard library alone, and may vanish at any time: before Python 3.13 a process that attaches
registers the block with its resource tracker, which unlinks that name when the process ends. Nothing is lost then, and
the next writer of the segment restores it. For the same reason our own processes never register a block: registering
and undoing it would leave a moment in which SIGKILL makes the tracker remove it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashckpt.core.digest import digest

SHM = Path("/dev/shm")  # noqa: S108 -- where `SharedMemory` keeps its blocks on Linux
SEGMENT_NAME = re.compile(r"r(\d+)-([0-9a-f]{16})\.seg")
TEMPORARY = ".tmp"
_LONGEST_JOB = 120
_LOCK = threading.Lock()


class MappedBlock(Protocol):
    """A writable mapping of a whole segment."""

    @property
    def buf(self) -> memoryview:
        """All its bytes."""

    def close(self) -> None:
        """Unmap it; buffers still in use keep the mapping until they are freed."""


class _NoTracker:
    """Stands in for the module `resource_tracker` while a block is opened: nothing is registered, no tracker starts."""

    register = unregister = staticmethod(lambda name, rtype: None)  # noqa: ARG005 -- the module's signature


class SharedBlock(shared_memory.SharedMemory):
    """A `SharedMemory` unknown to every resource tracker, whose buffers may outlive `close()`."""

    def __init__(self, name: str, *, create: bool = False, size: int = 0) -> None:
        if sys.version_info >= (3, 13):
            super().__init__(name, create=create, size=size, track=False)
            return
        with _LOCK:  # replaces the tracker inside the module `shared_memory` only, while the block is opened
            module: Any = shared_memory
            tracker, module.resource_tracker = module.resource_tracker, _NoTracker
            try:
                super().__init__(name, create=create, size=size)
            finally:
                module.resource_tracker = tracker

    _fd: int

    if TYPE_CHECKING:  # the parent's may be None, which this one is only once it is closed

        @property
        def buf(self) -> memoryview:
            """All its bytes; invalid once it is closed."""

    @property
    def inode(self) -> int:
        """Of the open block."""
        return os.fstat(self._fd).st_ino

    def close(self) -> None:
        """Unmap it, or leave that to the last buffer in use."""
        try:
            super().close()
        except BufferError:  # an array over a slot is still in use
            self._buf = self._mmap = None
            os.close(self._fd)
            self._fd = -1


class FileBlock:
    """The same for a file on another tmpfs."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self.buf = memoryview(self._map)

    def close(self) -> None:
        """Unmap it, or leave that to the last buffer in use."""
        with contextlib.suppress(BufferError):
            self.buf.release()
            self._map.close()


def name_of(path: Path) -> str | None:
    """Return the POSIX name of a segment's block; None for a plain file, outside /dev/shm.

    Args:
        path: Its durable name, <memory root>/<job id>/r<rank>-<layout>.seg.
    """
    job, base = path.parent.name, path.parent.parent
    if base != SHM / f"flashckpt-{os.getuid()}" or not SEGMENT_NAME.fullmatch(path.name):
        return None
    if len(job) > _LONGEST_JOB:
        job = f"{job[:_LONGEST_JOB]}~{int(digest(job.encode())):016x}"
    return f"flashckpt-{os.getuid()}-{job}-{path.stem}"


def new(path: Path, nbytes: int) -> tuple[Path, MappedBlock | None]:
    """Make the memory of a new segment under a temporary name.

    Args:
        path: Its future durable name.
        nbytes: Its size; no pages are reserved yet.

    Returns:
        Its temporary path, and its mapping (None: `mapped` makes it).
    """
    name, unique = name_of(path), f"{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
    if name is not None:
        with contextlib.suppress(PermissionError):  # no POSIX shared memory on this machine: a plain file
            return SHM / f"{name}.{unique}", SharedBlock(f"{name}.{unique}", create=True, size=nbytes)
    file = path.with_name(f".{path.name}.{unique}")
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    return file, None


def mapped(path: Path, fd: int, nbytes: int) -> MappedBlock:
    """Map an existing segment for writing: as a shared-memory block under its POSIX name if it can have one."""
    name = name_of(path)
    if name is not None and publish(path):
        with contextlib.suppress(OSError):  # another process's tracker removed the name in between
            block = SharedBlock(name)
            if block.inode == os.fstat(fd).st_ino and block.size >= nbytes:
                return block
            block.close()
    return FileBlock(fd, nbytes)


def publish(path: Path) -> bool:
    """Give a segment its POSIX name, so that other programs can find it; return whether it has it.

    It has none if another user owns a file of that name in /dev/shm.
    """
    name = name_of(path)
    if name is None:
        return False
    with contextlib.suppress(OSError):
        if (SHM / name).stat().st_ino == path.stat().st_ino:
            return True
    temporary = SHM / f"{name}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
    try:
        os.link(path, temporary)
        temporary.replace(SHM / name)  # the name was left by a segment that is gone
    except OSError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def withdraw(path: Path) -> None:
    """Remove a segment's POSIX name before its durable one: otherwise the memory would stay in use."""
    name = name_of(path)
    if name is None:
        return
    with contextlib.suppress(OSError):
        if (SHM / name).stat().st_ino == path.stat().st_ino:
            (SHM / name).unlink()


def withdraw_all(directory: Path) -> None:
    """Remove the POSIX names of all segments in a job directory that is about to be removed."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            withdraw(path)


def leftovers() -> list[Path]:
    """Return this user's blocks that belong to no job directory any more, and unfinished ones of dead processes.

    A job directory is removed after its names. If that was interrupted, or the directory was removed by hand,
    the POSIX name is the last link to the memory.
    """
    found = []
    for path in SHM.glob(f"flashckpt-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_last_link = path.is_file() and not path.is_symlink() and status.st_nlink == 1
            if status.st_uid == os.getuid() and is_last_link and not _is_creator_running(path.name):
                found.append(path)
    return found


def sweep_temporary(path: Path) -> None:
    """Remove temporary files of processes that were killed while creating this segment."""
    name = name_of(path)
    places = [path.parent.glob(f".{path.name}.*{TEMPORARY}")]
    if name is not None:
        places.append(SHM.glob(f"{name}.*{TEMPORARY}"))
    for left in (file for place in places for file in place):
        if not _is_creator_running(left.name):
            with contextlib.suppress(OSError):
                left.unlink()


def _is_creator_running(name: str) -> bool:
    """Whether a temporary name carries the pid of a running process."""
    if not name.endswith(TEMPORARY):
        return False
    pid = name.removesuffix(TEMPORARY).split(".")[-2]
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
