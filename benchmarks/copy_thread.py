"""What the copy of a snapshot costs: CPU seconds from ckpt.step() to COMPLETE, by what copies.

The training thread waits at once, and so takes part: two threads that share the memory use more CPU than one alone (`memory_copy.py`).

States of few large and of very many small tensors; beside them one memcpy of as many bytes in the same rounds. `step()` is the
CPU time of the training thread inside ckpt.step(). CPU time, not wall time, so that a busy machine can be used.

    python benchmarks/copy_thread.py [--case TENSORS:GB ...] [--levels NAME ...] [--rounds R] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flashckpt import Checkpointer
from flashckpt.bench.measure import LoadWatch, Summary, document, summarise, write_json
from flashckpt.bench.table import about
from flashckpt.native import LEVEL_VARIABLE, levels

SLOTS = 3
CASES = ("300:1", "20000:0.25", "100000:0.1")


class Measured:
    """One job and its figures: name -> CPU seconds of each snapshot.

    A job for each level: what reads the version counters is chosen with the level when a snapshot is planned.
    """

    def __init__(self, tensors: int, nbytes: int, folder: Path, level: str) -> None:
        self._level = os.environ[LEVEL_VARIABLE] = level
        each = nbytes // tensors // 4
        self.model = nn.ParameterList([torch.zeros(each) for _ in range(tensors)])
        self.nbytes = each * tensors * 4
        self.ckpt = Checkpointer(
            folder, snapshot_every=1, persist_every=10**6, slots=SLOTS, job=f"copy-{os.getpid()}-{level}"
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # without one, nothing would be fenced
        self.ckpt.track(model=self.model, optimizer=optimizer)
        self.ckpt.restore()
        while not self.ckpt._alive().memory.is_ready:
            time.sleep(0.01)
        self._source, self._target = np.ones(self.nbytes, np.uint8), np.ones(self.nbytes, np.uint8)
        self._step = 0
        self.spent: dict[str, list[float]] = {}

    def snapshot(self, *, is_noted: bool) -> None:
        """Take one snapshot."""
        session = self.ckpt._alive()
        before = session.stats.get("copy_cpu_s", 0.0)
        self._step += 1
        began = time.thread_time()
        self.ckpt.step(self._step)
        stepped = time.thread_time() - began
        session._stager.finish()
        if is_noted:
            self.spent.setdefault(self._level, []).append(session.stats["copy_cpu_s"] - before)
            self.spent.setdefault(f"step() with {self._level}", []).append(stepped)

    def memcpy(self) -> None:
        """Copy as many bytes by one call."""
        began = time.thread_time()
        np.copyto(self._target, self._source)
        self.spent.setdefault("memcpy", []).append(time.thread_time() - began)


def measure(case: str, chosen: list[str], rounds: int) -> dict[str, Summary]:
    """Return the figures of one case, "TENSORS:GB": milliseconds of CPU per snapshot."""
    tensors, gigabytes = case.split(":")
    spent: dict[str, list[float]] = {}
    for level in chosen:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            os.environ["FLASHCKPT_SHM_DIR"] = memory
            one = Measured(int(tensors), int(float(gigabytes) * 1e9), Path(folder), level)
            for number in range(-SLOTS, rounds):  # every slot is written once before anything counts
                one.snapshot(is_noted=number >= 0)
                if number >= 0:
                    one.memcpy()
            one.ckpt.close()
        for name, values in one.spent.items():
            spent.setdefault(name, []).extend(values)
    return {name: summarise([1e3 * value for value in values]) for name, values in spent.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=CASES, metavar="TENSORS:GB")
    parser.add_argument("--levels", nargs="+", default=["python", levels()[-1]], choices=levels(), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = LoadWatch()
    results: dict[str, Any] = {case: measure(case, args.levels, args.rounds) for case in args.case}
    made = document("copy_thread", {"rounds": args.rounds, "levels": args.levels}, results, load=load)
    print("\n".join(about(made)))
    print("\nms of CPU per snapshot, medians [min-max]\n\n| tensors:GB | what | ms | x of memcpy |\n|---|---|---|---|")
    for case, figures in results.items():
        for name, figure in figures.items():
            print(f"| {case} | {name} | {figure.text()} | {figure.median / figures['memcpy'].median:.2f} |")
    if args.json is not None:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
