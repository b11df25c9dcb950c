"""Waiting for the daemon to persist: when PID 1 of a container exits, the daemon is killed with it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.environment import env
from flashckpt.errors import FlashckptError, PersistError
from flashckpt.printable import printable
from flashckpt.shm.control import ControlRow
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory
from flashckpt.shm.persisted import await_persister
from flashckpt.shm.persister_process import LOG_NAME, in_one_line
from flashckpt.storage.factory import open_store

LIMIT_S = 600.0
_ANSWER_S = 10.0
_log = logging.getLogger("flashckpt.dlrun")


def is_last_process() -> bool:
    """Whether the daemon dies with this process: as PID 1, or if FLASHCKPT_WAIT_FLUSH=1 says so."""
    return os.getpid() == 1 or env.FLASHCKPT_WAIT_FLUSH


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


def unpersisted(job: JobDirectory, rows: Sequence[ControlRow], tick: Callable[[], None]) -> PersistError | None:
    """Return the error of a job that ended well, if it came to a persist step and nothing is on storage, nor can come there.

    A persister that works is not waited for: what it has not committed after some seconds it commits when dlrun has ended.

    Args:
        job: This node's job directory; `ended` is asked for.
        rows: The control rows of its ranks.
        tick: Lets a persister that is not there be started.
    """
    with contextlib.suppress(FlashckptError, OSError):
        config, status = job.read_config(), job.read_status()
        if config is None or (status is not None and status.committed) or not _reached_persist(job, config, rows):
            return None
        if (why := _why_not(job, tick)) and not _has_checkpoint(config):
            return PersistError(
                "the job ended, and nothing of it is on storage",
                found=in_one_line(why),
                expected=f"a checkpoint in {printable(config.root)}: a persist step was reached",
                state=f"The newest snapshot stays in this node's memory, job {job.job!r}.",
                remedy=f"look at {job.path / LOG_NAME}, fix the cause, and start the job again on this node: it restores from "
                "memory and persists",
            )
    return None


def _reached_persist(job: JobDirectory, config: JobConfig, rows: Sequence[ControlRow]) -> bool:
    """Whether a step was reached that is to be on storage, by the numbers of the steps or by a snapshot that is marked so."""
    every = config.persist_every
    if every and any(row.step // every > max(row.restored_step, 0) // every for row in rows):
        return True
    record = job.read_generation()
    return bool(scan(job, [record] if record else []).flagged())


def _why_not(job: JobDirectory, tick: Callable[[], None]) -> str:
    """Return why nothing is committed, "" where something is, or may still be."""
    asked_ns, why = job.ask("retry-now"), ""

    def is_over(status: DaemonStatus | None) -> bool:
        nonlocal why
        if not job.path.exists() or (status is not None and status.committed):
            return True
        why = status.error if status is not None and status.answered_ns >= asked_ns else ""
        tick()
        return bool(why)

    is_answered = await_persister(job, is_over, timeout_s=_ANSWER_S)
    if is_answered or job.daemon_alive():
        return why
    return "no persister is running on this node"


def _has_checkpoint(config: JobConfig) -> bool:
    """Whether the root holds a checkpoint of an earlier start; False where it does not answer."""
    found: list[object] = []

    def look() -> None:
        with contextlib.suppress(Exception):
            found.extend(list_checkpoints(open_store(config.root, **config.storage_options)))

    thread = threading.Thread(target=look, name="flashckpt-look", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return bool(found)


def _is_asked(job: JobDirectory) -> bool:
    return any(job.request_path(name).exists() for name in ("persist-now", "ended"))
