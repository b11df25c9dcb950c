"""The memory tier without memory: files of all nodes in one dictionary, with locks that end with their holder."""

from __future__ import annotations

import errno
import functools
import os as real_os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from simulation.clock import CLOCK, Process


class SimFile:
    """Bytes, when they were written, and who holds which of them locked."""

    __slots__ = ("buffer", "ino", "keepers", "locks", "mtime_ns")

    def __init__(self, ino: int, size: int = 0) -> None:
        self.buffer = bytearray(size)
        self.ino, self.mtime_ns = ino, CLOCK.time_ns()
        self.locks: dict[int, dict[SimLease, bool]] = {}
        self.keepers: set[SimLease] = set()  # that hold more than one byte


class Files:
    """The files of all nodes, by folder and name."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, SimFile]] = {}
        self.descriptors: dict[int, SimFile] = {}
        self.on_touch: dict[str, Callable[[], None]] = {}
        self._ino = self._descriptor = 10

    def find(self, path: SimPath) -> SimFile:
        """Return a file; FileNotFoundError where there is none."""
        try:
            return self.folders[path.folder][path.name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path)) from None

    def make(self, path: SimPath, size: int = 0) -> SimFile:
        """Make a file, in place of one that is there."""
        self._ino += 1
        made = self.folders.setdefault(path.folder, {})[path.name] = SimFile(self._ino, size)
        return made

    def write(self, path: SimPath, raw: bytes) -> None:
        """Replace a file as a whole."""
        CLOCK.scheduler.check()
        self.make(path).buffer[:] = raw

    def remove(self, path: SimPath) -> None:
        """Remove a file if it is there."""
        self.folders.get(path.folder, {}).pop(path.name, None)

    def open(self, path: SimPath, flags: int = 0, **_: object) -> int:
        """Return a descriptor."""
        try:
            found = self.find(path)
        except FileNotFoundError:
            if not flags & real_os.O_CREAT:
                raise
            found = self.make(path)
        self._descriptor += 1
        self.descriptors[self._descriptor] = found
        return self._descriptor

    def touch(self, path: SimPath) -> None:
        """Set the time of a file, and wake who watches its folder."""
        CLOCK.scheduler.check()
        try:
            self.find(path).mtime_ns = CLOCK.time_ns()
        except FileNotFoundError:
            self.make(path)
        self.on_touch.get(path.folder, lambda: None)()

    def rename(self, old: SimPath, new: SimPath) -> None:
        """Move a file in place of another, and wake who watches its folder."""
        CLOCK.scheduler.check()
        found = self.find(old)
        self.remove(old)
        self.folders[new.folder][new.name] = found
        self.on_touch.get(new.folder, lambda: None)()

    def lose(self, prefix: str) -> None:
        """A machine is gone, and its memory with it."""
        for folder in [one for one in self.folders if one == prefix or one.startswith(prefix + "/")]:
            del self.folders[folder]


FILES = Files()


class SimPath:
    """A path in `FILES`, with what the product asks of a `Path`."""

    __slots__ = ("_text", "folder", "name")

    def __init__(self, text: str | SimPath) -> None:
        self._text = str(text)
        self.folder, _, self.name = self._text.rpartition("/")

    @property
    def parent(self) -> SimPath:
        return SimPath(self.folder)

    def __truediv__(self, name: str) -> SimPath:
        return _inside(self._text, name)

    def with_name(self, name: str) -> SimPath:
        return _inside(self.folder, name)

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimPath) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __lt__(self, other: SimPath) -> bool:
        return self._text < other._text

    def stat(self) -> Any:
        found = SimFile(1) if self._text in FILES.folders else FILES.find(self)
        return SimpleNamespace(
            st_ino=found.ino, st_mtime_ns=found.mtime_ns, st_size=len(found.buffer), st_dev=1,
            st_blocks=-(-len(found.buffer) // 512),
        )  # fmt: skip

    lstat = stat

    def exists(self) -> bool:
        try:
            FILES.find(self)
        except FileNotFoundError:
            return self._text in FILES.folders
        return True

    def iterdir(self) -> Iterator[SimPath]:
        names = FILES.folders.get(self._text)
        if names is None:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(self))
        return iter([self / name for name in names])

    def read_text(self, encoding: str = "") -> str:
        del encoding
        return bytes(FILES.find(self).buffer).decode()

    def touch(self, mode: int = 0) -> None:
        del mode
        CLOCK.scheduler.check()
        FILES.make(self)

    def unlink(self, missing_ok: bool = False) -> None:
        del missing_ok
        CLOCK.scheduler.check()
        FILES.remove(self)


@functools.lru_cache(maxsize=4096)  # the same few for each node, again and again
def _inside(folder: str, name: str) -> SimPath:
    return SimPath(f"{folder}/{name}")


class SimLease:
    """In place of `Lease`: locks on single bytes, which end with the process that took them."""

    def __init__(self, path: SimPath, *, create: bool = False, dir_fd: int | None = None) -> None:
        del dir_fd
        self._file: SimFile | None = None
        self._bytes: set[int] = set()
        self._kept: range = range(0)
        self.fd = FILES.open(path, real_os.O_CREAT if create else 0)
        self._file = FILES.descriptors[self.fd]
        self._process = CLOCK.scheduler.process
        if self._process is not None:
            held_by.setdefault(self._process, set()).add(self)

    def exclusive(self, byte: int) -> bool:
        return self._take(byte, exclusively=True)

    def shared(self, byte: int, nbytes: int = 1) -> bool:
        if nbytes > 1:  # what a pin keeps of a slot that it gives back
            assert self._file is not None
            self._kept = range(byte, byte + nbytes)
            self._file.keepers.add(self)
        return self._take(byte, exclusively=False)

    def _take(self, byte: int, *, exclusively: bool) -> bool:
        CLOCK.scheduler.check()
        assert self._file is not None
        holders = self._file.locks.setdefault(byte, {})
        if any(lease is not self and (exclusively or alone) for lease, alone in holders.items()):
            return False
        holders[self] = exclusively
        self._bytes.add(byte)
        return True

    def release(self, byte: int, nbytes: int = 1) -> None:
        if self._file is not None:
            if byte in self._kept:
                after = byte == self._kept.start
                self._kept = range(byte + nbytes, self._kept.stop) if after else range(self._kept.start, byte)
            self._file.locks.get(byte, {}).pop(self, None)
            self._bytes.discard(byte)

    def first_held(self, byte: int, nbytes: int) -> tuple[int, int] | None:
        assert self._file is not None
        found = [one._kept for one in self._file.keepers if one is not self]
        inside = [(kept.start, kept.stop) for kept in found if kept and byte <= kept.start < byte + nbytes]
        return min(inside, default=None)

    def held_by_other(self, byte: int) -> bool:
        assert self._file is not None
        return any(lease is not self for lease in self._file.locks.get(byte, ()))

    def close(self) -> None:
        for byte in list(self._bytes):
            self.release(byte)
        if self.fd >= 0:
            FILES.descriptors.pop(self.fd, None)
        self.fd = -1
        if self._file is not None:
            self._file.keepers.discard(self)
        if self._process is not None:
            held_by.get(self._process, set()).discard(self)


held_by: dict[Process, set[SimLease]] = {}


def let_go(process: Process) -> None:
    """A process is dead: the kernel drops its locks."""
    for lease in list(held_by.pop(process, ())):
        lease.close()


class FileOs:
    """In place of the module `os` where the product reads and writes files of the memory tier."""

    O_RDWR, O_RDONLY, O_CREAT, O_WRONLY = real_os.O_RDWR, real_os.O_RDONLY, real_os.O_CREAT, real_os.O_WRONLY
    O_EXCL, O_CLOEXEC, O_TRUNC, SEEK_SET = real_os.O_EXCL, real_os.O_CLOEXEC, real_os.O_TRUNC, real_os.SEEK_SET
    environ, pathsep, path = real_os.environ, real_os.pathsep, real_os.path
    urandom, fsdecode = staticmethod(bytes), staticmethod(real_os.fsdecode)
    getuid = staticmethod(real_os.getuid)

    @staticmethod
    def getpid() -> int:
        """Return a number of the process that runs."""
        process = CLOCK.scheduler.process
        return 1 if process is None else pid_of(process)

    @staticmethod
    def pread(fd: int, count: int, at: int) -> bytes:
        return bytes(FILES.descriptors[fd].buffer[at : at + count])

    @staticmethod
    def preadv(fd: int, parts: list[memoryview], at: int) -> int:
        (out,) = parts
        raw = FILES.descriptors[fd].buffer[at : at + len(out)]
        out[: len(raw)] = raw
        return len(raw)

    @staticmethod
    def pwrite(fd: int, raw: bytes, at: int) -> int:
        CLOCK.scheduler.check()
        FILES.descriptors[fd].buffer[at : at + len(raw)] = raw
        return len(raw)

    @staticmethod
    def fstat(fd: int) -> Any:
        found = FILES.descriptors[fd]
        return SimpleNamespace(st_dev=1, st_ino=found.ino, st_size=len(found.buffer), st_uid=real_os.getuid())

    @staticmethod
    def dup(fd: int) -> int:
        FILES._descriptor += 1
        FILES.descriptors[FILES._descriptor] = FILES.descriptors[fd]
        return FILES._descriptor

    @staticmethod
    def close(fd: int) -> None:
        FILES.descriptors.pop(fd, None)

    @staticmethod
    def utime(path: SimPath | str, *, ns: tuple[int, int] | None = None, follow_symlinks: bool = True) -> None:
        del follow_symlinks
        found = FILES.find(path := SimPath(path))
        if ns is None:
            FILES.touch(path)
        else:
            found.mtime_ns = ns[1]

    @staticmethod
    def lstat(path: str) -> Any:
        return SimPath(path).stat()

    @staticmethod
    def listdir(folder: SimPath) -> list[str]:
        return [one.name for one in folder.iterdir()]

    @staticmethod
    def kill(pid: int, number: int) -> None:
        del number
        process = _processes.get(pid)
        if process is None or not process.alive:
            raise ProcessLookupError(pid)


_pids: dict[Process, int] = {}
_processes: dict[int, Process] = {}


def pid_of(process: Process) -> int:
    """Return the number of a process."""
    if process not in _pids:
        _pids[process] = 100 + len(_pids)
        _processes[_pids[process]] = process
    return _pids[process]


class SimBlock:
    """In place of a writer's mapping."""

    def __init__(self, file: SimFile) -> None:
        self.buf = memoryview(file.buffer)

    def close(self) -> None:
        """Keep it: a killed process may still be in the middle of it."""


class Mapped(np.ndarray[Any, Any]):
    """In place of `GuardedMap`."""

    is_lost = False

    @classmethod
    def of(cls, fd: int, nbytes: int, at: int) -> Any:
        """Return the bytes of a file as a reader maps them."""
        whole = np.frombuffer(memoryview(FILES.descriptors[fd].buffer).toreadonly(), np.uint8)
        return whole[at : at + nbytes].view(cls)


def read_file(path: SimPath, **_: object) -> bytes:
    """In place of `private.read_file`."""
    return bytes(FILES.find(path).buffer)


def reset() -> None:
    """Forget all files of the simulation before."""
    FILES.folders.clear()
    FILES.descriptors.clear()
    FILES.on_touch.clear()
    held_by.clear()
    _pids.clear()
    _processes.clear()
