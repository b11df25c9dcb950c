"""Linear layers that one input goes through, with what follows them, as one operator on a CPU: queries, keys, values; SwiGLU.

As single operators of torch, each product's gradient of the input is a tensor, added to the others by another pass,
and every step between products writes new memory. Here products add up in place, and what is no longer needed is written
over. Other devices and types, DTensors, biases and torch.compile take the single operators: `joins` says which it is.

Products are oneDNN's where MKL, which torch calls, is half as fast. MKL uses AVX-512 on Intel's processors alone, oneDNN on
every one that has it. Which of them computes follows from the processor and the shapes, never from a measurement: a
restarted run on the same kind of machine has the same bits.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_LEAST_ROWS = 16
"""With fewer, as in the steps of generation, a call costs more than the product."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of float32 matrices on a CPU; either may be a transposed view."""
    if len(a) < _LEAST_ROWS or not onednn_is_faster():
        return a @ b
    # the operator of torch's compiler for a linear layer on a CPU: its weight is transposed, its bias none
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")  # noqa: SLF001 -- no public name calls oneDNN
    return out


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this processor has AVX-512, MKL does not use it, and this build of torch has oneDNN."""
    has_both: bool = torch.backends.mkl.is_available() and has_onednn()  # type: ignore[no-untyped-call]  # untyped in torch
    return has_both and torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() != "GenuineIntel"


def has_onednn() -> bool:
    """Return whether this build of torch has the operator that `product` calls."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _vendor() -> str:
    """Return the maker of the processor; Intel where /proc does not say, for which nothing changes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "GenuineIntel")


def joins(x: Tensor, *linears: nn.Linear) -> bool:
    """Return whether `x` (..., D) and the layers that it goes through can be computed jointly."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    tensors = [x, *(linear.weight for linear in linears)]
    is_plain = all(t.device.type == "cpu" and t.dtype == torch.float32 and not isinstance(t, DTensor) for t in tensors)
    return is_plain and all(linear.bias is None for linear in linears)


class Linear(nn.Linear):
    """`torch.nn.Linear`, its products by `product` where it is `joint` and can be."""

    joint = True

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., F)."""
        if self.joint and joins(x, self):
            return _Linear.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
        return super().forward(x)


def feed_forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Return w2(silu(w1 x) * w3 x): (..., D), weights as `nn.Linear` has them -> (..., D)."""
    return _FeedForward.apply(x, w1, w2, w3)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


def turned_projections(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys turned by their positions, and values.

    The features of each turned head come in another order, the halves of a pair side by side: products of queries with keys
    are the same in any order that both have.

    Args:
        x: (B, T, D).
        weights: Of queries, keys and values, (heads x K, D), the halves of each head as `positions.rotate` has them.
        cosines: (T, 1, K / 2) or (B, T, 1, K / 2).
        sines: As cosines.

    Returns:
        (B, T, heads, K), three times.
    """
    return _TurnedProjections.apply(x, torch.complex(cosines, sines), *weights)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        ctx.save_for_backward(rows, weight)
        return product(rows, weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        out = grad.reshape(-1, grad.shape[-1])
        return product(out, weight).view(*grad.shape[:-1], -1), product(out.t(), rows)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        gate, up = product(rows, w1.t()), product(rows, w3.t())
        ctx.save_for_backward(rows, gate, up, w1, w2, w3)  # what w2 takes is computed again: a fourth less is held
        out = product(F.silu(gate).mul_(up), w2.t())
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, gate, up, w1, w2, w3 = ctx.saved_tensors
        out = grad.reshape(-1, grad.shape[-1])
        silu = F.silu(gate)
        hidden = silu * up
        grad_w2 = product(out.t(), hidden)
        del hidden  # its memory is that of its gradient
        hidden = product(out, w2)  # its gradient
        grad_up = silu.mul_(hidden)
        hidden.mul_(up)
        grad_gate = torch.ops.aten.silu_backward.grad_input(hidden, gate, grad_input=hidden)
        grad_x = product(grad_gate, w1).add_(product(grad_up, w3))
        return grad_x.view(*grad.shape[:-1], -1), product(grad_gate.t(), rows), grad_w2, product(grad_up.t(), rows)


class _TurnedProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        (wq, wk, wv), rows, size = weights, x.flatten(0, -2), 2 * turns.shape[-1]
        ctx.save_for_backward(rows, turns, *weights)
        shape = (*x.shape[:-1], -1, size)
        q, k = (product(rows, _paired(weight, size).t()).view(shape) for weight in (wq, wk))
        for heads in (q, k):
            _as_complex(heads).mul_(turns)
        return q, k, product(rows, wv.t()).view(shape)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        rows, turns, wq, wk, wv = ctx.saved_tensors
        size, length = 2 * turns.shape[-1], rows.shape[0]
        q, k = (torch.view_as_real(_as_complex(grad) * turns.conj()).view(length, -1) for grad in (grad_q, grad_k))
        v = grad_v.reshape(length, -1)
        grad_x = product(q, _paired(wq, size)).add_(product(k, _paired(wk, size))).add_(product(v, wv))
        of_q, of_k = (_unpaired(product(grad.t(), rows), size) for grad in (q, k))
        return grad_x.view(*grad_q.shape[:-2], -1), None, of_q, of_k, product(v.t(), rows)


def _as_complex(heads: Tensor) -> Tensor:
    """(..., K), paired -> complex (..., K / 2): the same memory if `heads` is contiguous."""
    return torch.view_as_complex(heads.contiguous().view(*heads.shape[:-1], -1, 2))


def _paired(weight: Tensor, size: int) -> Tensor:
    """Bring feature i of each head next to feature i + K/2, with which it turns: rows of (heads x K, D)."""
    return weight.view(-1, 2, size // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _unpaired(weight: Tensor, size: int) -> Tensor:
    """Undo `_paired`."""
    return weight.view(-1, size // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
