"""This rank's share of the memory tier: its segment, reserved in the background, and the choice of slots."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flashckpt.core.layout import Shard, layout_hash, place
from flashckpt.core.manifest import ShardTable, encode_table
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, FormatVersionError, SharedMemoryError
from flashckpt.memory import room
from flashckpt.memory.job import JobDirectory
from flashckpt.memory.segment import Segment, SegmentSpec, SlotPinned, SlotWriter, choose_slot
from flashckpt.memory.watermark import Known
from flashckpt.staging import device

_log = logging.getLogger("flashckpt")
MANIFEST_SLACK_BYTES = 256 << 10
SMALL_SLOT_BYTES = 16 << 20
"""Up to here the first slot is made at once, in about 10 ms; larger ones in the background, beside training."""
_LET_GO_S = 2.0
"""How long a killed process may take to give its locks back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one slot of a rank needs.

    Attributes:
        layout: u64 layout hash; names the segment.
        data_bytes: Bytes of the data area.
        manifest_bytes: Bytes of the manifest area.
    """

    layout: int
    data_bytes: int
    manifest_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, its header page included, and a share of the superblock."""
        return self.data_bytes + self.manifest_bytes + 3 * 4096

    def with_room(self, nbytes: int) -> Need:
        """Return the same need with more bytes in the data area, for state that grows."""
        return replace(self, data_bytes=self.data_bytes + nbytes)


def need_of(shards: Sequence[Shard], value_bytes: int = 0) -> Need:
    """Return what a slot for `shards` and about `value_bytes` of non-tensor state needs, with room to grow."""
    placement = place(shards)
    table = ShardTable.from_shards(shards, placement.offsets)
    manifest = manifest_room(table, len(encode_table(table)), value_bytes)
    return Need(layout=layout_hash(shards), data_bytes=placement.total, manifest_bytes=manifest)


def manifest_room(table: ShardTable, table_bytes: int, value_bytes: int) -> int:
    """Return the bytes to reserve for a manifest: its table and digests, and values that may grow."""
    return 2 * table_bytes + 8 * table.chunks + 4 * value_bytes + MANIFEST_SLACK_BYTES


class RankMemory:
    """The segments of one rank: one it writes, and older ones that the daemon retires.

    Args:
        directory: Of the job on this node.
        root_digest: Ties segments to the root.
        rank: Global rank.
        pin_for: Index of the CUDA device to page-lock the slots for, or None.
    """

    def __init__(self, directory: JobDirectory, *, root_digest: int, rank: int, pin_for: int | None = None) -> None:
        self._directory, self._root_digest, self._rank, self._pin_for = directory, root_digest, rank, pin_for
        self.segment: Segment | None = None
        self.reserve_s = 0.0
        self.adopted = False
        self._stop = threading.Event()
        self._ready, self._first = threading.Event(), threading.Event()
        self._reserved_bytes = 0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._registered: int | None = None

    def refuse_other_run(self) -> None:
        """Refuse to begin while a process of another run of this job holds memory on this node, whatever its layout.

        To be called before any rank of this run holds any. A rank of the life before that was just killed may
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

    def own_existing(self, need: Need) -> Segment | None:
        """Return this rank's segment of an earlier life if it has room for `need`, now owned; None if there is none.

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
    def _has_room(spec: SegmentSpec, need: Need) -> bool:
        """Whether a snapshot fits; half of the manifest's need is headroom for values that grow."""
        return spec.data_capacity >= need.data_bytes and spec.manifest_capacity >= need.manifest_bytes // 2

    def open(self, need: Need, *, slots: int | None, job: str) -> None:
        """Adopt or create the segment and reserve it in the background.

        Args:
            need: Of one slot.
            slots: Number of slots; None for 3, falling back to 2 where 3 do not fit.
            job: Job id.

        Raises:
            SharedMemoryError: There is too little room for 2 slots.
            JobInUseError: A live process holds this rank's segment.
        """
        self.release()
        segment = self.own_existing(need)
        self.adopted = segment is not None
        self.segment = segment if segment is not None else self._create(need, slots, job)
        self._stop, self._error, self._reserved_bytes = threading.Event(), None, 0
        self._ready, self._first = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._reserve, name="flashckpt-reserve", daemon=True)
        self._thread.start()
        if need.slot_bytes <= SMALL_SLOT_BYTES:
            self.wait_first()

    def replace(self, need: Need, *, slots: int | None, job: str) -> None:
        """Open another segment; the one before is removed at once if it never held a snapshot. Errors as `open`."""
        if self.segment is not None and not any(header.is_complete for header in self.segment.headers()):
            self.segment.unlink()
        self.open(need, slots=slots, job=job)

    def _create(self, need: Need, slots: int | None, job: str) -> Segment:
        path = next(p for p in self._paths(need.layout) if not p.exists())
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

    def _reserve(self) -> None:
        """Body of the background thread."""
        started = time.perf_counter()
        segment = self.segment
        assert segment is not None
        try:
            segment.reserve(self._stop, progress=self._note)
            if self._pin_for is not None and not self._stop.is_set():
                mapping = np.frombuffer(segment.buffer, np.uint8)  # the mapping itself is what CUDA page-locks
                if device.register(int(mapping.ctypes.data), mapping.nbytes, index=self._pin_for):
                    self._registered = int(mapping.ctypes.data)
                else:
                    _log.warning("the snapshots' memory could not be page-locked: copies from the device are slower")
        except Exception as error:  # noqa: BLE001 -- raised to the training thread at the next step()
            self._error = error
        self.reserve_s = time.perf_counter() - started
        self._ready.set()
        self._first.set()

    def _note(self, nbytes: int) -> None:
        self._reserved_bytes = nbytes
        if self._pin_for is None and self._unreserved() != set(range(self._slots)):
            self._first.set()

    @property
    def _slots(self) -> int:
        assert self.segment is not None
        return self.segment.spec.slots

    def _unreserved(self) -> set[int]:
        """Return the slots whose memory is not whole yet."""
        assert self.segment is not None
        spec = self.segment.spec
        if self._ready.is_set():
            return set()
        return {slot for slot in range(spec.slots) if spec.data_at(slot) + spec.data_capacity > self._reserved_bytes}

    @property
    def is_ready(self) -> bool:
        """Whether the memory is reserved; raises what the reservation raised."""
        if self._error is not None:
            raise self._error
        return self._ready.is_set()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for the whole reservation; False if it is not done in time."""
        self._ready.wait(timeout_s)
        return self.is_ready

    def wait_first(self, timeout_s: float | None = None) -> bool:
        """Wait until a snapshot can be taken: one slot is reserved; False if none is in time. Raises as `is_ready`."""
        self._first.wait(timeout_s)
        return self.is_ready or self._first.is_set()

    @property
    def has_slot(self) -> bool:
        """Whether the memory of some slot is made, so that a snapshot can be taken; does not wait. Raises as `is_ready`."""
        return self.is_ready or self._first.is_set()

    def fits(self, need: Need) -> bool:
        """Whether a snapshot of another structure has room in the open segment."""
        return self.segment is not None and self._has_room(self.segment.spec, need)

    def begin(
        self,
        *,
        generation: int,
        step: int,
        world_size: int,
        persist: bool,
        parent: tuple[int, int] | None,
        known: Known,
        superseded: tuple[int, int] | None,
    ) -> SlotWriter | None:
        """Return a writer on the slot that may be overwritten, or None if there is none (invariant M1, pins)."""
        assert self.segment is not None
        segment, busy = self.segment, self.segment.busy() | self._unreserved()
        while True:
            slot = choose_slot(
                segment.headers(), pinned=busy, common=known.common, hopeless=known.hopeless, superseded=superseded
            )
            if slot is None:
                return None
            try:
                return segment.begin(
                    slot, generation=generation, step=step, world_size=world_size, persist=persist, parent=parent
                )
            except SlotPinned:  # a reader took it between the look and the lock
                busy.add(slot)

    def complete(self) -> list[tuple[int, int]]:
        """Return the identities of this rank's COMPLETE slots, in all its segments on this node."""
        found = {h.identity for h in self.segment.headers() if h.is_complete} if self.segment else set()
        for path in self._directory.segments():
            if self.segment is not None and path == self.segment.path:
                continue
            if path.name.startswith(f"r{self._rank:05d}-"):
                with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as other:
                    found |= {h.identity for h in other.headers() if h.is_complete}
        return sorted(found, reverse=True)

    def release(self) -> None:
        """Stop reserving and give the segment up; its file and its snapshots stay."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._registered is not None:
            device.unregister(self._registered)
            self._registered = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None


def _other_root(path: Path) -> ConfigError:
    return ConfigError(
        "this job id is in use with another root",
        found=str(path),
        expected="one root per job id",
        state="The snapshots of the other run were left as they are.",
        remedy="give this run an id of its own (job='...' or FLASHCKPT_JOB_ID), or remove the old one: flashckpt gc",
    )


def slots_for(need_bytes: int, free_bytes: int, wanted: int | None) -> int:
    """Return how many slots per rank this node has room for: `wanted`, or 3, or 2.

    Args:
        need_bytes: Sum over the node's ranks of the bytes of one slot that are not yet reserved.
        free_bytes: Room on the node, before anybody reserves.
        wanted: The user's number, or None.

    Raises:
        SharedMemoryError: Not even 2 (or `wanted`) fit.
    """
    for count in [wanted] if wanted else [3, 2]:
        if need_bytes * count <= free_bytes:
            return count
    least = wanted or 2
    raise room.too_little(
        Path("/dev/shm"),  # noqa: S108 -- only named in the remedy
        need_bytes * least,
        room.Room(nbytes=free_bytes, limit="the tmpfs, the machine or a cgroup"),
        what=f"{least} slots per rank",
    )


def free_bytes(directory: JobDirectory) -> int:
    """Return the bytes that may still be reserved on this node."""
    return room.rooms(directory.path)[0].nbytes
