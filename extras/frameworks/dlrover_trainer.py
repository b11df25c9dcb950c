"""DLRover's `ElasticTrainer` by its call shape: the global batch stays as it is when there are fewer ranks.

    from flashckpt.integrations.dlrover_trainer import ElasticTrainer  # was: dlrover.trainer.torch.elastic.trainer

    trainer = ElasticTrainer(model)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    for inputs, targets in loader:
        with trainer.step(fix_total_batch_size=True):
            ...  # backward, optimizer.step(), scheduler.step(), optimizer.zero_grad(): they act at the last micro-batch
        if trainer.sync_gradients:
            ckpt.step(trainer.num_steps)

The most nodes are in WORKER_NUM, as DLRover sets it. DLRover itself is not needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from flashckpt.environment import env
from flashckpt.errors import LayoutError


class ElasticTrainer:
    """Accumulates gradients over as many micro-batches as ranks are missing.

    Args:
        model: With DDP around it, where there are several ranks.
        dataloader: Kept; its batch size is not changed.

    Attributes:
        gradient_accumulation_steps: Micro-batches of one optimizer step, from `prepare` on.
        num_steps: Optimizer steps since the start or `reset`; after a restore set it to `report.step`.
        sync_gradients: Whether this micro-batch is the last one of its optimizer step.
    """

    def __init__(self, model: Any, dataloader: Any = None) -> None:
        self.model, self.dataloader = model, dataloader
        self.gradient_accumulation_steps = 1
        self.num_steps = self._micro = 0
        self.sync_gradients = True

    def prepare(self, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Return the optimizer, and the scheduler where one is given, acting at the last micro-batch alone.

        The optimizer is the one that was given: a Checkpointer tracks it.

        Raises:
            LayoutError: The ranks do not divide the most that there can be.
        """
        self.gradient_accumulation_steps = _accumulation()
        optimizer.step, optimizer.zero_grad = map(self._when_last, (optimizer.step, optimizer.zero_grad))
        return optimizer if lr_scheduler is None else (optimizer, _Scheduler(lr_scheduler, self))

    def _when_last(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with the mark that schedulers look for
        def when_last(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.sync_gradients else None

        return when_last

    @contextlib.contextmanager
    def step(self, fix_total_batch_size: bool = False) -> Iterator[None]:
        """Run one micro-batch; without `fix_total_batch_size` each is an optimizer step."""
        self._micro += 1
        self.sync_gradients = not fix_total_batch_size or self._micro % self.gradient_accumulation_steps == 0
        apart = getattr(self.model, "no_sync", None)
        with contextlib.nullcontext() if self.sync_gradients or apart is None else apart():
            yield
        self.num_steps += self.sync_gradients

    def reset(self) -> None:
        """Count optimizer steps from 0."""
        self.num_steps = 0


class _Scheduler:
    """A scheduler that steps with the optimizer; its state is one for all ranks."""

    flashckpt_replicated = True

    def __init__(self, scheduler: Any, trainer: ElasticTrainer) -> None:
        self.scheduler, self._trainer = scheduler, trainer

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer.sync_gradients:
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)


def _accumulation() -> int:
    nodes = env.WORKER_NUM
    world = dist.get_world_size() if dist.is_initialized() else 1
    most = nodes * env.LOCAL_WORLD_SIZE if nodes else world
    if most % world:
        raise LayoutError(
            "the global batch does not divide over these ranks",
            found=f"{world} ranks; WORKER_NUM={nodes} nodes of {env.LOCAL_WORLD_SIZE}",
            expected=f"a divisor of {most} ranks: ranks with other numbers of micro-batches wait for each other forever",
            remedy=f"dlrun --nnodes with a number of nodes that divides {nodes}, or --node-unit",
        )
    return most // world


__all__ = ["ElasticTrainer"]
