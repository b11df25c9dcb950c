"""Copies from an accelerator: a side stream per device, batches with an event each, the fence as a stream wait.

The host is never blocked by a copy. `api` is `torch.cuda` or an object with the same Event, Stream,
stream and current_stream, so that the order of operations is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashckpt.staging.copying import Buffer, Item, source_of

BATCH_BYTES = 64 << 20
"""Bytes per event: the host hashes one batch while the next is on the wire."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What `mark` recorded: an event per device, and clones of what is not fenced."""

    events: dict[torch.device, Any]
    clones: list[tuple[Item, torch.Tensor]]


class CudaLanes:
    """The side streams of one rank.

    Args:
        api: `torch.cuda`, or a stand-in.
    """

    def __init__(self, api: Any = None) -> None:
        self._api = api if api is not None else torch.cuda
        self._streams: dict[torch.device, Any] = {}
        self._last: dict[torch.device, Any] = {}

    def mark(self, items: Sequence[Item], unfenced: Sequence[Item]) -> Marks:
        """Record what is queued now on each device's current stream: copies start behind it.

        Args:
            items: Fenced tensors; read where they are.
            unfenced: Tensors that may change as soon as `step()` returns: cloned on the device first, in stream order.
        """
        clones = [(item, source_of(item).clone()) for item in unfenced if item.nbytes]
        events = {}
        for device in {item.local.device for item in [*items, *unfenced]}:
            event = self._api.Event()
            event.record(self._api.current_stream(device))
            events[device] = event
        return Marks(events=events, clones=clones)

    def enqueue(self, items: Sequence[Item], buffer: Buffer, marks: Marks) -> list[Any]:
        """Queue every copy on the side streams (copy thread); return batches of (event, items)."""
        copies = [*marks.clones, *((item, None) for item in items)]
        batches = []
        for device, mark in marks.events.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = self._api.Stream(device)
            with self._api.stream(stream):
                stream.wait_event(mark)
                for batch in _batches([copy for copy in copies if copy[0].local.device == device]):
                    for item, clone in batch:
                        if item.nbytes:
                            source = source_of(item) if clone is None else clone
                            buffer.tensor(item).copy_(source, non_blocking=True)
                    event = self._api.Event()
                    event.record(stream)
                    batches.append((event, [item for item, _ in batch]))
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


def _batches(copies: Sequence[tuple[Item, torch.Tensor | None]]) -> Iterator[list[tuple[Item, torch.Tensor | None]]]:
    batch: list[tuple[Item, torch.Tensor | None]] = []
    size = 0
    for item, clone in sorted(copies, key=lambda copy: copy[0].offset):
        batch.append((item, clone))
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
