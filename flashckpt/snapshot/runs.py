"""Items that are one run of host memory each: found again by address, copied and digested by one call of `flashckpt.native`."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from flashckpt import faults
from flashckpt.core.records import CHUNK_BYTES
from flashckpt.environment import env
from flashckpt.native import SharedCopy, copy_and_digest, is_native
from flashckpt.native.copying import choose_level
from flashckpt.native.descriptors import Figures, kind_of
from flashckpt.snapshot.copy import Buffer, Item, StalePlanError, stale_plan
from flashckpt.snapshot.following import Following

# -- A copy under way, which the training thread joins instead of waiting: on a full machine the copy thread has no
#    core


class Offer:
    """What the copy thread of one snapshot lets the training thread take part in.

    Attributes:
        joined_bytes: That the training thread copied.
        joined_cpu_s: That it took.
    """

    def __init__(self) -> None:
        self.joined_bytes, self.joined_cpu_s = 0, 0.0
        self._is_decided, self._copying = threading.Event(), threading.Lock()
        self._shared: SharedCopy | None = None

    @contextlib.contextmanager
    def open(self, shared: SharedCopy) -> Iterator[None]:
        """Let the other thread take rows within; at the end it has left, and what it took is copied."""
        self._shared = shared
        self._is_decided.set()
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Offer nothing more: the copy is done, or there is none to take part in. The other thread has left then."""
        with self._copying:
            self._shared = None
        self._is_decided.set()

    def join(self) -> None:
        """Wait until there is something to copy or nothing any more, and copy until all is taken."""
        self._is_decided.wait()
        with self._copying:
            if self._shared is not None:
                began = time.thread_time()
                self.joined_bytes += self._shared.join()
                self.joined_cpu_s += time.thread_time() - began


# -- Whether a core is free for the copy thread, by what the scheduler let it wait; where none is, copies are made
#    inside `step()`

_OWN = Path("/proc/thread-self/schedstat")


class CoreTime(NamedTuple):
    """What a thread has had so far, in ns.

    Attributes:
        ran: On a core.
        waited: Ready to run, without one.
    """

    ran: int
    waited: int

    @classmethod
    def now(cls) -> CoreTime | None:
        """Return that of the calling thread; None where the kernel does not count it."""
        try:
            waited = int(_OWN.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return cls(time.thread_time_ns(), waited)  # the file's own time on a core is that of the last tick


class Crowding:
    """Decides where the next snapshot is copied: beside training, or by the training thread where the machine is full.

    With as many computing threads as cores a copy beside them costs what a copy by the training thread costs, and more:
    the scheduler moves threads from core to core, and the slowest rank is the one that it moved last.

    Attributes:
        is_full: Whether the training thread is to copy.
    """

    LEAST_BYTES = 16 << 20
    """Smaller snapshots are over before it matters."""
    LEAST_ROW_BYTES = 16 << 10
    """On average: of smaller rows most of a copy is what each costs, and training does not wait for that."""
    IN_A_ROW = 3
    TRIED_AGAIN = 32
    """One in so many snapshots is copied beside training on a machine that was full, to find out whether it still is."""

    def __init__(self) -> None:
        self.is_full = False
        self._crowded = self._since = 0

    @classmethod
    def counts(cls, nbytes: int, rows: int = 0) -> bool:
        """Return whether a snapshot of so many bytes in so many rows is one that the training thread may copy."""
        return nbytes >= max(cls.LEAST_BYTES, rows * cls.LEAST_ROW_BYTES)

    def next_here(self, nbytes: int, rows: int = 0) -> bool:
        """Return whether the training thread copies the snapshot that is about to be copied."""
        if not self.is_full or not self.counts(nbytes, rows):
            return False
        self._since += 1
        return self._since % self.TRIED_AGAIN != 0

    def saw(self, before: CoreTime | None, after: CoreTime | None, nbytes: int) -> bool:
        """Take note of a copy by the copy thread; True if from now on the training thread copies."""
        if before is None or after is None or nbytes < self.LEAST_BYTES:
            return False
        ran, waited = after.ran - before.ran, after.waited - before.waited
        self._crowded = self._crowded + 1 if waited > ran // 2 else 0
        was_full = self.is_full
        self.is_full = self._crowded >= self.IN_A_ROW
        return self.is_full and not was_full


Ints = npt.NDArray[np.int64]
_SHAPE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")
_NBYTES = operator.attrgetter("nbytes")
_STORAGE, _ADDRESS = torch.Tensor.untyped_storage, torch.Tensor.data_ptr
_BASE, _ROOM = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
_AT_A_TIME = 1024  # looked up without releasing the GIL to training
_POINT = "slot.during-copy"
_DEALT_BYTES = 8 << 20
"""A longer item is dealt in parts of so many bytes to the threads that copy: what one waits for the other at the end."""
_HANDED_BYTES = 64 << 20
"""Of what has arrived from a device, for one thread at a time: few enough hand-overs, which take the GIL from training."""


class HeldMemory(NamedTuple):
    """Memory that nobody can free while this exists, except by resizing a storage.

    Attributes:
        addresses: int64[n] of each item's tensor.
        bases: int64[n] where the storage of each starts.
        storages: That hold them.
    """

    addresses: Ints
    bases: Ints
    storages: list[torch.UntypedStorage]


class HostRuns:
    """The rows of one native copy: made once per plan, moved to a slot's address per snapshot.

    Storages are held while they are read, and no longer: `p.data = ...` in another thread would free what is being read.

    Args:
        items: Each with `start` >= 0.

    Attributes:
        level: What copies; chosen once, as the environment is slow to ask.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items, self.level = items, choose_level(None)
        self._locals = [item.local for item in items]
        self._shapes, self._dtypes = [item.shape for item in items], [item.dtype for item in items]
        self._sizes = [item.local_bytes for item in items]
        self._parts = [slice(first, first + _AT_A_TIME) for first in range(0, len(items), _AT_A_TIME)]
        columns = [(item.start, item.offset, item.nbytes, item.first_chunk, item.local_bytes) for item in items]
        *parts, self._room = np.array(columns, np.int64).reshape(-1, 5).T.copy()
        self._item, (self._start, self._offset, self._nbytes, self._first) = _dealt(*parts)
        self._kinds = np.array([kind_of(dtype) for dtype in self._dtypes], np.uint8)[self._item]
        self._checked_addresses = np.zeros(0, np.int64)
        self._checked_slots: set[int] = set()

    def __len__(self) -> int:
        return len(self._items)

    def copy(self, buffer: Buffer) -> None:
        """Copy without digests, in the training thread: what else is wrong with a tensor is found by `check_forms`.

        Raises:
            StalePlanError: A tensor has another size, or is not contiguous any more, or lost its memory meanwhile.
            UnusableMemoryError: Its memory, or the slot's, cannot be used.
        """
        if not self._items:
            return
        for part in self._parts:
            if list(map(_NBYTES, self._locals[part])) != self._sizes[part]:
                self._refuse(part)
        held = self.hold()
        rows, check = self._rows(held, buffer), self._is_new(held, buffer)
        copy_and_digest(rows, digest=False, check=check, level=self.level)
        self.refuse_lost(held)
        self._note_checked(held, buffer)

    def copy_and_digest(
        self,
        buffer: Buffer,
        digests: npt.NDArray[np.uint64],
        offer: Offer | None = None,
        *,
        figures: Figures | None = None,
        following: Following | None = None,
    ) -> None:
        """Copy and digest in the copy thread, after `check_forms`; the GIL is free except while tensors are looked up.

        With `offer` another thread may take part, as soon as the tensors are looked up; not where it follows behind a persist.

        Raises:
            StalePlanError: A tensor is not contiguous any more, or lost its memory meanwhile.
            UnusableMemoryError: Its memory, or the slot's, cannot be used.
        """
        if not self._items and following is None:
            return
        held = self.hold()
        rows = self._rows(held, buffer)
        # asking for the map of memory is cheap in C alone
        check = self._is_new(held, buffer) or is_native()
        if following is not None:
            for part in following.parts(self._offset, self._nbytes):
                copy_and_digest(
                    rows[part],
                    digests=digests,
                    first_chunks=self._first[part],
                    check=check,
                    level=self.level,
                    kinds=self._kinds[part],
                    figures=figures,
                )
                faults.crash_point("follow.after-part")
        elif faults.is_armed(_POINT):
            _copy_by_chunk(rows, self._first, digests, self._kinds, figures)
        elif offer is None:
            copy_and_digest(
                rows,
                digests=digests,
                first_chunks=self._first,
                check=check,
                level=self.level,
                kinds=self._kinds,
                figures=figures,
            )
        else:
            shared = SharedCopy(rows, digests, self._first, level=self.level, kinds=self._kinds, figures=figures)
            with offer.open(shared):
                shared.run(check=check)
        self.refuse_lost(held)
        self._note_checked(held, buffer)

    def check_forms(self) -> None:
        """Check that every tensor is of the planned dtype and shape.

        `p.data = ...` changes neither the parameter's identity nor its version: the bytes fit, and mean something else.

        Raises:
            StalePlanError: One is not.
        """
        for part in self._parts:
            tensors = self._locals[part]
            if list(map(_DTYPE, tensors)) != self._dtypes[part] or list(map(_SHAPE, tensors)) != self._shapes[part]:
                self._refuse(part)

    def addresses_now(self) -> Ints | None:
        """Return where each tensor is, for a read by the thread that trains, at once; None where one has another form or no memory."""
        tensors = self._locals
        if list(map(_NBYTES, tensors)) != self._sizes or not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        addresses = np.array(list(map(_ADDRESS, tensors)), np.int64)
        return addresses if addresses.all() else None

    def hold(self) -> HeldMemory:
        """Return what keeps every storage alive, and where each tensor is in it.

        A storage is taken first and its bounds after, so that the address is in memory that is held, whatever other threads do.

        Raises:
            StalePlanError: A tensor is not contiguous any more, has no memory, reaches beyond its storage, or moves right now.
        """
        addresses, bases, rooms = np.zeros((3, len(self._items)), np.int64)
        storages: list[torch.UntypedStorage] = []
        for part in self._parts:
            tensors = self._locals[part]
            if not all(map(torch.Tensor.is_contiguous, tensors)):
                self._refuse(part)
            own = list(map(_STORAGE, tensors))
            addresses[part] = list(map(_ADDRESS, tensors))
            bases[part], rooms[part] = list(map(_BASE, own)), list(map(_ROOM, own))
            storages += own
        held = HeldMemory(addresses, bases, storages)
        outside = (addresses == 0) | (addresses < bases) | (addresses + self._room > bases + rooms)
        self._refuse_first(outside & (self._room > 0), held)
        return held

    def refuse_lost(self, held: HeldMemory) -> None:
        """Refuse what was copied of a storage that got other memory meanwhile: its bytes were anybody's."""
        for part in self._parts:
            self._refuse_first(held.bases[part] != list(map(_BASE, held.storages[part])), held, part.start)

    def _refuse_first(self, wrong: npt.NDArray[np.bool_], held: HeldMemory, first: int = 0) -> None:
        for number in np.flatnonzero(wrong)[:1].tolist():
            item, storage = self._items[first + number], held.storages[first + number]
            raise StalePlanError(
                f"the memory of {item.fqn!r} was replaced or resized while its snapshot was taken",
                found=f"a storage of {storage.nbytes()} bytes at {storage.data_ptr():#x}",
                expected=f"{item.local_bytes} bytes from {int(held.addresses[first + number]):#x} on, until they are copied",
                state="That snapshot was discarded; the next one is planned again.",
            )

    def _is_new(self, held: HeldMemory, buffer: Buffer) -> bool:
        """Whether memory is used that no earlier copy has checked: another slot, or tensors elsewhere."""
        was_checked = buffer.address in self._checked_slots and np.array_equal(held.addresses, self._checked_addresses)
        return not was_checked

    def _note_checked(self, held: HeldMemory, buffer: Buffer) -> None:
        if not np.array_equal(held.addresses, self._checked_addresses):
            self._checked_addresses, self._checked_slots = held.addresses, set()
        self._checked_slots.add(buffer.address)

    def _rows(self, held: HeldMemory, buffer: Buffer) -> Ints:
        return np.column_stack((held.addresses[self._item] + self._start, self._offset + buffer.address, self._nbytes))

    def _refuse(self, part: slice) -> None:
        for item in self._items[part]:
            local = item.local
            if (local.dtype, local.shape) != (item.dtype, item.shape) or not local.is_contiguous():
                raise stale_plan(item, local)


def _dealt(start: Ints, offset: Ints, nbytes: Ints, first: Ints) -> tuple[Ints, tuple[Ints, Ints, Ints, Ints]]:
    """Cut long items into parts; return each part's item, and start, offset, bytes and first digest of the parts."""
    parts = np.maximum(-(-nbytes // _DEALT_BYTES), 1)
    item = np.repeat(np.arange(len(nbytes)), parts)
    part = np.arange(len(item)) - np.repeat(np.cumsum(parts) - parts, parts)
    at = part * _DEALT_BYTES
    size = np.minimum(nbytes[item] - at, _DEALT_BYTES)
    return item, (start[item] + at, offset[item] + at, size, first[item] + at // CHUNK_BYTES)


def places_of(items: Sequence[Item]) -> Ints:
    """Return int64[n, 4]: offset in the slot, bytes, first digest of each item, and how its numbers are read."""
    columns = [(item.offset, item.nbytes, item.first_chunk, kind_of(item.dtype)) for item in items]
    return np.array(columns, np.int64).reshape(-1, 4)


def digest_in_slot(
    places: Ints, buffer: Buffer, digests: npt.NDArray[np.uint64], figures: Figures | None = None
) -> None:
    """Digest what lies in the slot already; `places` as of `places_of`."""
    if len(places):
        offset, nbytes, first, kinds = places.T
        rows = np.column_stack((offset + buffer.address, np.zeros_like(offset), nbytes))
        copy_and_digest(
            rows,
            digests=digests,
            first_chunks=np.ascontiguousarray(first),
            check=False,
            kinds=kinds.astype(np.uint8),
            figures=figures,
        )


def digest_arrivals(
    arrivals: Iterable[Sequence[Item]],
    buffer: Buffer,
    digests: npt.NDArray[np.uint64],
    figures: Figures | None = None,
    *,
    threads: int,
) -> float:
    """Digest batches as they arrive in the slot: a fast bus brings them several times as fast as one thread digests.

    Where this returns or raises, no thread reads the slot any more. Where no thread can be started (a limit, or the
    interpreter is ending, which may wait for this very snapshot) the calling one digests.

    Returns:
        Seconds that cores took for it, the calling thread's left out.
    """

    def digest(places: Ints) -> float:
        began = time.thread_time()
        digest_in_slot(places, buffer, digests, figures)
        return time.thread_time() - began

    parts: list[Future[float]] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="flashckpt-digest") as pool:
        for places in (places for items in arrivals for places in _handed(items)):
            try:
                parts.append(pool.submit(digest, places))
            except RuntimeError:
                digest(places)
    return sum(part.result() for part in parts)


def _handed(items: Sequence[Item]) -> Iterator[Ints]:
    """Cut what has arrived into what one thread digests at a time, long items too."""
    if sum(item.nbytes for item in items) <= _HANDED_BYTES:
        yield places_of(items)
        return
    places: list[tuple[int, int, int, int]] = []
    size = 0
    for item in items:
        kind = kind_of(item.dtype)
        for at in range(0, item.nbytes, _HANDED_BYTES):
            nbytes = min(item.nbytes - at, _HANDED_BYTES)
            places.append((item.offset + at, nbytes, item.first_chunk + at // CHUNK_BYTES, kind))
            size += nbytes
            if size >= _HANDED_BYTES:
                yield np.array(places, np.int64)
                places, size = [], 0
    if places:
        yield np.array(places, np.int64)


def digest_threads() -> int:
    """Return how many threads digest what has arrived: half of this rank's share of the cores, training has the others."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // env.LOCAL_WORLD_SIZE // 2))


def _copy_by_chunk(
    rows: Ints,
    first: Ints,
    digests: npt.NDArray[np.uint64],
    kinds: npt.NDArray[np.uint8],
    figures: Figures | None,
) -> None:
    """Copy with the crash point behind each chunk, as if many calls were one: only where that point is armed."""
    for row_number, ((source, target, nbytes), chunk) in enumerate(zip(rows.tolist(), first.tolist(), strict=True)):
        kind = kinds[row_number : row_number + 1]
        for number, at in enumerate(range(0, max(nbytes, 1), CHUNK_BYTES), chunk):
            row = np.array([(source + at, target + at, min(CHUNK_BYTES, nbytes - at))], np.int64)
            copy_and_digest(
                row, digests=digests, first_chunks=np.array([number], np.int64), kinds=kind, figures=figures
            )
            faults.crash_point(_POINT)
