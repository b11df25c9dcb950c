"""The bytes of a pinned slot on their way into packs: verified, then handed out where they lie.

The persister serves every rank of the node, so that it must outlive another process that truncates a segment's file: a
mapping whose loss is an error of this snapshot alone, or, where there is none, copies by system calls.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flashckpt.core.digest import CHUNK_BYTES
from flashckpt.core.manifest import Manifest
from flashckpt.errors import DamagedError
from flashckpt.faults import crash_point
from flashckpt.native import digest_ranges
from flashckpt.planning.packs import Pack
from flashckpt.storage.store import PART_BYTES

COPIED_PART_BYTES = 4 << 20
"""Bytes of a part that is copied: a consumer holds several, and all writers of a node have their own."""
_PAGE = 4096
_STEP = 2 << 20  # parts differ by the chunks that reach over their ends, and shall fit into each other's buffers


class PinnedSlot(Protocol):
    """The part of `flashckpt.shm.segment.Pin` that is used."""

    @property
    def nbytes(self) -> int:
        """Used bytes of the slot's data area."""

    def view(self) -> memoryview | None:
        """Bytes of the data area, whose loss does not end this process; None where only `read_into` is as safe."""

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of the data area; DamagedError where the file ends before."""

    def check_whole(self) -> None:
        """Raise DamagedError where a byte that `view` gave may not have been the slot's."""

    def manifest(self) -> Manifest:
        """Return the slot's verified manifest."""

    def is_current(self) -> bool:
        """Whether the slot still holds what was pinned."""


class Buffers:
    """Page-aligned buffers that are reused once no view of them is left: new pages cost as much as the copy."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Return a writable view of at least `nbytes` bytes."""
        with self._lock:
            fitting = next((one for one in self._free if len(one) >= nbytes), None)
            if fitting is not None:
                self._free.remove(fitting)
        memory = fitting if fitting is not None else mmap.mmap(-1, -(-nbytes // _STEP) * _STEP)
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.append, memory)  # append: atomic, may run in any thread and within `take`
        return array.data


@dataclass(frozen=True, slots=True)
class SlotParts:
    """The bytes of one pack in `ranges` of the slot, each chunk verified before it is handed out; starts over on each `iter()`.

    Parts lie in the slot (`PinnedSlot.check_whole` when all are used), or in buffers that are reused once nobody holds a
    view of them.
    """

    slot: PinnedSlot
    manifest: Manifest
    pack: Pack
    ranges: tuple[tuple[int, int], ...]
    buffers: Buffers = field(default_factory=Buffers)

    def __iter__(self) -> Iterator[memoryview]:
        chunks = self._chunks()
        due = next(chunks, None)
        for begin, end in self.ranges:
            checks = []
            while due is not None and due[0] < end:
                checks.append(due)
                due = next(chunks, None)
            low = min([begin, *(check[0] for check in checks)])
            view = read(self.slot, self.buffers, low, max([end, *(check[1] for check in checks)]))
            self._verify(view, low, checks)
            part = view[begin - low : end - low]
            del view
            yield part
            del part  # before the next one is read: its buffer may be free by then
            crash_point("persist.during-pack")

    def _chunks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, stop, digest, row) of every chunk, by place in the slot."""
        table = self.manifest.table
        for row in self.pack.rows:
            start, nbytes, first = int(table.byte_offset[row]), int(table.nbytes[row]), int(table.first_chunk[row])
            for number, at in enumerate(range(0, nbytes, CHUNK_BYTES)):
                expected = int(self.manifest.digests[first + number])
                yield start + at, start + min(at + CHUNK_BYTES, nbytes), expected, row

    def _verify(self, view: memoryview, low: int, checks: Sequence[tuple[int, int, int, int]]) -> None:
        starts, sizes = [start - low for start, *_ in checks], [stop - start for start, stop, *_ in checks]
        digests = digest_ranges(view, starts, sizes).tolist()
        for found, (start, stop, expected, row) in zip(digests, checks, strict=True):
            if found != expected:
                self.slot.check_whole()  # has more to say
                raise self._damaged(found, start, stop, expected, row)

    def _damaged(self, found: int, start: int, stop: int, expected: int, row: int) -> DamagedError:
        begin = start - int(self.manifest.table.byte_offset[row])
        return DamagedError(
            f"{self.manifest.table.fqn(row)!r} is damaged in the snapshot of step {self.manifest.step}"
            f" (rank {self.manifest.rank}, memory)",
            found=f"digest {found:016x} of its bytes {begin} to {begin + stop - start}",
            expected=f"digest {expected:016x}",
            state="Nothing of this step was committed; earlier checkpoints are as they were.",
            remedy="check the machine's memory; the next snapshot is persisted as usual",
        )


def read(slot: PinnedSlot, buffers: Buffers, start: int, stop: int) -> memoryview:
    """Return bytes of a slot's data area, in place or copied into a buffer, at the same place of a page as in the slot."""
    if (whole := slot.view()) is not None:
        return whole[start:stop]
    lead = start % _PAGE  # what can be written past the page cache stays so
    view = buffers.take(lead + stop - start)[lead : lead + stop - start]
    slot.read_into(start, view)
    return view


def parts_of(pack: Pack, slot: PinnedSlot) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of the pack's bytes in the slot: at most PART_BYTES each, or COPIED_PART_BYTES."""
    most = COPIED_PART_BYTES if slot.view() is None else PART_BYTES
    return tuple((begin, min(begin + most, stop)) for start, stop in pack.runs for begin in range(start, stop, most))
