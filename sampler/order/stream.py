"""From a position of the endless sample stream to a sample of the data set: a pure function, independent of world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from flashckpt.errors import ConfigError
from flashckpt.sampler.order.block import BlockPermutation
from flashckpt.sampler.order.permutation import PERMUTATION_ID, Int64Array, Permutation
from flashckpt.sampler.order.state import whole

ORDERS = ("global", "block", "sequential")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of the samples of an epoch.

    Args:
        kind: "global" (full shuffle), "block" (blocks, then samples inside windows of blocks) or "sequential".
        block_size: Samples of a block, for "block".
        window_blocks: Blocks of a window, for "block".
    """

    kind: str = "global"
    block_size: int = 1024
    window_blocks: int = 16

    def __post_init__(self) -> None:
        for name in ("block_size", "window_blocks"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.kind not in ORDERS or self.block_size < 1 or self.window_blocks < 1:
            raise ConfigError(
                "unknown order",
                found=f"{self.kind!r}, block_size {self.block_size}, window_blocks {self.window_blocks}",
                expected=", ".join(ORDERS) + "; positive sizes",
            )

    @classmethod
    def of(cls, order: str | Order, *, shuffle: bool) -> Order:
        """Return an order, or the one of this kind; in sequence without `shuffle`."""
        if not shuffle:
            return cls(kind="sequential")
        return order if isinstance(order, Order) else cls(kind=order)

    @property
    def name(self) -> str:
        """The name that a state records: kind, sizes and version."""
        if self.kind == "sequential":
            return "sequential"
        sizes = f":{self.block_size}x{self.window_blocks}" if self.kind == "block" else ""
        return f"{self.kind}{sizes}:{PERMUTATION_ID}"

    def permutation(self, length: int, seed: int, epoch: int) -> Permutation | None:
        """Return the order of one epoch; None for "sequential"."""
        if self.kind == "global":
            return Permutation(length, seed, epoch)
        if self.kind == "block":
            return BlockPermutation(length, seed, epoch, block_size=self.block_size, window_blocks=self.window_blocks)
        return None


class Stream(Protocol):
    """A sample stream: `length` samples per epoch, and the sample at any position."""

    length: int
    name: str

    def take(self, positions: Int64Array) -> Int64Array:
        """Return the sample ids at `positions` (1-d, any epochs)."""
        ...


class EpochStream:
    """The epochs of one data set one after another, each in its own order.

    Args:
        length: Samples of the data set.
        seed: Key of the order.
        order: Kind of the order.
    """

    def __init__(self, length: int, *, seed: int, order: Order) -> None:
        self.length, self.name = length, order.name
        self.of_epoch: Callable[[int], Permutation | None] = lru_cache(maxsize=2)(
            lambda epoch: order.permutation(length, seed, epoch)
        )

    def take(self, positions: Int64Array) -> Int64Array:
        """Return the sample ids at `positions` (1-d, any epochs)."""
        epochs, offsets = np.divmod(positions, self.length)
        if not len(offsets):
            return offsets
        if epochs.min() == epochs.max():
            return self._of_epoch(int(epochs[0]), offsets)
        ids = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            ids[here] = self._of_epoch(epoch, offsets[here])
        return ids

    def _of_epoch(self, epoch: int, offsets: Int64Array) -> Int64Array:
        permutation = self.of_epoch(epoch)
        return offsets if permutation is None else permutation.take(offsets)
