"""Losses that keep a router even: load balancing as Switch Transformer has it, and the z-loss of ST-MoE.

They arise inside a stage, and with a pipeline only gradients leave it. So their value is added to nothing: the output of
the layer carries them, and backward gives them the factor that the loss of the run has there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashckpt.trainer.config.model import ModelConfig


class RouterLoss:
    """The losses of one layer, by which its output is trained too.

    Args:
        config: Sizes and coefficients.

    Attributes:
        groups: Over these in turn, tokens per expert are added: all data-parallel ranks. [] where there is one.
        holders: Ranks that compute the same loss, whose gradients are then added (tensor parallelism).
        scale: What backward multiplies the loss of the run by.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._balance, self._z = config.router_aux_loss, config.router_z_loss
        self.groups: list[dist.ProcessGroup] = []
        self.holders, self.scale = 1, 1.0

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; `scale` changes between steps
    def carried(self, out: Tensor, logits: Tensor, counts: Tensor) -> Tensor:
        """Return `out` unchanged, whose backward also gives the gradients of the losses. Collective over `groups`.

        Args:
            out: What the layer gives.
            logits: (N, experts), float32, of this rank's N tokens.
            counts: Of these tokens, how many chose each expert.
        """
        if not (self._balance or self._z) or not torch.is_grad_enabled():
            return out
        loss = self._z * logits.logsumexp(-1).square().mean()
        if self._balance:
            loss = loss + self._balance * balance_loss(logits, self._shares(counts))
        carried: Tensor = _Carry.apply(out, loss, self.scale / self.holders)  # type: ignore[no-untyped-call]  # untyped in torch
        return carried

    def _shares(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total.float() / total.sum()


def balance_loss(logits: Tensor, shares: Tensor) -> Tensor:
    """Return experts x sum over experts of (share of the choices) x (mean probability): 1 if all are equal.

    The mean over ranks of what each returns for its own tokens is the loss over all of them: it is linear in the probabilities.

    Args:
        logits: (N, experts) of this rank's tokens.
        shares: (experts,), of the tokens of all ranks; they add up to 1.
    """
    return logits.shape[-1] * (shares * torch.softmax(logits, -1).mean(0)).sum()


def set_router_scale(parts: list[nn.Module], scale: float) -> None:
    """Give the factor of the run's loss to all router losses."""
    for module in (module for part in parts for module in part.modules()):
        if isinstance(held := getattr(module, "router_loss", None), RouterLoss):
            held.scale = scale


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.loss = scale, (loss.shape, loss.dtype, loss.device)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dtype, device = ctx.loss
        return grad, torch.full(shape, ctx.scale, dtype=dtype, device=device), None
