"""flashckpt, as in README."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler
from race import problem


class Engine:
    """Snapshots in memory, checkpoints behind them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Dataset[Any], micro: int) -> None:
        world = dist.get_world_size()
        self.sampler = ElasticSampler(
            problem.SAMPLES, dp_rank=dist.get_rank(), dp_size=world, global_batch_size=micro * world, seed=0
        )
        self.loader = DataLoader(data, batch_size=micro, sampler=self.sampler)
        self.ckpt = Checkpointer(
            problem.FOLDER / "root", snapshot_every=problem.EVERY, persist_every=problem.PERSIST, keep_last=2
        )
        # the loop gives the module inside DDP, which does not say that it is the same on all ranks
        self.ckpt.track(model=model, optimizer=optimizer, sampler=self.sampler, rng=True, replicated_over="world")

    def restore(self) -> int:
        """Return the step of what was restored."""
        report = self.ckpt.restore()
        return report.step if report else 0

    def epochs(self) -> Iterator[int]:
        """Return the epochs that are left."""
        yield from self.sampler.epochs(problem.EPOCHS)

    def update(self) -> Any:
        """Return nothing to hold: the optimizer waits automatically."""
        return contextlib.nullcontext()

    def save(self, step: int) -> None:
        """Snapshots and checkpoints, where they are due."""
        self.ckpt.step(step)

    def finish(self) -> None:
        """Wait until the last checkpoint is durable."""
        self.ckpt.wait()
        self.ckpt.close()
