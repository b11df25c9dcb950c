"""The race: every entrant through every failure, by a referee that only starts, kills, and reads logs.

    make race [ARGS="--entrants flashckpt dcp --kinds rank machine --seed 7"]
    python -m race.referee --setup            # environments alone
    python -m race.referee --tune             # the interval of each entrant, by a search in unbroken runs

Printed and written: per entrant and kind of failure the time from the first step to the last over that of the same loop
without failures and checkpoints, steps trained again, samples lost or doubled, whether the last weights have the bits of
the entrant's own unbroken run, bytes written, peak memory, and how often somebody had to intervene.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flashckpt.bench.measure import LoadWatch, document, median, write_json
from race import failures, score, table
from race.entrants import ENTRANTS, HERE, PLAIN, Entrant, tuned
from race.failures import Failure
from race.lanes import disturbed, drive
from race.run import RANKS, Run

EPOCHS = 2
EVERY = (2, 5, 10, 20, 40)
Asked = tuple[Entrant, Failure, int, float]
"""Entrant, failure, steps, seconds of an ordinary step: what a run is made of."""


def together(runs: Sequence[Asked], keep: Path | None = None) -> list[dict[str, Any]]:
    """Run side by side what waits most of its time; again, alone, those that worked while another one did.

    Returns:
        Lines of the scoreboard, still without what the unbroken run says.
    """
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(opened(*asked, keep)) for asked in runs]
        drive(lanes)
        again = disturbed(lanes)
        rows = [line_of(lane) for lane in lanes]
    for place in [lanes.index(lane) for lane in again]:
        print(f"{runs[place][0].name}: again, alone: another run worked beside it", flush=True)
        rows[place] = one(*runs[place], keep)
    return rows


def one(entrant: Entrant, failure: Failure, steps: int, step_s: float, keep: Path | None = None) -> dict[str, Any]:
    """Run once; return the line of the scoreboard, still without what the unbroken run says."""
    return together([(entrant, failure, steps, step_s)], keep)[0]


@contextlib.contextmanager
def opened(entrant: Entrant, failure: Failure, steps: int, step_s: float, keep: Path | None) -> Iterator[Run]:
    """Make a run with all that is its own; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="race-", ignore_cleanup_errors=True) as name:
        run = Run(entrant, failure, steps, step_s, Path(name))
        try:
            yield run
        finally:
            run.close()
            if keep is not None:
                left_out = shutil.ignore_patterns("tmp", "disk", "image")
                shutil.copytree(name, keep / f"{entrant.name}-{failure.kind}-{time.time_ns()}", ignore=left_out)


def line_of(run: Run) -> dict[str, Any]:
    """Return what a run that has ended came to."""
    run.kill_all()
    run.look()
    found = score.score(run.lines, score_samples(run.steps), EPOCHS)
    weights = Path(f"{run.log}.weights")
    return {
        "entrant": run.entrant.name, "kind": run.failure.kind, "finished": bool(found.sha256), **asdict(found),
        "ideal_s": score.ideal_s(run.lines, run.steps), "interventions": run.by_hand, "peak_bytes": run.peak_bytes,
        "written_bytes": run.disk.written_bytes(), "notes": run.notes, "failure": asdict(run.failure),
        "first_start_s": run.first_at - run.began, "whole_s": run.ended_at - run.began,
        "weights": weights.read_bytes() if found.sha256 else b"",
    }  # fmt: skip


def score_samples(steps: int) -> int:
    """Return how many samples an epoch of the problem has: 32 per step, half of the steps."""
    return 32 * steps // EPOCHS


def judged(row: dict[str, Any], unbroken: dict[str, Any], off_s: float, steps: int) -> dict[str, Any]:
    """Return the line with its ratio and its weights beside those of the unbroken run."""
    whole = row["ideal_s"] if row["kind"] == "resize" else off_s + steps * row["failure"]["sleep_s"]
    mine, theirs = row["weights"], unbroken["weights"]
    distance = None
    if mine and len(mine) == len(theirs):
        import numpy as np

        a, b = np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32)
        distance = float(np.abs(a - b).max() / np.abs(b).max())
    ratio = row["seconds"] / whole if whole else 0.0
    equal = bool(mine) and row["sha256"] == unbroken["sha256"]
    return {
        **{key: value for key, value in row.items() if key != "weights"},
        "ratio": ratio,
        "equal": equal,
        "distance": distance,
    }


def unbroken_s(entrants: list[Entrant], steps: int, runs: int, keep: Path | None) -> dict[str, float]:
    """Return the seconds of each loop that the entrants need, without checkpoints and failures."""
    found = {}
    for name in dict.fromkeys(entrant.off for entrant in entrants):
        who = PLAIN if name == "loop" else replace(next(one for one in entrants if one.off == name), every=0)
        nothing = failures.Failure(kind="none", step=0, later=0, rank=0)
        rows = [one(who, nothing, steps, 0.0, keep) for _ in range(runs if who is PLAIN else 1)]
        if not all(row["finished"] for row in rows):
            raise SystemExit(f"the loop {name!r} does not come to its end without failures: {rows[0]['notes']}")
        found[name] = median([row["seconds"] for row in rows])
        print(f"unbroken, no checkpoints, {name}: {found[name]:.2f} s", flush=True)
    return found


def tune(entrants: list[Entrant], steps: int) -> None:
    """Write the interval of each entrant with the lowest cost: what saving adds, and half an interval trained again.

    Of those with a memory tier files are written every 20 steps while that is searched.
    """
    path = HERE / "intervals.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    off, nothing = unbroken_s(entrants, steps, 2, None), failures.Failure(kind="none", step=0, later=0, rank=0)
    for entrant in entrants:
        costs = {}
        for every in EVERY:
            persist = max(every, 20)
            rows = [one(replace(entrant, every=every, persist=persist), nothing, steps, 0.0) for _ in range(2)]
            if took := [row["seconds"] for row in rows if row["finished"]]:  # what disturbs only adds: the shorter one
                costs[every] = min(took) - off[entrant.off] * (1 - every / 2 / steps)
        print(
            f"{entrant.name}: seconds by interval { ({every: round(cost, 2) for every, cost in costs.items()}) }",
            flush=True,
        )
        if costs:
            best = min(costs, key=lambda every: costs[every])
            found[entrant.name] = {"every": best, "persist": max(best, 20)}
            path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [entrant.name for entrant in ENTRANTS]
    parser.add_argument("--entrants", nargs="+", choices=names, default=names)
    parser.add_argument("--kinds", nargs="+", choices=list(failures.KINDS), default=list(failures.KINDS))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=20261126)
    parser.add_argument("--runs", type=int, default=2, help="of the loop without checkpoints; of those of trainers one")
    parser.add_argument("--setup", action="store_true", help="make the environments, and end")
    parser.add_argument("--tune", action="store_true", help="search the interval of each entrant, and end")
    parser.add_argument("--keep", type=Path, help="a folder for logs and output of each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="the table as a file")
    parser.add_argument("--svg", type=Path, help="the picture")
    return parser.parse_args()


def main() -> int:
    """Run the race."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, load = time.monotonic(), LoadWatch()
    left_out, entrants = {}, []
    PLAIN.setup()
    for entrant in (entrant for entrant in tuned() if entrant.name in args.entrants):
        if why := entrant.setup():
            left_out[entrant.name] = why
            print(f"{entrant.name} does not start: {why}", flush=True)
        else:
            entrants.append(entrant)
    if args.setup:
        return 0
    if args.tune:
        tune(entrants, args.steps)
        return 0
    off = unbroken_s(entrants, args.steps, args.runs, args.keep)
    rows = raced(args, entrants, off, began)
    return finish(args, rows, {"unbroken_s": off, "left_out": left_out, "seconds": time.monotonic() - began}, load)


def raced(args: argparse.Namespace, entrants: list[Entrant], off: Mapping[str, float], began: float) -> list[dict[str, Any]]:  # fmt: skip
    """Run everything, first what runs alone; return the scoreboard, sorted."""
    kinds = list(dict.fromkeys(["none", *args.kinds]))
    asked: list[Asked] = []
    for entrant in entrants:
        drawn = failures.draw(args.seed, args.steps, RANKS, off[entrant.off] / args.steps)
        asked += [(entrant, drawn[kind], args.steps, off[entrant.off] / args.steps) for kind in kinds]
    waiting = [one for one in asked if one[1].kind == "hang" and one[0].waits_s]
    rows: list[dict[str, Any]] = []
    unbroken: dict[str, dict[str, Any]] = {}
    for group in [*([one] for one in asked if one not in waiting), waiting]:
        for (entrant, *_), row in zip(group, together(group, args.keep), strict=True):
            theirs = unbroken.setdefault(entrant.name, row)
            rows.append(judged(row, theirs, off[entrant.off], args.steps))
            said = " | ".join(table._cells(rows[-1], {}))
            print(f"{time.monotonic() - began:5.0f} s  {said}  {row['notes'] or ''}", flush=True)
    order = [(entrant.name, failure.kind) for entrant, failure, *_ in asked]
    return sorted(rows, key=lambda row: order.index((row["entrant"], row["kind"])))


def finish(args: argparse.Namespace, rows: list[dict[str, Any]], more: dict[str, Any], load: LoadWatch) -> int:
    """Print, and write what was asked for."""
    made = document("race", {"seed": args.seed, "steps": args.steps}, {**more, "rows": rows}, load=load)
    text = f"{table.matrix(rows)}\n\n{table.markdown(rows)}"
    print(
        f"\n{text}\n\n{more['seconds']:.0f} s in all; time of the loop without failures and checkpoints: {more['unbroken_s']}"
    )
    if args.json:
        write_json(args.json, made)
    if args.table:
        args.table.write_text(text + "\n")
    if args.svg:
        notes = [
            "length: time from the first step to the last over that of the same loop without failures and checkpoints"
        ]
        args.svg.write_text(table.svg(rows, "Time to the last step through one failure (lower is better)", notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
