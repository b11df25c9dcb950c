"""Block-local shuffle: for storage where neighbouring samples are cheap and distant ones are not.

Blocks of consecutive samples are permuted, then samples inside windows of a few blocks. A reader that
keeps `window_blocks` blocks open touches every block once per epoch, yet neighbours are separated. Random
access both ways, O(1) in n: one block permutation, and one permutation per window when it is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from flashckpt.errors import ConfigError
from flashckpt.sampler.order.permutation import Int64Array, Permutation, derive_keys
from flashckpt.sampler.order.state import whole


class BlockCore:
    """The bijection of `BlockPermutation`, which documents the arguments."""

    def __init__(self, n: int, seed: int, epoch: int, block_size: int, window_blocks: int) -> None:
        self.block, self.window = block_size, block_size * window_blocks
        blocks = -(-n // block_size)
        self.order = Permutation(blocks, seed, epoch)
        self.missing = blocks * block_size - n  # samples that the last block lacks
        self.short_at = self.order.index(blocks - 1)  # position of the last block
        keys = derive_keys("window", seed, epoch, n, block_size, window_blocks)
        self.inside: Callable[[int], Permutation] = lru_cache(maxsize=8)(
            lambda window: Permutation(min(self.window, n - window * self.window), keys[0] | keys[1] << 32, window)
        )

    def forward(self, index: int) -> int:
        """Return the value at `index`."""
        return int(self.forward_array(np.array([index], np.int64))[0])

    def backward(self, value: int) -> int:
        """Return the index of `value`."""
        return int(self.backward_array(np.array([value], np.int64))[0])

    def forward_array(self, indices: Int64Array) -> Int64Array:
        """Return the values at `indices` (1-d)."""
        place = self._within_windows(indices, Permutation.take)
        place += np.where(place >= (self.short_at + 1) * self.block - self.missing, self.missing, 0)
        slots, inside = np.divmod(place, self.block)
        return self.order.take(slots) * self.block + inside

    def backward_array(self, values: Int64Array) -> Int64Array:
        """Return the indices of `values` (1-d)."""
        blocks, inside = np.divmod(values, self.block)
        slots = self.order.index_of(blocks)
        place = slots * self.block + inside - np.where(slots > self.short_at, self.missing, 0)
        return self._within_windows(place, Permutation.index_of)

    def _within_windows(self, places: Int64Array, apply: Callable[[Permutation, Int64Array], Int64Array]) -> Int64Array:
        windows, inside = np.divmod(places, self.window)
        out = np.empty_like(places)
        for window in np.unique(windows).tolist():
            here = windows == window
            out[here] = apply(self.inside(window), inside[here]) + window * self.window
        return out


class BlockPermutation(Permutation):
    """A permutation of [0, n) that shuffles whole blocks, then samples inside windows of blocks.

    Args:
        n: Length, 1 to 2**62.
        seed: Any integer.
        epoch: Any integer.
        block_size: Consecutive samples that belong together (a row group, a read-ahead block).
        window_blocks: Blocks whose samples are mixed: the number a reader keeps open.

    Raises:
        SamplerStateError: `n` is out of range.
        ConfigError: a size is not positive.
    """

    def __init__(
        self, n: int, seed: int = 0, epoch: int = 0, *, block_size: int = 1024, window_blocks: int = 16
    ) -> None:
        super().__init__(n, seed, epoch)
        block_size, window_blocks = whole("block_size", block_size), whole("window_blocks", window_blocks)
        if block_size < 1 or window_blocks < 1:
            raise ConfigError(
                "block order needs positive sizes",
                found=f"block_size {block_size}, window_blocks {window_blocks}",
                expected="1 or more",
            )
        self.core = BlockCore(self._n, self.seed, self.epoch, block_size, window_blocks)
