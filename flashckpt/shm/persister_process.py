"""One persister as its owner sees it: started, confirmed, ended, stopped, silent, and what its log says last. Torch-free."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from pathlib import Path

from flashckpt.errors import DamagedError
from flashckpt.shm.private import DaemonStatus, open_file

MODULE = "flashckpt.daemon.persister.service"
LOG_NAME = "daemon.log"
_TAIL = 4096
_LONGEST_GAP_S = 2.0
_KEPT = 600
_IS_ROUTINE = re.compile(r"\S+ \S+ INFO \[")
_PREFIX = re.compile(r"^\S+ \S+ [A-Z]+ \[[^]]*\] ")


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


class PersisterProcess:
    """A persister that was started here, by its pidfd.

    Where this process is its parent or a subreaper above it, `has_ended` reaps it and learns its exit code.
    """

    def __init__(self, pid: int, log: Path, log_start: int) -> None:
        self.pid, self.started_s = pid, time.monotonic()
        self.code: int | None = None
        self._log, self._from = log, log_start
        self._fd = _pidfd(pid)

    def has_ended(self) -> bool:
        """Whether it has ended; reaps it where that is up to this process."""
        if self._fd < 0:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(0):
            return False
        with contextlib.suppress(ChildProcessError):  # a child of init, or reaped by somebody else
            found = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
            if found is not None:
                self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self.close()
        return True

    def how_it_ended(self) -> str:
        """Return what is known of its end: "ended with exit code 10: the last words of its log"."""
        if self.code is not None and self.code < 0:
            how = f"was ended by {_signal_name(-self.code)}"
        else:
            how = "ended" if self.code is None else f"ended with exit code {self.code}"
        said = last_words(self._log, self._from)
        if not said:
            return f"{how}, and its log says nothing"
        return how if _IS_ROUTINE.match(said) else f"{how}: {_PREFIX.sub('', said)}"

    def kill(self) -> None:
        """SIGKILL."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it; it keeps running."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def kill_persister(pid: int, job: Path) -> bool:
    """SIGKILL the persister of a job directory; False, and nothing is done, where `pid` is another process by now."""
    fd = _pidfd(pid) if pid > 0 else -1
    if fd < 0:
        return False
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if MODULE.encode() not in words or os.fsencode(job) not in words:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class Silence:
    """How long the persister has written no status, counted over looks: a clock that was set does not count.

    Neither does time in which the one who looks was stopped as well.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._mark: object = self
        self._looked_s = time.monotonic()

    def see(self, status: DaemonStatus | None) -> float:
        """Look at the present status; returns the seconds."""
        mark = None if status is None else (status.pid, status.updated_ns)
        now = time.monotonic()
        gap_s, self._looked_s = min(now - self._looked_s, _LONGEST_GAP_S), now
        self.seconds = self.seconds + gap_s if mark == self._mark else 0.0
        self._mark = mark
        return self.seconds


def last_words(log: Path, start: int = 0) -> str:
    """Return the last message of a log behind byte `start` in one line, "" where there is none.

    Of a traceback that is its last line; of a message of several lines, all of them.
    """
    try:
        with os.fdopen(open_file(log, os.O_RDONLY), "rb") as file:
            size = log_size(log)
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


def log_size(path: Path) -> int:
    """Return the bytes of a log, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
