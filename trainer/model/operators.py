"""Operators that torch computes on a CPU as a dozen small ones: a norm, the rotation of positions, and the loss of tokens.

Each is written out here with its gradient, in a third to two thirds of the time and with less held for backward. Elsewhere (on a GPU, in
half precision, as a DTensor, inside torch.compile) torch has better kernels of its own, and they are used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor, nn


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


def token_losses(logits: Any, targets: Tensor) -> Tensor:
    """Cross entropy in nats, float32: (N, vocab), (N,) -> (N,); 0, and no gradient, where the target is negative."""
    if _is_plain(logits):
        return _TokenLosses.apply(logits, targets)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _is_plain(x: Tensor) -> bool:
    is_tensor = type(x) is Tensor or type(x) is nn.Parameter
    return is_tensor and x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]  # of this forward
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        product = grad * normal
        along = (product @ weight).div_(x.shape[-1]).unsqueeze(-1)  # what leaves the norm as it is has no gradient
        grad_x = (grad * weight).addcmul_(normal, along, value=-1).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, -1)
        ctx.save_for_backward(logs, targets)
        return F.nll_loss(logs, targets.where(targets >= 0, -100), reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # of this forward
        logs, targets = ctx.saved_tensors
        grad = grad.where(targets >= 0, 0).unsqueeze(-1)
        # In place: the largest tensor of a step is not needed twice. A second backward is noticed by autograd.
        out = logs.exp_().mul_(grad)
        return out.scatter_add_(1, targets.clamp(min=0).unsqueeze(-1), -grad), None
