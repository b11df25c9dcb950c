"""Rows of a restore that lie in device memory: verified bytes reach them through a few page-locked blocks of the host.

The host memory this takes does not grow with the state, and a block crosses the bus while others are being filled. One
stream per device takes all copies in the order they were queued, so that bytes which replace damaged ones come after them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from flashckpt.accelerator import host_buffer, runtime, waited_event
from flashckpt.core.shard import round_up
from flashckpt.planning.pieces import Runs
from flashckpt.restore.destinations import Bytes, Ints, copy_bytes, strided_blocks
from flashckpt.shm.segment_file import address_of

BLOCK_BYTES = 8 << 20
"""Of one block: what one thread fetches at a time."""
BLOCKS = 16
"""Blocks of one restore; more only where more threads fill one each at the same moment."""
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
        self._free: list[torch.Tensor] = []
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._made = 0
        self._lock = threading.Lock()
        self._streams: dict[torch.device, Any] = {}
        for device in {row.device for row in rows.values()}:
            queued = self._api.Event()
            queued.record(self._api.current_stream(device))
            self._streams[device] = self._api.Stream(device)
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
            return host_buffer(BLOCK_BYTES, device, api=self._api)
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
        with torch.no_grad(), self._api.device(device), self._api.stream(stream := self._streams[device]):
            yield
            event = waited_event(self._api)
            event.record(stream)
        if len(staging) == BLOCK_BYTES:
            with self._lock:
                self._under_way.append((event, staging))
        else:
            event.synchronize()
