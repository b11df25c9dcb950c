"""What restoring very many tensors costs: CPU seconds of each step of a restore, fresh, from memory and from storage.

A model of N small parameters under AdamW takes one step and one snapshot, which is committed; that is 4 N tensors. Then
separate processes restore, one after another in each round: fresh (nothing is there), from this node's memory, and from
storage with an empty memory. It reports the CPU seconds of every phase (all threads of the process), and of all of
`restore()` those of the training thread and of all threads (one of which reserves memory), as medians over the rounds
with the least and the most. CPU time, not wall time, so that a busy machine can be used. The bytes of each tensor are
few (32 floats): what is measured is what the number of tensors costs.

    python benchmarks/many_tensors_restore.py [N ...] [--runs R] [--json FILE] [--profile fresh|memory|storage]

`--profile` prints where one restore from that tier spent its time, instead of the table.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, COLUMNS = 4, 8
PER_BLOCK = 100
TIERS = ("fresh", "memory", "storage")
STRUCTURE = "structure"
"""The phase that reads what the live objects consist of; everything else is what a restore does with it."""


def objects(count: int, *, stepped: bool) -> tuple[Any, Any]:
    """Return a module with `count` parameters of 4 x 8 float32, and its optimizer."""
    import torch

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList()
    for first in range(0, count, PER_BLOCK):
        block = torch.nn.Module()
        for k in range(min(PER_BLOCK, count - first)):
            block.register_parameter(f"w{k}", torch.nn.Parameter(torch.full((ROWS, COLUMNS), float(first + k))))
        model.blocks.append(block)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def save(count: int, root: str) -> None:
    """Take one snapshot of step 1 and wait until it is committed."""
    import flashckpt

    model, optimizer = objects(count, stepped=True)
    checkpointer = flashckpt.Checkpointer(root, job="many-tensors", persist_every=1)
    checkpointer.track(model=model, optimizer=optimizer)
    checkpointer.restore()
    checkpointer.step(1)
    checkpointer.wait(1800)
    os._exit(0)  # as if killed: memory stays for the next process


def restore(count: int, root: str, *, profiled: bool) -> dict[str, Any]:
    """Restore in this process; return CPU seconds by phase, and check one value of each kind."""
    import flashckpt
    from flashckpt.restore.executor import Phases

    model, optimizer = objects(count, stepped=False)
    checkpointer = flashckpt.Checkpointer(root, job="many-tensors", persist_every=1)
    checkpointer.track(model=model, optimizer=optimizer)
    seen: list[Phases] = []
    make_report = Phases.report

    def reporting(self: Phases) -> dict[str, float]:
        seen.append(self)
        return make_report(self)

    Phases.report = reporting  # type: ignore[method-assign]  # the phases are nobody's business but a benchmark's
    profile = cProfile.Profile(time.process_time)
    began, began_here = time.process_time(), time.thread_time()
    report = profile.runcall(checkpointer.restore) if profiled else checkpointer.restore()
    thread, total = time.thread_time() - began_here, time.process_time() - began
    if profiled:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    found = {"phases": {}, "pipeline": 0.0, "thread": thread, "total": total}
    if report is None:
        return {"tier": "fresh", **found}
    assert report.step == 1
    last = next(reversed(list(model.parameters())))
    assert set(optimizer.state[last]) == {"step", "exp_avg", "exp_avg_sq"}
    phases = dict(seen[-1].cpu_seconds)
    pipeline = sum(phases.values()) - phases.get(STRUCTURE, 0.0)
    return found | {"tier": report.tier, "phases": phases, "pipeline": pipeline}


def child(role: str, count: int, root: str, memory: Path, *flags: str) -> str:
    """Run this program in a separate process, with its memory in `memory`."""
    memory.mkdir(exist_ok=True)
    environment = {**os.environ, "FLASHCKPT_SHM_DIR": str(memory)}
    words = [sys.executable, __file__, str(count), "--role", role, "--root", root, *flags]
    return subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def measured(count: int, runs: int, profiled: str | None) -> dict[str, list[dict[str, Any]]]:
    """Return what each run cost, by tier."""
    found: dict[str, list[dict[str, Any]]] = {tier: [] for tier in TIERS}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flashckpt-many-") as scratch,
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory() as empty,
    ):
        child("save", count, disk, Path(scratch) / "job")
        for run in range(runs):
            for tier in TIERS if profiled is None else (profiled,):
                root = f"{empty}/{run}" if tier == "fresh" else disk
                memory = Path(scratch) / ("job" if tier == "memory" else f"{tier}{run}")
                flags = ["--profile", tier] if profiled else []
                one = json.loads(child("restore", count, root, memory, *flags).splitlines()[-1])
                assert one["tier"] == tier
                found[tier].append(one)
                if tier != "memory":
                    shutil.rmtree(memory)
    return found


def table(count: int, found: dict[str, list[dict[str, Any]]]) -> str:
    """Return medians (least to most) of CPU seconds by phase."""
    lines = [f"{count} parameters, {4 * count} tensors: CPU s, median (least to most)", ""]
    for tier, runs in ((tier, runs) for tier, runs in found.items() if runs):
        lines.append("fresh" if tier == "fresh" else f"from {tier}")
        names = [*dict.fromkeys(name for run in runs for name in run["phases"])]
        rows = {name: [run["phases"].get(name, 0.0) for run in runs] for name in names}
        if names:
            rows |= {f"all phases but {STRUCTURE}": [run["pipeline"] for run in runs]}
        rows |= {"restore(), training thread": [run["thread"] for run in runs]}
        rows |= {"restore(), all threads": [run["total"] for run in runs]}
        for name, values in rows.items():
            spread = f"({min(values):.3f} to {max(values):.3f})"
            lines.append(f"  {name:<26} {statistics.median(values):>8.3f} {spread}")
    return "\n".join(lines)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="*", default=[25_000, 100_000], help="parameters (25,000 100,000)")
    parser.add_argument("--runs", type=int, default=3, help="rounds (3)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--profile", choices=TIERS, help="profile one such restore")
    parser.add_argument("--role", choices=("save", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "save":
        save(options.count[0], options.root)
    elif options.role == "restore":
        print(json.dumps(restore(options.count[0], options.root, profiled=options.profile is not None)))
        sys.stdout.flush()
        os._exit(0)
    else:
        found = {}
        for count in options.count:
            found[count] = measured(count, 1 if options.profile else options.runs, options.profile)
            print(table(count, found[count]), flush=True)
        if options.json:
            machine = {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}
            options.json.write_text(json.dumps({"machine": machine, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
