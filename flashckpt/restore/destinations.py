"""The memory that a restore writes into, by address: a hundred thousand tensors need no object each. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flashckpt.core.shard import Shard
from flashckpt.native.copying import PYTHON, copy_and_digest, implementation
from flashckpt.native.descriptors import DescriptorError
from flashckpt.planning.pieces import Runs
from flashckpt.shm.segment_file import address_of

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_GIL_BYTES = 64 << 10
"""From here on a copy lets other threads run; giving the interpreter lock up costs more than a smaller copy."""
_copy_holding_gil: Any = ctypes.PyDLL(None).memmove
_copy_holding_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A wanted shard and the memory it goes to."""

    shard: Shard
    buffer: memoryview


class RowWriter(Protocol):
    """Writes into wanted shards whose memory has no address on the host (restore/device_rows.py). From any thread."""

    def shares(self, rows: Ints, sizes: Ints) -> Iterator[Ints]:
        """Yield which runs of so many bytes, as indices, can be filled together."""
        ...

    def filling(self, rows: Ints, at: Ints, sizes: Ints) -> AbstractContextManager[Ints]:
        """Give host addresses to fill with what belongs at byte `at[k]` of shard `rows[k]`.

        The runs are a share, or a single one. Nothing is written where the block raises.
        """
        ...

    def write(self, rows: Ints, at: Ints, sources: Ints, sizes: Ints) -> None:
        """Copy `sizes[k]` bytes from host address `sources[k]` to byte `at[k]` of shard `rows[k]`."""
        ...

    def scatter(self, row: int, held: Bytes, start: int, found: Runs) -> int:
        """Copy the runs that lie in `held` to their places in a shard; return the bytes copied."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Where the bytes of each wanted shard go.

    Attributes:
        addresses: int64[n], of writable host memory, row-major; 0 for a shard without bytes, and for one of `writer`.
        nbytes: int64[n], bytes of each.
        owners: What keeps that memory alive.
        writer: Writes to shards with bytes and without an address; None where there are none.
    """

    addresses: Ints
    nbytes: Ints
    owners: Sequence[object]
    writer: RowWriter | None = None

    @classmethod
    def of(cls, targets: Sequence[Target]) -> Destinations:
        """Return the memory of targets.

        Raises:
            ValueError: A buffer is read-only, or has another size than its shard.
        """
        addresses = np.zeros(len(targets), np.int64)
        for k, target in enumerate(targets):
            buffer = memoryview(target.buffer)
            if buffer.nbytes != target.shard.nbytes or (buffer.readonly and buffer.nbytes):
                raise ValueError(
                    f"buffer of {target.shard.fqn!r}: {buffer.nbytes} bytes, shard has {target.shard.nbytes}"
                )
            if buffer.nbytes:
                addresses[k] = address_of(np.frombuffer(buffer, np.uint8))
        nbytes = np.array([target.shard.nbytes for target in targets], np.int64)
        return cls(addresses=addresses, nbytes=nbytes, owners=targets)

    def writer_of(self, target: int) -> RowWriter | None:
        """Return what writes to a shard without an address; None where it has one."""
        return None if self.addresses[target] else self.writer

    def view(self, target: int) -> Bytes:
        """Return the bytes of one shard, writable."""
        return memory_at(int(self.addresses[target]), int(self.nbytes[target]), self.owners)


def memory_at(address: int, nbytes: int, owners: object) -> Bytes:
    """Return host memory by its address, writable, as an array that keeps `owners` alive."""
    return np.asarray(_Memory(address, nbytes, owners))


class _Memory:
    """Host memory, as numpy takes it over; the array keeps this object, and so the owners."""

    def __init__(self, address: int, nbytes: int, owners: object) -> None:
        self.owners = owners
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def copy_bytes(targets: Ints, sources: Ints, sizes: Ints) -> None:
    """Copy `sizes[k]` bytes from address `sources[k]` to `targets[k]`; none lies over a source."""
    if implementation() != PYTHON:
        rows = np.column_stack((sources, targets, sizes))[sizes > 0]
        with contextlib.suppress(DescriptorError):  # live tensors may be views of each other: one after another then
            copy_and_digest(rows, digest=False, check=False)
            return
    for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        (_copy_holding_gil if nbytes < _GIL_BYTES else ctypes.memmove)(target, source, nbytes)


# -- Copies of many runs of bytes at once, for boxes that do not lie in one piece. Pure, numpy only ----------------


class StridedBlock(NamedTuple):
    """So many runs of `nbytes` bytes, one distance apart on each side; starts and steps are in bytes."""

    source_start: int
    target_start: int
    runs: int
    source_step: int
    target_step: int
    nbytes: int


def scatter(held: Bytes, start: int, found: Runs, into: Bytes) -> int:
    """Copy the runs that lie in `held`, which begins at byte `start` of the row, to their places in `into`.

    Returns:
        The bytes copied.
    """
    copied = 0
    for block in strided_blocks(len(held), start, found):
        shape = (block.runs, block.nbytes)
        source = np.lib.stride_tricks.as_strided(held[block.source_start :], shape, (block.source_step, 1))
        target = np.lib.stride_tricks.as_strided(into[block.target_start :], shape, (block.target_step, 1))
        np.copyto(target, source)  # releases the GIL
        copied += block.runs * block.nbytes
    return copied


def strided_blocks(held_bytes: int, start: int, found: Runs) -> Iterator[StridedBlock]:
    """Yield the copies that `scatter` makes out of `held_bytes` bytes, which begin at byte `start` of the row."""
    starts, targets, nbytes = found.source_starts - start, found.target_starts, found.nbytes
    low, high = 0, len(starts)
    for k in sorted({0, len(starts) - 1}):  # only the first and the last run can reach over the ends
        skip, stop = max(-int(starts[k]), 0), min(nbytes, held_bytes - int(starts[k]))
        if skip or stop < nbytes:
            size = stop - skip
            if size > 0:
                yield StridedBlock(int(starts[k]) + skip, int(targets[k]) + skip, 1, size, size, size)
            low, high = (1, high) if k == 0 else (low, k)
    if low >= high:
        return
    for first, last in _uniform(starts[low:high], targets[low:high]):
        count = last - first
        source, target = starts[low + first : low + last], targets[low + first : low + last]
        steps = [int(side[1] - side[0]) if count > 1 else nbytes for side in (source, target)]
        yield StridedBlock(int(source[0]), int(target[0]), count, steps[0], steps[1], nbytes)


def _uniform(starts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut runs into groups of constant distance on both sides, as (first, past the last)."""
    count = len(starts)
    if count <= 2:
        yield 0, count
        return
    steps = np.stack((np.diff(starts), np.diff(targets)))
    changes = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1
    first = 0
    while first < count:
        k = int(np.searchsorted(changes, first, side="right"))
        last = int(changes[k]) + 1 if k < len(changes) else count
        yield first, last
        first = last
