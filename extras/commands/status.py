"""`flashckpt status`: the jobs on this machine."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashckpt.checkpoint.history import SessionRecord, read_history, read_incidents, summary
from flashckpt.cli.common import Command, complete_job, json_option, open_root, show, tell_skipped
from flashckpt.commands.replicas import replication
from flashckpt.commands.status_page import MOST_VERDICTS, in_short, page, table
from flashckpt.commands.status_page import sessions as sessions_table
from flashckpt.core.incident import Incident, as_values
from flashckpt.core.records import pack
from flashckpt.errors import FlashckptError, PersistError
from flashckpt.native import IMPLEMENTATIONS, implementation
from flashckpt.printable import printable
from flashckpt.shm.block import huge_pages
from flashckpt.shm.control import ControlRow, ControlView
from flashckpt.shm.incident_files import incidents_in
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import LEFT_OUT, JobDirectory, jobs_in_memory, memory_root
from flashckpt.shm.segment import Segment
from flashckpt.storage.factory import root_url


@click.command(cls=Command)
@click.argument("root", required=False, type=click.Path())
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("--job", shell_complete=complete_job, help="Only this job.")
@click.option("--all", "everything", is_flag=True, help="One row per job, with every column; dead jobs too.")
@json_option
def status(root: str | None, options: tuple[str, ...], job: str | None, everything: bool, as_json: bool) -> int:
    """Show the jobs in this machine's memory: last snapshot, last persist, lag, failures.

    With ROOT: only its jobs, and what the root remembers of all its sessions, also on another machine and after their end:
    restarts by cause, steps lost, goodput.
    The newest verdicts are shown of incidents that ended a generation (docs/incidents.md).
    `copied_by` is what copies memory: the C part, and its level, or python; of a job, what its ranks use, else what this installation would.
    `huge_pages` is when the memory of the slots is in huge pages, as its tmpfs is mounted: never, always, within_size, advise.
    Exit code 40 if persisting fails for one of them.

    Examples:
      flashckpt status
      flashckpt status s3://bucket/run7
      flashckpt status --json
    """
    directories, skipped = jobs_in_memory()
    left_alone = tell_skipped(skipped)
    found = [describe(directory) for directory in directories if job in (None, directory.job)]
    document: dict[str, Any] = {"jobs": found, "left_alone": left_alone, "copied_by": implementation()}
    document["huge_pages"] = huge = huge_pages(memory_root().resolve())
    records: list[SessionRecord] = []
    incidents: list[Incident] = []
    if root is not None:
        document["jobs"] = found = [one for one in found if one["root"] and root_url(one["root"]) == root_url(root)]
        records = read_history(open_root(root, options))
        sessions = [pack(one) for one in records]
        incidents = read_incidents(open_root(root, options))
        document["incidents"] = [as_values(one) for one in incidents]
        document |= {"root": root, "history": summary(records) | {"records": sessions}}

    def shown() -> Group | Table:
        jobs = table(found, implementation()) if everything else page(found, implementation(), huge)
        if root is None:
            return jobs
        lines = in_short(records) + [f"{one.time[:19]} {one.verdict}" for one in incidents[-MOST_VERDICTS:]]
        text = "\n".join(printable(line) for line in lines) or f"{printable(root)} remembers no session"
        return Group(Text(text, overflow="fold"), sessions_table(records), *([Text(""), jobs] if found else []))

    show(document, as_json=as_json, table=shown)
    return PersistError.exit_code if any(one["error"] for one in found) else 0


def describe(directory: JobDirectory) -> dict[str, Any]:
    """Return what is known of one job on this node, as JSON values; damaged records are reported, not raised."""
    notes: list[str] = []

    def read(function: Any) -> Any:
        try:
            return function()
        except (FlashckptError, OSError) as error:
            notes.append(str(error).splitlines()[0])
            return None

    config, record = read(directory.read_config), read(directory.read_generation)
    daemon = read(directory.read_status)
    rows = read(lambda: _rows(directory)) or []
    notes += filter(None, (read(lambda name=name: directory.read_notice(name)) for name in ("notice", LEFT_OUT)))
    view = scan(directory, [record] if record else [])
    newest = max(view.complete(), default=None)
    files = [path.lstat() for path in directory.segments() if path.exists()]
    return {
        "job": directory.job,
        "path": str(directory.path),
        "root": config.root if config else None,
        "alive": bool(read(directory.anyone_alive)),
        "daemon_alive": bool(read(directory.daemon_alive)),
        "generation": record.number if record else None,
        "step": max((row.step for row in rows), default=None),
        "copied_by": sorted({_implementation(row.copied_by) for row in rows} - {""}),
        "snapshot": newest,
        "snapshots": view.complete(),
        "suspect": view.suspect(),
        "committed": daemon.committed if daemon else None,
        "lag": daemon.lag if daemon else 0,
        "failures": daemon.failures if daemon else 0,
        "error": daemon.error if daemon else "",
        "updated_s": daemon.updated_ns / 1e9 if daemon else None,
        "replicas": replication(directory, daemon, record),
        **goodput(directory),
        "nbytes": sum(one.st_blocks * 512 for one in files),
        "touched_s": max((one.st_mtime for one in files), default=None),
        "notes": notes,
        "incidents": [as_values(one) for one in incidents_in(directory.path, MOST_VERDICTS)],
    }


def goodput(directory: JobDirectory, now_s: float | None = None) -> dict[str, Any]:
    """Return a summary of dlrun's ledger: failures of ranks, seconds they cost, the share of time that was training.

    The time counts from the job's first segment on this node; without a failure `goodput` is 1.
    """
    lost_s, count = 0.0, 0
    for line in _lines(directory.path / "ledger.jsonl"):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            record = json.loads(line)
            lost_s += max(0.0, float(record.get("total_s", 0))) + float(record.get("seconds", {}).get("recompute", 0))
            count += 1
    began = [created for path in directory.segments() if (created := _created_s(path)) is not None]
    elapsed_s = (time.time() if now_s is None else now_s) - min(began) if began else None
    share = None if not elapsed_s or elapsed_s <= 0 else max(0.0, 1 - lost_s / elapsed_s)
    return {"rank_failures": count, "lost_s": round(lost_s, 3), "goodput": share}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _created_s(path: Path) -> float | None:
    try:
        with contextlib.closing(Segment.attach(path)) as segment:
            return segment.created_ns / 1e9
    except (FlashckptError, OSError):
        return None


def _rows(directory: JobDirectory) -> list[ControlRow]:
    """Return the control rows of the local ranks that have taken theirs."""
    if not directory.control_path.exists():
        return []
    return [row for row in ControlView(directory.control_path).rows() if row.pid]


def _implementation(number: int) -> str:
    """Return what copies, by its number in a row; "" for none, and for one of a later release."""
    return IMPLEMENTATIONS[number] if 0 <= number < len(IMPLEMENTATIONS) else ""
