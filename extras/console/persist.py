"""`flashckpt persist`: what a running job holds in memory, on storage now."""

from __future__ import annotations

from typing import Any

import click

from flashckpt.cli.common import Command, complete_source, job_named, json_option, show
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import NoCheckpointError, PersistError
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory
from flashckpt.shm.persisted import await_persister
from flashckpt.shm.persister_process import LOG_NAME

REQUEST = "persist-now"


@click.command(cls=Command)
@click.argument("name", metavar="JOB|ROOT", shell_complete=complete_source)
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="  [default: as long as it takes]")
@json_option
def persist(*, name: str, timeout: float | None, as_json: bool) -> None:
    """Ask the persister of a job on this machine for its newest snapshot, and wait until that is committed.

    Whatever persist_every says; training continues. Of several nodes one is enough. What is committed is the snapshot
    that was newest here when it was asked, or a newer one. Exit code 40 if it is not committed, with the reason.

    Examples:
      flashckpt persist run7
      flashckpt persist s3://bucket/run7 --timeout 600
    """
    directory = job_named(name)
    wanted = newest_here(directory)
    asked = _Asked(directory, wanted)
    if not await_persister(directory, asked.is_over, timeout_s=timeout):
        raise asked.error(asked.failure or f"not committed after {timeout:g} s")
    assert asked.committed is not None
    document: dict[str, Any] = {"job": directory.job, "asked": wanted, "committed": asked.committed}
    text = f"step {asked.committed.step} of generation {asked.committed.generation} is on storage"
    show(document, as_json=as_json, table=lambda: text)


def newest_here(directory: JobDirectory) -> SnapshotId:
    """Return the newest snapshot that all ranks of this node hold; NoCheckpointError where there is none."""
    record = directory.read_generation()
    complete = scan(directory, () if record is None else (record,)).complete()
    if not complete:
        raise NoCheckpointError(
            f"job {directory.job} has no snapshot in this machine's memory",
            expected="one that all its ranks here hold",
            remedy="try again after snapshot_every steps",
        )
    return complete[-1]


class _Asked:
    """One request, and what became of it."""

    def __init__(self, directory: JobDirectory, wanted: SnapshotId) -> None:
        self.committed: SnapshotId | None = None
        self.failure = ""
        self._directory, self._wanted = directory, wanted
        self._retry_ns = 0

    def is_over(self, status: DaemonStatus | None) -> bool:
        """Look at the status of the persister; ask as long as it has not begun to answer."""
        status = status or DaemonStatus()
        self.failure = status.error.partition("\n")[0]
        if status.committed is not None and status.committed >= self._wanted:
            self.committed = status.committed
            return True
        if status.floor >= self._wanted:
            raise self.error(status.given_up or "it was given up")
        if not self._directory.daemon_alive():
            raise self.error("no persister of this job is running on this machine")
        if status.error:
            self._refuse_failure(status)
        if self._directory.asked_ns(REQUEST) is None:
            self._directory.request(REQUEST)
        return False

    def _refuse_failure(self, status: DaemonStatus) -> None:
        """Have it tried at once; raise where an attempt that began after that has failed too."""
        if not self._retry_ns:
            self._retry_ns = self._directory.ask("retry-now", after=status.answered_ns)
        elif status.answered_ns >= self._retry_ns:
            raise self.error(self.failure)

    def error(self, found: str) -> PersistError:
        """Return the error of a snapshot that is not committed."""
        return PersistError(
            f"step {self._wanted.step} of generation {self._wanted.generation} is not on storage",
            found=found,
            state="It is in memory as long as nothing newer is; the job is not affected.",
            remedy=f"look at {self._directory.path / LOG_NAME} and at flashckpt status, then ask again",
        )
