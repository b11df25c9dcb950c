"""Copies from an accelerator: a side stream per device, batches with an event each, the fence as a stream wait.

The host is never blocked by a copy. `api` is `torch.cuda` or an object with the same Event, Stream,
stream and current_stream, so that the order of operations is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flashckpt.copying import Buffer, Item, source_of

BATCH_BYTES = 64 << 20
"""Bytes per event: the host hashes one batch while the next is on the wire."""


class CudaLanes:
    """The side streams of one rank.

    Args:
        api: `torch.cuda`, or a stand-in.
    """

    def __init__(self, api: Any = None) -> None:
        self._api = api if api is not None else torch.cuda
        self._streams: dict[torch.device, Any] = {}
        self._last: dict[torch.device, Any] = {}

    def mark(self, items: Sequence[Item]) -> dict[torch.device, Any]:
        """Record what is queued now on each device's current stream: copies start behind it."""
        marks = {}
        for device in {item.row.entry.local.device for item in items}:
            event = self._api.Event()
            event.record(self._api.current_stream(device))
            marks[device] = event
        return marks

    def enqueue(self, items: Sequence[Item], buffer: Buffer, marks: dict[torch.device, Any]) -> list[Any]:
        """Queue every copy on the side streams (copy thread); return batches of (event, items)."""
        batches = []
        for device, mark in marks.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = self._api.Stream(device)
            with self._api.stream(stream):
                stream.wait_event(mark)
                for batch in _batches([item for item in items if item.row.entry.local.device == device]):
                    for item in batch:
                        if item.nbytes:
                            buffer.tensor(item).copy_(source_of(item), non_blocking=True)
                    event = self._api.Event()
                    event.record(stream)
                    batches.append((event, batch))
                    self._last[device] = event
        return batches

    def fence(self) -> None:
        """Make what the training thread queues from now on wait for the copies; returns at once."""
        for device, event in self._last.items():
            self._api.current_stream(device).wait_event(event)

    def arrivals(self, batches: Sequence[Any]) -> Iterator[Sequence[Item]]:
        """Yield each batch when its bytes are in the slot (copy thread; the wait releases the GIL)."""
        for event, items in batches:
            event.synchronize()
            yield items


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in sorted(items, key=lambda i: i.offset):
        batch.append(item)
        size += item.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def register(address: int, nbytes: int) -> bool:
    """Page-lock host memory for direct transfers; False where there is no CUDA (copies then go through a bounce buffer)."""
    if not torch.cuda.is_available():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0  # type: ignore[no-untyped-call]  # as torch has it


def unregister(address: int) -> None:
    """Give page-locked memory back."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # as torch has it
