"""Gradients as the optimizers need them: placed, clipped, with one norm over all meshes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from flashckpt.trainer.model.moe import average_expert_gradients
from flashckpt.trainer.parallel.apply import Parallel, local_tensor
from flashckpt.trainer.parallel.tied import add_tied_gradients


def settle_gradients(parallel: Parallel) -> None:
    """Make every gradient the mean over the data-parallel ranks, placed like its parameter."""
    for part in parallel.parts:
        average_expert_gradients(part)
    for parameter in parallel.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
    if parallel.tied:
        add_tied_gradients(parallel.parts, parallel.layout, parallel.mesh["pp"].get_group())


def local_square_sum(parallel: Parallel) -> Tensor:
    """Return this rank's share of the squared gradient norm, float64 scalar; every element counts once in its group.

    The group is the world, without `parallel.sync_every`. The sum of it over all its ranks is the whole norm: one
    collective, one value for all, where norms reduced one mesh dimension after another may differ between ranks and let replicas drift.
    """
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    first = parallel.layout.groups > 1 or parallel.replica == 0  # the other replicas have the same gradients
    for parameter in parallel.counted_parameters():
        if parameter.grad is not None and first and _owns(parameter.grad):
            total += _square_sum(local_tensor(parameter.grad).detach()).to(total.device)
    return total


def _square_sum(grad: Tensor) -> Tensor:
    """Return the sum of squares, float64; rows are short enough to be added in float32."""
    norms: Tensor = torch.linalg.vector_norm(grad, dim=-1)
    return norms.double().square().sum()


def _owns(grad: Tensor) -> bool:
    if not isinstance(grad, DTensor):
        return True  # plain gradients exist under DDP, where only dp_replicate is replicated, and in layouts without any copy
    coordinate = list(grad.device_mesh.get_coordinate() or [])
    for placement, index in zip(grad.placements, coordinate, strict=True):
        assert not isinstance(placement, Partial), "settle_gradients() must run first"
        if isinstance(placement, Replicate) and index != 0:
            return False
    return True


def clip_gradients(parallel: Parallel, norm: float, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit` (0: leave them)."""
    if limit <= 0 or norm <= limit:
        return
    scale_gradients(parallel, limit / (norm + 1e-6))


def scale_gradients(parallel: Parallel, factor: float) -> None:
    """Multiply all gradients by a number."""
    for parameter in parallel.parameters():
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(factor)


def clamp_gradients(parallel: Parallel, limit: float) -> None:
    """Clip every gradient element to [-limit, limit] (0: leave them)."""
    if limit > 0:
        for parameter in parallel.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).clamp_(-limit, limit)
