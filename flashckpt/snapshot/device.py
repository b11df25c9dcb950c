"""Copies from an accelerator: a side stream per device, batches with an event each, the fence as a stream wait.

Where the slot is page-locked, a copy blocks no thread of the host; else `staging` brings it there. Small tensors are gathered
into one buffer on the device and cross the bus as one copy: a separate copy costs each of them more than its bytes. `api` is
the module of the accelerator (`accelerator.runtime`), or an object with the same Event, Stream, stream and current_stream, so
that the order of operations is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from flashckpt import accelerator
from flashckpt.accelerator import host_buffer, runtime, waited_event
from flashckpt.core.shard import ALIGN_SMALL, SMALL_BYTES, round_up
from flashckpt.native import copy_and_digest
from flashckpt.snapshot import staging
from flashckpt.snapshot.copy import INTEGERS, Buffer, Item, is_plain, source_of
from flashckpt.snapshot.staging import Filling, HeldStorages, Ring, Source, sources_of

BATCH_BYTES = 256 << 20
"""Bytes per event: the host digests one batch while the next is on the wire. Each costs training a turn of the GIL."""


@dataclass(frozen=True, slots=True)
class StreamEvents:
    """What `mark` recorded: an event per device, clones of what is not fenced, and small ones of it gathered.

    Attributes:
        samples: Blocks as they were then, gathered; compared with the slot when all has arrived.
        error: Why this snapshot cannot be taken; raised by `enqueue` in the copy thread, so that training continues.
    """

    events: dict[torch.device, Any]
    clones: list[tuple[Item, torch.Tensor]]
    packs: list[SmallBatch]
    samples: list[SmallBatch]
    error: Exception | None = None


class SmallBatch:
    """Small tensors of one device: gathered there in a few kernels, copied to the host at once, distributed in the slot.

    Args:
        items: At most SMALL_BYTES each, not empty, all on one device.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.device = items[0].local.device
        *starts, self._total = accumulate((round_up(item.nbytes, ALIGN_SMALL) for item in items), initial=0)
        self._starts = starts
        self._on_device: torch.Tensor | None = None
        self._typed: list[torch.Tensor] = []
        self._integers: list[torch.Tensor] = []
        self._on_host: torch.Tensor | None = None

    def gather(self) -> None:
        """Queue the gathering on the current stream.

        The device's memory is made here, the first time: it belongs to the stream that writes it. Of another stream it may
        be what training has just freed and still reads, and both would be wrong.
        One kernel copies many tensors only if they are of one type, and only if all of them are plain: others stand apart.
        """
        if self._on_device is None:
            self._on_device = self._made()
        groups: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for number, item in enumerate(self.items):
            plain = is_plain(item) and item.local.stride() == self._typed[number].stride()
            part, source = (self._typed[number], item.local) if plain else (self._integers[number], source_of(item))
            parts, sources = groups.setdefault((part.dtype, plain), ([], []))
            parts.append(part)
            sources.append(source)
        with torch.no_grad():
            for parts, sources in groups.values():
                torch._foreach_copy_(parts, sources)

    def _made(self) -> torch.Tensor:
        memory = torch.empty(self._total, dtype=torch.uint8, device=self.device)
        flat = [memory[start : start + item.nbytes] for item, start in zip(self.items, self._starts, strict=True)]
        pairs = list(zip(flat, self.items, strict=True))
        self._typed = [  # a part of a tensor is never plain
            part.view(item.dtype).view(item.box.lengths) if item.shape == item.box.lengths else part
            for part, item in pairs
        ]
        self._integers = [part.view(INTEGERS[item.dtype.itemsize]).view(item.box.lengths) for part, item in pairs]
        return memory

    def fetch(self) -> None:
        """Queue the copy to the host on the current stream (copy thread).

        The page-locked buffer is made here and not with the pack: making it holds up the device, and `step()` with it.
        """
        assert self._on_device is not None, "gather() comes first"
        if self._on_host is None:
            self._on_host = host_buffer(self._total, self.device)
        self._on_host.copy_(self._on_device, non_blocking=True)

    def sources(self) -> Iterator[Source]:
        """Return what was gathered as pieces for staging, of whole tensors each (copy thread)."""
        assert self._on_device is not None, "gather() comes first"
        first = 0
        ends = [
            start + round_up(item.nbytes, ALIGN_SMALL) for item, start in zip(self.items, self._starts, strict=True)
        ]
        for number, end in enumerate(ends, 1):
            begin = self._starts[first]
            if number < len(ends) and ends[number] - begin <= staging.BLOCK_BYTES // 4:
                continue
            own = range(first, number)
            rows = [(self._starts[i] - begin, self.items[i].offset, self.items[i].nbytes) for i in own]
            yield self._on_device[begin:end], rows, self.items[first:number]
            first = number

    def differing(self, buffer: Buffer) -> list[str]:
        """Return the names of those whose bytes in the slot are not what was gathered; the copy must have arrived."""
        assert self._on_host is not None, "fetch() comes first"
        own, slot = self._on_host.numpy(), buffer.array
        pairs = zip(self.items, self._starts, strict=True)
        return [
            item.fqn
            for item, start in pairs
            if not np.array_equal(own[start : start + item.nbytes], slot[item.offset : item.offset + item.nbytes])
        ]

    def deal(self, buffer: Buffer) -> None:
        """Put every tensor into its place in the slot; the copy must have arrived."""
        assert self._on_host is not None, "fetch() comes first"
        address = self._on_host.data_ptr()
        rows = [
            (address + start, buffer.address + item.offset, item.nbytes)
            for item, start in zip(self.items, self._starts, strict=True)
        ]
        copy_and_digest(np.array(rows, np.int64).reshape(-1, 3), digest=False, check=False)


class SmallBatches:
    """The packs of a list of items: made when the list is another one, else used again."""

    def __init__(self) -> None:
        self._items: Sequence[Item] = ()
        self.large: list[Item] = []
        self.packs: list[SmallBatch] = []

    def of(self, items: Sequence[Item]) -> tuple[list[Item], list[SmallBatch]]:
        """Return (items that are copied one by one, packs of the others)."""
        if items is not self._items:
            small: dict[torch.device, list[Item]] = {}
            self.large = [item for item in items if item.nbytes > SMALL_BYTES]
            for item in items:
                if 0 < item.nbytes <= SMALL_BYTES:
                    small.setdefault(item.local.device, []).append(item)
            self._items, self.packs = items, [SmallBatch(some) for some in small.values()]
        return self.large, self.packs


class Devices:
    """The devices of a list of items: looked up when the list is another one, since it may have 20,000 items."""

    def __init__(self) -> None:
        self._items: Sequence[Item] = ()
        self._found: frozenset[torch.device] = frozenset()

    def of(self, items: Sequence[Item]) -> frozenset[torch.device]:
        """Return the devices of the items."""
        if items is not self._items:
            self._items, self._found = items, frozenset(item.local.device for item in items)
        return self._found


class DeviceCopier:
    """The side streams of one rank.

    Args:
        api: `runtime()`, or a stand-in.
    """

    def __init__(self, api: Any = None) -> None:
        self._api = api if api is not None else runtime()
        self._streams: dict[torch.device, Any] = {}
        self._last: dict[torch.device, Any] = {}
        self._fenced, self._unfenced, self._devices = SmallBatches(), SmallBatches(), Devices()
        self._ring, self._held = Ring(self._api), HeldStorages(())

    def mark(
        self,
        devices: Iterable[torch.device],
        unfenced: Sequence[Item],
        fresh: Sequence[tuple[Item, torch.Tensor]] = (),
        blocks: Sequence[Item] = (),
    ) -> StreamEvents:
        """Record what is queued now on each device's current stream: copies start behind it.

        Args:
            devices: Of the fenced tensors, which are read where they are.
            unfenced: Tensors that may change as soon as `step()` returns: cloned or gathered on the device first, in
                stream order. The snapshot before must be at its end: its gathered tensors are overwritten.
            fresh: The same, each with what its owner returned for this snapshot.
            blocks: Of fenced tensors: gathered, for the comparison in `changed`.
        """
        clones: list[tuple[Item, torch.Tensor]] = []
        packs: list[SmallBatch] = []
        samples: list[SmallBatch] = []
        error = None
        try:
            large, packs = self._unfenced.of(unfenced)
            clones += [(item, source_of(item).clone()) for item in large]
            clones += [(item, source_of(item, tensor).clone()) for item, tensor in fresh]
            samples = SmallBatches().of(blocks)[1]
            for pack in [*packs, *samples]:
                pack.gather()
        except Exception as found:  # noqa: BLE001 -- out of memory too ends this snapshot, not training
            error = found
            clones, packs, samples = [], [], []
        events = {}
        for device in {*devices, *self._devices.of(unfenced), *(clone.device for _, clone in clones)}:
            event = self._api.Event()
            event.record(self._api.current_stream(device))
            events[device] = event
        return StreamEvents(events=events, clones=clones, packs=packs, samples=samples, error=error)

    def enqueue(
        self,
        items: Sequence[Item],
        buffer: Buffer,
        marks: StreamEvents,
        *,
        arrived: Callable[[Sequence[Item]], None] = lambda _: None,
    ) -> list[Any]:
        """Queue every copy on the side streams (copy thread); return batches for `arrivals`.

        Where it raises, nothing is under way any more: the slot may be given to another snapshot, or unmapped.

        Args:
            items: Fenced tensors.
            buffer: Of the slot.
            marks: Of `mark`.
            arrived: Called with what lies in the slot already, where staging needs its blocks again meanwhile.
        """
        if marks.error is not None:
            raise marks.error
        large, packs = self._fenced.of(items)
        copies = [*marks.clones, *((item, None) for item in large)]
        self._held = HeldStorages(items)
        batches: list[Any] = []
        try:
            for device, mark in marks.events.items():
                # the device first: a thread begins on device 0, and going back there would make a context on it
                with self._api.device(device), self._api.stream(stream := self._stream(device)):
                    stream.wait_event(mark)
                    own = [copy for copy in copies if (copy[0].local if copy[1] is None else copy[1]).device == device]
                    here = [pack for pack in packs if pack.device == device]
                    for pack in here:
                        pack.gather()
                    here += [pack for pack in marks.packs if pack.device == device]
                    if accelerator.is_direct(buffer.address, device):
                        batches += self._queue(device, buffer, own, here)
                    else:
                        batches += self._stage(device, buffer, own, here, arrived)
                    for pack in marks.samples:
                        if pack.device == device:
                            pack.fetch()
                            batches.append((self._recorded(device), (), None))
        except BaseException:
            self.wait()
            raise
        return batches

    def _queue(
        self,
        device: torch.device,
        buffer: Buffer,
        copies: Sequence[tuple[Item, torch.Tensor | None]],
        packs: Sequence[SmallBatch],
    ) -> Iterator[tuple[Any, Sequence[Item], SmallBatch | Filling | None]]:
        """Queue the copies of one device into the slot itself; yield batches of (event, items, what deals them or None)."""
        for pack in packs:
            pack.fetch()
            yield self._recorded(device), pack.items, pack
        for batch in _batches(copies):
            _copy(batch, buffer)
            yield self._recorded(device), [item for item, _ in batch], None

    def _stage(
        self,
        device: torch.device,
        buffer: Buffer,
        copies: Sequence[tuple[Item, torch.Tensor | None]],
        packs: Sequence[SmallBatch],
        arrived: Callable[[Sequence[Item]], None],
    ) -> Iterator[tuple[Any, Sequence[Item], SmallBatch | Filling | None]]:
        """Do what `_queue` says by way of the ring."""

        def pieces() -> Iterator[Source]:
            for pack in packs:
                yield from pack.sources()
            for item, clone in copies:
                yield from sources_of(item, source_of(item) if clone is None else clone)

        def early(filling: Filling) -> None:
            self._deal(filling, buffer)
            arrived(filling.items)

        with torch.no_grad():
            for filling in self._ring.queue(device, pieces(), lambda: self._recorded(device), early):
                yield filling.event, filling.items, filling

    def _deal(self, filling: Filling, buffer: Buffer) -> None:
        filling.deal(buffer)
        self._ring.dealt(filling)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._api.Stream(device)
        return self._streams[device]

    def _recorded(self, device: torch.device) -> Any:
        event = self._last[device] = waited_event(self._api)
        event.record(self._stream(device))
        return event

    @staticmethod
    def changed(marks: StreamEvents | None, buffer: Buffer) -> list[str]:
        """Return the names of tensors of which a block was copied otherwise than it was at `mark`; all must have arrived."""
        return [name for pack in (marks.samples if marks is not None else ()) for name in pack.differing(buffer)]

    def fence(self) -> None:
        """Make what the training thread queues from now on wait for the copies; returns at once."""
        for device, event in self._last.items():
            self._api.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Return when every copy that was queued has ended: before a slot whose snapshot is discarded is used again."""
        for stream in self._streams.values():
            stream.synchronize()
        self._ring.reset()
        self._held = HeldStorages(())

    def arrivals(self, batches: Sequence[Any], buffer: Buffer) -> Iterator[Sequence[Item]]:
        """Yield each batch when its bytes are in the slot (copy thread; the wait releases the GIL).

        Raises:
            StalePlanError: A tensor lost its memory meanwhile.
        """
        for event, items, pack in batches:
            if isinstance(pack, Filling) and pack.is_dealt:
                continue
            event.synchronize()
            if isinstance(pack, Filling):
                self._deal(pack, buffer)
            elif pack is not None:
                pack.deal(buffer)
            yield items
        self._held.refuse_lost()
        self._held = HeldStorages(())


def _copy(copies: Sequence[tuple[Item, torch.Tensor | None]], buffer: Buffer) -> None:
    """Queue copies on the current stream: all that are plain in one call, which holds the GIL up for none of them."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for item, clone in copies:
        plain = clone is None and is_plain(item)
        targets.append(buffer.like_live(item) if plain else buffer.tensor(item))
        sources.append(item.local if plain else source_of(item) if clone is None else clone)
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)


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
