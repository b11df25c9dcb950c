"""One rank of `stall.py`: holds the training loop and the cases it is told to set up, and runs them on command."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import descendants
from training_loop import Case, Loop, measured

from flashckpt.bench.worker import serve


class Rank:
    """What the parent may order."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.ranks = config, config["ranks"]
        self.folder = Path(config["folder"])
        self.rank = int(os.environ["RANK"])
        store = dist.FileStore(f"{self.folder}/{config['kind']}.store", self.ranks)  # type: ignore[attr-defined]  # not in the stubs
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks)
        nbytes = config["bytes"] / self.ranks
        self.loop = Loop(nbytes, tensors=config["tensors"], compute=config["compute"], rank=self.rank)
        self.cases: dict[str, Case] = {}

    def about(self) -> dict[str, Any]:
        """Size of the state."""
        return {"nbytes": self.loop.nbytes, "tensors": len(self.loop.state())}

    def setup(self, case: str) -> float:
        """Make a case ready; seconds."""
        started = time.perf_counter()
        if case.startswith("DLRover"):
            from stall_dlrover import Dlrover

            self.cases[case] = Dlrover(self.loop, self.folder, self.ranks, disk=case.endswith("disk"))
        else:
            from stall_cases import make

            job, slots = self.config["job"], self.config["slots"]
            self.cases[case] = make(case, self.loop, self.folder, job=job, slots=slots)
        return time.perf_counter() - started

    def run(self, case: str) -> dict[str, float | None]:
        """One memcpy, then one snapshot by this case, all ranks at once."""
        dist.barrier()
        wall, cpu = self.loop.memcpy()
        dist.barrier()
        return {"memcpy_s": wall, "memcpy_cpu_s": cpu} | measured(self.loop, self.cases[case])

    def step(self) -> float:
        """One quiet step; seconds."""
        return self.loop.compute() + self.loop.update()

    def pids(self, case: str) -> list[int]:
        """This process, its descendants, and whoever works for the case."""
        return [*descendants(os.getpid()), *self.cases[case].pids()]

    def alone(self, case: str) -> dict[str, float]:
        """One snapshot and restore by flashckpt with nothing beside; its counters of CPU and of skipped snapshots."""
        from stall_cases import Flashckpt, alone

        one = self.cases[case]
        assert isinstance(one, Flashckpt)
        dist.barrier()
        found, stats = alone(one, self.loop), one.job.ckpt.stats
        return found | {"copy_cpu_s": stats["copy_cpu_s"] / stats["snapshots"], "skipped": one.job.skipped}

    def close(self) -> None:
        """End everything; the ranks leave together."""
        for case in self.cases.values():
            case.close()
        dist.barrier()


def commands(config: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make the loop; return what the parent may order."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = Rank(config)
    return {name: getattr(rank, name) for name in ("about", "setup", "run", "step", "pids", "alone", "close")}


if __name__ == "__main__":
    serve(commands)
