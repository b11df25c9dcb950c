"""Tokens per expert of every layer in a step, the same on all ranks, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from flashckpt.trainer.model.moe import MixtureOfExperts
from flashckpt.trainer.model.router_load import move_bias
from flashckpt.trainer.parallel.apply import Parallel


class ExpertLoad:
    """Adds up what the routers of all ranks counted.

    Args:
        parallel: This rank's parts.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._routers = _routers(parallel)

    def begin(self) -> None:
        """Forget what was counted before this step."""
        for layer in self._routers.values():
            layer.router_load.take()

    def total(self) -> list[list[int]]:
        """Return for each layer the tokens that chose each expert, of all data-parallel ranks; [] without experts. Collective.

        In integers, so that no order of the sum matters. A separate collective: the one of the totals adds up floats, whose
        order would be another in a longer vector.
        """
        if not self._routers:
            return []
        number = next(iter(self._routers.values())).number
        layers = sum(map(len, self._parallel.layout.stage_layers))
        tokens = torch.zeros(layers, number, dtype=torch.int64, device=self._parallel.device)
        is_first = self._parallel.coordinate("tp") == 0  # the others route the same tokens
        for index, layer in self._routers.items():
            counts = layer.router_load.take()
            if counts is not None and is_first:
                tokens[index] = counts
        dist.all_reduce(tokens)
        found: list[list[int]] = tokens.tolist()
        return found

    def balance(self, tokens: Sequence[Sequence[int]], rate: float) -> None:
        """Move the biases of the routers that have one; every rank that holds one moves it by the same bits."""
        for index, layer in self._routers.items():
            if layer.router_bias is not None:
                move_bias(layer.router_bias, tokens[index], rate)


def _routers(parallel: Parallel) -> dict[int, MixtureOfExperts]:
    """Return this rank's layers with experts by their global number."""
    found = {}
    for part in parallel.parts:
        for name, module in part.named_modules():
            if isinstance(module, MixtureOfExperts):
                found[int(name.split("layers.")[1].split(".")[0])] = module
    return found
