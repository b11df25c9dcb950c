"""Losses that keep a router even: load balancing as Switch Transformer has it, and the z-loss of ST-MoE.

They arise inside a stage, and with a pipeline only gradients leave it. So their value is added to nothing: the output of
the layer carries them, and backward gives them the factor that the loss of the run has there.

Without a loss a bias evens it out (Wang et al., 2024), from how many tokens chose each expert. It is added to the scores
where experts are chosen, and nowhere else. After a step of the optimizer it goes up by the rate for each expert with less
than its share, and down for each with more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashckpt.trainer.config.model import ModelConfig


class RouterLoad:
    """Counts the choices of one layer, on this rank, in the micro-batches of a step."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; what is added up changes between calls
    def add(self, counts: Tensor) -> None:
        """Add the choices of a forward that trains; (experts,), integers.

        Neither of one without gradients (the trial of a pipeline), nor of one that backward repeats to recompute activations.
        """
        is_recomputed = torch._C._current_graph_task_id() != -1  # noqa: SLF001 -- torch's own checkpointing asks the same
        if torch.is_grad_enabled() and not is_recomputed:
            self._counts = counts if self._counts is None else self._counts + counts

    def take(self) -> Tensor | None:
        """Return the sums since the last call, and begin again at none."""
        counts, self._counts = self._counts, None
        return counts


def choose(scores: Tensor, top_k: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scores and numbers of the experts that each token chooses, (N, top_k) both.

    Args:
        scores: (N, experts).
        top_k: How many.
        bias: (experts,), for the choice alone; None: none.
    """
    if bias is None:
        return torch.topk(scores, top_k, dim=-1)
    chosen = torch.topk(scores.detach() + bias, top_k, dim=-1).indices
    return scores.gather(-1, chosen), chosen


@torch.no_grad()
def move_bias(bias: Tensor, tokens: Sequence[int], rate: float) -> None:
    """Move the bias of each expert by `rate` against the sign of what it has beyond its share.

    In integers up to there: whoever knows the same tokens per expert gets the same bits.
    """
    share = sum(tokens)
    signs = [(share > len(tokens) * own) - (share < len(tokens) * own) for own in tokens]
    bias.add_(torch.tensor(signs, dtype=bias.dtype, device=bias.device), alpha=rate)


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
