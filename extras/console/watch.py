"""`flashckpt watch`: follows a job until something has happened, with an exit code for scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import click

from flashckpt.checkpoint.catalog import newest_checkpoint
from flashckpt.checkpoint.history import ENDED
from flashckpt.cli.common import Command, age_of, complete_source, json_option
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.dashboard.gather import PageSource, ranks
from flashckpt.errors import FlashckptError
from flashckpt.printable import printable, to_json
from flashckpt.shm.job_directory import DaemonStatus

NOT_REACHED, TIMED_OUT = 1, 124
"""Exit codes: the job ended before, as `timeout` of coreutils."""
EVERY_S = 2.0
SILENT_S = 180.0
"""The record of a session is written once a minute: one that is older than this may be that of a node that was lost."""


class WatchedJob(NamedTuple):
    """What can be seen of a job now.

    Attributes:
        generation: Newest generation, 0 before the first.
        step: Last step; of another machine's job at most a minute old.
        end: "" while it runs, else how its last session ended.
        problem: Why nothing is persisted, or why the root cannot be read.
        seen_s: When the job was last seen, unix seconds.
    """

    generation: int = 0
    step: int = -1
    committed: SnapshotId | None = None
    end: str = ""
    problem: str = ""
    seen_s: float = 0.0


@click.command(cls=Command)
@click.argument("source", metavar="ROOT|JOB", shell_complete=complete_source)
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("--commit", "wants_commit", is_flag=True, help="Until another checkpoint than now is committed.")
@click.option(
    "--committed", type=click.IntRange(0), metavar="STEP", help="Until this step, or a later one, is committed."
)
@click.option("--step", type=click.IntRange(0), metavar="STEP", help="Until this step is done.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Exit code 124 after that.")
@json_option
def watch(
    *,
    source: str,
    options: tuple[str, ...],
    wants_commit: bool,
    committed: int | None,
    step: int | None,
    timeout: float | None,
    as_json: bool,
) -> int:
    """Print what changes, until one of the options is fulfilled; without any, until the job ends.

    Exit code 0 where it happened; 1 where the job ended before that, or, without an option, not cleanly; 124 when the time
    is over. The root is enough: the job may run anywhere (steps are then at most a minute late).

    Examples:
      flashckpt watch s3://bucket/run7 --committed 1200 && sbatch evaluate.sh
      flashckpt watch run7 || mail -s 'run7 stopped' me
    """
    found = PageSource(source, options)
    end_s = None if timeout is None else time.monotonic() + timeout
    first: WatchedJob | None = None
    before = WatchedJob()
    while True:
        now = state_of(found, before)
        first = first or now
        if not as_json:
            for line in changes(before, now):
                click.echo(printable(f"{time.strftime('%H:%M:%S')} {line}"))
        before = now
        is_committed = wants_commit and now.committed not in (None, first.committed)
        is_committed |= committed is not None and now.committed is not None and now.committed.step >= committed
        is_reached = is_committed or (step is not None and now.step >= step)
        is_over = bool(now.end) or (end_s is not None and time.monotonic() >= end_s)
        if is_reached or is_over:
            break
        time.sleep(EVERY_S if end_s is None else max(0.0, min(EVERY_S, end_s - time.monotonic())))
    is_asked = wants_commit or committed is not None or step is not None
    done = is_reached or (not is_asked and now.end == ENDED)
    if as_json:
        click.echo(to_json({"root": found.root, "reached": done, **now._asdict()}))
    return 0 if done else NOT_REACHED if now.end else TIMED_OUT


def state_of(source: PageSource, before: WatchedJob) -> WatchedJob:
    """Look at the job: at this machine's memory of it, and at the root; what cannot be read stays as it was before."""
    directory, problem = source.directory(), ""
    is_alive = directory is not None and directory.anyone_alive()
    committed, records = before.committed, []
    try:
        newest, records = newest_checkpoint(source.store), source.sessions()
        committed = None if newest is None else newest.identity
    except (FlashckptError, OSError) as error:
        problem = f"the root cannot be read: {str(error).splitlines()[0]}"
    last = records[-1] if records else None
    generation, step, end = before.generation, before.step, before.end
    seen_s = before.seen_s
    if last is not None:
        generation, step, end, seen_s = last.generation, last.step, last.end, last.updated_s
        problem = problem or (f"persisting fails: {last.error}" if last.error and not last.end else "")
    if directory is not None and is_alive:
        rows = ranks(directory)
        record, status = directory.read_generation(), directory.read_status() or DaemonStatus()
        generation = max(generation, record.number if record else 0)
        step = max((row["step"] for row in rows), default=step)
        committed = max(filter(None, (committed, status.committed)), default=None)
        problem = f"persisting fails: {status.error.splitlines()[0]}" if status.error else problem
        end, seen_s = "", time.time()
    if not end and seen_s and time.time() - seen_s > SILENT_S:
        problem = problem or f"nothing was heard of it for {age_of(seen_s)}"
    return WatchedJob(generation, step, committed, end, problem, seen_s)


def changes(before: WatchedJob, now: WatchedJob) -> Iterator[str]:
    """Yield a line for each thing that has changed, but steps: each of the others names the last one."""
    at = "" if now.step < 0 else f" at step {now.step}"
    if now.generation != before.generation:
        yield f"generation {now.generation} runs{at}" if not now.end else f"generation {now.generation}"
    if now.committed != before.committed and now.committed is not None:
        yield f"step {now.committed.step} of generation {now.committed.generation} is committed"
    if now.problem and now.problem != before.problem:
        yield now.problem
    if before.problem and not now.problem:
        yield f"it continues{at}"
    if now.end and now.end != before.end:
        yield f"{now.end}{at}"
