"""Items that are one run of host memory each: found again by address, copied and digested by one call of `flashckpt.native`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flashckpt import faults
from flashckpt.core.digest import CHUNK_BYTES
from flashckpt.native import copy_and_digest, is_native
from flashckpt.snapshot.copy import Buffer, Item, stale_plan

Ints = npt.NDArray[np.int64]
_SHAPE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")
_NBYTES = operator.attrgetter("nbytes")
_AT_A_TIME = 1024  # looked up without releasing the GIL to training
_POINT = "slot.during-copy"


class Runs:
    """The rows of one native copy: made once per plan, moved to a slot's address per snapshot.

    Args:
        items: Each with `start` >= 0.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._locals = [item.local for item in items]
        self._shapes, self._dtypes = [item.shape for item in items], [item.dtype for item in items]
        self._sizes = [item.local_bytes for item in items]
        columns = [(item.start, item.offset, item.nbytes, item.first_chunk) for item in items]
        self._start, self._offset, self._nbytes, self._first = np.array(columns, np.int64).reshape(-1, 4).T.copy()
        self._addresses = np.zeros(len(items), np.int64)
        self._kept: list[Any] = [None] * len(items)
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self._items)

    def copy(self, buffer: Buffer) -> None:
        """Copy without digests, in the training thread: what else is wrong with a tensor is found by `check_forms`.

        Raises:
            StalePlanError: A tensor has another size, or is not contiguous any more.
        """
        if self._items:
            for part in self._parts():
                if list(map(_NBYTES, self._locals[part])) != self._sizes[part]:
                    self._refuse(part)
            copy_and_digest(self._rows(self._find(), buffer), digest=False, check=False)

    def copy_and_digest(self, buffer: Buffer, digests: npt.NDArray[np.uint64]) -> None:
        """Copy and digest in the copy thread, after `check_forms`; the GIL is free except while addresses are looked up.

        The storages are held until the copy has ended: `p.data = ...` in another thread would free what is being read.

        Raises:
            StalePlanError: A tensor is not contiguous any more, or moved meanwhile.
            UnusableMemoryError: Its memory, or the slot's, cannot be used.
        """
        if not self._items:
            return
        addresses = self._find()
        held = self._hold(addresses)
        rows, first = self._rows(addresses, buffer), self._first
        # asking for the map of memory is cheap in C alone; else once per slot, since what was checked is held
        check = is_native() or buffer.address not in self._checked
        if faults.is_armed(_POINT):
            _copy_by_chunk(rows, first, digests)
        else:
            copy_and_digest(rows, digests=digests, first_chunks=first, check=check)
        self._checked.add(buffer.address)
        del held

    def check_forms(self) -> None:
        """Check that every tensor is of the planned dtype and shape.

        `p.data = ...` changes neither the parameter's identity nor its version: the bytes fit, and mean something else.

        Raises:
            StalePlanError: One is not.
        """
        for part in self._parts():
            tensors = self._locals[part]
            if list(map(_DTYPE, tensors)) != self._dtypes[part] or list(map(_SHAPE, tensors)) != self._shapes[part]:
                self._refuse(part)

    def _find(self) -> Ints:
        """Return the address of each item's tensor. Raises StalePlanError where one is not contiguous any more."""
        found = np.empty(len(self._items), np.int64)
        for part in self._parts():
            tensors = self._locals[part]
            if not all(map(torch.Tensor.is_contiguous, tensors)):
                self._refuse(part)
            found[part] = list(map(torch.Tensor.data_ptr, tensors))
        return found

    def _rows(self, addresses: Ints, buffer: Buffer) -> Ints:
        return np.column_stack((addresses + self._start, self._offset + buffer.address, self._nbytes))

    def _hold(self, addresses: Ints) -> list[Any]:
        """Return what keeps every storage alive that was found.

        One that was where it is now the time before is kept from then on, so that this costs nothing later: its address cannot be
        given to another. One that has moved is held by the caller alone. A tensor that moves after it was kept has two until the next snapshot.
        """
        moved = addresses != self._addresses
        if moved.any():
            self._checked.clear()
        for number in np.flatnonzero(moved).tolist():
            self._kept[number] = None
        held = []
        for number in (number for number, kept in enumerate(self._kept) if kept is None):
            local = self._locals[number]
            storage = local.untyped_storage()
            if local.data_ptr() != addresses[number]:
                raise stale_plan(self._items[number], local)
            held.append(storage)
            if not moved[number]:
                self._kept[number] = storage
        self._addresses = addresses
        return held

    def _parts(self) -> Iterator[slice]:
        return (slice(first, first + _AT_A_TIME) for first in range(0, len(self._items), _AT_A_TIME))

    def _refuse(self, part: slice) -> None:
        for item in self._items[part]:
            local = item.local
            if (local.dtype, local.shape) != (item.dtype, item.shape) or not local.is_contiguous():
                raise stale_plan(item, local)


def places_of(items: Sequence[Item]) -> Ints:
    """Return int64[n, 3]: offset in the slot, bytes and first digest of each item."""
    return np.array([(item.offset, item.nbytes, item.first_chunk) for item in items], np.int64).reshape(-1, 3)


def digest_in_slot(places: Ints, buffer: Buffer, digests: npt.NDArray[np.uint64]) -> None:
    """Digest what lies in the slot already; `places` as of `places_of`."""
    if len(places):
        offset, nbytes, first = places.T
        rows = np.column_stack((offset + buffer.address, np.zeros_like(offset), nbytes))
        copy_and_digest(rows, digests=digests, first_chunks=np.ascontiguousarray(first), check=False)


def _copy_by_chunk(rows: Ints, first: Ints, digests: npt.NDArray[np.uint64]) -> None:
    """Copy with the crash point behind each chunk, as if many calls were one: only where that point is armed."""
    for (source, target, nbytes), chunk in zip(rows.tolist(), first.tolist(), strict=True):
        for number, at in enumerate(range(0, max(nbytes, 1), CHUNK_BYTES), chunk):
            row = np.array([(source + at, target + at, min(CHUNK_BYTES, nbytes - at))], np.int64)
            copy_and_digest(row, digests=digests, first_chunks=np.array([number], np.int64))
            faults.crash_point(_POINT)
