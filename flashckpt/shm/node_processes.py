"""The processes of a node beside its ranks, as others see them: the persister, and the dlrun agent by its folder. Torch-free.

A persister is started, confirmed, ended, stopped or silent, and its log says last what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from pathlib import Path

from flashckpt.environment import env
from flashckpt.errors import FINAL_CODES, DamagedError
from flashckpt.shm.lease import Lease
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


# -- The folder of a dlrun agent: what its ranks leave there for it (job, permanent error, display), and their key -


LOCK = "lock"
"""File in the folder whose byte 0 the agent holds as long as it runs."""

LATE = "late-variable"
"""File in the folder in which a rank names a variable that its script changes too late for a standby process."""


def agent_folder() -> Path | None:
    """Return the folder of the agent above this process, or None without dlrun.

    None too where the agent that the environment names has ended: the variable was inherited, by a shell or an image.
    """
    folder = env.FLASHCKPT_AGENT_DIR
    return Path(folder) if folder and _is_held(Path(folder)) else None


def ended_agent() -> str:
    """Return how the environment names an agent that is not running; "" where it names none, or one that runs."""
    folder = env.FLASHCKPT_AGENT_DIR
    return f"FLASHCKPT_AGENT_DIR={folder}" if folder and not _is_held(Path(folder)) else ""


def _is_held(folder: Path) -> bool:
    try:
        lease = Lease(folder / LOCK)
    except OSError:
        return False
    try:
        return lease.held_by_other(0)
    except OSError:
        return True  # a file system without locks: the agent is believed
    finally:
        lease.close()


def write_job(folder: Path, job: Path) -> None:
    """Record the job directory of the ranks below an agent; the same for all of them. They know the job's newest generation."""
    _replace(folder / "job", str(job))
    (folder / "missed").unlink(missing_ok=True)


def read_job(folder: Path) -> Path | None:
    """Return the job directory that a rank recorded, or None.

    Raises:
        OSError: it cannot be read, though it may be there.
    """
    try:
        text = (folder / "job").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return Path(text) if text else None


def note_missed(folder: Path) -> None:
    """Record that the job ran without this node meanwhile, until ranks have begun here again."""
    (folder / "missed").touch()


def has_missed(folder: Path) -> bool:
    """Return whether the job ran without this node since ranks last began here."""
    return (folder / "missed").exists()


def write_key(folder: Path, key: bytes) -> None:
    """Leave the key of the ranks (job_key) below an agent; nobody else can read it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(folder / "key", flags, 0o600), "wb") as file:
        file.write(key)


def read_key(folder: Path) -> bytes:
    """Return the key of the ranks below an agent; b"" where it has left none."""
    try:
        return (folder / "key").read_bytes()
    except FileNotFoundError:
        return b""


def write_permanent_error(folder: Path, exit_code: int) -> None:
    """Record that a restart cannot fix an error, before the agent kills the rank that has it; other errors are none."""
    if exit_code in FINAL_CODES:
        _replace(folder / "refused", str(exit_code))


def read_permanent_error(folder: Path) -> int:
    """Return the exit code of a rank's permanent error, 0 if there is none."""
    try:
        return int((folder / "refused").read_text(encoding="utf-8") or "0")
    except (OSError, ValueError):
        return 0


def forget_permanent_error(folder: Path) -> None:
    """Remove the record: the next generation may have another size, which the error was about."""
    (folder / "refused").unlink(missing_ok=True)


def late_variable(folder: Path) -> str:
    """Return the variable that a rank names in LATE, or ""."""
    try:
        return (folder / LATE).read_text(encoding="utf-8")
    except OSError:
        return ""


def note_waiting(folder: Path) -> None:
    """Record that a rank waits for storage just now: it does not hang."""
    (folder / "waiting").touch()


def waited_at(folder: Path) -> float:
    """Return when a rank last recorded that it waits, 0 if none did."""
    try:
        return (folder / "waiting").stat().st_mtime
    except OSError:
        return 0.0


def note_bad_numbers(folder: Path, step: int, *, is_here: bool) -> None:
    """Record that numbers became bad in a step on one node alone: on this one, or on another, which clears this one."""
    with (folder / "bad-numbers").open("a" if is_here else "w", encoding="utf-8") as file:
        file.write(f"{step}\n" if is_here else "")


def bad_numbers(folder: Path) -> list[int]:
    """Return the steps, each once, in which numbers became bad on this node alone, if they did so on no other since."""
    try:
        return sorted({int(step) for step in (folder / "bad-numbers").read_text(encoding="utf-8").split()})
    except OSError:
        return []


def note_suspect(folder: Path, first: int, last: int) -> None:
    """Record that numbers on this rank became bad, or grew as by a flipped bit, in one of these steps of this start; 0, 0: not any more."""
    with (folder / "suspect").open("a", encoding="utf-8") as file:
        file.write(f"{env.FLASHCKPT_RESTART} {env.RANK} {first} {last}\n")


def bad_steps(folder: Path) -> tuple[int, int] | None:
    """Return the steps in one of which numbers here became bad first, as far as the ranks know; None where none did."""
    try:
        lines = [line.split() for line in (folder / "suspect").read_text(encoding="utf-8").splitlines()]
        found = [(int(first), int(last)) for *_, first, last in lines]
    except (OSError, ValueError):
        return None
    return min((steps for steps in found if steps[1]), key=lambda steps: steps[1], default=None)


def end_suspects(folder: Path, start: int, restored: int) -> None:
    """Drop what was noted and holds no more: numbers are good again, or the start that has ended went back to before it.

    Args:
        folder: The agent's.
        start: The number of that start.
        restored: The step that it began with; below 0: it did not come so far.
    """
    path = folder / "suspect"
    with contextlib.suppress(OSError, ValueError):  # a line cut short
        left: list[list[int]] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            begun, rank, first, last = map(int, line.split())
            if not last:
                left = [one for one in left if one[1] != rank]
            elif begun == start or restored < 0 or first <= restored:
                left.append([begun, rank, first, last])
        _replace(path, "".join("{} {} {} {}\n".format(*one) for one in left))


def note_display(folder: Path) -> None:
    """Record that a rank draws on the terminal: whoever writes there next erases what is below the cursor first."""
    (folder / "display").touch()


def has_display(folder: Path) -> bool:
    """Return whether a rank draws on the terminal."""
    return (folder / "display").exists()


def forget_display(folder: Path) -> bool:
    """Remove the record after the ranks have ended; return whether there was one."""
    try:
        (folder / "display").unlink()
    except OSError:
        return False
    return True


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
