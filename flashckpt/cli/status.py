"""`flashckpt status`: the jobs on this machine."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from flashckpt.cli.common import Command, age_of, human_bytes, json_option, new_table, show, tell_skipped
from flashckpt.cli.replicas import in_words, replication
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError, PersistError
from flashckpt.native import IMPLEMENTATIONS, implementation
from flashckpt.shm.control import ControlRow, ControlView
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import JobDirectory, jobs_in_memory
from flashckpt.shm.segment import Segment


@click.command(cls=Command)
@click.option("--job", help="Only this job.")
@json_option
def status(job: str | None, as_json: bool) -> int:
    """Show the jobs in this machine's memory: last snapshot, last persist, lag, failures.

    `copied_by` is what copies memory: the C part, and its level, or python; of a job, what its ranks use, else what this installation would.
    Exit code 40 if persisting fails for one of them.

    Example:
      flashckpt status --json
    """
    directories, skipped = jobs_in_memory()
    left_alone = tell_skipped(skipped)
    found = [describe(directory) for directory in directories if job in (None, directory.job)]
    document = {"jobs": found, "left_alone": left_alone, "copied_by": implementation()}
    show(document, as_json=as_json, table=lambda: _table(found, implementation()))
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
    if notice := read(directory.read_notice):
        notes.append(notice)
    view = scan(directory, [record] if record else [])
    newest = max(view.complete(), default=None)
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
        "committed": daemon.committed if daemon else None,
        "lag": daemon.lag if daemon else 0,
        "failures": daemon.failures if daemon else 0,
        "error": daemon.error if daemon else "",
        "updated_s": daemon.updated_ns / 1e9 if daemon else None,
        "replicas": replication(directory, daemon, record),
        **goodput(directory),
        "nbytes": sum(path.lstat().st_blocks * 512 for path in directory.segments() if path.exists()),
        "notes": notes,
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


def _table(found: list[dict[str, Any]], copied_by: str) -> Table | str:
    if not found:
        return f"no job in this machine's memory; copied by: {copied_by}"
    table = new_table(
        "JOB",
        "STATE",
        ">GEN",
        ">STEP",
        ">SNAPSHOT",
        ">COMMITTED",
        ">LAG",
        ">FAILURES",
        ">RESTARTS",
        ">GOODPUT",
        ">MEMORY",
        *(["REPLICAS"] if any(one["replicas"] for one in found) else []),
        "ROOT",
        "",
        title=f"this installation copies memory by: {copied_by}",
    )
    for one in found:
        state = "running" if one["alive"] else "flushing" if one["daemon_alive"] else "dead, resumable"
        stale = one["updated_s"] and one["daemon_alive"] and time.time() - one["updated_s"] > 60
        remark = one["error"].splitlines()[0] if one["error"] else ""
        if stale:
            remark = f"the daemon has reported nothing for {age_of(one['updated_s'])}. {remark}"
        if one["copied_by"] not in ([], [copied_by]):
            remark = f"its ranks copy by: {', '.join(one['copied_by'])}. {remark}"
        table.add_row(
            one["job"],
            state,
            str(one["generation"] or ""),
            "" if one["step"] is None else str(one["step"]),
            _identity(one["snapshot"]),
            _identity(one["committed"]),
            str(one["lag"]),
            str(one["failures"]),
            str(one["rank_failures"]),
            f"{one['goodput']:.1%}" if one["goodput"] is not None and one["alive"] else "",
            human_bytes(one["nbytes"]),
            *([in_words(one["replicas"])] if any(other["replicas"] for other in found) else []),
            one["root"] or "",
            "; ".join([*one["notes"], remark]).strip("; "),
        )
    return table


def _identity(identity: SnapshotId | None) -> str:
    return "" if identity is None else f"{identity[1]}.g{identity[0]}"
