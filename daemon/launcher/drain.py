"""Waiting for the daemon to persist: when PID 1 of a container exits, the daemon is killed with it."""

from __future__ import annotations

import contextlib
import logging
import os

from flashckpt.errors import FlashckptError
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory
from flashckpt.shm.persisted import await_persister

LIMIT_S = 600.0
_log = logging.getLogger("flashckpt.dlrun")


def is_last_process() -> bool:
    """Whether the daemon dies with this process: as PID 1, or if FLASHCKPT_WAIT_FLUSH=1 says so."""
    return os.getpid() == 1 or os.environ.get("FLASHCKPT_WAIT_FLUSH") == "1"


def wait_for_flush(job: JobDirectory, limit_s: float = LIMIT_S) -> bool:
    """Return True once the daemon has answered every request; False if it died or `limit_s` seconds have passed."""
    said = False

    def is_over(_: DaemonStatus | None) -> bool:
        nonlocal said
        if not _is_asked(job) or not job.daemon_alive():
            return True
        if not said:
            _log.info("waiting for the daemon to persist the newest snapshot (at most %.0f s)", limit_s)
            said = True
        return False

    with contextlib.suppress(FlashckptError):  # a persister of another release: nobody knows what it has done
        await_persister(job, is_over, timeout_s=limit_s)
    if _is_asked(job):
        _log.error("the snapshots in memory were not persisted in time: see %s", job.path / "daemon.log")
        return False
    return True


def _is_asked(job: JobDirectory) -> bool:
    return any(job.request_path(name).exists() for name in ("persist-now", "ended"))
