"""The outer optimizer of groups that train apart (local SGD, DiLoCo): what synchronises them.

Every group has its own parameters and optimizer state. `anchor` is what all had after the last synchronisation. The mean
over the groups of how far each went from there is to the outer optimizer a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flashckpt.trainer.config.parallel import ParallelConfig
from flashckpt.trainer.optim.average import WeightCopy
from flashckpt.trainer.parallel.apply import Parallel, local_tensor


class Meeting(Protocol):
    """The other groups where they are separate runs: `separate_runs.meeting`. A roster is what was decided of one."""

    def meet(self, step: int, changes: Sequence[Tensor], common: Sequence[Tensor]) -> Any:
        """Return the roster, the means of `changes`, and `common` of those that trained; None where the run has ended."""

    def keeps(self, roster: Any) -> bool:
        """Return whether this group continues as if the synchronisation had not been."""


class OuterOptimizer:
    """SGD with Nesterov momentum over the parameters of all groups.

    Args:
        settings: Interval, rate and momentum.
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
    def step(self, step: int) -> int:
        """Synchronise the groups of this run after `step`, and return it. No copy of parameters, anchor or momentum may be under way. Collective over them."""
        for number, change in enumerate(self._changes()):
            dist.all_reduce(change, group=self._group.get_group())
            self._move(number, change.div_(self._group.size()))
        return step

    @torch.no_grad()
    def meet(self, meeting: Meeting, step: int) -> Any:
        """Synchronise groups that are separate runs, as `step` does; return the roster, None where the run has ended. Collective."""
        held = [*self.anchor.held, *(() if self.momentum is None else self.momentum.held)]
        common = [local_tensor(one).detach() for one in held]
        found = meeting.meet(step, [one.cpu() for one in self._changes()], [one.cpu() for one in common])
        if found is None:
            return None
        roster, means, shared = found
        if meeting.keeps(roster):
            return roster
        for mine, theirs in zip(common, shared, strict=True):
            mine.copy_(theirs)
        if roster.again:
            self.join()
            return roster
        for number, mean in enumerate(means):
            self._move(number, mean.to(common[number].device))
        return roster

    def _changes(self) -> Iterator[Tensor]:
        for weight, anchor in zip(self.anchor.weights, self.anchor.held, strict=True):
            yield local_tensor(anchor) - local_tensor(weight)

    def _move(self, number: int, change: Tensor) -> None:
        """Move a weight, and what the groups have in common of it, by the mean change of the groups."""
        if self.momentum is not None:
            factor, momentum = self._settings.outer_momentum, local_tensor(self.momentum.held[number])
            momentum.mul_(factor).add_(change)
            change.add_(momentum, alpha=factor)
        anchor = local_tensor(self.anchor.held[number])
        anchor.sub_(change, alpha=self._settings.outer_rate)
        local_tensor(self.anchor.weights[number]).copy_(anchor)
