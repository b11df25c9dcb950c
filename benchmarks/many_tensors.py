"""What state of very many tensors costs the process that trains it: CPU seconds of track(), restore() and step().

A model of N small parameters (experts of three matrices each) under AdamW has 4 N tensors once it has stepped. Each
run is a separate process on a new root, so that nothing is planned before. Three figures per call: CPU of the training
thread, CPU of all threads of the process (the copy thread, and what reserves memory, run beside training), and wall time,
which means something on a quiet machine alone. `fence()` follows the later calls of step() at once, so that its wall time is
all of the copy: training that computes in between waits for what is left of it.

    python benchmarks/many_tensors.py [--tensors N ...] [--runs R] [--json FILE] [--profile CALL]

`--profile restore` (or track, first_step, later_step) prints where that call spent its time, instead of the table.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("track", "restore", "first_step", "later_step", "fence")
LATER_STEPS = 7
EDGE = 16
"""Rows and columns of a parameter: 1 KiB of float32, so that the tensors cost and not their bytes."""


Spent = tuple[float, float, float]


class Meter:
    """Seconds of calls: {call: (CPU of the training thread, CPU of the process, wall)}."""

    def __init__(self, profiled: str | None) -> None:
        self.spent: dict[str, list[Spent]] = {}
        self._profiled = profiled

    def call(self, name: str, function: Callable[[], Any]) -> None:
        """Call a function and note its cost under a name."""
        profile = cProfile.Profile(time.thread_time) if name == self._profiled else None
        thread, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
        if profile is None:
            function()
        else:
            profile.runcall(function)
        spent = time.thread_time() - thread, time.process_time() - process, time.perf_counter() - wall
        self.spent.setdefault(name, []).append(spent)
        if profile is not None:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def measure(tensors: int, folder: Path, profiled: str | None) -> dict[str, list[Spent]]:
    """Run one job of one process with `tensors` parameters; return what its calls cost."""
    import torch
    from torch import nn

    from flashckpt import Checkpointer

    torch.set_num_threads(1)

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("w1", "w2", "w3"):
                self.register_parameter(name, nn.Parameter(torch.zeros(EDGE, EDGE)))

    model = nn.Module()
    model.experts = nn.ModuleList(Expert() for _ in range(tensors // 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    ckpt = Checkpointer(folder / "root", snapshot_every=1, persist_every=10**6, job=f"many-{os.getpid()}")
    meter = Meter(profiled)
    meter.call("track", lambda: ckpt.track(model=model, optimizer=optimizer, rng=True))
    meter.call("restore", ckpt.restore)
    while not ckpt._alive().memory.is_ready:
        time.sleep(0.001)
    for step in range(1, LATER_STEPS + 2):
        optimizer.step()
        meter.call("first_step" if step == 1 else "later_step", lambda step=step: ckpt.step(step))  # type: ignore[misc]  # bound now
        meter.call("fence", ckpt.fence)
    ckpt.close()
    return meter.spent


def run(tensors: int, profiled: str | None) -> dict[str, list[Spent]]:
    """Measure in a separate process with its own memory."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # the daemon persists the last snapshot
        tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as memory,
    ):
        command = [sys.executable, __file__, "--child", folder, "--tensors", str(tensors)]
        command += ["--profile", profiled] if profiled else []
        environment = {**os.environ, "FLASHCKPT_SHM_DIR": memory}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[Spent]] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[int, dict[str, list[Spent]]]) -> str:
    """Return the medians as a table: CPU of the training thread; in brackets CPU of all threads, and wall."""
    lines = ["| parameters | " + " | ".join(f"{call}() ms" for call in CALLS) + " |", "|---" * (len(CALLS) + 1) + "|"]
    for tensors, calls in results.items():
        cells = [
            "{:.2f} ({:.2f}; {:.2f})".format(
                *(1e3 * statistics.median(column) for column in zip(*calls[call], strict=True))
            )
            for call in CALLS
        ]
        lines.append(f"| {tensors:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000], metavar="N")
    parser.add_argument("--runs", type=int, default=3, help="processes per size; the medians are of all of them")
    parser.add_argument("--json", type=Path, help="write every single figure here too")
    parser.add_argument("--profile", choices=CALLS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(measure(options.tensors[0], options.child, options.profile)))
        return
    results: dict[int, dict[str, list[Spent]]] = {}
    for tensors in options.tensors:
        found = results[tensors] = {call: [] for call in CALLS}
        for _ in range(1 if options.profile else options.runs):
            for call, spent in run(tensors, options.profile).items():
                found[call] += spent
    print(table(results))
    if options.json is not None:
        machine = {"python": platform.python_version(), "cpu": platform.processor(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "calls": results}, indent=1))


if __name__ == "__main__":
    main()
