"""Rows of a restore that lie in device memory: verified bytes reach them through a few page-locked blocks of the host.

The host memory this takes does not grow with the state, and a block crosses the bus while others are being filled. One
stream per device takes all copies in the order they were queued, so that bytes which replace damaged ones come after them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from flashckpt.accelerator import host_buffer, runtime, waited_event
from flashckpt.core.shard import round_up
from flashckpt.planning.pieces import JOB_BYTES, WIDE_JOB_BYTES, Runs
from flashckpt.restore.destinations import Bytes, Ints, copy_bytes, strided_blocks
from flashckpt.shm.segment_file import address_of

BLOCK_BYTES = WIDE_JOB_BYTES
"""Of one block: what one thread fetches at a time from memory; a job from storage needs JOB_BYTES, and is given no more."""
BLOCKS = 12
"""Blocks of each size; more only where more threads fill one each at the same moment."""
_ALONE_BYTES = 1 << 20
"""On average, from which on runs of one block are copied one by one."""
_ALIGN = 16
"""Runs that share a block begin at multiples of this: a kernel then copies them by whole words."""

cuda: Any = None
"""A stand-in for `runtime()`, so that the order of operations is tested without a GPU."""


class DeviceRows:
    """Writes into rows of device memory, from any thread.

    Attributes:
        rows: uint8[nbytes] on a device by row: the memory of each.
    """

    def __init__(self, rows: Mapping[int, torch.Tensor]) -> None:
        self.rows = rows
        self._api = cuda if cuda is not None else runtime()
        # by their size
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._under_way: defaultdict[int, deque[tuple[Any, torch.Tensor]]] = defaultdict(deque)
        self._made: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._streams: dict[torch.device, Any] = {}
        for device in {row.device for row in rows.values()}:
            queued = self._api.Event()
            queued.record(self._api.current_stream(device))
            self._streams[device] = self._api.Stream(device)
            self._streams[device].wait_event(queued)  # new memory may still be read by what used it before

    def shares(self, rows: Ints, sizes: Ints) -> Iterator[Ints]:
        """Yield which runs go together, as indices: of one device, as many as a block holds."""
        devices = [self.rows[row].device for row in rows.tolist()]
        for device in dict.fromkeys(devices):
            own = np.flatnonzero(np.array([one == device for one in devices]))
            while len(own):
                ends = np.cumsum(-(-sizes[own] // _ALIGN) * _ALIGN)
                count = max(1, int(np.searchsorted(ends, BLOCK_BYTES, side="right")))
                now, own = own[:count], own[count:]
                yield now

    @contextlib.contextmanager
    def filling(self, rows: Ints, at: Ints, sizes: Ints) -> Iterator[Ints]:
        """Give host memory to fill; behind the block its copies to the rows are queued.

        Where the block raises, the rows stay as they are.

        Args:
            rows: int64[n], of one device: a share.
            at: int64[n], byte in the row.
            sizes: int64[n], bytes, 1 or more.

        Yields:
            int64[n], the host address of each run.
        """
        ends = np.cumsum(-(-sizes // _ALIGN) * _ALIGN)
        starts, device = np.concatenate([[0], ends[:-1]]), self.rows[int(rows[0])].device
        staging = self._take(int(ends[-1]), device)
        try:
            yield staging.data_ptr() + starts
        except BaseException:
            self._give_back(staging)
            raise
        with self._queueing(device, staging):
            self._queue(_joined(rows, at, starts, sizes), staging)

    def _queue(self, runs: list[tuple[int, int, int, int]], staging: torch.Tensor) -> None:
        """Queue the copies of runs (row, byte in it, start in the block, bytes): small ones cross the bus together."""
        total = runs[-1][2] + runs[-1][3]
        if total < len(runs) * _ALONE_BYTES and len(runs) > 1:
            arrived = torch.empty(round_up(total, _ALIGN), dtype=torch.uint8, device=self.rows[runs[0][0]].device)
            arrived[:total].copy_(staging[:total], non_blocking=True)
            pairs = [(self.rows[row][to : to + n], arrived[start : start + n]) for row, to, start, n in runs]
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
            return
        for row, to, start, n in runs:
            self.rows[row][to : to + n].copy_(staging[start : start + n], non_blocking=True)

    def write(self, rows: Ints, at: Ints, sources: Ints, sizes: Ints) -> None:
        """Copy runs of host memory into rows; those of one device cross the bus together.

        Args:
            rows: int64[n].
            at: int64[n], byte in the row.
            sources: int64[n], host addresses; they are read before this returns.
            sizes: int64[n], bytes, 1 or more.
        """
        for own in self.shares(rows, sizes):
            with self.filling(rows[own], at[own], sizes[own]) as addresses:
                copy_bytes(addresses, sources[own], sizes[own])

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
        size = min(JOB_BYTES, BLOCK_BYTES) if nbytes <= JOB_BYTES else BLOCK_BYTES
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            is_made = self._made[size] >= BLOCKS and self._under_way[size]
            used = self._under_way[size].popleft() if is_made else None
            self._made[size] += used is None
        if used is None:
            return host_buffer(size, device, api=self._api)
        event, block = used
        event.synchronize()
        return block

    def _give_back(self, staging: torch.Tensor) -> None:
        if len(staging) <= BLOCK_BYTES:
            with self._lock:
                self._free[len(staging)].append(staging)

    @contextlib.contextmanager
    def _queueing(self, device: torch.device, staging: torch.Tensor) -> Iterator[None]:
        """Make the device's stream the current one; behind the block `staging` is used again once the stream got there."""
        # the device first: a thread begins on device 0, and going back there would make a context on it
        with torch.no_grad(), self._api.device(device), self._api.stream(stream := self._streams[device]):
            yield
            event = waited_event(self._api)
            event.record(stream)
        if len(staging) <= BLOCK_BYTES:
            with self._lock:
                self._under_way[len(staging)].append((event, staging))
        else:
            event.synchronize()


def _joined(rows: Ints, at: Ints, starts: Ints, sizes: Ints) -> list[tuple[int, int, int, int]]:
    """Return runs as (row, byte in it, start in the block, bytes); those that continue the one before are one."""
    continues = (np.diff(rows) == 0) & (at[1:] == at[:-1] + sizes[:-1]) & (starts[1:] == starts[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    nbytes = np.add.reduceat(sizes, first)
    return list(zip(rows[first].tolist(), at[first].tolist(), starts[first].tolist(), nbytes.tolist(), strict=True))
