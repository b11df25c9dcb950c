"""The memory that a restore writes into, by address: a hundred thousand tensors need no object each. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.accelerator import host_buffer, runtime
from flashckpt.core.shard import Shard, round_up
from flashckpt.native.copying import PYTHON, copy_and_digest, implementation
from flashckpt.native.descriptors import DescriptorError
from flashckpt.planning.pieces import Runs

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_GIL_BYTES = 64 << 10
"""From here on a copy lets other threads run; giving the interpreter lock up costs more than a smaller copy."""
_copy_holding_gil: Any = ctypes.PyDLL(None).memmove
_copy_holding_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A wanted shard and the memory it goes to.

    Args:
        shard: The wanted box.
        buffer: Its writable bytes, row-major, `shard.nbytes` of them.
    """

    shard: Shard
    buffer: memoryview


class RowWriter(Protocol):
    """Writes into wanted shards whose memory has no address on the host (restore/device_rows.py). From any thread."""

    def filling(self, row: int, at: int, nbytes: int) -> AbstractContextManager[memoryview]:
        """Give memory to fill with what belongs at byte `at` of a shard; nothing is written where the block raises."""
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
        return np.asarray(_Memory(int(self.addresses[target]), int(self.nbytes[target]), self.owners))


class _Memory:
    """Host memory, as numpy takes it over; the array keeps this object, and so the owners."""

    def __init__(self, address: int, nbytes: int, owners: object) -> None:
        self.owners = owners
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def address_of(array: Bytes) -> int:
    """Return where an array's first byte lies."""
    address: int = array.__array_interface__["data"][0]
    return address


def copy_bytes(targets: Ints, sources: Ints, sizes: Ints) -> None:
    """Copy `sizes[k]` bytes from address `sources[k]` to `targets[k]`; none lies over a source."""
    if implementation() != PYTHON:
        rows = np.column_stack((sources, targets, sizes))[sizes > 0]
        with contextlib.suppress(DescriptorError):  # live tensors may be views of each other: one after another then
            copy_and_digest(rows, digest=False, check=False)
            return
    for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        (_copy_holding_gil if nbytes < _GIL_BYTES else ctypes.memmove)(target, source, nbytes)


# -- Rows of a restore that lie in device memory: verified bytes reach them through a few page-locked blocks of the
#    host
#
# The host memory this takes does not grow with the state, and a block crosses the bus while others are being
# filled. One stream per device takes all copies in the order they were queued, so that bytes which replace
# damaged ones come after them.

BLOCK_BYTES = 8 << 20
"""Of one block: what one thread fetches at a time."""
BLOCKS = 16
"""Blocks of one restore; more only where more threads fill one each at the same moment."""
_ALIGN = 16
"""Runs that share a block begin at multiples of this: a kernel then copies them by whole words."""

cuda: Any = runtime()
"""Or a stand-in, so that the order of operations is tested without a GPU."""


class DeviceRows:
    """Writes into rows of device memory, from any thread.

    Attributes:
        rows: uint8[nbytes] on a device by row: the memory of each.
    """

    def __init__(self, rows: Mapping[int, torch.Tensor]) -> None:
        self.rows = rows
        self._free: list[torch.Tensor] = []
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._made = 0
        self._lock = threading.Lock()
        self._streams: dict[torch.device, Any] = {}
        for device in {row.device for row in rows.values()}:
            queued = cuda.Event()
            queued.record(cuda.current_stream(device))
            self._streams[device] = cuda.Stream(device)
            self._streams[device].wait_event(queued)  # new memory may still be read by what used it before

    @contextlib.contextmanager
    def filling(self, row: int, at: int, nbytes: int) -> Iterator[memoryview]:
        """Give host memory of `nbytes` to fill; behind the block its copy to byte `at` of the row is queued.

        Where the block raises, the row stays as it is.
        """
        target = self.rows[row]
        staging = self._take(nbytes, target.device)
        try:
            yield memoryview(staging.numpy())[:nbytes]  # type: ignore[arg-type]  # numpy's arrays are buffers
        except BaseException:
            self._give_back(staging)
            raise
        with self._queueing(target.device, staging):
            target[at : at + nbytes].copy_(staging[:nbytes], non_blocking=True)

    def write(self, rows: Ints, at: Ints, sources: Ints, sizes: Ints) -> None:
        """Copy runs of host memory into rows; those of one device cross the bus together.

        Args:
            rows: int64[n].
            at: int64[n], byte in the row.
            sources: int64[n], host addresses; they are read before this returns.
            sizes: int64[n], bytes, 1 or more.
        """
        devices = [self.rows[row].device for row in rows.tolist()]
        for device in dict.fromkeys(devices):
            own = np.flatnonzero(np.array([one == device for one in devices]))
            while len(own):
                ends = np.cumsum(-(-sizes[own] // _ALIGN) * _ALIGN)
                count = max(1, int(np.searchsorted(ends, BLOCK_BYTES, side="right")))
                now, own = own[:count], own[count:]
                self._write_some(device, rows[now], at[now], sources[now], sizes[now])

    def _write_some(self, device: torch.device, rows: Ints, at: Ints, sources: Ints, sizes: Ints) -> None:
        """Do what `write` says for runs that share one block."""
        ends = np.cumsum(-(-sizes // _ALIGN) * _ALIGN)
        starts = np.concatenate([[0], ends[:-1]])
        total = int(ends[-1])
        staging = self._take(total, device)
        copy_bytes(staging.data_ptr() + starts, sources, sizes)
        columns = zip(rows.tolist(), at.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        with self._queueing(device, staging):
            if len(rows) == 1:
                target = self.rows[int(rows[0])][int(at[0]) :][: int(sizes[0])]
                target.copy_(staging[: int(sizes[0])], non_blocking=True)
                return
            arrived = torch.empty(total, dtype=torch.uint8, device=device)
            arrived.copy_(staging[:total], non_blocking=True)
            pairs = [(self.rows[row][to : to + n], arrived[start : start + n]) for row, to, start, n in columns]
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def scatter(self, row: int, held: Bytes, start: int, found: Runs) -> int:
        """Do what `scatter.scatter` does, distributing the bytes on the device; return the bytes copied."""
        target = self.rows[row]
        staging = self._take(len(held), target.device)
        copy_bytes(np.array([staging.data_ptr()]), np.array([address_of(held)]), np.array([len(held)]))
        copied = 0
        with self._queueing(target.device, staging):
            arrived = torch.empty(round_up(len(held), _ALIGN), dtype=torch.uint8, device=target.device)
            arrived[: len(held)].copy_(staging[: len(held)], non_blocking=True)
            for block in strided_blocks(len(held), start, found):
                shape = (block.runs, block.nbytes)
                source = arrived.as_strided(shape, (block.source_step, 1), block.source_start)
                into = target.as_strided(shape, (block.target_step, 1), target.storage_offset() + block.target_start)
                into.copy_(source, non_blocking=True)
                copied += block.runs * block.nbytes
        return copied

    def wait(self) -> None:
        """Return when every queued copy has arrived."""
        for stream in self._streams.values():
            stream.synchronize()

    # -- blocks of the host ------------------------------------------------------------------------------

    def _take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a block of at least so many bytes that no copy reads any more."""
        if nbytes > BLOCK_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)  # of foreign layouts; freed once it was copied
        with self._lock:
            if self._free:
                return self._free.pop()
            used = self._under_way.popleft() if self._under_way and self._made >= BLOCKS else None
            self._made += used is None
        if used is None:
            return host_buffer(BLOCK_BYTES, device, api=cuda)
        event, block = used
        event.synchronize()
        return block

    def _give_back(self, staging: torch.Tensor) -> None:
        if len(staging) == BLOCK_BYTES:
            with self._lock:
                self._free.append(staging)

    @contextlib.contextmanager
    def _queueing(self, device: torch.device, staging: torch.Tensor) -> Iterator[None]:
        """Make the device's stream the current one; behind the block `staging` is used again once the stream got there."""
        # the device first: a thread begins on device 0, and going back there would make a context on it
        with torch.no_grad(), cuda.device(device), cuda.stream(stream := self._streams[device]):
            yield
            event = cuda.Event(blocking=True)
            event.record(stream)
        if len(staging) == BLOCK_BYTES:
            with self._lock:
                self._under_way.append((event, staging))
        else:
            event.synchronize()


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
