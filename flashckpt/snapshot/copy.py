"""Copy one box of a live tensor into a slot, hashing each 1 MiB chunk right behind the copy.

Both the copy and the hash release the GIL. Contiguous host memory, which is nearly all of it, goes by
memmove: one thread's copy_ is as fast, but would start an OpenMP pool of its own in the copy thread.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from flashckpt.core.digest import CHUNK_BYTES
from flashckpt.errors import FenceError, FlashckptError, SharedMemoryError
from flashckpt.faults import crash_point
from flashckpt.state.placement import Box, local_of

PIECE_BYTES = 256 << 10
"""Bytes copied at a time ahead of their hash: they stay in the level-2 cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Item(NamedTuple):
    """One row of the table and where it goes.

    Attributes:
        fqn: Name of its tensor.
        box: The box.
        local: The tensor with this rank's bytes; held, so that nothing is looked up per snapshot.
        offset: Byte in the data area.
        nbytes: Its size.
        first_chunk: Index of its first digest.
        start: Byte in the local tensor where the box starts, if it is one run of host memory there; -1 if not.
        local_bytes: Size of the whole local tensor when this was planned.
        dtype: Of the whole local tensor when this was planned.
        shape: Of it then.
    """

    fqn: str
    box: Box
    local: torch.Tensor
    offset: int
    nbytes: int
    first_chunk: int
    start: int
    local_bytes: int
    dtype: torch.dtype
    shape: torch.Size


class StalePlanError(FlashckptError):
    """A tensor has another shape or storage than the plan was made for; that snapshot is discarded."""

    exit_code = FenceError.exit_code


class SlotOverflowError(FlashckptError):
    """A plan needs more bytes than its slot has: a fault of this program, found before a byte was written."""

    exit_code = SharedMemoryError.exit_code


def check_slot(plan_bytes: int, slot_bytes: int, step: int) -> None:
    """Refuse a plan that would write behind its slot; once per snapshot, before the first copy.

    Raises:
        SlotOverflowError: It would.
    """
    if plan_bytes > slot_bytes:
        raise SlotOverflowError(
            f"internal error: the snapshot of step {step} was planned for a larger slot than it was given",
            found=f"{plan_bytes} bytes to copy",
            expected=f"at most {slot_bytes} bytes",
            state="That snapshot was discarded before anything was copied; the next one is planned anew.",
            remedy="please report it with the kinds of optimizer and model that are tracked",
        )


def run_starts(boxes: Sequence[Box], shape: torch.Size, itemsize: int) -> list[int]:
    """Return the byte where each box of a contiguous tensor starts, if it is one run of it; -1 if not."""
    row = math.prod(shape[1:]) * itemsize
    return [(box.starts[0] if box.starts else 0) * row if box.lengths[1:] == shape[1:] else -1 for box in boxes]


def is_run(local: torch.Tensor) -> bool:
    """Whether a tensor is one run of host memory that holds its values bit for bit."""
    return local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg()


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
        flat = torch.from_numpy(self._array[item.offset : item.offset + item.nbytes])
        return flat.view(_INTEGERS[item.local.element_size()]).view(item.box.lengths)

    def close(self) -> None:
        """Forget the memory."""
        self._array = None
        self.view = memoryview(b"")


def source_of(item: Item, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the box of the live tensor as integers as wide as its elements: bits are copied, never values.

    Raises:
        StalePlanError: The tensor has another shape or dtype than was planned.
    """
    local = (item.local if tensor is None else local_of(tensor)).detach()
    if local.shape != item.shape or local.dtype is not item.dtype:
        raise stale_plan(item, local)
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    source = local.view(_INTEGERS[local.element_size()])
    for dim, (start, length) in enumerate(zip(item.box.starts, item.box.lengths, strict=True)):
        source = source.narrow(dim, start, length)
    return source


def address_of(item: Item) -> int:
    """Return the address of an item's first byte.

    Raises:
        StalePlanError: The tensor was given another storage (`p.data = ...`) that is not of the planned form.
    """
    local = item.local
    if local.nbytes != item.local_bytes or not local.is_contiguous():
        raise stale_plan(item, local)
    return local.data_ptr() + item.start


def stale_plan(item: Item, local: torch.Tensor) -> StalePlanError:
    """Return the error for a tensor that is not of the form that was planned any more."""
    return StalePlanError(
        f"{item.fqn!r} has another shape or storage than when its snapshot was planned",
        found=f"{local.dtype}, shape {tuple(local.shape)}, strides {local.stride()}",
        expected=f"{item.dtype}, shape {tuple(item.shape)}" + (", contiguous" if item.start >= 0 else ""),
        state="That snapshot was discarded; the next one is planned anew.",
    )


def copy_item(item: Item, buffer: Buffer, tensor: torch.Tensor | None = None) -> None:
    """Copy one item without hashing it; from `tensor` where its owner gives out another object each time."""
    if not item.nbytes:
        return
    if item.start >= 0 and tensor is None:
        ctypes.memmove(buffer.address + item.offset, address_of(item), item.nbytes)
    else:
        buffer.tensor(item).copy_(source_of(item, tensor))


def hash_item(item: Item, buffer: Buffer, digests: np.ndarray) -> None:
    """Hash one item where it lies in the slot."""
    view, end = buffer.view, item.offset + item.nbytes
    for chunk, at in enumerate(range(item.offset, end, CHUNK_BYTES), item.first_chunk):
        digests[chunk] = xxhash.xxh3_64_intdigest(view[at : min(at + CHUNK_BYTES, end)])


def copy_and_hash(item: Item, buffer: Buffer, digests: np.ndarray) -> None:
    """Copy one item, hashing behind the copy.

    Runs of host memory are hashed where they came from: the bytes are in the cache even where the stores went past it,
    and a run that somebody wrote in between does not verify.
    """
    if item.start < 0 or item.nbytes <= PIECE_BYTES:
        copy_item(item, buffer)
        hash_item(item, buffer, digests)
        crash_point("slot.during-copy")
        return
    source, target, end = address_of(item), buffer.address + item.offset, item.nbytes
    view = memoryview((ctypes.c_ubyte * end).from_address(source))
    for chunk, first in enumerate(range(0, end, CHUNK_BYTES), item.first_chunk):
        hasher = xxhash.xxh3_64()
        last = min(first + CHUNK_BYTES, end)
        for at in range(first, last, PIECE_BYTES):
            size = min(PIECE_BYTES, last - at)
            ctypes.memmove(target + at, source + at, size)
            hasher.update(view[at : at + size])
        digests[chunk] = hasher.intdigest()
        crash_point("slot.during-copy")
