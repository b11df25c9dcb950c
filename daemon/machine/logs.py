"""Log lines of the daemon: each one names its generation, rank and step.

2026-11-20 13:35:07 INFO [gen 2 | rank 5 | step 1200] 512.0 MB in 1 pack after 0.4 s
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from flashckpt.errors import FlashckptError
from flashckpt.nonfatal import Nonfatal, log_stream
from flashckpt.report import PrintableFormatter
from flashckpt.shm.private import open_file, private_directory

_where: ContextVar[tuple[tuple[str, int], ...]] = ContextVar("flashckpt_where", default=())
LOG_BYTES = 4 << 20
"""Size at which the log is turned over: it lies in memory beside the snapshots."""
COPY_S = 1.0
"""Seconds between two looks of `LogCopy`."""
COPY_NAME = "persister.log"
COMPARED_BYTES = 64 << 10
"""Bytes at the end of a copy by which it is known to be one of the present log."""
FORMAT = "%(asctime)s %(levelname)s [%(where)s] %(message)s"


@contextlib.contextmanager
def log_context(*, generation: int | None = None, rank: int | None = None, step: int | None = None) -> Iterator[None]:
    """Within the block, lines of this thread carry these numbers; None leaves the outer value."""
    given = {name: value for name, value in (("gen", generation), ("rank", rank), ("step", step)) if value is not None}
    known = {**dict(_where.get()), **given}
    token = _where.set(tuple(known.items()))
    try:
        yield
    finally:
        _where.reset(token)


class WhereFilter(logging.Filter):
    """Adds `where` to every record: "gen 2 | rank 5 | step 1200", "-" for what is not known."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True."""
        known = dict(_where.get())
        record.where = " | ".join(f"{name} {known.get(name, '-')}" for name in ("gen", "rank", "step"))
        return True


def configure() -> None:
    """Write our lines to standard error, which is `daemon.log` in the job directory."""
    handler = logging.StreamHandler(log_stream(""))
    handler.addFilter(WhereFilter())
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def turn_over(path: Path, *, streams: Sequence[int] = (1, 2), limit: int = LOG_BYTES) -> bool:
    """Begin a new log where the present one has grown past `limit`; that one becomes NAME.1, and the one before it goes.

    What writes to the descriptors, the C library and faulthandler included, continues in the new file.

    Args:
        path: The log, in a directory of our own.
        streams: Descriptors of it; nothing is done if the first of them is something else.
        limit: Bytes.

    Returns:
        Whether there is a new log.
    """
    held = os.fstat(streams[0])
    if held.st_size <= limit:
        return False
    with contextlib.suppress(OSError, FlashckptError), private_directory(path.parent) as inside:
        if not os.path.samestat(held, os.stat(path.name, dir_fd=inside, follow_symlinks=False)):
            return False
        os.rename(path.name, f"{path.name}.1", src_dir_fd=inside, dst_dir_fd=inside)
        new = open_file(path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, dir_fd=inside)
        for stream in streams:
            os.dup2(new, stream)
        os.close(new)
        return True
    return False  # the directory has gone, or memory is full: another turn tries again


class LogCopy:
    """Copies the daemon's log into another folder, from a thread that alone waits where that disk hangs.

    Args:
        path: The log; `turn_over` may take it away.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._folder, self._into = path, "", ""
        self._source, self._end = -1, threading.Event()
        self._thread: threading.Thread | None = None
        self._writing = Nonfatal(COPY_NAME)

    def follow(self, folder: str) -> None:
        """Copy the whole log, and what comes, into a folder that exists; "": nowhere."""
        self._folder = folder
        if folder and self._thread is None:
            thread = threading.Thread(target=self._work, name="flashckpt-log", daemon=True)
            with contextlib.suppress(RuntimeError):  # a limit on threads: the next turn tries again
                thread.start()
                self._thread = thread

    def close(self, limit_s: float = 2.0) -> None:
        """Copy the rest; a disk that hangs does not get it."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    def _work(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._end.is_set()
            with contextlib.suppress(OSError, FlashckptError):  # the job directory has gone
                self._copy()
            self._end.wait(COPY_S)
        if self._source >= 0:
            os.close(self._source)

    def _copy(self) -> None:
        folder = self._folder
        if folder != self._into:
            self._into = folder
            self._open()
            if folder:
                self._resume(Path(folder) / COPY_NAME)
        while folder and self._source >= 0:
            while data := os.read(self._source, 1 << 20):
                self._writing.place = f"{folder}/{COPY_NAME}"
                self._writing.attempt(functools.partial(_append, self._writing.place, data), data.count(b"\n"))
            if os.path.samestat(os.fstat(self._source), self._path.lstat()):
                return
            self._open()

    def _resume(self, copy: Path) -> None:
        """Leave out what the persister before has copied, unless the log was turned over since."""
        with contextlib.suppress(FileNotFoundError), copy.open("rb") as file:
            there = file.seek(0, os.SEEK_END)
            compared = min(there, COMPARED_BYTES)
            file.seek(there - compared)
            if file.read() == os.pread(self._source, compared, there - compared):
                os.lseek(self._source, there, os.SEEK_SET)

    def _open(self) -> None:
        if self._source >= 0:
            os.close(self._source)
            self._source = -1
        self._source = open_file(self._path, os.O_RDONLY)


def _append(path: str, data: bytes) -> None:
    with open(path, "ab") as file:  # noqa: PTH123 -- as Nonfatal has its name
        file.write(data)
