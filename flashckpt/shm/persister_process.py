"""A persister from outside: its names, its state by the kernel, what its log says last. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from flashckpt.errors import DamagedError
from flashckpt.shm.private import open_file

MODULE = "flashckpt.daemon.persister.service"
LOG_NAME = "daemon.log"
_TAIL, _KEPT = 4096, 600


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; [] where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process (R, S, D, T, t, Z, X), "" where it is gone."""
    return "".join(stat_of(pid)[:1])


def last_words(log: Path, start: int = 0) -> str:
    """Return the last message of a log behind byte `start` in one line, "" where there is none.

    Of a traceback that is its last line; of a message of several lines, all of them.
    """
    try:
        with os.fdopen(open_file(log, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(start if start <= size else 0, size - _TAIL))  # a log that was turned over is shorter
            lines = file.read(_TAIL).decode(errors="replace").splitlines()
    except (OSError, DamagedError):  # something else in its place
        return ""
    lines = [line for line in lines if line.strip()]
    first = next((number for number in reversed(range(len(lines))) if not lines[number].startswith(" ")), 0)
    return in_one_line("\n".join(lines[first:]))


def in_one_line(error: str) -> str:
    """Return a rendered error in one line, without its exit code."""
    lines = [" ".join(line.split()) for line in error.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("exit code"))[:_KEPT]
