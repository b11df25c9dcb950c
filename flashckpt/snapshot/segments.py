"""This rank's share of the memory tier: its segment, reserved in the background, and the choice of slots."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt import accelerator
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.environment import env
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, FormatVersionError, SharedMemoryError
from flashckpt.report import guarded
from flashckpt.shm import block
from flashckpt.shm.acks import AckedSnapshots, GiveBackRate, choose_slot
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment, SegmentSpec, SlotPinned, SlotWriter
from flashckpt.state.state_layout import MemoryNeed

# -- One segment on its way into use: made or adopted, its pages reserved by a thread beside training, given back
#    in the end


class Reservation:
    """A segment, and what of it may be written already.

    Args:
        pin_for: Index of the device to page-lock the slots for, or None.

    Attributes:
        segment: None while it is still to be made, and after the end.
        stop: Set to end the thread early.
        ready, first: Set once all of it, or one slot, is reserved and page-locked; both where that failed.
        error: What the thread raised.
        seconds: How long the reservation took.
    """

    def __init__(self, *, pin_for: int | None) -> None:
        self.segment: Segment | None = None
        self.stop, self.ready, self.first = threading.Event(), threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.seconds = 0.0
        self._pin_for = pin_for
        self._page_locked: list[tuple[int, int]] = []  # address, index of the device
        self._usable: set[int] = set()
        self._thread: threading.Thread | None = None

    def start(self, obtain: Callable[[], Segment | None]) -> None:
        """Begin the thread.

        Args:
            obtain: Called there first; returns the segment, or None where it was stopped.
        """
        self._thread = threading.Thread(target=self._work, args=(obtain,), name="flashckpt-reserve", daemon=True)
        self._thread.start()

    def _work(self, obtain: Callable[[], Segment | None]) -> None:
        started = time.perf_counter()
        try:
            segment = obtain()
            if segment is not None:
                self.segment = segment
                self._reserve(segment)
        except Exception as error:  # noqa: BLE001 -- raised to the training thread at the next step()
            self.error = error
        self.seconds = time.perf_counter() - started
        self.ready.set()
        self.first.set()

    def _reserve(self, segment: Segment) -> None:
        view: Any = np.frombuffer(segment.buffer, np.uint8)
        address, spec = int(view.ctypes.data), segment.spec
        if self._pin_for is not None and not locks_slots(spec.slots * spec.data_capacity):
            self._pin_for = None

        def note(nbytes: int) -> None:
            """Page-lock each slot as soon as it is reserved: the first snapshot waits for no other slot."""
            for slot in sorted({*range(spec.slots)} - self._usable):
                if spec.data_at(slot) + spec.data_capacity <= nbytes and not self.stop.is_set():
                    self._page_lock(address + spec.data_at(slot), spec.data_capacity)
                    self._usable.add(slot)
                    self.first.set()

        segment.reserve(self.stop, progress=note)

    def _page_lock(self, address: int, nbytes: int) -> None:
        if self._pin_for is None:
            return
        if accelerator.register(address, nbytes, index=self._pin_for):
            self._page_locked.append((address, self._pin_for))
        else:
            _log.warning(
                "the snapshots' memory could not be page-locked: copies from the device go through staging buffers"
            )
            self._pin_for = None  # the limit that refused this slot refuses the others

    def unreserved(self) -> set[int]:
        """Return the slots whose memory is not whole, or not page-locked, yet."""
        if self.segment is None or self.ready.is_set():
            return set()
        return {*range(self.segment.spec.slots)} - self._usable

    @property
    def is_ready(self) -> bool:
        """Whether all of it is reserved; raises what the thread raised."""
        if self.error is not None:
            raise self.error
        return self.ready.is_set()

    def end(self, *, unlink_unused: bool = False) -> None:
        """Stop reserving, wait for the thread and give the segment up.

        Args:
            unlink_unused: Remove its file if it never held a snapshot; otherwise file and snapshots stay.
        """
        self.stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._page_locked:
            address, index = self._page_locked.pop()
            accelerator.unregister(address, index=index)
        segment, self.segment = self.segment, None
        if segment is not None:
            if unlink_unused and not any(header.is_complete for header in segment.headers()):
                segment.unlink()
            segment.close()


_log = guarded(logging.getLogger("flashckpt"))
SMALL_SLOT_BYTES = 16 << 20
"""Up to here the first slot is made at once, in about 10 ms; larger ones in the background, beside training."""
_CORES_OF_A_RESTORE = 2
"""Of each rank: with no more, zeroing new slots would take its restore half of the cores and of the memory bus."""
_LET_GO_S = 2.0
"""How long a killed process may take to give its locks back."""


def locks_slots(nbytes: int) -> bool:
    """Whether a rank page-locks its slots: where the device can use them so, and they are no large part of the machine's memory."""
    most = env.FLASHCKPT_LOCKED_MB
    if most is not None:
        return accelerator.registers() and nbytes <= most * 1_000_000
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return accelerator.registers() and nbytes <= memory // 4 // env.LOCAL_WORLD_SIZE


class RankSegments:
    """The segments of one rank: one it writes, and older ones that the daemon retires.

    Args:
        directory: Of the job on this node.
        root_digest: Ties segments to the root.
        rank: Global rank.
        pin_for: Index of the device to page-lock the slots for, or None.
    """

    def __init__(self, directory: JobDirectory, *, root_digest: int, rank: int, pin_for: int | None = None) -> None:
        self._directory, self._root_digest, self._rank, self.pin_for = directory, root_digest, rank, pin_for
        self._reservation = Reservation(pin_for=pin_for)
        self._coming: MemoryNeed | None = None
        self._give_back = GiveBackRate()
        self._waits = self._is_new = False  # for `use`, `use_new`
        self._replace_again: Callable[[], None] | None = None

    @property
    def segment(self) -> Segment | None:
        """The segment that is written; None while another is being made, and before and after."""
        return self._reservation.segment

    def refuse_other_run(self) -> None:
        """Refuse to begin while a process of another run of this job holds memory on this node, whatever its layout.

        To be called before any rank of this run holds any. A rank of the previous generation that was just killed may
        need a moment to let go.

        Raises:
            JobInUseError: Names the process; nothing was changed.
        """
        end = time.monotonic() + _LET_GO_S
        for path in self._directory.segments():
            try:
                segment = Segment.attach(path)
            except (FileNotFoundError, DamagedError, FormatVersionError):
                continue
            with contextlib.closing(segment):
                while segment.is_owned and time.monotonic() < end:
                    time.sleep(0.01)
                segment.refuse_if_owned()

    def own_existing(self, need: MemoryNeed) -> Segment | None:
        """Return this rank's segment of an earlier generation if it has space for `need`, now owned; None if there is none.

        Raises:
            JobInUseError: A live process holds it.
            ConfigError: It belongs to another root under the same job id.
        """
        for path in filter(Path.exists, self._paths(need.layout)):
            try:
                segment = Segment.attach(path, writable=True)
            except (FileNotFoundError, DamagedError, FormatVersionError) as error:
                _log.warning("%s is not used: %s", path, error)
                continue
            if segment.spec.root_digest != self._root_digest:
                segment.close()
                raise _other_root(path)
            try:
                if self._has_room(segment.spec, need):
                    segment.own()
                    return segment
            except BaseException:
                segment.close()
                raise
            segment.close()
        return None

    def _paths(self, layout: int) -> list[Path]:
        """Return where segments of a layout may lie: the second and later names serve when one has no room or is damaged."""
        return [self._directory.segment_path(self._rank, (layout + i) % (1 << 64)) for i in range(8)]

    @staticmethod
    def _has_room(spec: SegmentSpec, need: MemoryNeed) -> bool:
        """Whether a snapshot fits; half of the manifest's need is headroom for values that grow."""
        return spec.data_capacity >= need.data_bytes and spec.manifest_capacity >= need.manifest_bytes // 2

    def open(self, need: MemoryNeed, *, slots: int | None, job: str, is_opening: bool = False) -> None:
        """Adopt or create the segment and reserve it in the background.

        Args:
            need: Of one slot.
            slots: Number of slots; None for 3, falling back to 2 where 3 do not fit.
            job: Job id.
            is_opening: The restore and the first step come first, and want the cores: large slots of an adopted segment, whose
                memory is there already, are mapped from `use()` on, and where cores are few, new ones made from `use_new()` on.

        Raises:
            SharedMemoryError: There is too little room for 2 slots.
            JobInUseError: A live process holds this rank's segment.
        """
        self.release()
        adopted = self.own_existing(need)
        segment = adopted if adopted is not None else self._create(need, slots, job)
        self._reservation = Reservation(pin_for=self.pin_for)
        self._reservation.segment = segment
        self._is_new = adopted is None
        is_crowded = len(os.sched_getaffinity(0)) <= _CORES_OF_A_RESTORE * env.LOCAL_WORLD_SIZE
        self._waits = is_opening and need.slot_bytes > SMALL_SLOT_BYTES and (is_crowded or not self._is_new)
        if not self._waits:
            self._reservation.start(lambda: segment)
        self._coming = need
        self._replace_again = partial(self.replace, need, slots=slots, job=job)
        self.wait_if_small()

    def use_new(self) -> None:
        """Begin to make a new segment, where `open` left that for now: the restore has its bytes."""
        if self._is_new:
            self.use()

    def use(self) -> None:
        """Begin to map an adopted segment, or to make a new one, where `open` left that for now."""
        if self._waits:
            segment, self._waits = self._reservation.segment, False
            self._reservation.start(lambda: segment)

    def wait_if_small(self) -> None:
        """Wait for the first slot where that takes some 10 ms. Not for the training loop: while the job begins. Raises as `open`."""
        if self._coming is not None and self._coming.slot_bytes <= SMALL_SLOT_BYTES:
            self.wait_first()

    def replace(self, need: MemoryNeed, *, slots: int | None, job: str) -> None:
        """Move to another segment: from now on there is no slot until a thread has made one. Costs the caller no waiting.

        The segment before is given up there, and removed if it never held a snapshot. What `open` raises is raised by
        the next question for a slot. Not while a snapshot is being written.
        """
        before, coming = self._reservation, Reservation(pin_for=self.pin_for)
        before.stop.set()
        self._reservation, self._coming = coming, need
        self._replace_again = partial(self.replace, need, slots=slots, job=job)

        def obtain() -> Segment | None:
            before.end(unlink_unused=True)
            return None if coming.stop.is_set() else self._obtain(need, slots, job)

        coming.start(obtain)

    def _obtain(self, need: MemoryNeed, slots: int | None, job: str) -> Segment:
        segment = self.own_existing(need)
        return segment if segment is not None else self._create(need, slots, job)

    def _create(self, need: MemoryNeed, slots: int | None, job: str) -> Segment:
        path = next(p for p in self._paths(need.layout) if not os.path.lexists(p))
        for count in [slots] if slots else [3, 2]:
            spec = SegmentSpec(
                job=job,
                root_digest=self._root_digest,
                rank=self._rank,
                slots=count,
                manifest_capacity=need.manifest_bytes,
                data_capacity=need.data_bytes,
                layout_hash=need.layout,
            )
            try:
                return Segment.create(path, spec)
            except SharedMemoryError as error:
                if slots or count == 2:
                    raise
                _log.warning("too little room for 3 slots, taking 2: %s", error.found)
        raise AssertionError

    @property
    def is_ready(self) -> bool:
        """Whether the memory is reserved; raises what the reservation raised."""
        return self._reservation.is_ready

    def wait_first(self, timeout_s: float | None = None) -> bool:
        """Wait until a snapshot can be taken: one slot is reserved; False if none is in time. Raises as `is_ready`."""
        self._reservation.first.wait(timeout_s)
        return self.has_slot

    @property
    def has_slot(self) -> bool:
        """Whether the memory of some slot is made, so that a snapshot can be taken; does not wait. Raises as `is_ready`."""
        return self.is_ready or self._reservation.first.is_set()

    def fits(self, need: MemoryNeed) -> bool:
        """Whether a snapshot of another structure has room in the open segment, or in the one that is being made."""
        segment, coming = self.segment, self._coming
        if segment is not None:
            return self._has_room(segment.spec, need)
        return coming is not None and (
            coming.data_bytes >= need.data_bytes and coming.manifest_bytes >= need.manifest_bytes // 2
        )

    def begin(
        self,
        request: SnapshotRequest,
        *,
        known: AckedSnapshots,
        superseded: SnapshotId | None,
        follows: Callable[[int, int], bool] = lambda _start, _stop: False,
        window_s: float = 0.0,
    ) -> SlotWriter | None:
        """Return a writer on the slot that may be overwritten, or None if there is none (invariant M1, pins).

        A slot that is still being persisted is one where `follows` says so of the bytes that are kept, and these will be
        given back within `window_s`, until the fence.

        There is none either where the file was cut short: what is written to it could never be read. Another one is made then.
        """
        segment = self._reservation.segment
        assert segment is not None, "ask has_slot first"
        if segment.is_cut_short:
            assert self._replace_again is not None, "there is a segment"
            _log.error(
                "%s was truncated by another process: its snapshots are lost; a new segment is being allocated in the background",
                segment.path,
            )
            self._replace_again()
            return None
        busy, headers = segment.writing | self._reservation.unreserved(), segment.headers()
        now_s, is_in_part = time.monotonic(), False

        def reaches(start: int, stop: int) -> bool:
            nonlocal is_in_part
            is_in_part = True
            size = segment.spec.data_capacity
            return self._give_back.reaches(stop - start, size, now_s=now_s, window_s=window_s) and follows(start, stop)

        writer = None
        while writer is None:
            slot = choose_slot(
                headers,
                pinned=busy,
                common=known.common,
                unrecoverable=known.unrecoverable,
                superseded=superseded,
            )
            if slot is None:
                break
            try:
                writer = segment.begin(slot, request, follows=reaches)
            except SlotPinned:  # a reader holds it: only of the slot that is chosen does it matter, and is it asked
                busy.add(slot)
        if not is_in_part:
            self._give_back.whole(now_s)
        return writer

    def complete(self) -> list[SnapshotId]:
        """Return the identities of this rank's COMPLETE slots, in all its segments on this node."""
        segment = self._reservation.segment
        found = {h.identity for h in segment.headers() if h.is_complete} if segment is not None else set()
        for path in self._directory.segments():
            if segment is not None and path == segment.path:
                continue
            if path.name.startswith(f"r{self._rank:05d}-"):
                with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as other:
                    found |= {h.identity for h in other.headers() if h.is_complete}
        return sorted(found, reverse=True)

    def release(self) -> None:
        """Stop reserving and give the segment up; its file and its snapshots stay."""
        self._reservation.end()


def _other_root(path: Path) -> ConfigError:
    return ConfigError(
        "this job id is in use with another root",
        found=str(path),
        expected="one root per job id",
        state="The snapshots of the other run were left as they are.",
        remedy="give this run another id (job='...' or FLASHCKPT_JOB_ID), or remove the old one: flashckpt gc",
    )


def free_bytes(directory: JobDirectory) -> int:
    """Return the bytes that may still be reserved on this node."""
    return block.capacities(directory.path)[0].nbytes
