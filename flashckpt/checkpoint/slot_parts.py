"""The bytes of a pinned slot on their way into packs: verified, then handed out where they lie.

The persister serves every rank of the node, so that it must outlive another process that truncates a segment's
file: a mapping whose loss is an error of this snapshot alone, or, where there is none, copies by system calls.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from flashckpt.core.manifest import Manifest
from flashckpt.core.records import CHUNK_BYTES
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


class _Chunks(NamedTuple):
    """Chunks with a digest: where each begins and ends in the slot, what it is, and of which row."""

    starts: np.ndarray
    stops: np.ndarray
    expected: np.ndarray
    rows: np.ndarray

    def between(self, first: int, last: int) -> _Chunks:
        """Return those of these numbers, without the last."""
        return _Chunks(*(array[first:last] for array in self))


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
        chunks, done = self._chunks(), 0
        for begin, end in self.ranges:
            stop = int(np.searchsorted(chunks.starts, end))
            checks = chunks.between(done, stop)
            low, high = min([begin, *checks.starts[:1].tolist()]), max([end, *checks.stops[-1:].tolist()])
            view = read(self.slot, self.buffers, low, high)
            self._verify(view, low, checks)
            part, done = view[begin - low : end - low], stop
            del view
            yield part
            del part  # before the next one is read: its buffer may be free by then
            crash_point("persist.during-pack")

    def _chunks(self) -> _Chunks:
        """Return all chunks, by place in the slot."""
        table, rows = self.manifest.table, np.array(self.pack.rows, np.int64)
        begin, nbytes = table.byte_offset[rows], table.nbytes[rows]
        counts = -(-nbytes // CHUNK_BYTES)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(begin, counts) + number * CHUNK_BYTES
        stops = np.minimum(starts + CHUNK_BYTES, np.repeat(begin + nbytes, counts))
        expected = self.manifest.digests[np.repeat(table.first_chunk[rows], counts) + number]
        return _Chunks(starts, stops, expected, np.repeat(rows, counts))

    def _verify(self, view: memoryview, low: int, chunks: _Chunks) -> None:
        found = digest_ranges(view, chunks.starts - low, chunks.stops - chunks.starts)
        if wrong := np.flatnonzero(found != chunks.expected).tolist():
            self.slot.check_whole()  # has more to say
            at = (int(array[wrong[0]]) for array in (chunks.starts, chunks.stops, chunks.expected, chunks.rows))
            raise self._damaged(int(found[wrong[0]]), *at)

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
