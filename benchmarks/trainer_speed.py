"""How fast does the trainer train, beside torchtitan and nanoGPT? Tokens per CPU second, tokens per second, peak memory.

    python benchmarks/trainer_speed.py [--torchtitan VENV] [--nanogpt FOLDER] [--layouts 1,fsdp2] [--rounds 6] [--json FILE]

One model for all: dim 256, 6 layers, 16 heads, a vocabulary of 2,048, windows of 256 tokens, 4 of them for each data-parallel
rank, float32, one thread per rank, gloo. All contestants of a layout are started, then trained in turns of some steps, in
another order each round, so that a busy machine is busy for all; who waits uses no processor. The first steps are left out, and with them the first touch of all slots.
A ratio is the median of the ratios of each round, with the least and the greatest.

Nothing is fetched: `--torchtitan` is a virtual environment with torchtitan 0.3.0 and torch 2.13 (or its Python), `--nanogpt` a folder with
nanoGPT's model.py. Without them flashckpt is measured alone. "snapshots" is flashckpt with its engine: a snapshot every 5 steps, one in ten
of them made durable; its CPU seconds include the copy thread and the daemon.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from processes import clean_up_on_sigterm
from trainer_speed_jobs import Job, Turn
from trainer_speed_runs import LAYOUTS, Contestant, contestants, write_data

REASONS = {
    "torchtitan": "--torchtitan names no environment",
    "nanoGPT": "--nanogpt names no folder",
}


def race(runs: list[Contestant], *, warm_up: int, block: int, rounds: int, folder: Path) -> dict[str, list[Turn]]:
    """Train all contestants of a layout in turns; return the turns of each."""
    jobs = {run.name: Job(run, folder / run.name.replace(" ", "-")) for run in runs}
    found: dict[str, list[Turn]] = {name: [] for name in jobs}
    try:
        for job in jobs.values():
            job.turn(warm_up)
        names = list(jobs)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                jobs[name].turn(block)
        for name, job in jobs.items():
            found[name] = job.finish()[1:]
    finally:
        for job in jobs.values():
            job.kill()
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(turns: list[Turn]) -> dict[str, Any]:
    return {
        "tokens_per_cpu_s": spread([turn.tokens / turn.cpu_s for turn in turns]),
        "tokens_per_s": spread([turn.tokens / turn.wall_s for turn in turns]),
        "peak_mb": max(turn.peak_mb for turn in turns),
        "peak_beyond_imports_mb": max(turn.beyond_imports_mb for turn in turns),
        "data_share_of_cpu": statistics.median(turn.data_s / turn.cpu_s for turn in turns),
    }


def ratios(ours: list[Turn], theirs: list[Turn]) -> dict[str, Any]:
    """Compare round by round: above 1, `ours` is better in all but memory."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "tokens_per_cpu_s": spread([(a.tokens / a.cpu_s) / (b.tokens / b.cpu_s) for a, b in pairs]),
        "tokens_per_s": spread([(a.tokens / a.wall_s) / (b.tokens / b.wall_s) for a, b in pairs]),
        "peak": max(a.peak_mb for a in ours) / max(b.peak_mb for b in theirs),
        "peak_beyond_imports": max(a.beyond_imports_mb for a in ours) / max(b.beyond_imports_mb for b in theirs),
    }


def table(layout: str, found: dict[str, list[Turn]]) -> dict[str, Any]:
    """Print a layout's rows and return them."""
    rows = {name: summary(turns) for name, turns in found.items()}
    print(f"\n{layout}: {LAYOUTS[layout].text}")
    for name, row in rows.items():
        cpu, wall = (
            f"{row[key]['median']:7.0f} [{row[key]['min']:.0f} - {row[key]['max']:.0f}]"
            for key in ("tokens_per_cpu_s", "tokens_per_s")
        )
        print(f"  {name:20} {cpu} tokens per CPU second, {wall} per second, peak {row['peak_mb']:.0f} MB", end="")
        print(f" ({row['peak_beyond_imports_mb']:.0f} beyond imports), data {row['data_share_of_cpu']:.1%}")
    compared = {}
    pairs = [("flashckpt", name) for name in found if name not in ("flashckpt", "snapshots")]
    for one, other in [*pairs, ("snapshots", "flashckpt")]:
        if one not in found or other not in found:
            continue
        ratio = compared[f"{one} / {other}"] = ratios(found[one], found[other])
        cpu, wall = (
            f"{ratio[key]['median']:.3f} [{ratio[key]['min']:.3f} - {ratio[key]['max']:.3f}]"
            for key in ("tokens_per_cpu_s", "tokens_per_s")
        )
        print(f"  {one} / {other}: {cpu} per CPU second, {wall} per second, peak {ratio['peak']:.2f}", end="")
        print(f" ({ratio['peak_beyond_imports']:.2f} beyond imports)", flush=True)
    return {"contestants": rows, "ratios": compared}


def facts() -> dict[str, Any]:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "machine": cpu.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtitan", metavar="VENV", help="virtual environment with torchtitan 0.3.0, or its Python")
    parser.add_argument("--nanogpt", metavar="FOLDER", help="folder with nanoGPT's model.py")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contestant")
    parser.add_argument("--block", type=int, default=10, help="steps of a turn")
    parser.add_argument(
        "--warm-up", type=int, default=16, help="first steps, left out: three slots of snapshots are touched first"
    )
    parser.add_argument("--no-snapshots", action="store_true", help="leave the runs with the engine out")
    parser.add_argument("--keep", metavar="FOLDER", help="keep data and logs here")
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    clean_up_on_sigterm()
    folder = Path(args.keep or tempfile.mkdtemp(prefix="trainer-speed-")).absolute()
    shm = Path(tempfile.mkdtemp(prefix="trainer-speed-", dir="/dev/shm"))
    result: dict[str, Any] = {"before": facts(), "block": args.block, "warm_up": args.warm_up, "layouts": {}}
    for name, given in (("torchtitan", args.torchtitan), ("nanoGPT", args.nanogpt)):
        if not given:
            print(f"{name} is left out: {REASONS[name]}")
    try:
        write_data(folder)
        for layout in args.layouts.split(","):
            runs = contestants(layout, folder, shm, torchtitan=args.torchtitan, nanogpt=args.nanogpt)
            runs = [run for run in runs if not (args.no_snapshots and run.name == "snapshots")]
            found = race(runs, warm_up=args.warm_up, block=args.block, rounds=args.rounds, folder=folder / layout)
            result["layouts"][layout] = table(layout, found)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    result["after"] = facts()
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
