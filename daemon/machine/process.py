"""Linux process plumbing: death signals, subreaping, and the waits that use them (torch-free)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from flashckpt.shm.persister_process import stat_of, state_of

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_ARG_START = 45  # of /proc/PID/stat, counted from the state: where the memory of the command line begins, then its end
_ENV_START = 47
_SESSION, _CPU = 3, slice(11, 15)  # counted likewise: user and system time, its own and of children that were reaped
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def set_title(name: str, line: str) -> None:
    """Let ps, top and pgrep show this process as `name` (15 bytes), and its command line as `line`.

    The command line is written over the one the process was started with, and cut to its length. Otherwise a
    fork without exec keeps its parent's, and all ranks and the zygote would read "dlrun".
    """
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:
        text = line.encode(errors="surrogateescape")[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def hide_variable(name: str) -> None:
    """Overwrite the value of a variable where /proc/PID/environ shows it; forks inherit that. `os.environ` keeps it."""
    fields = stat_of(os.getpid())
    if len(fields) <= _ENV_START + 1:
        return
    start, end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])
    if not 0 < start < end:
        return
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if entry.startswith(os.fsencode(f"{name}=")):
            ctypes.memset(at + len(name) + 1, 0, len(entry) - len(name) - 1)
        at += len(entry) + 1


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that is its parent ends.

    The caller checks its parent again afterwards: the parent may have died just before.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def adopt_parent(parent: int, *, deadline_s: float = 30.0) -> None:
    """Wait until `parent` is this process's parent, then die with it; ends the process if the parent is gone or never appears."""
    end = time.monotonic() + deadline_s
    while os.getppid() != parent:
        if time.monotonic() > end or has_ended(parent):
            os._exit(1)
        time.sleep(0.0005)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or waits to be reaped."""
    return state_of(pid) in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP, a debugger)."""
    return state_of(pid) in ("T", "t")


def session_cpu_s(leaders: Collection[int]) -> float:
    """Return the seconds of processor time that the sessions of these processes have used: they, and what they have started."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        fields = stat_of(int(entry.name)) if entry.name.isdigit() else []
        if len(fields) > _CPU.stop and int(fields[_SESSION]) in leaders:
            ticks += sum(map(int, fields[_CPU]))
    return ticks / os.sysconf("SC_CLK_TCK")


def thread_count() -> int:
    """Return the number of threads of this process as the kernel sees it."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def kill_group(pid: int, signum: int, *, reaped: bool = False) -> None:
    """Send a signal to the whole process group of a child.

    A child that has not created its group yet gets the signal itself, unless it was `reaped`: its pid may
    belong to another process by now.
    """
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        if not reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
    except PermissionError:
        pass  # only members that changed their user are left


def wait_readable(fds: list[int], timeout_s: float | None) -> list[int]:
    """Return those of `fds` (pidfds, sockets, pipes) that are ready within `timeout_s` seconds."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    ready = poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
    return [fd for fd, _ in ready]


def exit_code(pidfd: int) -> int | None:
    """Reap a child by its pidfd and return its exit code (negative: signal), None while it runs."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL  # something else reaped it: its exit code is lost
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def zombies() -> set[int]:
    """Return the ended children of this process that nobody has waited for."""
    with contextlib.suppress(OSError):  # CONFIG_PROC_CHILDREN, a thread that ended meanwhile
        lists = [path.read_text(encoding="utf-8") for path in Path("/proc/self/task").glob("*/children")]
        return {pid for words in lists for pid in map(int, words.split()) if state_of(pid) == "Z"}
    return set()


def reap(pids: set[int]) -> None:
    """Reap these children, where they have ended and nobody has done so."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


_own: set[int] = set()
_starting = threading.Lock()


@contextlib.contextmanager
def own_child(start: Callable[[], subprocess.Popen[Any]]) -> Iterator[subprocess.Popen[Any]]:
    """Start a child whose exit code its owner wants: `reap_strays`, in another thread, leaves it alone within the block."""
    with _starting:
        child = start()
        _own.add(child.pid)
    try:
        yield child
    finally:
        _own.discard(child.pid)


def reap_strays(known: set[int]) -> int:
    """Reap ended orphans that a subreaper inherited, except the children in `known` and of `own_child`; return how many."""
    if not _starting.acquire(blocking=False):  # what is being started may have ended, and its number is not known yet
        return 0
    try:
        return _reap_but(known | _own)
    finally:
        _starting.release()


def _reap_but(known: set[int]) -> int:
    reaped = 0
    while True:
        try:
            result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if result is None or result.si_pid in known:
            return reaped
        os.waitid(os.P_PID, result.si_pid, os.WEXITED | os.WNOHANG)
        reaped += 1
