"""Waiting for the daemon to persist: when PID 1 of a container exits, the daemon is killed with it."""

from __future__ import annotations

import logging
import os
import time

from flashckpt.shm.job_directory import JobDirectory

LIMIT_S = 600.0
_log = logging.getLogger("flashckpt.dlrun")


def is_last_process() -> bool:
    """Whether the daemon dies with this process: as PID 1, or if FLASHCKPT_WAIT_FLUSH=1 says so."""
    return os.getpid() == 1 or os.environ.get("FLASHCKPT_WAIT_FLUSH") == "1"


def wait_for_flush(job: JobDirectory, limit_s: float = LIMIT_S) -> bool:
    """Return True once the daemon has answered every request; False if it died or `limit_s` seconds have passed."""
    end = time.monotonic() + limit_s
    said = False
    while any(job.request_path(name).exists() for name in ("persist-now", "ended")):
        if not job.daemon_alive() or time.monotonic() > end:
            _log.error("the snapshots in memory were not persisted in time: see %s", job.path / "daemon.log")
            return False
        if not said:
            _log.info("waiting for the daemon to persist the newest snapshot (at most %.0f s)", limit_s)
            said = True
        time.sleep(0.05)
    return True
