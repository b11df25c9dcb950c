"""One product for all experts of a layer, where torch has it for the device, the type and the sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor

_ALIGNED_BYTES = 16
"""Rows of what is multiplied begin at multiples of it."""


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Apply linear layer i to the i-th run of rows: (N, D), (experts, F, D) -> (N, F).

    Args:
        x: Rows, one run after the other.
        weights: Of all layers, each as `nn.Linear` has it.
        ends: (experts,), int32: behind the last row of each run.
    """
    return _grouped(x, weights, ends) if x.dtype == torch.bfloat16 else _uncompiled(x, weights, ends)


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; its compiler knows the product of bfloat16 alone (2.13)
def _uncompiled(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _grouped(x, weights, ends)


def obstacle(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str:
    """Return why there is no grouped product, for people; "" where there is.

    Args:
        device: On which it would be computed.
        dtype: In which.
        widths: Elements of the rows that would be multiplied.
    """
    if device.type == "meta":
        return "nothing is computed"
    uneven = [width for width in widths if width * dtype.itemsize % _ALIGNED_BYTES]
    if uneven:
        return f"rows of {uneven[0]} elements of {dtype.itemsize} bytes are no multiple of {_ALIGNED_BYTES} bytes"
    return _tried(device.type, dtype)


@functools.cache
def _tried(kind: str, dtype: torch.dtype) -> str:
    """Compute a small product both ways, forward and backward. Releases of torch differ in what they have."""
    draw = torch.Generator().manual_seed(0)  # the run's own numbers stay as they are
    x, weights, grad = (
        torch.randn(shape, generator=draw).to(kind, dtype).requires_grad_() for shape in ((8, 16), (3, 32, 16), (8, 32))
    )
    counts, ends = (3, 0, 5), torch.tensor([3, 3, 8], dtype=torch.int32, device=kind)
    try:
        with torch.enable_grad():
            found = grouped_linear(x, weights, ends)
            wanted = torch.cat(
                [F.linear(rows, one) for rows, one in zip(torch.split(x, list(counts)), weights, strict=True)]
            )
            mine, theirs = (torch.autograd.grad(out, [x, weights], grad.detach()) for out in (found, wanted))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"torch {torch.__version__} has none: {str(error).splitlines()[0][:100]}"
    pairs = zip((found, *mine), (wanted, *theirs), strict=True)
    near = all(torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2) for one, other in pairs)
    return "" if near else f"that of torch {torch.__version__} gives other results on this device"
