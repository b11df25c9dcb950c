"""What the figures of a snapshot's tensors cost: the same snapshots with them and without, in turns.

Two jobs with the same state: `with` notes figures (non-finite, largest magnitude, sum of squares) in the pass that copies
and digests, `without` has every dtype read as one without numbers. Times from ckpt.step() to COMPLETE: CPU seconds of all
threads that copy, and of the clock. `copy` is the pass alone, one thread, the same rows. The cost is the median over rounds
of with / without of one round. On a busy machine compare the CPU seconds.

    python benchmarks/figures.py [--case DTYPE:TENSORS:GB ...] [--level NAME] [--rounds R] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from flashckpt import Checkpointer
from flashckpt.bench.measure import LoadWatch, Summary, document, summarise, write_json
from flashckpt.bench.table import about
from flashckpt.core.records import CHUNK_BYTES
from flashckpt.native import LEVEL_VARIABLE, copy_and_digest, levels
from flashckpt.native import descriptors as numbers_module
from flashckpt.native.descriptors import FIGURES, KINDS

CASES = ("float32:300:0.5", "bfloat16:300:0.5", "float32:300:1", "bfloat16:300:1", "float32:20000:0.25")
SIDES = ("without", "with")
SLOTS = 2


class Job:
    """One job; CPU and clock seconds of each of its snapshots."""

    def __init__(self, side: str, dtype: torch.dtype, tensors: int, nbytes: int, folder: Path) -> None:
        each = nbytes // tensors // dtype.itemsize
        generator = torch.Generator().manual_seed(0)
        self.nbytes = each * tensors * dtype.itemsize
        self.model = nn.ParameterList(
            [torch.randn(each, generator=generator).mul(0.02).to(dtype) for _ in range(tensors)]
        )
        self.ckpt = Checkpointer(
            folder / side, snapshot_every=1, persist_every=10**6, slots=SLOTS, job=f"figures-{os.getpid()}-{side}"
        )
        self._side, self._step = side, 0
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # without one, nothing would be fenced
        self.ckpt.track(model=self.model, optimizer=optimizer)
        with self.kinds():
            self.ckpt.restore()
            while not self.ckpt._alive().memory.is_ready:
                time.sleep(0.01)

    def kinds(self) -> Any:
        """Return the context in which plans read numbers, or do not."""
        return mock.patch.dict(numbers_module.KINDS, {}, clear=self._side == "without")

    def snapshot(self) -> tuple[float, float]:
        """Take one; return its CPU and clock seconds."""
        session = self.ckpt._alive()
        before = session.stats.get("copy_cpu_s", 0.0)
        self._step += 1
        began = time.perf_counter()
        with self.kinds():
            self.ckpt.step(self._step)
            session._stager.finish()
        return session.stats["copy_cpu_s"] - before, time.perf_counter() - began


def pass_alone(dtype: str, nbytes: int) -> Callable[[str], float]:
    """Return what copies and digests one row, with figures or without, and says its CPU seconds."""
    count = nbytes // torch.float32.itemsize
    source = (np.random.default_rng(0).standard_normal(count, np.float32) * 0.02).view(np.uint8)
    target = np.ones(len(source), np.uint8)
    rows = np.array([[source.ctypes.data, target.ctypes.data, len(source)]], np.int64)
    digests = np.zeros(-(-len(source) // CHUNK_BYTES), np.uint64)
    figures = np.zeros(len(digests), FIGURES)

    def run(side: str) -> float:
        kinds = np.array([KINDS[dtype] if side == "with" else 0], np.uint8)
        assert len(source) == len(target)  # rows hold addresses alone: this keeps the memory
        began = time.thread_time()
        copy_and_digest(rows, digests=digests, kinds=kinds, figures=figures, check=False)
        return time.thread_time() - began

    return run


def _folder(place: str | None = None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True)  # a persister may still be ending


def measure(case: str, rounds: int) -> dict[str, Summary]:
    """Return the figures of one case, "DTYPE:TENSORS:GB": milliseconds, and percent that figures cost."""
    dtype, tensors, gigabytes = case.split(":")
    nbytes = int(float(gigabytes) * 1e9)
    spent: dict[tuple[str, str], list[float]] = {}
    with _folder() as folder, _folder("/dev/shm") as memory:
        os.environ["FLASHCKPT_SHM_DIR"] = memory
        jobs = {side: Job(side, getattr(torch, dtype), int(tensors), nbytes, Path(folder)) for side in SIDES}
        alone = pass_alone(dtype, min(nbytes, 1 << 28))
        for number in range(-SLOTS, rounds):  # every slot is written once before anything counts
            for side in SIDES[:: 1 if number % 2 else -1]:
                cpu_s, wall_s = jobs[side].snapshot()
                taken = {"COMPLETE, CPU": cpu_s, "COMPLETE, clock": wall_s, "the pass, CPU": alone(side)}
                for name, seconds in taken.items() if number >= 0 else ():
                    spent.setdefault((name, side), []).append(seconds)
        for job in jobs.values():
            job.ckpt.close()
    found = {}
    for name in dict.fromkeys(name for name, _ in spent):
        without, noted = (np.array(spent[name, side]) for side in SIDES)
        found[f"{name}, without, ms"] = summarise(list(without * 1e3))
        found[f"{name}, with, ms"] = summarise(list(noted * 1e3))
        found[f"{name}, cost, %"] = summarise(list((noted / without - 1) * 100))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=CASES, metavar="DTYPE:TENSORS:GB")
    parser.add_argument("--level", choices=levels(), default=levels()[-1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ[LEVEL_VARIABLE] = args.level
    torch.set_num_threads(1)
    load = LoadWatch()
    results: dict[str, Any] = {case: measure(case, args.rounds) for case in args.case}
    made = document("figures", {"rounds": args.rounds, "level": args.level}, results, load=load)
    print("\n".join(about(made)))
    print("\nmedians [min-max]\n\n| dtype:tensors:GB | what | |\n|---|---|---|")
    for case, figures in results.items():
        for name, figure in figures.items():
            print(f"| {case} | {name} | {figure.text()} |")
    if args.json is not None:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
