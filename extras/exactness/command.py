"""`flashckpt check`: whether a script continues exactly after a kill, and if not, what moved."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Group

from flashckpt.bench import scratch
from flashckpt.cli.common import Command, json_option, new_table, show
from flashckpt.commands.quantity import DURATION
from flashckpt.exactness import comparing
from flashckpt.exactness.comparing import EXACT, Judgement
from flashckpt.exactness.runs import NotCheckedError, Ran, Script
from flashckpt.printable import counted

_SHOWN = 6
_NEED_BYTES = 64 << 20


@click.command(cls=Command, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--nproc-per-node", "ranks", type=click.IntRange(1, 64), help="Ranks under dlrun  [default: plain Python]"
)
@click.option("--kill-after", type=click.IntRange(1), default=5, show_default=True, help="Steps before the kill.")
@click.option("--steps", type=click.IntRange(2), default=9, show_default=True, help="Steps of each run.")
@click.option("--timeout", "limit_s", type=DURATION, default="10min", show_default=True, help="Longest run.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Names that may differ, e.g. --ignore 'total_*'.")
@json_option
def check(
    *,
    script: str,
    arguments: tuple[str, ...],
    ranks: int | None,
    kill_after: int,
    steps: int,
    limit_s: float,
    ignore: tuple[str, ...],
    as_json: bool,
) -> int:
    """Run a training script twice unbroken and once killed and restarted, and name what is not the same after it.

    The script stays as it is; its Checkpointer gets a root and memory that are removed at the end. Whatever else it
    writes, it writes three times. Exit code 0: exact, 1: not exact, 2: it could not be judged.

    Examples:
      flashckpt check train.py
      flashckpt check --nproc-per-node 2 --kill-after 10 --steps 30 train.py --config small.toml
    """
    if not Path(script).is_file():
        raise NotCheckedError(
            f"there is no script {script!r}", state="Nothing was started.", remedy="a path to a .py file"
        )
    if kill_after >= steps:
        raise click.UsageError("--kill-after must be below --steps")
    with scratch.memory(_NEED_BYTES, what="a check") as memory, tempfile.TemporaryDirectory(prefix="fc-") as folder:
        words = (str(Path(script).absolute()), *arguments)
        own = Script(words=words, ranks=ranks or 0, steps=steps, limit_s=limit_s, memory=memory, folder=Path(folder))
        found = judged(own, kill_after, ignore)
    document = {"script": script, "ranks": ranks or 1, "steps": steps, **comparing.as_json(found)}
    show(document, as_json=as_json, table=lambda: _table(found, script))
    return 0 if found.verdict == EXACT else 1


def judged(script: Script, kill_after: int, ignore: tuple[str, ...] = ()) -> Judgement:
    """Run a script three times, and compare.

    Raises:
        NotCheckedError: It fails without a kill, makes no Checkpointer, or takes too few steps.
    """
    unbroken = script.run("unbroken")
    _refuse_unusable(unbroken, kill_after)
    second = script.run("again")
    pairs = list(zip(unbroken.traces(), second.traces(), strict=True))
    found = comparing.merged(comparing.deterministic(one, other, ignore) for one, other in pairs)
    if found.verdict != EXACT:
        return found
    killed = script.run("killed", kill_after)
    traces = killed.traces(1)
    if not all(trace.steps for trace in traces):
        return _not_continued(killed)
    ignored = [[*ignore, *comparing.noise(one, other)] for one, other in pairs]
    return comparing.merged(
        comparing.continued(one, trace, ignored=names)
        for (one, _), trace, names in zip(pairs, traces, ignored, strict=True)
    )


def _not_continued(killed: Ran) -> Judgement:
    """Return that the restarted script ends, where the unbroken one continues."""
    what = f"the restarted script takes no step: {killed.why()}"
    if killed.code:
        remedy = "this error comes in a restart alone: it says what to do"
    else:
        remedy = "begin the loop at report.step + 1 of `report = ckpt.restore()`"
    return Judgement(verdict=comparing.NOT_EXACT, causes=[
        comparing.Moved(kind="state", name="restart", what=what, remedy=remedy)
    ])  # fmt: skip


def _refuse_unusable(run: Ran, kill_after: int) -> None:
    traces = run.traces()
    steps = min(len(trace.steps) for trace in traces)
    if run.is_done or (run.code == 0 and steps > kill_after):
        return
    if run.code:
        problem = "the script fails without a kill"
        remedy = "run it alone first; --nproc-per-node 1 starts it by dlrun, as a script needs that reads RANK"
    elif not any(trace.is_made for trace in traces):
        problem, remedy = "the script makes no Checkpointer", "give it one: README, 'A loop'"
    elif not steps:
        problem, remedy = "the script takes no step", "call ckpt.step(n) after each optimizer step"
    else:
        problem, remedy = (
            "the script ends before the kill",
            f"--kill-after {max(steps - 1, 1)} --steps {steps}, or more data",
        )
    raise NotCheckedError(
        problem,
        found=run.why() if run.code else counted(steps, "step"),
        expected=f"more than {counted(kill_after, 'step')}",
        state="Nothing is left of the run but what the script itself wrote.",
        remedy=remedy,
    )


def _table(found: Judgement, script: str) -> Group:
    table = new_table("WHAT", "TO DO", title=_title(found, script))
    for cause in found.likely:
        table.add_row(cause.what, cause.remedy)
    lines: list[Any] = [table] if table.rows else [_title(found, script)]
    if found.moved:
        more = f" and {len(found.moved) - _SHOWN} more" if len(found.moved) > _SHOWN else ""
        lines.append(f"different at the end of step {found.first}: {', '.join(found.moved[:_SHOWN])}{more}")
    if others := [hint.what for hint in found.hints[:_SHOWN] if hint not in found.likely]:
        lines.append("also other than they were: " + "; ".join(others))
    return Group(*lines)


def _title(found: Judgement, script: str) -> str:
    if found.verdict == comparing.NOT_DETERMINISTIC:
        return f"{script} is not deterministic in itself: two unbroken runs differ from step {found.first} on"
    if found.verdict == EXACT:
        return f"{script} continues exactly: killed, restored at step {found.restored}, nothing tracked differs"
    return f"{script} does not continue exactly after the restore of step {found.restored}"
