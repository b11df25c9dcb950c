"""Memory of jobs whose processes are all dead: what may go, and its removal. Torch-free.

Such memory is *resumable*, not garbage: a restart finds its snapshots. It goes only when its job ended cleanly
(the daemon does that), when the user names the job, or when it is older than FLASHCKPT_KEEP_DEAD seconds (24 h).
Segments that a newer common snapshot of the same job supersedes are the daemon's to retire (M1).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from flashckpt.errors import JobInUseError, NoCheckpointError
from flashckpt.memory import block
from flashckpt.memory.job import JobDirectory, memory_root
from flashckpt.memory.lease import Lease

KEEP_DEAD_S = 24 * 3600.0
_ENDED = ".ended-"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadMemory:
    """The memory of one dead job on this node.

    Attributes:
        job: Job id, or the name of a directory whose removal was cut short.
        path: Its directory.
        age_s: Seconds since the job last did something here.
        nbytes: Bytes of host memory it holds.
        is_expired: Whether it may go without being named.
    """

    job: str
    path: Path
    age_s: float
    nbytes: int
    is_expired: bool


def keep_dead_s() -> float:
    """Return for how many seconds memory of dead jobs is kept: FLASHCKPT_KEEP_DEAD, 24 h if not set."""
    return float(os.environ.get("FLASHCKPT_KEEP_DEAD") or KEEP_DEAD_S)


def dead_memory(job: str | None = None) -> list[DeadMemory]:
    """Return the memory of dead jobs on this node, resumable or expired; removes nothing.

    Args:
        job: Only this job; every dead job of this user if None.

    Raises:
        NoCheckpointError: `job` has no memory here.
        JobInUseError: `job` is alive.
    """
    base = memory_root()
    if job is not None and not (base / job).is_dir():
        raise NoCheckpointError(f"No job {job!r} in this machine's memory", remedy="flashckpt status")
    found = []
    for path in sorted(base.iterdir()) if base.is_dir() else []:
        is_left = path.name.startswith(".") and _ENDED in path.name
        if not path.is_dir() or (path.name.startswith(".") and not is_left) or job not in (None, path.name):
            continue
        directory = JobDirectory(path)
        if not is_left and (directory.anyone_alive() or directory.daemon_alive()):
            if job is not None:
                raise JobInUseError(f"Job {job!r} is alive", state="Nothing was removed.", remedy="stop it first")
            continue
        age_s = time.time() - _touched_s(path)
        found.append(
            DeadMemory(
                job=path.name,
                path=path,
                age_s=age_s,
                nbytes=_nbytes(path),
                is_expired=is_left or age_s >= keep_dead_s(),
            )
        )
    return found


def remove(dead: DeadMemory) -> None:
    """Remove one dead job's memory, under the locks that keep ranks and daemon from starting in between.

    Raises:
        JobInUseError: It has come to life since it was looked at; it was kept.
    """
    if _ENDED in dead.path.name:
        shutil.rmtree(dead.path, ignore_errors=True)
        return
    directory = JobDirectory(dead.path)
    with contextlib.ExitStack() as stack:
        live, daemon = Lease(directory.live_path, create=True), directory.hold_daemon()
        stack.callback(live.close)
        if daemon is not None:
            stack.callback(daemon.close)
        if daemon is None or not live.exclusive(0):
            raise JobInUseError(f"Job {dead.job!r} has just come to life", state="Its memory was kept.")
        gone = dead.path.with_name(f".{dead.job}{_ENDED}{os.getpid()}")
        block.withdraw_all(dead.path)
        dead.path.rename(gone)  # at once for everybody: half a directory is never seen under the job's name
    shutil.rmtree(gone, ignore_errors=True)


def _nbytes(path: Path) -> int:
    total = 0
    for part in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += part.lstat().st_blocks * 512
    return total


def _touched_s(path: Path) -> float:
    times = [0.0]
    for part in (path, *path.glob("*.seg"), *path.glob("events/*")):
        with contextlib.suppress(FileNotFoundError):
            times.append(part.stat().st_mtime)
    return max(times)
