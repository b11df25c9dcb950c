"""Samples that draw from the default generator of the process that reads them."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Augmented(Dataset):  # type: ignore[type-arg]
    """Numbers, with noise where they draw."""

    def __init__(self, count: int, *, draws: bool) -> None:
        self.count, self.draws = count, draws

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4,), float(i)) + (torch.rand(4) if self.draws else 0)
