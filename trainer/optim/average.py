"""Second sets of the weights, sharded as they are: their moving average, and what groups that train apart have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from flashckpt.trainer.config.optim import EmaConfig
from flashckpt.trainer.config.parallel import ParallelConfig
from flashckpt.trainer.parallel.apply import Parallel, local_tensor


class WeightCopy:
    """A second set of the weights of the local parts, with their names and placements.

    Args:
        parts: The local parts, without DDP around them.
        over: A mesh dimension along which weights differ, and their copies do not; None: there is none.

    Attributes:
        modules: One per part: what a snapshot takes. Zeros until `begin`.
    """

    def __init__(self, parts: Sequence[nn.Module], *, over: DeviceMesh | None = None) -> None:
        self.modules: list[nn.Module] = []
        self.weights: list[nn.Parameter] = []
        self.held: list[nn.Parameter] = []
        for part in parts:
            root = nn.Module()
            for name, parameter in part.named_parameters():
                zeros = torch.zeros_like(parameter)
                held = nn.Parameter(zeros if over is None else _equal_over(over, zeros), requires_grad=False)
                _put(root, name.split("."), held)
                self.weights.append(parameter)
                self.held.append(held)
            self.modules.append(root)

    @torch.no_grad()
    def begin(self) -> None:
        """Let the copy be the weights as they are."""
        for weight, held in zip(self.weights, self.held, strict=True):
            local_tensor(held).copy_(local_tensor(weight))

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Have the copy in place of the weights meanwhile; the weights come back to the bit. Nothing may copy them."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, held in zip(self.weights, self.held, strict=True):  # one after the other: memory for one tensor
            mine, theirs = local_tensor(weight), local_tensor(held)
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)


class WeightAverage(WeightCopy):
    """The average of the weights of the local parts."""

    def __init__(self, config: EmaConfig, parts: Sequence[nn.Module]) -> None:
        super().__init__(parts)
        self._config = config

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` are to be taken into the average."""
        return step % self._config.every == 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the average. No copy of it may be under way."""
        averages, weights = list(map(local_tensor, self.held)), list(map(local_tensor, self.weights))
        torch._foreach_lerp_(averages, weights, 1.0 - self._config.decay)


def _equal_over(mesh: DeviceMesh, tensor: Tensor) -> DTensor:
    """Return a tensor that is the same along a mesh dimension and placed as before along the others."""
    (name,), root = mesh.mesh_dim_names or (), mesh._get_root_mesh()  # noqa: SLF001 -- torch has no public way from a dimension to its mesh
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    whole = root[(name, *(tensor.device_mesh.mesh_dim_names or ()))]
    placements = [Replicate(), *tensor.placements]
    return DTensor.from_local(
        tensor.to_local(), whole, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _put(root: nn.Module, path: list[str], held: nn.Parameter) -> None:
    for name in path[:-1]:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.register_parameter(path[-1], held)


class OtherGroups(Protocol):
    """The other groups where they are separate runs: `separate_runs.meeting`. A roster is what was decided of one."""

    def meet(self, step: int, changes: Sequence[Tensor], common: Sequence[Tensor]) -> Any:
        """Return the roster, the means of `changes`, and `common` of those that trained; None where the run has ended."""

    def keeps(self, roster: Any) -> bool:
        """Return whether this group continues as if the synchronisation had not been."""


class OuterOptimizer:
    """SGD with Nesterov momentum over the parameters of all groups that train apart (local SGD, DiLoCo).

    Every group has its own parameters and optimizer state. The mean over the groups of how far each went from `anchor` is to
    this optimizer a gradient.

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
    def meet(self, meeting: OtherGroups, step: int) -> Any:
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
