"""A second set of the weights, sharded as they are: their exponential moving average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from flashckpt.trainer.config.optim import EmaConfig
from flashckpt.trainer.parallel.apply import local_tensor


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
