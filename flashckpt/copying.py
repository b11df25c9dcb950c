"""Copy one box of a live tensor into a slot, hashing each 1 MiB chunk right behind the copy.

Both the copy and the hash release the GIL. Contiguous host memory, which is nearly all of it, goes by
memmove: one thread's copy_ is as fast, but would start an OpenMP pool of its own in the copy thread.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from flashckpt.digest import CHUNK_BYTES
from flashckpt.faults import crash_point
from flashckpt.placement import local_of
from flashckpt.structure import Row

PIECE_BYTES = 256 << 10
"""Bytes copied at a time ahead of their hash: they stay in the level-2 cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Item:
    """One row of the table and where it goes.

    Attributes:
        row: The box.
        offset: Byte in the data area.
        nbytes: Its size.
        first_chunk: Index of its first digest.
        start: Byte in the local tensor where the box starts, if it is one run there; -1 if not.
    """

    row: Row
    offset: int
    nbytes: int
    first_chunk: int
    start: int


def item_of(row: Row, offset: int, first_chunk: int) -> Item:
    """Return the Item of a row; finds out whether its box is one run of the local tensor."""
    local, box = row.entry.local, row.box
    start = -1
    whole = all(a == b for a, b in zip(box.lengths[1:], local.shape[1:], strict=True))
    if local.is_contiguous() and whole and not local.is_conj() and not local.is_neg():
        inner = math.prod(local.shape[1:]) * local.element_size()
        start = (box.starts[0] if box.starts else 0) * inner
    return Item(row=row, offset=offset, nbytes=row.shard.nbytes, first_chunk=first_chunk, start=start)


class Buffer:
    """The data area of one slot as the copies see it: an address, a view for hashing, tensors where needed.

    Holds the memory for as long as it lives; `close()` lets the slot's view go.
    """

    def __init__(self, data: memoryview) -> None:
        self.view = data
        self._array: Any = np.frombuffer(data, np.uint8)
        self.address = int(self._array.ctypes.data)

    def tensor(self, item: Item) -> torch.Tensor:
        """Return the destination of an item as a tensor of integers as wide as its elements."""
        local = item.row.entry.local
        flat = torch.from_numpy(self._array[item.offset : item.offset + item.nbytes])
        return flat.view(_INTEGERS[local.element_size()]).view(item.row.box.lengths)

    def close(self) -> None:
        """Forget the memory."""
        self._array = None
        self.view = memoryview(b"")


def source_of(item: Item, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the box of the live tensor as integers as wide as its elements: bits are copied, never values."""
    local = local_of(item.row.entry.tensor if tensor is None else tensor).detach()
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    source = local.view(_INTEGERS[local.element_size()])
    for dim, (start, length) in enumerate(zip(item.row.box.starts, item.row.box.lengths, strict=True)):
        source = source.narrow(dim, start, length)
    return source


def copy_item(item: Item, buffer: Buffer, tensor: torch.Tensor | None = None) -> None:
    """Copy one item without hashing it; from `tensor` where its owner gives out another object each time."""
    if not item.nbytes:
        return
    local = item.row.entry.local
    if item.start >= 0 and local.device.type == "cpu" and tensor is None:
        ctypes.memmove(buffer.address + item.offset, local.data_ptr() + item.start, item.nbytes)
    else:
        buffer.tensor(item).copy_(source_of(item, tensor))


def hash_item(item: Item, buffer: Buffer, digests: np.ndarray) -> None:
    """Hash one item where it lies in the slot."""
    view, end = buffer.view, item.offset + item.nbytes
    for chunk, at in enumerate(range(item.offset, end, CHUNK_BYTES), item.first_chunk):
        digests[chunk] = xxhash.xxh3_64_intdigest(view[at : min(at + CHUNK_BYTES, end)])


def copy_and_hash(item: Item, buffer: Buffer, digests: np.ndarray) -> None:
    """Copy one item from host memory, hashing behind the copy."""
    if item.start < 0 or item.nbytes <= PIECE_BYTES:
        copy_item(item, buffer)
        hash_item(item, buffer, digests)
        crash_point("slot.during-copy")
        return
    view, target, source = buffer.view, buffer.address, item.row.entry.local.data_ptr() + item.start - item.offset
    end = item.offset + item.nbytes
    for chunk, first in enumerate(range(item.offset, end, CHUNK_BYTES), item.first_chunk):
        hasher = xxhash.xxh3_64()
        last = min(first + CHUNK_BYTES, end)
        for at in range(first, last, PIECE_BYTES):
            size = min(PIECE_BYTES, last - at)
            ctypes.memmove(target + at, source + at, size)
            hasher.update(view[at : at + size])
        digests[chunk] = hasher.intdigest()
        crash_point("slot.during-copy")
