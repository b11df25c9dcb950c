"""OFD locks as proof that their holder is alive: they end with the process and never cross a fork.

A lock says nothing about data: only headers and digests decide what may be read.
An open-file-description lock is shared by every descriptor of that description, so a lease opens its
own descriptor, which is never mapped (mmap keeps a duplicate) and is closed in forked children.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import weakref
from pathlib import Path

from flashckpt.shm.private import open_file

_FLOCK = struct.Struct("hhqqi")  # l_type, l_whence, l_start, l_len, l_pid: native alignment of struct flock
_GUARD = threading.Lock()  # no fork between opening a lock descriptor and knowing it
_OPEN: weakref.WeakSet[Lease] = weakref.WeakSet()


class Lease:
    """A separate descriptor on `path`, for locks on single bytes; `close()` or garbage collection ends them all."""

    def __init__(self, path: str | Path, *, create: bool = False, dir_fd: int | None = None) -> None:
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        with _GUARD:
            self._cell = [open_file(path, flags, dir_fd=dir_fd)]
            _OPEN.add(self)
        weakref.finalize(self, _close, self._cell).atexit = False

    @property
    def fd(self) -> int:
        """The descriptor; -1 once closed, and in a forked child. Never map it: a mapping keeps a duplicate."""
        return self._cell[0]

    def exclusive(self, byte: int) -> bool:
        """Try to lock one byte for this lease alone; False if another lease holds it."""
        return self._set(fcntl.F_WRLCK, byte)

    def shared(self, byte: int) -> bool:
        """Try to lock one byte together with other sharers; False if it is held exclusively."""
        return self._set(fcntl.F_RDLCK, byte)

    def release(self, byte: int) -> None:
        """Release one byte."""
        if self.fd >= 0:
            self._set(fcntl.F_UNLCK, byte)

    def held_by_other(self, byte: int) -> bool:
        """Return whether another lease holds the byte, shared or exclusively; takes nothing."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """End every lock of this lease."""
        _OPEN.discard(self)
        _close(self._cell)

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


def _close(cell: list[int]) -> None:
    fd, cell[0] = cell[0], -1
    if fd >= 0:
        os.close(fd)


def is_at(path: Path, fd: int) -> bool:
    """Return whether `path` still names the open file (st_nlink is not enough: `create` links)."""
    try:
        return path.lstat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """A forked child must hold no lease, or its dead rank would count as alive."""
    for lease in list(_OPEN):
        _close(lease._cell)  # noqa: SLF001 -- the same module
    _OPEN.clear()
    _GUARD.release()


os.register_at_fork(before=_GUARD.acquire, after_in_parent=_GUARD.release, after_in_child=_close_in_child)
