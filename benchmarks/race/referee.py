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
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flashckpt.bench.measure import LoadWatch, document, median, write_json
from race import failures, score, table
from race.entrants import ENTRANTS, HERE, PLAIN, Entrant, tuned
from race.failures import Failure
from race.lanes import Queue, disturbed, drive
from race.run import RANKS, Run

EPOCHS = 2
CORES = 2  # runs at a time, each on a separate core: a run leaves two cores idle for two fifths of its time
EVERY = (2, 5, 10, 20, 40)
Asked = tuple[Entrant, Failure, int, float, float]
"""Entrant, failure, steps, seconds of an ordinary step, most seconds of the whole or 0: what a run is made of."""
Row = dict[str, Any]
SURELY = 1.25  # times as long as the longest loop without checkpoints: a run that nothing happens to


def together(runs: Sequence[Asked], keep: Path | None, noted: Callable[[Row], None] = lambda *_: None) -> list[Row]:
    """Run all, one on each core at a time; again those that worked while another one did on the same core.

    Args:
        runs: What is to be run, in order.
        keep: A folder for logs and output.
        noted: Called with the line of each that has ended.

    Returns:
        Lines of the scoreboard, still without what the unbroken run says.
    """
    rows: dict[int, Row] = {}
    with tempfile.TemporaryDirectory(prefix="race-", ignore_cleanup_errors=True) as name:
        lanes = [Run(*asked, Path(name) / str(place)) for place, asked in enumerate(runs)]

        def ended(run: Run) -> None:
            place = lanes.index(run)
            rows[place] = line_of(run)
            run.close()
            if keep is not None:
                left_out = shutil.ignore_patterns("tmp", "disk", "image")
                folder = keep / f"{run.entrant.name}-{run.failure.kind}-{time.time_ns()}"
                shutil.copytree(run.folder, folder, ignore=left_out)
            noted(rows[place])

        try:
            on_all_cores(Queue(lanes), ended)
        finally:
            for run in lanes:
                run.close()
    again = sorted(lanes.index(lane) for lane in disturbed(lanes))
    for place, row in zip(again, together([runs[place] for place in again], keep) if again else (), strict=True):
        print(f"{row['entrant']}, {row['kind']}: again: another run worked beside it", flush=True)
        rows[place] = row
        noted(row)
    return [rows[place] for place in range(len(runs))]


def on_all_cores(queue: Queue[Run], ended: Callable[[Run], None]) -> None:
    """Run what is queued: a thread for each core, whose children inherit it."""

    def on(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        drive(queue, core, ended)

    cores = sorted(os.sched_getaffinity(0))[:CORES]
    with ThreadPoolExecutor(len(cores)) as pool:
        try:
            for done in as_completed([pool.submit(on, core) for core in cores]):
                done.result()
        finally:
            queue.give_up()


def line_of(run: Run) -> Row:
    """Return what a run that has ended came to."""
    run.kill_all()
    run.look()
    found = score.score(run.lines, score_samples(run.steps), EPOCHS)
    weights = Path(f"{run.log}.weights")
    return {
        "entrant": run.entrant.name, "kind": run.failure.kind, "finished": bool(found.sha256), **asdict(found),
        "ideal_s": score.ideal_s(run.lines, run.steps), "interventions": run.by_hand, "peak_bytes": run.peak_bytes,
        "written_bytes": run.disk.written_bytes(), "notes": run.notes, "failure": asdict(run.failure),
        "first_start_s": run.first_at - run.began, "whole_s": run.ended_at - run.began, "core": run.core,
        "weights": weights.read_bytes() if found.sha256 else b"",
    }  # fmt: skip


def score_samples(steps: int) -> int:
    """Return how many samples an epoch of the problem has: 32 per step, half of the steps."""
    return 32 * steps // EPOCHS


def judged(row: Row, unbroken: Row, off_s: float, steps: int) -> Row:
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


def unbroken_s(entrants: list[Entrant], steps: int, runs: int, keep: Path | None) -> tuple[dict[str, float], float]:
    """Return the seconds of each loop that the entrants need, without checkpoints and failures, and of the longest with its start."""
    nothing = failures.Failure(kind="none", step=0, later=0, rank=0)
    asked: list[Asked] = []
    for name in dict.fromkeys(entrant.off for entrant in entrants):
        who = PLAIN if name == "loop" else replace(next(one for one in entrants if one.off == name), every=0)
        asked += [(who, nothing, steps, 0.0, 0.0)] * (runs if who is PLAIN else 1)
    took: dict[str, list[float]] = {}
    rows = together(asked, keep)
    for (entrant, *_), row in zip(asked, rows, strict=True):
        if not row["finished"]:
            raise SystemExit(f"{entrant.name} does not come to its end without failures: {row['notes']}")
        took.setdefault(entrant.off, []).append(row["seconds"])
    for name, seconds in took.items():
        print(f"unbroken, no checkpoints, {name}: {', '.join(f'{one:.2f}' for one in seconds)} s", flush=True)
    return {name: median(seconds) for name, seconds in took.items()}, max(row["whole_s"] for row in rows)


def tune(entrants: list[Entrant], steps: int) -> None:
    """Write the interval of each entrant with the lowest cost: what saving adds, and half an interval trained again.

    Of those with a memory tier files are written every 20 steps while that is searched.
    """
    path = HERE / "intervals.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    (off, _), nothing = unbroken_s(entrants, steps, 2, None), failures.Failure(kind="none", step=0, later=0, rank=0)
    for entrant in entrants:
        costs = {}
        for every in EVERY:
            persist = max(every, 20)
            rows = together([(replace(entrant, every=every, persist=persist), nothing, steps, 0.0, 0.0)] * 2, None)
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
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=20261126)
    parser.add_argument("--runs", type=int, default=2, help="of the loop without checkpoints; of those of trainers one")
    parser.add_argument("--setup", action="store_true", help="make the environments, and end")
    parser.add_argument("--tune", action="store_true", help="search the interval of each entrant, and end")
    parser.add_argument("--keep", type=Path, help="a folder for logs and output of each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="the table as a file")
    parser.add_argument("--svg", type=Path, help="the picture")
    return parser.parse_args()


def stop(*_: object) -> None:
    """Unwind, once: a second SIGTERM would leave processes and file systems behind."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> int:
    """Run the race."""
    args = _arguments()
    signal.signal(signal.SIGTERM, stop)
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
    off, longest_s = unbroken_s(entrants, args.steps, args.runs, args.keep)
    rows = raced(args, entrants, off, longest_s, began)
    return finish(args, rows, {"unbroken_s": off, "left_out": left_out, "seconds": time.monotonic() - began}, load)


def raced(args: argparse.Namespace, entrants: list[Entrant], off: Mapping[str, float], longest_s: float, began: float) -> list[Row]:  # fmt: skip
    """Run everything; return the scoreboard, sorted."""
    asked: list[Asked] = []
    for kind in dict.fromkeys(["none", *args.kinds]):
        for entrant in entrants:
            step_s = off[entrant.off] / args.steps
            failure = failures.draw(args.seed, args.steps, RANKS, step_s)[kind]
            asked.append((entrant, failure, args.steps, step_s, SURELY * longest_s if kind == "none" else 0.0))
    asked = in_order(asked)

    def noted(row: Row) -> None:
        said = f"{row['seconds']:5.1f} s" if row["finished"] else "not finished"
        print(
            f"{time.monotonic() - began:5.0f} s  {row['kind']}, {row['entrant']}: {said}  {row['notes'] or ''}",
            flush=True,
        )

    rows = together(asked, args.keep, noted)
    unbroken = {row["entrant"]: row for row in rows if row["kind"] == "none"}
    found = [
        judged(row, unbroken[row["entrant"]], off[one[0].off], args.steps) for one, row in zip(asked, rows, strict=True)
    ]
    names, kinds = [entrant.name for entrant in entrants], list(failures.KINDS)
    return sorted(found, key=lambda row: (kinds.index(row["kind"]), names.index(row["entrant"])))


def in_order(asked: Sequence[Asked]) -> list[Asked]:
    """Return first those that wait for a fixed time, behind as many as there are cores as many that fit into their waits."""
    waiting = [one for one in asked if one[1].kind == "hang" and one[0].waits_s]
    brief = [one for one in asked if one[4]]
    found: list[Asked] = []
    while waiting:
        found += [*waiting[:CORES], *brief[:CORES]]
        waiting, brief = waiting[CORES:], brief[CORES:]
    return [*found, *(one for one in asked if one not in found)]


def finish(args: argparse.Namespace, rows: list[Row], more: dict[str, Any], load: LoadWatch) -> int:
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
            "length: time from the first step to the last over that of the same loop without failures and checkpoints; bars end at 8"
        ]
        args.svg.write_text(table.svg(rows, "Time to the last step through one failure (lower is better)", notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
