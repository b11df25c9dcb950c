"""Waiting for this node's persister: the one loop of all who wait, a rank in `wait()` and an agent that ends. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from flashckpt.errors import DamagedError
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory

_GLANCE_S = 0.001


def await_persister(
    job: JobDirectory,
    is_over: Callable[[DaemonStatus | None], bool],
    *,
    timeout_s: float | None,
    poll_s: float = 0.05,
) -> bool:
    """Look at the persister's status again and again until `is_over` says so; False where the time ends first.

    Args:
        job: Of this node.
        is_over: Takes the last status; None where there is none, or one that is being written.
        timeout_s: Seconds; None waits for ever.
        poll_s: Seconds between two looks, where the status does not change before.

    Raises:
        FormatVersionError: The persister is of another major version.
        Whatever `is_over` raises.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        mark, again_s = _mark(job), time.monotonic() + poll_s  # before it is read: what is written meanwhile is seen
        if is_over(_status_of(job)):
            return True
        if end is not None and time.monotonic() > end:
            return False
        while time.monotonic() < again_s and _mark(job) == mark:
            time.sleep(_GLANCE_S)


def _mark(job: JobDirectory) -> tuple[int, int] | None:
    """Return what most often tells one status from the next, for a fraction of the cost of reading it."""
    try:
        found = os.lstat(job.path / "daemon.msgpack")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _status_of(job: JobDirectory) -> DaemonStatus | None:
    try:
        return job.read_status()
    except DamagedError:
        return None
