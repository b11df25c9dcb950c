"""Memory of jobs whose processes are all dead: what may be removed, and its removal. Torch-free.

Such memory is *resumable*, not garbage: a restart finds its snapshots. It is removed only when its job ended cleanly
(by the daemon), when the user names the job, or when it is older than FLASHCKPT_KEEP_DEAD seconds (24 h).
Segments that a newer common snapshot of the same job supersedes are the daemon's to retire (M1).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashckpt.environment import env
from flashckpt.errors import FlashckptError, JobInUseError, NoCheckpointError
from flashckpt.shm import block
from flashckpt.shm.job_directory import JobDirectory, memory_root
from flashckpt.shm.lease import Lease
from flashckpt.shm.persister_process import LOG_NAME
from flashckpt.shm.private import Skipped, private_directories, private_directory, remove_tree
from flashckpt.shm.segment import Segment

_ENDED = ".ended-"
_LOCKS = ("live.lock", "daemon.lock")
_OF_ALL = {*_LOCKS, LOG_NAME, "daemon.msgpack", "log-folder", "ended", "persist-now"}
"""Files that a persister and an agent leave also where no rank has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadMemory:
    """The memory of one dead job on this node.

    Attributes:
        job: Job id, or the name of a directory whose removal was interrupted.
        age_s: Seconds since the job last did something here.
        nbytes: Bytes of host memory it holds.
        is_expired: Whether it may be removed without being named.
    """

    job: str
    path: Path
    age_s: float
    nbytes: int
    is_expired: bool


def dead_memory(job: str | None = None) -> list[DeadMemory]:
    """Return the memory of dead jobs on this node, resumable or expired; removes nothing.

    Args:
        job: Only this job; every dead job of this user if None.

    Raises:
        NoCheckpointError: `job` has no memory here.
        JobInUseError: `job` is alive.
    """
    return look(job)[0]


def look(job: str | None = None) -> tuple[list[DeadMemory], list[Skipped]]:
    """Return what `dead_memory` does, and foreign files among it, which are not opened, measured or removed."""
    keep_s = env.FLASHCKPT_KEEP_DEAD
    paths, skipped = private_directories(memory_root())
    if job is not None and job not in [path.name for path in paths]:
        why = [f"{one.path}: {one.reason}" for one in skipped if one.path in (memory_root(), memory_root() / job)]
        raise NoCheckpointError(
            f"no job {job!r} in this user's memory on this machine",
            found="; ".join(why),
            expected="a directory of this user, mode drwx------" if why else "",
            remedy="flashckpt status",
        )
    found = []
    for path in paths:
        is_left = path.name.startswith(".") and _ENDED in path.name
        if (path.name.startswith(".") and not is_left) or job not in (None, path.name):
            continue
        directory = JobDirectory(path)
        if not is_left and (directory.anyone_alive() or directory.daemon_alive()):
            if job is not None:
                raise JobInUseError(f"job {job!r} is alive", state="Nothing was removed.", remedy="stop it first")
            continue
        age_s = time.time() - _touched_s(path)
        found.append(
            DeadMemory(
                job=path.name, path=path, age_s=age_s, nbytes=_nbytes(path), is_expired=is_left or age_s >= keep_s
            )
        )
    return [*found, *_unlinked_blocks(job)], skipped


def _unlinked_blocks(job: str | None) -> list[DeadMemory]:
    """Return blocks that belong to no job directory any more: it was removed by hand, or its removal was interrupted."""
    found = []
    is_default = memory_root().parent == block.SHM  # segments have a POSIX name only there
    for path in leftovers() if job is None and is_default else []:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            age_s = max(0.0, time.time() - status.st_mtime)
            nbytes = status.st_blocks * 512
            found.append(DeadMemory(job=path.name, path=path, age_s=age_s, nbytes=nbytes, is_expired=True))
    return found


def remove(dead: DeadMemory) -> int:
    """Remove one dead job's memory, under the locks that keep ranks and daemon from starting in between.

    Returns:
        Bytes that could not be removed: 0 if all of it is gone.

    Raises:
        JobInUseError: It was started since it was found; it was kept.
        FileNotFoundError: It is gone already.
    """
    if dead.path.parent == block.SHM:
        dead.path.unlink()
        return 0
    with private_directory(dead.path.parent) as base:
        if _ENDED in dead.path.name:
            return _remove_tree(dead.path, base)
        gone = take_away(dead.path, base, locks=_LOCKS)
        if gone is None:
            raise JobInUseError(f"job {dead.job!r} was just started", state="Its memory was kept.")
        return _remove_tree(gone, base)


def remove_unused(path: Path) -> None:
    """Remove a job directory without a snapshot or record, unless somebody uses it: that of an opening that was refused."""
    with contextlib.suppress(FileNotFoundError), private_directory(path.parent) as base:
        if gone := take_away(path, base, locks=_LOCKS, only_unused=True):
            remove_tree(gone.name, base)


def take_away(path: Path, base: int, *, locks: Sequence[str], only_unused: bool = False) -> Path | None:
    """Give a job directory a name under which nobody looks for it; return that, or None where somebody uses it.

    Args:
        path: The directory.
        base: Descriptor of the one around it.
        locks: Those that must be free, and are held until it is done: nobody starts in between.
        only_unused: Also None where it holds more than these and segments without a snapshot.
    """
    gone = path.with_name(f".{path.name}{_ENDED}{os.getpid()}")
    with private_directory(path, within=base) as inside, contextlib.ExitStack() as stack:
        leases = [Lease(name, create=True, dir_fd=inside) for name in locks]
        for lease in leases:
            stack.callback(lease.close)
        if not all(lease.exclusive(0) for lease in leases):
            return None
        if only_unused and any(map(_holds, (Path(folder, one) for folder, _, names in os.walk(path) for one in names))):
            return None
        # one rename: nobody ever sees half a directory under the job's name
        block.withdraw_all(path)
        os.rename(path.name, gone.name, src_dir_fd=base, dst_dir_fd=base)
    return gone


def _holds(path: Path) -> bool:
    """Return whether a file of a job is a record, or a segment with a snapshot or of which nobody can tell."""
    if path.name in _OF_ALL:
        return False
    try:
        with contextlib.closing(Segment.attach(path)) as segment:
            return any(header.is_complete for header in segment.headers())
    except (FlashckptError, OSError):  # no segment
        return True


def _remove_tree(path: Path, base: int) -> int:
    return 0 if remove_tree(path.name, base) else max(1, _nbytes(path))


def _nbytes(path: Path) -> int:
    total = 0
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                total += os.lstat(Path(folder, name)).st_blocks * 512
    return total


def _touched_s(path: Path) -> float:
    times = [0.0]
    for part in (path, *path.glob("*.seg"), *path.glob("events/*")):
        with contextlib.suppress(OSError):
            times.append(part.lstat().st_mtime)
    return max(times)


def leftovers() -> list[Path]:
    """Return this user's blocks that belong to no job directory any more, and unfinished ones of dead processes.

    A job directory is removed after its names. If that was interrupted, or the directory was removed by hand,
    the POSIX name is the last link to the memory.
    """
    found = []
    for path in block.SHM.glob(f"flashckpt-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_last_link = path.is_file() and not path.is_symlink() and status.st_nlink == 1
            if status.st_uid == os.getuid() and is_last_link and not block.is_creator_running(path.name):
                found.append(path)
    return found
