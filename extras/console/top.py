"""`flashckpt top`: the page of a running job in a terminal; one table where there is none."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from flashckpt.checkpoint.history import Points
from flashckpt.cli.common import (
    Command,
    age_of,
    complete_source,
    console,
    human_age,
    human_bytes,
    json_option,
    new_table,
)
from flashckpt.cli.output import FittingTable
from flashckpt.commands.status_page import block
from flashckpt.dashboard.gather import PageSource
from flashckpt.native import implementation
from flashckpt.printable import counted, printable, to_json
from flashckpt.shm.persister_process import state_of

EVERY_S = 2.0
MOST_RANKS, MOST_CHECKPOINTS, MOST_VALUES = 8, 5, 6
_OF_PROCESS = {
    "": "gone",
    "Z": "gone",
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "D": "waits for a device",
}
_LEAVE = "qQ\x03\x04\x1b"


@click.command(cls=Command)
@click.argument("source", metavar="ROOT|JOB", shell_complete=complete_source)
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@json_option
def top(*, source: str, options: tuple[str, ...], as_json: bool) -> None:
    """Follow a job: step and rate, what is in memory and on storage, restarts, ranks that are behind, what it has logged.

    For any program with a Checkpointer, on this machine or, with what its root remembers, on another. q leaves. Where the
    output is no terminal it is printed once. What `flashckpt dashboard` shows in a browser.

    Examples:
      flashckpt top run7
      flashckpt top s3://bucket/run7
    """
    found = PageSource(source, options)
    if as_json:
        click.echo(to_json(found.document()))
        return
    document = found.document()
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        console().print(page(document, None))
        return
    with _keys() as pressed, Live(page(document, None), console=console(), screen=True, auto_refresh=False) as live:
        while not pressed(EVERY_S):
            before, document = document, found.document()
            live.update(page(document, before), refresh=True)


def page(document: Mapping[str, Any], before: Mapping[str, Any] | None) -> Group:
    """Return the page of a document of `PageSource`, in 80 columns."""
    parts: list[Any] = [*_lines(_head(document, before))]
    parts += _ranks(document["ranks"])
    if document["checkpoints"]:
        parts += [Text(""), _checkpoints(document["checkpoints"], document["now_s"])]
    if document["curves"] and (values := list(_values(document["curves"][-1]["points"]))):
        parts += [Text(""), *_lines(values)]
    if document["error"]:
        parts += [Text(""), *_lines([f"! the root cannot be read: {document['error']}"])]
    return Group(*parts)


def _lines(lines: Sequence[str]) -> list[Text]:
    return [Text(printable(line), overflow="fold") for line in lines]


def _head(document: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    job, found = document["job"], document["summary"]
    lines = list(block(job, implementation())) if job is not None else []
    rate = _rate(document, before)
    if job is None or not job["alive"]:
        last = document["sessions"][-1] if document["sessions"] else None
        lines = lines or [document["root"]]
        if last is not None:
            seen = f"{last['end'] or 'last seen'} {age_of(last['updated_s'])} ago"
            lines.append(f"          {seen} at step {last['step']}, generation {last['generation']}, on {last['host']}")
    share = "" if found["goodput"] is None else f", goodput {found['goodput']:.1%}"
    cost = f"{counted(found['steps_lost'], 'step')} lost, {human_age(found['down_s'])} down{share}"
    lines.append(f"          in all {counted(found['sessions'], 'session')}, {cost}{rate}")
    lines += [f"          {number} x {cause}" for cause, number in found["restarts_by_cause"].items()]
    if job is None or not job["alive"]:
        lines += [f"          {one['time'][:19]} {one['verdict']}" for one in document["incidents"][-1:]]
    return lines


def _rate(document: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return the steps per second since the document before; "" where they are not known."""
    if before is None or not document["ranks"] or not before["ranks"]:
        return ""
    steps = max(one["step"] for one in document["ranks"]) - max(one["step"] for one in before["ranks"])
    seconds = document["now_s"] - before["now_s"]
    return f", {steps / seconds:.2f} steps/s" if seconds > 0 and steps >= 0 else ""


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the ranks of this machine: all, or of many those that are farthest behind."""
    if not ranks:
        return []
    newest, usual = max(one["step"] for one in ranks), Counter(one["step"] for one in ranks).most_common(1)[0]
    shown = sorted(ranks, key=lambda one: (one["step"], -(one["silent_s"] or 0), one["rank"]))[:MOST_RANKS]
    text = f"{usual[1]} of {len(ranks)} ranks here at step {usual[0]}; farthest behind:"
    title = [text] if len(shown) < len(ranks) else []
    table = new_table(">RANK", ">STEP", ">BEHIND", ">LAST SIGN", ">PID", "")
    for one in sorted(shown, key=lambda one: one["rank"]):
        state = (
            "ended" if one["has_ended"] else _OF_PROCESS.get(state_of(one["pid"]), "paused" if one["is_paused"] else "")
        )
        silent = "" if one["silent_s"] is None else f"{human_age(one['silent_s'])} ago"
        behind = str(newest - one["step"] or "")
        table.add_row(str(one["rank"]), str(one["step"]), behind, silent, str(one["pid"]), state)
    return [Text(""), *_lines(title), table]


def _checkpoints(checkpoints: Sequence[Mapping[str, Any]], now_s: float) -> FittingTable:
    table = new_table(">CHECKPOINT", ">AGE", ">SIZE", "STATE")
    for one in checkpoints[:MOST_CHECKPOINTS]:
        state = one["state"] + (", kept" if one["kept"] else "")
        name = f"{one['step']}.g{one['generation']}"
        table.add_row(name, human_age(now_s - one["created_s"]), human_bytes(one["nbytes"]), state)
    return table


def _values(points: Points) -> Iterator[str]:
    for name, curve in sorted(points.items())[:MOST_VALUES]:
        step, value = curve[-1]
        yield f"{printable(name)[:40]:<12}  {value:<12.6g} at step {step}"


@contextmanager
def _keys() -> Iterator[Any]:
    """Give a function that waits for a key which ends the page, so many seconds; the terminal is as before afterwards."""
    fd = sys.stdin.fileno()
    saved = termios.tcgetattr(fd)

    def pressed(seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([fd], [], [], left_s)[0]:
                raw = os.read(fd, 64)
                if not raw or any(key in raw.decode(errors="replace") for key in _LEAVE):
                    return True
        return False

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, saved)
