"""The outer optimizer of groups that train apart (local SGD, DiLoCo): what synchronises them.

Every group has its own parameters and optimizer state. `anchor` is what all had after the last synchronisation. The mean
over the groups of how far each went from there is to the outer optimizer a gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from flashckpt.trainer.config.parallel import ParallelConfig
from flashckpt.trainer.optim.average import WeightCopy
from flashckpt.trainer.parallel.apply import Parallel, local_tensor


class OuterOptimizer:
    """SGD with Nesterov momentum over the parameters of all groups.

    Args:
        settings: Interval, rate and momentum.
        parallel: This rank's parts.
        last: The last step of the run: after it the groups are synchronised too.

    Attributes:
        anchor: The parameters after the last synchronisation, the same in all groups.
        momentum: Of the outer optimizer; None without.
    """

    def __init__(self, settings: ParallelConfig, parallel: Parallel, *, last: int) -> None:
        self._settings, self._last = settings, last
        self._group = parallel.mesh[parallel.layout.mesh_names[1]]
        parts = parallel.bare_parts()
        self.anchor = WeightCopy(parts, over=self._group)
        self.momentum = WeightCopy(parts, over=self._group) if settings.outer_momentum else None

    def begin(self) -> None:
        """Let the parameters as they are be those that were synchronised last."""
        self.anchor.begin()

    @torch.no_grad()
    def join(self) -> None:
        """Take the weights that were synchronised last. Nothing may copy the weights."""
        for weight, anchor in zip(self.anchor.weights, self.anchor.held, strict=True):
            local_tensor(weight).copy_(local_tensor(anchor))

    def is_due(self, step: int) -> bool:
        """Return whether the groups are synchronised after `step`."""
        return step % self._settings.sync_every == 0 or step == self._last

    @torch.no_grad()
    def step(self) -> None:
        """Synchronise the groups. No copy of parameters, anchor or momentum may be under way. Collective over the groups."""
        momenta = self.momentum.held if self.momentum is not None else [None] * len(self.anchor.held)
        for weight, anchor, momentum in zip(self.anchor.weights, self.anchor.held, momenta, strict=True):
            self._update(
                local_tensor(weight), local_tensor(anchor), None if momentum is None else local_tensor(momentum)
            )

    def _update(self, weight: Tensor, anchor: Tensor, momentum: Tensor | None) -> None:
        change = anchor - weight
        dist.all_reduce(change, group=self._group.get_group())
        change.div_(self._group.size())
        if momentum is not None:
            factor = self._settings.outer_momentum
            momentum.mul_(factor).add_(change)
            change.add_(momentum, alpha=factor)
        anchor.sub_(change, alpha=self._settings.outer_rate)
        weight.copy_(anchor)
