"""Optimizers that look at a matrix as a whole: each one is gathered for its own update, one after the other.

Every rank that holds a part of a matrix computes the same whole update and applies its part of it. So a layout gives
what one process does, and a rank needs memory for one whole matrix (a few times) beyond its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from flashckpt.trainer.parallel.apply import local_tensor


class WholeMuon(torch.optim.Muon):
    """torch's Muon for matrices that may be sharded: the momentum is, the orthogonalised update is of the whole matrix."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002 -- as torch calls it
        """Update every parameter that has a gradient; `closure` is not called. Collective."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the caller has looked"
        local, grad = local_tensor(parameter), local_tensor(parameter.grad)
        momentum, buffer = group["momentum"], local_tensor(self.state[parameter]["momentum_buffer"])
        buffer.lerp_(grad, 1 - momentum)
        update = whole_of(grad.lerp(buffer, momentum) if group["nesterov"] else buffer, parameter)
        update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(part_of(update, parameter), alpha=-rate)


class WholeAdafactor(torch.optim.Adafactor):
    """torch's Adafactor for tensors that may be sharded: it scales by means over rows, columns and the whole tensor.

    Its state is a row and a column per matrix, small enough to be whole on every rank.
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(_factors(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002 -- as torch calls it
        """Update every parameter that has a gradient; `closure` is not called. Collective."""
        for group in self.param_groups:
            settings = {key: group[key] for key in ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach")}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, settings)

    def _update(self, parameter: Tensor, settings: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the caller has looked"
        whole = whole_of(local_tensor(parameter).detach(), parameter)
        whole.grad = whole_of(local_tensor(parameter.grad), parameter)
        one = torch.optim.Adafactor([whole], **settings)  # torch's own arithmetic, on our state
        one.state[whole] = {key: local_tensor(value) for key, value in self.state[parameter].items()}
        one.step()  # type: ignore[no-untyped-call]  # untyped in torch
        if isinstance(parameter, DTensor):
            local_tensor(parameter).copy_(part_of(whole, parameter))


def _factors(parameter: Tensor) -> dict[str, Tensor]:
    """Return the first state of a parameter, whole also where that is sharded."""
    shape = tuple(parameter.shape)
    shapes = {"variance": shape}
    if len(shape) > 1:
        shapes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    made = {key: torch.zeros(size, dtype=parameter.dtype, device=parameter.device) for key, size in shapes.items()}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        made = {
            key: DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
            for key, value in made.items()
        }
    return {"step": torch.tensor(0.0), **made}


def whole_of(local: Tensor, like: Tensor) -> Tensor:
    """Return the whole tensor of which each rank has a part, placed as `like` is; itself where nothing is sharded.

    Collective over the ranks that hold parts: a sum in which each element is added to zeros, so nothing is rounded.
    """
    if not isinstance(like, DTensor):
        return local
    whole = torch.zeros(like.shape, dtype=local.dtype, device=local.device)
    whole[_box(like)] = local
    for dimension, placement in enumerate(like.placements):
        if not placement.is_replicate() and like.device_mesh.size(dimension) > 1:
            dist.all_reduce(whole, group=like.device_mesh.get_group(dimension))
    return whole


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of `like`; no communication."""
    return whole[_box(like)] if isinstance(like, DTensor) else whole


def _box(like: DTensor) -> tuple[slice, ...]:
    lengths, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
