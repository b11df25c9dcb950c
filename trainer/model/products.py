"""Products of matrices in float32 on a CPU: by oneDNN where MKL, which torch calls, is half as fast.

MKL uses AVX-512 on Intel's processors alone. oneDNN, which torch brings too, uses it on every one that has it: on AMD's
EPYC (Zen 5) twice the multiplications per second. Which of them computes follows from the processor and the shapes, never
from a measurement: a restarted run on the same kind of machine has the same bits.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

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
