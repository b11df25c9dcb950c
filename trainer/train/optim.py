"""AdamW groups, the learning rate as a pure function of the step, and one gradient norm over all meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from flashckpt.trainer.config import OptimConfig
from flashckpt.trainer.model.moe import EXPERT_WEIGHTS, average_expert_gradients
from flashckpt.trainer.parallel.apply import Parallel, local_tensor
from flashckpt.trainer.parallel.tied import add_tied_gradients, is_tied_head


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates local shards; its state stays DTensors, which know their global offsets.

    The update is element-wise and `settle_gradients` has placed every gradient like its parameter, so DTensor has
    nothing to decide. Its dispatch would still plan each list of tensors: a quarter of the first step after a restart.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]  # untyped in torch
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


def build_optimizers(config: OptimConfig, parts: Iterable[nn.Module], *, tied: bool = False) -> list[torch.optim.AdamW]:
    """Return one AdamW per local model part; norms, biases and embeddings (and a head tied to them) are not decayed."""
    return [_build(config, part, tied=tied) for part in parts]


def _build(config: OptimConfig, part: nn.Module, *, tied: bool) -> torch.optim.AdamW:
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    experts: list[nn.Parameter] = []  # a separate group: they are on another mesh, and a group is one operator
    for name, parameter in part.named_parameters():
        small = parameter.dim() < 2 or "tok_embeddings" in name or (tied and is_tied_head(name))
        (experts if name.endswith(EXPERT_WEIGHTS) else plain if small else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
        {"params": experts, "weight_decay": config.weight_decay},
    ]
    return LocalAdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,  # one operator per group
    )


def set_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def settle_gradients(parallel: Parallel) -> None:
    """Make every gradient the mean over the data-parallel ranks, placed like its parameter."""
    for part in parallel.parts:
        average_expert_gradients(part)
    for parameter in parallel.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
    if parallel.tied:
        add_tied_gradients(parallel)


def local_square_sum(parallel: Parallel) -> Tensor:
    """Return this rank's share of the squared gradient norm, float64 scalar; every element counts once in the world.

    The sum of it over all ranks is the whole norm: one collective, one value for all, where norms
    reduced one mesh dimension after another may differ between ranks and let replicas drift.
    """
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    first = parallel.coordinate("dp_replicate") == 0
    for parameter in parallel.counted_parameters():
        if parameter.grad is not None and first and _owns(parameter.grad):
            total += _square_sum(local_tensor(parameter.grad).detach())
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
    factor = limit / (norm + 1e-6)
    for parameter in parallel.parameters():
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(factor)


def clamp_gradients(parallel: Parallel, limit: float) -> None:
    """Clip every gradient element to [-limit, limit] (0: leave them)."""
    if limit > 0:
        for parameter in parallel.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).clamp_(-limit, limit)
