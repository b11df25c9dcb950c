"""From a position of the endless sample stream to a sample of the data set: a pure function, world size unknown."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError
from flashckpt.sampler.permutation import PERMUTATION_ID, Permutation

Int64Array = npt.NDArray[np.int64]


class Stream(Protocol):
    """What a sampler walks along: `length` samples per epoch, and the sample at any position."""

    length: int
    name: str

    def take(self, positions: Int64Array) -> Int64Array:
        """Return the sample ids at `positions` (1-d, any epochs)."""
        ...


class EpochStream:
    """Epoch after epoch of one data set, each in its own order.

    Args:
        length: Samples of the data set.
        seed: Key of the order.
        order: "global" (full shuffle) or "sequential".
    """

    def __init__(self, length: int, *, seed: int, order: str = "global") -> None:
        if order not in ("global", "sequential"):
            raise ConfigError("unknown order", found=repr(order), expected='"global", "block" or "sequential"')
        self.length = length
        self.name = "sequential" if order == "sequential" else f"global:{PERMUTATION_ID}"
        self._sequential = order == "sequential"
        self._epoch = lru_cache(maxsize=2)(lambda epoch: Permutation(length, seed, epoch))

    def take(self, positions: Int64Array) -> Int64Array:
        """Return the sample ids at `positions` (1-d, any epochs)."""
        epochs, offsets = np.divmod(positions, self.length)
        if self._sequential or not len(offsets):
            return offsets
        first, last = int(epochs.min()), int(epochs.max())
        if first == last:
            return self._epoch(first).take(offsets)
        ids = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            ids[here] = self._epoch(epoch).take(offsets[here])
        return ids
