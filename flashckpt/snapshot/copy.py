"""What is copied: one box of a live tensor and its place in a slot. Most are runs of host memory, which `snapshot/runs` copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from flashckpt.errors import FenceError, FlashckptError, SharedMemoryError
from flashckpt.state.placement import LocalBox, local_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""The type whose elements are as wide: bits are copied, never values."""
_COPIED_BY_BITS = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32}
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


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
    box: LocalBox
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
    """Reject a plan that would write past its slot; once per snapshot, before the first copy.

    Raises:
        SlotOverflowError: It would.
    """
    if plan_bytes > slot_bytes:
        raise SlotOverflowError(
            f"internal error: the snapshot of step {step} was planned for a larger slot than it was given",
            found=f"{plan_bytes} bytes to copy",
            expected=f"at most {slot_bytes} bytes",
            state="That snapshot was discarded before anything was copied; the next one is planned again.",
            remedy="please report it with the kinds of optimizer and model that are tracked",
        )


def run_starts(boxes: Sequence[LocalBox], shape: torch.Size, itemsize: int) -> list[int]:
    """Return the byte where each box of a contiguous tensor starts, if it is one run of it; -1 if not."""
    row = math.prod(shape[1:]) * itemsize
    return [(box.starts[0] if box.starts else 0) * row if box.lengths[1:] == shape[1:] else -1 for box in boxes]


def is_run(local: torch.Tensor) -> bool:
    """Whether a tensor is one run of host memory that holds its values bit for bit."""
    return local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg()


class Buffer:
    """The data area of one slot as the copies see it: an address, tensors where needed; made by the thread that asks first.

    Holds the memory until `close()` releases the slot's view.
    """

    def __init__(self, data: memoryview) -> None:
        self._data: memoryview | None = data
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    @cached_property
    def array(self) -> Any:
        """Its bytes, uint8[n]."""
        assert self._data is not None, "closed"
        return np.frombuffer(self._data, np.uint8)

    @cached_property
    def address(self) -> int:
        """Of its first byte."""
        return int(self.array.ctypes.data)

    def tensor(self, item: Item) -> torch.Tensor:
        """Return the destination of an item as a tensor of integers as wide as its elements."""
        flat = torch.from_numpy(self.array[item.offset : item.offset + item.nbytes])
        return flat.view(INTEGERS[item.local.element_size()]).view(item.box.lengths)

    def like_live(self, item: Item) -> torch.Tensor:
        """Return the destination of an item that `is_plain`, of the dtype and strides of its live tensor."""
        if item.dtype not in self._by_dtype:
            whole = self.array[: len(self.array) // 8 * 8]
            self._by_dtype[item.dtype] = torch.from_numpy(whole).view(item.dtype)
        at = item.offset // item.dtype.itemsize
        return self._by_dtype[item.dtype].as_strided(item.shape, item.local.stride(), at)

    def close(self) -> None:
        """Forget the memory."""
        self._data, self._by_dtype = None, {}
        self.__dict__.pop("array", None)


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
    source = local.view(INTEGERS[local.element_size()])
    for dim, (start, length) in enumerate(zip(item.box.starts, item.box.lengths, strict=True)):
        source = source.narrow(dim, start, length)
    return source


def is_plain(item: Item) -> bool:
    """Whether the live tensor may be copied as it stands: whole, row-major, of a type whose copies keep every bit.

    No view of it is made then, which costs more than all of these questions.

    Raises:
        StalePlanError: As `source_of`.
    """
    local = item.local
    if local.shape != item.shape or local.dtype is not item.dtype:
        raise stale_plan(item, local)
    return (
        local.dtype in _COPIED_BY_BITS
        and type(local) in _PLAIN_TYPES
        and local.shape == item.box.lengths
        and local.is_contiguous()
        and not local.is_neg()
    )


def stale_plan(item: Item, local: torch.Tensor) -> StalePlanError:
    """Return the error for a tensor that is not of the form that was planned any more."""
    return StalePlanError(
        f"{item.fqn!r} has another shape or storage than when its snapshot was planned",
        found=f"{local.dtype}, shape {tuple(local.shape)}, strides {local.stride()}",
        expected=f"{item.dtype}, shape {tuple(item.shape)}" + (", contiguous" if item.start >= 0 else ""),
        state="That snapshot was discarded; the next one is planned again.",
    )


def copy_item(item: Item, buffer: Buffer, tensor: torch.Tensor | None = None) -> None:
    """Copy one item by torch, without digesting it; from `tensor` where its owner gives out another object each time."""
    if item.nbytes:
        buffer.tensor(item).copy_(source_of(item, tensor))
