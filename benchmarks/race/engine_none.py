"""No checkpoints, and what the engines of PyTorch's own tools have in common: data by torchdata's StatefulDataLoader."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from race import problem


class Engine:
    """Trains from the beginning; subclasses save and restore."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Dataset[Any], micro: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.sampler = StatefulDistributedSampler(data, shuffle=True, seed=0)
        self.loader = StatefulDataLoader(data, batch_size=micro, sampler=self.sampler)
        self.first = self.epoch = 0

    def restore(self) -> int:
        """Return the step that the state is of, 0 at the beginning."""
        return 0

    def epochs(self) -> Iterator[int]:
        """Return the epochs that are left, the first one maybe in part."""
        for epoch in range(self.first, problem.EPOCHS):
            self.epoch = epoch
            self.sampler.set_epoch(epoch)
            yield epoch

    def update(self) -> Any:
        """Return the context in which the optimizer may change what is being saved."""
        return contextlib.nullcontext()

    def save(self, step: int) -> None:
        """Save after a step, if one is due."""

    def finish(self) -> None:
        """Wait for what is being saved."""

    def position(self, step: int) -> dict[str, Any]:
        """Return step, epoch and position in the data, as numbers and text."""
        return {"step": step, "epoch": self.epoch, "loader": json.dumps(self.loader.state_dict())}

    def reposition(self, state: dict[str, Any]) -> int:
        """Continue where `position` was taken; at the end of an epoch with the next one."""
        self.first = int(state["epoch"])
        per_epoch = problem.STEPS // problem.EPOCHS
        if int(state["step"]) >= (self.first + 1) * per_epoch:
            self.first += 1
        else:
            self.loader.load_state_dict(json.loads(state["loader"]))
        return int(state["step"])


def due(step: int) -> bool:
    """Whether a snapshot of this step is wanted."""
    return problem.EVERY > 0 and step % problem.EVERY == 0


def folders(pattern: str, complete: str = "") -> list[Path]:
    """Return checkpoints, oldest first, that have the file `complete`; without those given up by hand."""
    found = [path for path in problem.FOLDER.glob(pattern) if not complete or (path / complete).exists()]
    return list(problem.drop_newest(sorted(found, key=lambda path: int(re.findall(r"\d+", path.name)[-1]))))


def keep_two(pattern: str) -> None:
    """Remove all but the newest two."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for path in folders(pattern)[:-2]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
