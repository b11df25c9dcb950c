"""DLRover 0.6.1: Flash Checkpoint for DDP into memory, now and then to disk, and its elastic sampler, as in its examples."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from race import engine_none, problem


class Engine(engine_none.Engine):
    """A blocking copy into memory; dlrover-run's agent writes it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Dataset[Any], micro: int) -> None:
        self.model, self.optimizer, self.micro = model, optimizer, micro
        flash = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        samplers = importlib.import_module("dlrover.trainer.torch.elastic.sampler")
        strategies = importlib.import_module("dlrover.python.common.storage")
        self.kinds = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer").StorageType
        folder = str(problem.FOLDER)
        self.checkpointer = flash.DdpCheckpointer(
            folder, deletion_strategy=strategies.KeepLatestStepStrategy(2, folder)
        )
        self.sampler = samplers.ElasticDistributedSampler(data, shuffle=True, seed=0)
        self.loader = DataLoader(data, batch_size=micro, sampler=self.sampler)
        self.first = self.epoch = 0

    def restore(self) -> int:
        """Load from memory, else from the file that its tracker names."""
        state = self.checkpointer.load_checkpoint()
        if not state:
            return 0
        # views of shared memory that all ranks have: an optimizer on a GPU copies them, one on a CPU would share them
        state = copy.deepcopy(state.get("model_states", state))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        step, per_epoch = int(state["step"]), problem.STEPS // problem.EPOCHS
        self.first = step // per_epoch
        if step % per_epoch:
            self.sampler.load_state_dict(state["sampler"])
        return step

    def save(self, step: int) -> None:
        """Into memory, or to disk."""
        if not engine_none.due(step):
            return
        in_epoch = step - self.epoch * (problem.STEPS // problem.EPOCHS)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": step,
            "sampler": self.sampler.state_dict(in_epoch, self.micro),
        }
        kind = self.kinds.MEMORY if step % problem.PERSIST else self.kinds.DISK
        self.checkpointer.save_checkpoint(step, state, storage_type=kind)

    def finish(self) -> None:
        """Wait for the last file: rank 0 alone writes, and another one would wait for its own for ever."""
        if not dist.get_rank():
            self.checkpointer.wait_latest_checkpoint(60)
