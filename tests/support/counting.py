"""A data set of numbers, for tests of the sampler under loaders."""

from __future__ import annotations

from torch.utils.data import Dataset


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index
