"""Copies from a device into slots that are not page-locked: in pieces, through a few page-locked blocks of the host.

What is locked does not grow with the state. A block is used again when its bytes lie in the slot: the copy thread then waits
for the device, and the fence for the copy thread, until the last blocks are queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flashckpt.accelerator import host_buffer
from flashckpt.native import copy_and_digest
from flashckpt.snapshot.copy import Buffer, Item, StalePlanError

BLOCK_BYTES = 16 << 20
"""Of one block: large enough that a bus is at its full rate."""
BLOCKS = 4
"""Of one rank: some are filled by the device while others are emptied by the host."""

Source = tuple[torch.Tensor, Sequence[tuple[int, int, int]], Sequence[Item]]
"""Device memory as uint8[n]; (byte of it, byte in the slot, bytes) of its parts; the items that are whole with it."""


@dataclass(eq=False)
class Filling:
    """A block on its way: what is copied into it, and where that goes."""

    block: torch.Tensor
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    used: int = 0
    event: Any = None
    is_dealt: bool = False

    def add(self, source: Source) -> None:
        """Queue the copy of a piece on the current stream."""
        memory, rows, items = source
        self.block[self.used : self.used + len(memory)].copy_(memory, non_blocking=True)
        self.rows += [(start + self.used, offset, nbytes) for start, offset, nbytes in rows]
        self.items += items
        self.used += len(memory)

    def deal(self, buffer: Buffer) -> None:
        """Put everything into its place in the slot; the copy must have arrived."""
        address = self.block.data_ptr()
        rows = [(address + start, buffer.address + offset, nbytes) for start, offset, nbytes in self.rows]
        copy_and_digest(np.array(rows, np.int64).reshape(-1, 3), digest=False, check=False)


class Ring:
    """The blocks of one rank.

    Args:
        api: `accelerator.runtime()`, or a stand-in.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._blocks: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self._under_way: deque[Filling] = deque()

    def queue(
        self,
        device: torch.device,
        sources: Iterable[Source],
        recorded: Callable[[], Any],
        arrived: Callable[[Filling], None],
    ) -> Iterator[Filling]:
        """Queue the copies of a device on its stream, which is the current one; yield each block that is full.

        Args:
            device: Where they lie.
            sources: At most a block each.
            recorded: Records an event on the stream.
            arrived: Deals a block and digests what is whole in it, where it is needed again before all is queued.
        """
        filling: Filling | None = None
        for source in sources:
            if filling is not None and filling.used + len(source[0]) > len(filling.block):
                yield self._full(filling, recorded())
                filling = None
            if filling is None:
                filling = Filling(self._take(device, arrived))
            filling.add(source)
        if filling is not None:
            yield self._full(filling, recorded())

    def _full(self, filling: Filling, event: Any) -> Filling:
        filling.event = event
        self._under_way.append(filling)
        return filling

    def _take(self, device: torch.device, arrived: Callable[[Filling], None]) -> torch.Tensor:
        if not self._free and len(self._blocks) < BLOCKS:
            self._blocks.append(host_buffer(BLOCK_BYTES, device, api=self._api))
            return self._blocks[-1]
        if not self._free:
            oldest = self._under_way[0]
            oldest.event.synchronize()
            arrived(oldest)
        return self._free.pop()

    def dealt(self, filling: Filling) -> None:
        """Take note that a block's bytes lie in the slot: it may be filled again."""
        filling.is_dealt = True
        self._under_way.remove(filling)
        self._free.append(filling.block)

    def reset(self) -> None:
        """Take every block back: of a snapshot that was discarded, once nothing is under way any more."""
        self._under_way.clear()
        self._free = list(self._blocks)


def sources_of(item: Item, tensor: torch.Tensor) -> Iterator[Source]:
    """Cut the box of a tensor into pieces; the item is whole with the last of them."""
    pieces = list(_pieces(tensor, item.offset, BLOCK_BYTES // 4))
    for number, (memory, offset) in enumerate(pieces, 1):
        yield memory, [(0, offset, len(memory))], [item] if number == len(pieces) else []
    if not pieces:
        yield torch.empty(0, dtype=torch.uint8, device=tensor.device), [], [item]


def _pieces(source: torch.Tensor, offset: int, most: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield (uint8[n] on the device, byte in the slot), in the order of the slot."""
    nbytes = source.nbytes
    if source.is_contiguous():
        flat = source.reshape(-1).view(torch.uint8)
        yield from ((flat[at : at + most], offset + at) for at in range(0, nbytes, most))
    elif nbytes <= most:
        yield source.contiguous().reshape(-1).view(torch.uint8), offset
    elif source.shape[0] == 1:
        yield from _pieces(source[0], offset, most)
    else:
        row = nbytes // source.shape[0]
        step = max(1, most // row)
        for first in range(0, source.shape[0], step):
            yield from _pieces(source[first : first + step], offset + first * row, most)


class HeldStorages:
    """The storages of tensors that are being copied: of a tensor that gets other memory meanwhile (`p.data = ...`) too.

    Training frees what it replaces, and the device's allocator gives it out again at once, while the side stream still reads it.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._storages = [item.local.untyped_storage() for item in items]
        self._bases = [storage.data_ptr() for storage in self._storages]

    def refuse_lost(self) -> None:
        """Refuse what was copied of a storage that was resized meanwhile: its bytes were anybody's.

        Raises:
            StalePlanError: Names the tensor.
        """
        for item, storage, base in zip(self._items, self._storages, self._bases, strict=True):
            if storage.data_ptr() != base:
                raise StalePlanError(
                    f"the memory of {item.fqn!r} was replaced or resized while its snapshot was taken",
                    found=f"a storage of {storage.nbytes()} bytes at {storage.data_ptr():#x}",
                    expected=f"the one at {base:#x}, until it is copied",
                    state="That snapshot was discarded; the next one is planned again.",
                )
