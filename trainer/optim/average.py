"""An exponential moving average of the weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flashckpt.trainer.optim_config import EmaConfig
from flashckpt.trainer.parallel.apply import local_tensor


class WeightAverage:
    """The average of the weights of the local parts.

    Args:
        config: Decay and interval.
        parts: The local parts, without DDP around them.

    Attributes:
        modules: One per part, with its parameters' names and placements: what a snapshot takes.
    """

    def __init__(self, config: EmaConfig, parts: Sequence[nn.Module]) -> None:
        self._config = config
        self.modules: list[nn.Module] = []
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []  # weight, its average
        for part in parts:
            root = nn.Module()
            for name, parameter in part.named_parameters():
                held = nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
                _put(root, name.split("."), held)
                self._pairs.append((parameter, held))
            self.modules.append(root)

    @torch.no_grad()
    def begin(self) -> None:
        """Let the average be the weights as they are."""
        for weight, average in self._pairs:
            local_tensor(average).copy_(local_tensor(weight))

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` are to be taken into the average."""
        return step % self._config.every == 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the average. No copy of it may be under way."""
        averages = [local_tensor(average) for _, average in self._pairs]
        weights = [local_tensor(weight) for weight, _ in self._pairs]
        torch._foreach_lerp_(averages, weights, 1.0 - self._config.decay)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Have the average in place of the weights meanwhile; the weights come back to the bit. Nothing may copy them."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in self._pairs:  # one after the other: memory for one tensor
            mine, theirs = local_tensor(weight), local_tensor(average)
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)


def _put(root: nn.Module, path: list[str], held: nn.Parameter) -> None:
    for name in path[:-1]:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.register_parameter(path[-1], held)
