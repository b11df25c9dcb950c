"""`flashckpt forget`: start over on a root, or continue from memory after the root was lost. Shows before it removes."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Group

from flashckpt.cli.common import (
    Command,
    complete_job,
    human_age,
    human_bytes,
    jobs_on_this_machine,
    json_option,
    new_table,
    show,
)
from flashckpt.errors import ConfigError, JobInUseError
from flashckpt.shm.gc import DeadMemory, dead_memory, remove
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.storage.factory import job_id


@click.command(cls=Command)
@click.argument("root", required=False, type=click.Path())
@click.option("--job", metavar="ID", shell_complete=complete_job, help="This job, instead of those of ROOT.")
@click.option("--apply", "do_it", is_flag=True, help="Do it; without it only show what would be done.")
@click.option(
    "--keep-memory",
    is_flag=True,
    help="Keep the snapshots and forget only that checkpoints were on the root: the next start continues from memory.",
)
@json_option
def forget(*, root: str | None, job: str | None, do_it: bool, keep_memory: bool, as_json: bool) -> None:
    """Show, and with --apply remove, what this machine's memory holds of a dead job, so that it starts over.

    Checkpoints on storage stay: where ROOT holds some, the next start restores the newest of them. It affects
    this machine only: run it on every node. From a program: restore(fresh=True), which ignores both.

    Examples:
      rm -rf /checkpoints/run7; flashckpt forget /checkpoints/run7 --apply
      flashckpt forget --job run7 --apply
      flashckpt forget /checkpoints/run7 --keep-memory --apply
    """
    if (root is None) == (job is None):
        raise ConfigError("give either ROOT or --job", found="both" if root else "neither")
    jobs = [job_id("", job)] if job is not None else [directory.job for directory in jobs_on_this_machine(root)]
    found = [_forget(one, do_it=do_it, keep_memory=keep_memory) for one in jobs]
    document = {"applied": do_it, "kept_memory": keep_memory, "jobs": found}
    show(document, as_json=as_json, table=lambda: _page(document))


def _forget(job: str, *, do_it: bool, keep_memory: bool) -> dict[str, Any]:
    """Return what is forgotten of one job, doing it if asked.

    Raises:
        NoCheckpointError: There is no such job here.
        JobInUseError: It is alive, or its daemon still works.
    """
    dead = _dead(job)
    if do_it and keep_memory:
        _forget_status(dead)
    elif do_it:
        remove(dead)
    return {"job": dead.job, "path": str(dead.path), "age_s": dead.age_s, "nbytes": dead.nbytes}


def _dead(job: str) -> DeadMemory:
    try:
        (dead,) = dead_memory(job)
    except JobInUseError as error:
        raise _in_use(job) from error
    return dead


def _in_use(job: str) -> JobInUseError:
    return JobInUseError(
        f"job {job!r} is alive",
        found="a process of it, or its daemon, which ends about 30 s after the last process once its work is done",
        state="Nothing was forgotten.",
        remedy="stop it, or wait for its daemon: flashckpt status",
    )


def _forget_status(dead: DeadMemory) -> None:
    """Remove the daemon's record, under the daemon's lock."""
    directory = JobDirectory(dead.path)
    lock = directory.hold_daemon()
    if lock is None:
        raise _in_use(dead.job)
    try:
        directory.forget_status()
    finally:
        lock.close()


def _page(document: dict[str, Any]) -> Group:
    if not document["jobs"]:
        return Group("nothing of this root is in this machine's memory")
    table = new_table("JOB", ">SIZE", ">DEAD FOR")
    for one in document["jobs"]:
        table.add_row(one["job"], human_bytes(one["nbytes"]), human_age(one["age_s"]))
    if document["kept_memory"]:
        word = "the snapshots were kept: the next start continues from them"
        planned = "the snapshots would be kept and what was on the root forgotten (--apply does it)"
    else:
        word, planned = "forgotten", "would be forgotten (--apply does it)"
    return Group(table, word if document["applied"] else planned)
