"""Gradients as the optimizers need them: placed, clipped, with one norm over all meshes; and who has some that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from flashckpt.errors import DivergedError
from flashckpt.trainer.model.moe import average_expert_gradients
from flashckpt.trainer.parallel.apply import Parallel, local_tensor
from flashckpt.trainer.parallel.tied import add_tied_gradients

logger = logging.getLogger(__name__)
_NAMED = 3
"""Parameters that a rank names; the first NaN of a step is in few, or in all."""


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


def report_nonfinite(parallel: Parallel, losses: Sequence[Tensor], step: int) -> bool:
    """Log where a step is not finite; return whether parameters are not: the state is bad, and not the batch alone. Collective.

    Gradients are those after the sum over data-parallel ranks: a rank is named for the part that it holds. Losses are of
    the samples of a rank.

    Args:
        parallel: This rank's parts.
        losses: Of the samples of this rank; none where the loss is computed elsewhere.
        step: For the log.
    """
    named = [pair for part in parallel.bare_parts() for pair in part.named_parameters()]
    bad = [name for name, p in named if p.grad is not None and not _is_finite(local_tensor(p.grad))]
    state = [name for name, p in named if not _is_finite(local_tensor(p.detach()))]
    flags = torch.zeros(3, dist.get_world_size(), device=parallel.device)
    flags[0, dist.get_rank()] = float(not all(map(_is_finite, losses)))
    flags[1, dist.get_rank()] = float(bool(bad))
    flags[2, dist.get_rank()] = float(bool(state))
    dist.all_reduce(flags)
    by_loss, by_gradient, by_state = ([rank for rank, flag in enumerate(row) if flag] for row in flags.tolist())
    if bad:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        logger.warning("step %d: gradients of %s%s are not finite here", step, ", ".join(bad[:_NAMED]), more)
    if dist.get_rank() == 0:
        logger.warning(
            "step %d: losses are not finite on %s, gradients on %s, parameters on %s",
            step, _ranks(by_loss), _ranks(by_gradient), _ranks(by_state),
        )  # fmt: skip
    return bool(by_state)


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _ranks(numbers: list[int]) -> str:
    return f"rank {', '.join(map(str, numbers))}" if numbers else "no rank"


def no_way_back(step: int, snapshot_every: int) -> DivergedError:
    """Return the error of parameters that are not finite before there was a snapshot of better ones."""
    return DivergedError(
        f"parameters are not finite at step {step}, and no snapshot is there to go back to",
        found=f"checkpoint.snapshot_every = {snapshot_every}",
        state="Nothing was kept of this run.",
        remedy="lower checkpoint.snapshot_every or the learning rate, and start again",
    )
