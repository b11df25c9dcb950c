"""The model of `end_to_end.py`: parameters of float32, and nothing that computes."""

from __future__ import annotations

import torch
from torch import nn

TENSORS = 100


class Model(nn.Module):
    """100 parameters of so many bytes in all, each with its own memory."""

    def __init__(self, nbytes: int, *, value: float = 1.0) -> None:
        super().__init__()
        each = max(1, nbytes // TENSORS // 4)
        self.layers = nn.ParameterList(nn.Parameter(torch.full((each,), value)) for _ in range(TENSORS))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(one.numel() * one.element_size() for one in self.parameters())

    def holds(self, value: float) -> bool:
        """Whether the first and last element of every parameter are `value`."""
        return all(bool(one[0] == value) and bool(one[-1] == value) for one in self.parameters())
