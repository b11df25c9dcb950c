"""The page of `flashckpt status`: running jobs in full, dead ones in two lines, 80 columns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashckpt.checkpoint.history import cause_of
from flashckpt.checkpoint.history import summary as summary_of
from flashckpt.cli.common import age_of, human_age, human_bytes, new_table
from flashckpt.commands.replicas import in_words
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.printable import counted, printable

STALE_S = 60
"""Seconds of silence after which the persister counts as stuck."""
MOST_SHOWN = 20
"""Sessions of a root that are shown."""
MOST_VERDICTS = 3
"""Incidents of a job that are shown, the newest."""
Job = Mapping[str, Any]


def page(found: Sequence[Job], copied_by: str, huge: str) -> Group:
    """Return all jobs: one block for each that runs, and one for all that do not."""
    lines: list[str] = []
    for one in found:
        if one["alive"] or one["daemon_alive"]:
            lines += block(one, copied_by)
    dead = [one for one in found if not (one["alive"] or one["daemon_alive"])]
    lines += _dead(dead) if dead else []
    if not found:
        lines.append("no job in this machine's memory; flashckpt status ROOT reads what a root remembers")
    lines.append(f"this installation copies memory by {copied_by}; huge pages for slots: {huge}")
    if huge == "never":
        lines.append("  allowed by: mount -o remount,huge=within_size /dev/shm")
    return Group(*(Text(printable(line), overflow="fold") for line in lines))


def block(one: Job, copied_by: str) -> Iterator[str]:
    """Yield the lines of one job."""
    state = "RUNNING " if one["alive"] else "FLUSHING" if one["daemon_alive"] else "STOPPED "
    yield f"{state}  {one['root'] or 'no root known'}  (job {one['job']})"
    step = "no step yet" if one["step"] is None or one["step"] < 0 else f"step {one['step']}"
    share = "" if one["goodput"] is None else f"   goodput {one['goodput']:.1%}"
    restarts = f"restarts {one['rank_failures']}{share}"
    yield f"          {step}   generation {one['generation'] or '?'}   {human_bytes(one['nbytes'])}   {restarts}"
    yield f"          in memory {_known(one['snapshot'])}{' (suspect)' * (one['snapshot'] in one['suspect'])}   on storage {_known(one['committed'])}{_cost(one)}"
    if one["replicas"]:
        yield f"          replicas: {in_words(one['replicas'])}"
    for remark in remarks(one, copied_by):
        yield f"          ! {remark}"
    for found in one["incidents"]:
        yield f"          {found['time'][11:19]} {found['verdict']}"


def remarks(one: Job, copied_by: str) -> list[str]:
    """Return what is to be known of a job besides its numbers."""
    found = list(one["notes"])
    if one["updated_s"] and one["daemon_alive"] and time.time() - one["updated_s"] > STALE_S:
        found.append(f"the daemon has reported nothing for {age_of(one['updated_s'])}")
    if one["copied_by"] not in ([], [copied_by]):
        found.append(f"its ranks copy by: {', '.join(one['copied_by'])}")
    if one["error"]:
        found.append(f"persisting fails ({one['failures']} times): {one['error'].splitlines()[0]}")
    if one["lag"]:
        found.append(f"{counted(one['lag'], 'persist step')} in memory, not yet committed")
    return found


def _cost(one: Job) -> str:
    """Return what a node that is lost now would cost."""
    kept = max(filter(None, [one["committed"], (one["replicas"] or {}).get("replicated")]), default=None)
    if one["step"] is None or one["step"] < 0:
        return ""
    lost = one["step"] - (kept[1] if kept else 0)
    return f"   a lost node costs {counted(max(0, lost), 'step')}"


def _dead(dead: Sequence[Job]) -> Iterator[str]:
    can = sorted((one for one in dead if one["snapshot"]), key=lambda one: one["touched_s"] or 0.0, reverse=True)
    empty = len(dead) - len(can)
    parts = [f"{counted(len(can), 'job')} can continue", f"{empty} hold{'s' * (empty == 1)} nothing"]
    yield "STOPPED   " + "   ".join(part for part, is_there in zip(parts, (can, empty), strict=True) if is_there)
    if can:
        newest = can[0]
        ago = "" if newest["touched_s"] is None else f", {age_of(newest['touched_s'])} ago"
        yield f"          newest: {newest['root'] or newest['job']}, step {newest['snapshot'][1]}{ago}"
    for one in dead:
        if one["error"] or one["notes"]:
            yield f"          ! {one['job']}: {'; '.join([*one['notes'], *one['error'].splitlines()[:1]])}"
    held = human_bytes(sum(one["nbytes"] for one in dead))
    yield f"          flashckpt status --all lists them; they hold {held} (flashckpt gc)"


def table(found: Sequence[Job], copied_by: str) -> Table:
    """Return one row per job, with every column."""
    has_replicas = any(one["replicas"] for one in found)
    made = new_table(
        *("JOB", "STATE", ">GEN", ">STEP", ">SNAPSHOT", ">COMMITTED", ">LAG", ">FAILURES", ">RESTARTS", ">GOODPUT"),
        *(">MEMORY", *(["REPLICAS"] if has_replicas else []), "ROOT", ""),
        title=f"this installation copies memory by {copied_by}",
    )
    for one in found:
        dead = "dead, resumable" if one["snapshot"] else "dead, nothing to resume"
        made.add_row(
            one["job"],
            "running" if one["alive"] else "flushing" if one["daemon_alive"] else dead,
            str(one["generation"] or ""),
            "" if one["step"] is None else str(one["step"]),
            identity(one["snapshot"]),
            identity(one["committed"]),
            str(one["lag"]),
            str(one["failures"]),
            str(one["rank_failures"]),
            f"{one['goodput']:.1%}" if one["goodput"] is not None and one["alive"] else "",
            human_bytes(one["nbytes"]),
            *([in_words(one["replicas"])] if has_replicas else []),
            one["root"] or "",
            "; ".join(remarks(one, copied_by)),
        )
    return made


def identity(found: SnapshotId | None) -> str:
    """Return "120.g3"; "" for None."""
    return "" if found is None else f"{found[1]}.g{found[0]}"


def _known(found: SnapshotId | None) -> str:
    return identity(found) or "nothing"


# -- what a root remembers of its sessions ---------------------------------------------------------------------------


def in_short(records: Sequence[Any]) -> list[str]:
    """Return what a job's sessions cost, in lines; [] where the root remembers none."""
    if not records:
        return []
    found = summary_of(records)
    last = records[-1]
    ends = {"ended": "ended", "stopped": "stopped", "": "last seen"}
    share = "" if found["goodput"] is None else f", goodput {found['goodput']:.1%}"
    cost = f"{counted(found['steps_lost'], 'step')} lost, {human_age(found['down_s'])} down{share}"
    end = f"{ends.get(last.end, last.end)} at step {max(0, last.step)}, {age_of(last.updated_s)} ago"
    lines = [
        f"{counted(found['sessions'], 'session')}, {counted(found['restarts'], 'restart')}, {cost}",
        f"generation {last.generation} {end}, on {last.host or 'a host that is not known'}",
    ]
    lines += [
        f"{number} x {cause}" for cause, number in sorted(found["restarts_by_cause"].items(), key=lambda n: -n[1])
    ]
    if cause := str(last.ended_by.get("cause", "")):
        lines.append(f"it ended by: {cause}")
    return lines


def sessions(records: Sequence[Any]) -> Table | Text:
    """Return one row for each of the newest sessions, newest first."""
    if not records:
        return Text("")
    made = new_table(">GEN", ">BEGUN", ">RAN", ">RANKS", ">FROM", ">TO STEP", ">START", "WHY IT BEGAN")
    for before, one in list(zip([None, *records], records, strict=False))[-MOST_SHOWN:][::-1]:
        restarted = before is not None and before.end != "ended"
        made.add_row(
            str(one.generation),
            f"{age_of(one.begun_s)} ago",
            human_age(one.updated_s - one.begun_s),
            str(one.world_size),
            "" if one.restored_step < 0 else str(one.restored_step),
            "" if one.step < 0 else str(one.step),
            f"{one.first_step_s:.1f} s" if one.first_step_s else "",
            cause_of(one) if restarted else "first start" if before is None else "started again",
        )
    return made
