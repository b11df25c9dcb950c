"""From SIGKILL of one of 4 ranks to all ranks having trained a step: torchrun against dlrun, by phase.

    python benchmarks/restart.py --state-mb 1 --runs 4 --kills 3 --json benchmarks/results/restart-1mb.json

The launchers take turns within one run. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which
torchrun 2.13 hangs after a restart under gloo, and restores with torch.load from /dev/shm; dlrun restores with
flashckpt. The cold start is the time from the command to the first step of all ranks. `--build empty` shows scripts that
do not initialise what they are going to restore; the ordinary step beside the first one shows how much of that is the restart's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashckpt.bench.measure import LoadWatch, document, median, summarise, write_json

TRAINER = Path(__file__).with_name("restart_trainer.py")
MODULES = {"torchrun": "torch.distributed.run", "dlrun": "flashckpt.daemon.run"}
ENGINES = {"torchrun": "torch.save", "dlrun": "flashckpt"}
PHASES = ("to_script", "import", "init", "build", "restore", "first_step")
MARKS = ("entered", "imported", "initialised", "built", "restored", "stepped")


def until(condition: Callable[[], Any], what: str, deadline_s: float = 240.0) -> Any:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.002)
    raise SystemExit(f"waited {deadline_s} s in vain for {what}")


def generations(folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """Return the marks of every generation that all ranks have trained in."""
    try:
        lines = [json.loads(line) for line in (folder / "marks").read_text().splitlines() if line.endswith("}")]
    except FileNotFoundError:
        return []
    whole = len(lines) // ranks
    return [lines[i * ranks : (i + 1) * ranks] for i in range(whole)]


def has_trained(folder: Path, ranks: int, count: int) -> bool:
    return len(generations(folder, ranks)) == count


def ordinary_steps(folder: Path, generation: list[dict[str, Any]]) -> list[float]:
    """Return per rank the median seconds of its 2nd to 12th step; [] until all ranks of `generation` have come so far."""
    try:
        lines = [line.split() for line in (folder / "ready").read_text().splitlines()]
    except FileNotFoundError:
        return []
    medians = {int(words[0]): float(words[1]) for words in lines if len(words) == 2}
    return (
        [medians[marks["pid"]] for marks in generation] if all(marks["pid"] in medians for marks in generation) else []
    )


def phases(begun: float, generation: list[dict[str, Any]]) -> dict[str, float]:
    """Cut the time from `begun` to the last rank's first step at the moments when the last rank reached each mark."""
    moments = [begun, *(max(marks[name] for marks in generation) for name in MARKS)]
    named = dict(zip(PHASES, (late - early for early, late in pairwise(moments)), strict=True))
    return {**named, "total": moments[-1] - begun}


def cpu_phases(generation: list[dict[str, Any]]) -> dict[str, float]:
    """Return the processor seconds of all ranks together by phase: other work on the machine changes them least."""
    sums = [0.0, *(sum(marks[f"cpu_{name}"] for marks in generation) for name in MARKS)]
    named = dict(zip(PHASES, (late - early for early, late in pairwise(sums)), strict=True))
    return {**named, "total": sums[-1]}


def one_launch(launcher: str, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Launch once, kill `args.kills` times; return the phases of the cold start and of each restart."""
    folder = Path(tempfile.mkdtemp(prefix="restart-"))
    shm = Path(tempfile.mkdtemp(prefix="flashckpt-bench-", dir="/dev/shm"))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BENCH_SHM": str(shm),
        "FLASHCKPT_SHM_DIR": str(shm),
        "TMPDIR": str(folder),
    }
    if launcher == "torchrun":
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    state = str(args.state_mb * 10**6 // args.ranks)
    flags = [f"--nproc-per-node={args.ranks}", f"--max-restarts={args.kills}"]
    command = [
        sys.executable,
        "-m",
        MODULES[launcher],
        *flags,
        str(TRAINER),
        str(folder),
        ENGINES[launcher],
        state,
        args.build,
    ]
    begun = time.time()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        until(partial(has_trained, folder, args.ranks, 1), "the first generation")
        result = {
            "cold": [phases(begun, generations(folder, args.ranks)[0])],
            "restart": [],
            "restart_cpu": [],
            "steps": [],
        }
        for kill in range(args.kills):
            generation = generations(folder, args.ranks)[kill]
            steps = until(partial(ordinary_steps, folder, generation), "12 steps")
            result["steps"].append({"ordinary_step": max(steps)})
            killed = time.time()
            os.kill(generation[(kill + 1) % args.ranks]["pid"], signal.SIGKILL)
            until(partial(has_trained, folder, args.ranks, kill + 2), f"generation {kill + 1}")
            again = generations(folder, args.ranks)[kill + 1]
            result["restart"].append(phases(killed, again))
            result["restart_cpu"].append(cpu_phases(again))
        return result
    finally:
        for marks in (line for generation in generations(folder, args.ranks) for line in generation):
            kill_quietly(marks["pid"])
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def memcpy_s(nbytes: int) -> float:
    """Return the median seconds to copy `nbytes` within warm memory, one thread, as the ranks share the cores."""
    import torch

    torch.set_num_threads(1)
    source = torch.ones(max(1, nbytes // 4))
    target = torch.zeros_like(source)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-mb", type=int, default=1, help="state of all ranks together, 10^6 bytes")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="launches of each launcher")
    parser.add_argument("--kills", type=int, default=3, help="kills per launch")
    parser.add_argument(
        "--build",
        choices=["random", "empty"],
        default="random",
        help="whether a restart fills the weights at random before it restores them",
    )
    parser.add_argument("--launchers", nargs="+", choices=sorted(MODULES), default=["torchrun", "dlrun"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was launched is ended
    load = LoadWatch()
    results: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {"cold": [], "restart": [], "restart_cpu": [], "steps": []} for name in args.launchers
    }
    loads = []
    for run in range(args.runs):
        for launcher in args.launchers:
            loads.append(os.getloadavg()[0])
            for kind, rows in one_launch(launcher, args).items():
                results[launcher][kind] += rows
            last = results[launcher]["restart"][-1]["total"] if args.kills else float("nan")
            print(f"run {run} {launcher}: last restart {last:.2f} s, load average {loads[-1]:.1f}", flush=True)
    table = {
        launcher: {
            kind: {phase: summarise([row[phase] for row in rows]) for phase in rows[0]}
            for kind, rows in kinds.items()
            if rows
        }
        for launcher, kinds in results.items()
    }
    show(table)
    state = {"memcpy_s": memcpy_s(args.state_mb * 10**6), "state_bytes": args.state_mb * 10**6}
    print(f"memcpy of the whole state, one thread: {state['memcpy_s']:.3f} s")
    if args.json:
        arguments = {key: str(value) for key, value in vars(args).items()}
        measured = {"summary": table, "rows": results, "load_averages": loads, **state}
        write_json(args.json, document("restart", arguments, measured, load=load, paths=[Path("/dev/shm")]))


def show(table: dict[str, Any]) -> None:
    for kind, what in (("restart", "seconds"), ("restart_cpu", "CPU seconds of all ranks"), ("cold", "seconds")):
        columns = [launcher for launcher in table if kind in table[launcher]]
        if not columns:
            continue
        print(f"\n{kind}, {what}, median [min-max]\n{'':12}" + "".join(f"{name:>26}" for name in columns))
        for phase in (*PHASES, "total"):
            print(f"{phase:12}" + "".join(f"{table[name][kind][phase].text():>26}" for name in columns))
        if len(columns) == 2:
            ratio = table["torchrun"][kind]["total"].median / table["dlrun"][kind]["total"].median
            print(f"torchrun / dlrun: {ratio:.1f}")
    for name in (name for name in table if "steps" in table[name]):
        print(f"{name}: an ordinary step, slowest rank: {table[name]['steps']['ordinary_step'].text()} s")


if __name__ == "__main__":
    main()
