"""Operators that torch computes on a CPU as many small ones: a norm, the turn of positions, SwiGLU, the loss.

Each is written out here with its gradient: fewer passes, and less held for backward. Elsewhere (on a GPU, in half
precision, as a DTensor) torch's own are used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension: (..., D), (D,) -> (..., D)."""
    if _is_plain(x):
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
    return torch.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) * x, element by element."""
    if _is_plain(gate):
        return _SwiGlu.apply(gate, x)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
    return F.silu(gate) * x


def turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the halves of the last dimension, in float32: (..., K), tables of (..., K / 2) -> (..., K), of x's type."""
    if _is_plain(x):
        return _Turn.apply(x, cosines, sines)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(x.dtype)


def token_losses(logits: Any, targets: Tensor) -> Tensor:
    """Cross entropy in nats, float32: (N, vocab), (N,) -> (N,); 0, and no gradient, where the target is negative."""
    if _is_plain(logits):
        return _TokenLosses.apply(logits, targets)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _is_plain(x: Tensor) -> bool:
    return not isinstance(x, DTensor) and x.device.type == "cpu" and x.dtype == torch.float32


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # LayerNorm's backward is one pass. With a mean of 0 it is this norm's, less what it takes out along the mean.
        of_layer_norm = torch.ops.aten.native_layer_norm_backward
        grad_x, grad_weight, _ = of_layer_norm(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, [True, True, False]
        )
        along_mean = (grad.flatten(0, -2) @ weight).view_as(scale).mul_(scale).div_(x.shape[-1])
        return grad_x.add_(along_mean), grad_weight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)  # not silu(gate): computing it again is cheaper than holding it
        return F.silu(gate).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, x = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * x, gate), F.silu(gate).mul_(grad)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _turned(grad, cosines, sines, -1), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, way: int) -> Tensor:
    half = x.shape[-1] // 2
    swapped = torch.roll(x, half, -1)
    out = x * torch.cat([cosines, cosines], -1)
    return out.addcmul_(swapped, torch.cat([-sines, sines], -1), value=way)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, -1)
        ctx.save_for_backward(logs, targets)
        return F.nll_loss(logs, targets.where(targets >= 0, -100), reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logs, targets = ctx.saved_tensors
        grad = grad.where(targets >= 0, 0).unsqueeze(-1)
        # In place: the largest tensor of a step is not needed twice. A second backward is noticed by autograd.
        out = logs.exp_().mul_(grad)
        return out.scatter_add_(1, targets.clamp(min=0).unsqueeze(-1), -grad), None


def per_token_loss(logits: Any, targets: Tensor) -> Tensor:
    """Cross entropy of each token in nats, float32, shape (B x T,); 0 where there is no target (-100)."""
    return token_losses(logits.flatten(0, 1), targets.flatten())


def chunked_losses(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross entropy of each token, float32 (B, T), holding the logits of `chunk` tokens at a time.

    Backward makes each piece's logits again, with its gradient: one product with the head more, and never the logits
    of all tokens, neither in their own type nor in float32.

    Args:
        head: Activations (N, D) -> logits (N, vocab).
        hidden: (B, T, D).
        targets: (B, T) int64; negative: no target, loss 0.
        chunk: Tokens of a piece.
    """

    def piece(rows: Tensor, wanted: Tensor) -> Tensor:
        return token_losses(head(rows), wanted)

    pairs = zip(torch.split(hidden.flatten(0, 1), chunk), torch.split(targets.flatten(), chunk), strict=True)
    losses = [checkpoint(piece, rows, wanted, use_reentrant=False) for rows, wanted in pairs]
    return torch.cat(losses).view(targets.shape)
