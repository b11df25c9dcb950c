"""A rank's segment: slots in a block of shared memory. Only this module and `slot_writer` write to slots.

Write order (each line is done when the next begins): exclusive lease on the slot; header WRITING (both
copies); data; manifest; header COMPLETE (one copy); lease released. Read order: shared lease; header;
manifest and its digest; header again; data and its digests. Nothing relies on the order in which stores
become visible: what a digest does not confirm is not read. Byte tables are in docs/format.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from flashckpt.core.records import mark_of
from flashckpt.core.snapshot_id import SnapshotRequest
from flashckpt.core.superblock import (
    HEADER_COPY_BYTES,
    OWNER_AT,
    PAGE,
    SegmentSpec,
    SlotHeader,
    SlotState,
    Superblock,
    decode_owner,
    decode_superblock,
    encode_header,
    encode_owner,
    encode_superblock,
    newest_copy,
)
from flashckpt.errors import DamagedError, JobInUseError
from flashckpt.faults import crash_point
from flashckpt.shm import block
from flashckpt.shm.lease import Lease, Pin, extents_at, is_at
from flashckpt.shm.private import open_file
from flashckpt.shm.segment_file import address_of, boot_id, check_place, describe_process, fill_holes, lay_out, touch
from flashckpt.shm.slot_writer import SlotWriter

__all__ = ["Pin", "Segment", "SegmentSpec", "SlotHeader", "SlotPinned", "SlotState", "SlotWriter"]

RESERVE_BYTES = 64 << 20
_LOCKED_BYTES = 4 << 20
"""Per system call: a header that is written meanwhile, by `step()`, waits for the one under way."""
_OWNER_BYTE = 0  # slot k is byte 1 + k


class SlotPinned(Exception):  # noqa: N818 -- not a user error: the caller chooses another slot or skips
    """The slot is under a reader's lease, or is being written."""


class Segment:
    """The slots of one (job, rank, layout), mapped by its owner, read by anybody of the same user."""

    def __init__(self, path: Path, fd: int, superblock: Superblock, memory: block.MappedBlock | None) -> None:
        """Wrap an open descriptor, and the mapping of a writer; use `create` or `attach`."""
        self.path, self.spec, self.created_ns, self._fd = path, superblock.spec, superblock.created_ns, fd
        self._lease = Lease(path)
        if os.fstat(self._lease.fd).st_ino != os.fstat(fd).st_ino:  # removed and recreated between the two opens
            self._lease.close()
            raise FileNotFoundError(path)
        self._block = memory
        self._writing: set[int] = set()
        self._next_hole = 0
        self._owned = False

    # -- lifetime -----------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, spec: SegmentSpec) -> Segment:
        """Make a new segment, owned by this process from its first instant; its memory is not reserved yet.

        Args:
            path: Must not exist; its folder must, on tmpfs.
            spec: Shape and identity.

        Raises:
            SharedMemoryError: Too little memory; names need, free space and remedies. Nothing is left behind.
            JobInUseError: `path` exists and a live process owns it.
            FileExistsError: `path` exists and nobody owns it: attach to it instead.
        """
        path = Path(path)
        block.require_capacity(path.parent, spec.nbytes, what=f"job {spec.job!r}, rank {spec.rank}", slots=spec.slots)
        block.sweep_temporary(path)
        temporary, memory = block.new(path, spec.nbytes)
        fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        segment = None
        try:
            crash_point("segment.before-reserve")
            superblock = Superblock(spec=spec, uid=os.getuid(), boot_id=boot_id(), created_ns=time.time_ns())
            lay_out(fd, spec)
            os.pwrite(fd, encode_superblock(superblock), 0)
            segment = cls(temporary, fd, superblock, memory or block.FileBlock(fd, spec.nbytes))
            segment.own()
            crash_point("segment.before-rename")
            os.link(temporary, path)  # not rename: an existing segment may hold the only snapshot of a rank
            segment.path = path
            crash_point("segment.after-rename")
            block.publish(path)
        except BaseException as error:
            _undo(segment, fd, memory)
            if isinstance(error, FileExistsError):
                with contextlib.suppress(DamagedError), contextlib.closing(cls.attach(path)) as other:
                    other.refuse_if_owned()
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return segment

    @classmethod
    def attach(cls, path: str | Path, *, writable: bool = False) -> Segment:
        """Open an existing segment; `writable` maps it, for a rank that continues to use its slots.

        Raises:
            FileNotFoundError: It does not exist.
            DamagedError: It is not a segment, is truncated, is another user's, or is from an earlier boot.
            FormatVersionError: Written by another major version.
        """
        path = Path(path)
        fd = open_file(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            superblock = decode_superblock(os.pread(fd, OWNER_AT, 0), path=str(path))
            check_place(fd, superblock, path)
            memory = block.mapped(path, fd, superblock.spec.nbytes) if writable else None
            return cls(path, fd, superblock, memory)
        except BaseException:
            os.close(fd)
            raise

    def reserve(self, stop: threading.Event | None = None, *, progress: Callable[[int], None] = lambda _: None) -> None:
        """Reserve and touch every page, 64 MiB at a time; run it in a background thread (it releases the GIL).

        Args:
            stop: Ends it early.
            progress: Called with the number of bytes, from the start of the segment, that are reserved and touched.

        Raises:
            SharedMemoryError: The file system or a cgroup is full. A segment without a snapshot is removed.
        """
        assert self._block is not None, "attach(writable=True)"
        buffer = self.buffer
        address, self._next_hole = address_of(buffer), 0
        for start in range(0, self.spec.nbytes, RESERVE_BYTES):
            if self._fd < 0 or (stop is not None and stop.is_set()):
                return
            size = min(RESERVE_BYTES, self.spec.nbytes - start)
            self._reserve_step(start, size)
            touch(buffer, address, start, size)
            progress(start + size)

    @property
    def is_allocated(self) -> bool:
        """Whether all of its memory was reserved before, by a process that made it."""
        return os.fstat(self._fd).st_blocks * 512 >= self.spec.nbytes

    def close(self) -> None:
        """Give up ownership and unmap; buffers still in use keep the mapping until they are freed."""
        self._lease.close()
        self._owned = False
        if self._block is not None:
            self._block.close()
        self._block = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def unlink(self) -> None:
        """Remove the file; only under M1, or when the job ended.

        Raises:
            JobInUseError: A live process other than this one owns it.
        """
        self.own()
        self.remove_names()

    def remove_names(self) -> None:
        """Remove both names of the memory; it is freed with its last mapping."""
        block.withdraw(self.path)
        self.path.unlink(missing_ok=True)

    def is_same(self, other: Segment) -> bool:
        """Whether another object has the same file open."""
        return os.path.samestat(os.fstat(self._fd), os.fstat(other._fd))

    @property
    def buffer(self) -> memoryview:
        """All bytes of the writer's mapping."""
        buffer = None if self._block is None else self._block.buf
        assert buffer is not None, "attach(writable=True)"
        return buffer

    # -- ownership ----------------------------------------------------------------------------------

    def own(self) -> None:
        """Take the segment for this process until `close()` or death.

        Raises:
            JobInUseError: Another live process holds it; names its pid.
            FileNotFoundError: It was removed meanwhile.
        """
        if self._owned:
            return
        if not self._lease.exclusive(_OWNER_BYTE):
            self.refuse_if_owned()
            raise JobInUseError(f"segment {self.path} was just taken by another process")
        if not is_at(self.path, self._lease.fd):
            self._lease.release(_OWNER_BYTE)
            raise FileNotFoundError(self.path)
        self._owned = True
        os.pwrite(self._lease.fd, encode_owner(os.getpid(), time.time_ns()), OWNER_AT)

    @property
    def is_owned(self) -> bool:
        """Whether a live process (this one included) owns it."""
        return self._owned or self._lease.held_by_other(_OWNER_BYTE)

    def refuse_if_owned(self) -> None:
        """Raise JobInUseError, naming the holder, if another live process owns the segment."""
        if self._owned or not self._lease.held_by_other(_OWNER_BYTE):
            return
        pid = decode_owner(os.pread(self._fd, 64, OWNER_AT))
        if pid == os.getpid():
            raise JobInUseError(
                "an earlier Checkpointer of this process was not closed",
                found=f"job {self.spec.job!r} is held by this very process, {pid}",
                expected="one open Checkpointer per job",
                state="Nothing was changed.",
                remedy="call close() on the earlier one before another begins (run again, a cell of a notebook makes a second one)",
            )
        raise JobInUseError(
            f"job {self.spec.job!r} is already running on this node",
            found=f"rank {self.spec.rank} is held by {describe_process(pid)}",
            expected="one live process per rank of a job",
            state="Nothing was changed.",
            remedy="stop the other run, or give this one another id: job='...' or FLASHCKPT_JOB_ID",
        )

    # -- slots --------------------------------------------------------------------------------------

    @property
    def is_cut_short(self) -> bool:
        """Whether another process truncated the file: an access behind its end would be a SIGBUS, and nobody can attach to it."""
        return os.fstat(self._fd).st_size < self.spec.nbytes

    def header(self, slot: int) -> SlotHeader:
        """Return the valid header of a slot with the highest sequence."""
        return newest_copy(os.pread(self._fd, PAGE, self.spec.header_at(slot)))[0]

    def headers(self) -> list[SlotHeader]:
        """Return one header per slot."""
        fd, at = self._fd, self.spec.header_at
        return [newest_copy(os.pread(fd, PAGE, at(slot)))[0] for slot in range(self.spec.slots)]

    def busy(self) -> set[int]:
        """Return the slots under a reader's lease, or being written by this process."""
        pinned = {slot for slot in range(self.spec.slots) if self._lease.held_by_other(1 + slot)}
        return pinned | self._writing

    @property
    def writing(self) -> set[int]:
        """The slots that are being written by this process."""
        return set(self._writing)

    def still_read(self, slot: int) -> tuple[int, int]:
        """Return the bytes of a slot's data area that its last snapshot's persister keeps, as (start, stop); (0, 0): none."""
        at = extents_at(slot)
        kept = self._lease.first_held(at, self.spec.data_capacity)
        return (0, 0) if kept is None else (kept[0] - at, kept[1] - at)

    def begin(
        self, slot: int, request: SnapshotRequest, *, follows: Callable[[int, int], bool] = lambda _start, _stop: False
    ) -> SlotWriter:
        """Set a slot to WRITING and return its writer. The caller owns the segment and chose by `choose_slot`.

        Args:
            slot: The slot.
            request: The snapshot.
            follows: Whether to begin while [start, stop) of the data area is still being persisted. What is written must
                stay behind that: `SlotWriter.still_read`.

        Raises:
            SlotPinned: A reader holds a lease on it, or it is being written, or some of it is kept and nobody follows.
        """
        assert self._owned, "own() first"
        if slot in self._writing or not self._lease.exclusive(1 + slot):
            raise SlotPinned(f"slot {slot} of {self.path}")
        start, stop = self.still_read(slot)  # only less from here on: who keeps more holds the slot first
        if stop > start and not follows(start, stop):
            self._lease.release(1 + slot)
            raise SlotPinned(f"bytes {start} to {stop} of slot {slot} of {self.path}")
        crash_point("slot.before-writing")
        header = SlotHeader(
            generation=request.id.generation,
            step=request.id.step,
            state=SlotState.WRITING,
            world_size=request.world_size,
            rank=self.spec.rank,
            persist=request.persist,
            parent=request.parent,
            mark=mark_of(request.token),
        )
        # Both copies: were only one written, damage to it would bring the old COMPLETE header back over new data.
        header = self._put_both_headers(slot, header)
        self._writing.add(slot)
        crash_point("slot.after-writing")
        return SlotWriter(
            self.spec,
            self.buffer,
            slot,
            header,
            put=partial(self._put_header, slot),
            release=partial(self._end, slot),
            still_read=partial(self.still_read, slot),
            follows=stop > start,
        )

    def mark_empty(self, slot: int) -> None:
        """Set a slot EMPTY: its snapshot was rolled back. A reader that has pinned it keeps its bytes.

        Raises:
            JobInUseError: Another live process owns the segment.
        """
        borrowed = not self._owned
        self.own()
        try:
            old = self.header(slot)
            header = replace(old, state=SlotState.EMPTY, manifest_bytes=0, manifest_digest=0, data_bytes=0)
            self._put_both_headers(slot, header)
        finally:
            if borrowed:
                self._lease.release(_OWNER_BYTE)
                self._owned = False

    def pin(self, slot: int) -> Pin | None:
        """Return a lease on a COMPLETE slot, or None if it is not COMPLETE or is being overwritten."""
        if not self.header(slot).is_complete:
            return None
        lease = Lease(self.path)
        same_file = os.fstat(lease.fd).st_ino == os.fstat(self._fd).st_ino  # the path may name a new segment by now
        if same_file and lease.shared(1 + slot):
            header = self.header(slot)  # again: it may have been overwritten before we got the lease
            if header.is_complete:
                return Pin(self.path, self.spec, os.dup(self._fd), slot=slot, header=header, lease=lease)
        lease.close()
        return None

    def _end(self, slot: int) -> None:
        self._writing.discard(slot)
        self._lease.release(1 + slot)

    def _put_both_headers(self, slot: int, header: SlotHeader) -> SlotHeader:
        """Write both copies one after the other, as `_put_header` would, which need not be read in between."""
        at = self.spec.header_at(slot)
        newest, copy = newest_copy(os.pread(self._fd, PAGE, at))
        for more, place in enumerate((copy, 1 - copy), 1):
            header = replace(header, sequence=newest.sequence + more)
            os.pwrite(self._lease.fd, encode_header(header), at + place * HEADER_COPY_BYTES)
        return header

    def _put_header(self, slot: int, header: SlotHeader) -> SlotHeader:
        """Write one copy, the one that is not valid or older, with the next sequence number."""
        at = self.spec.header_at(slot)
        newest, copy = newest_copy(os.pread(self._fd, PAGE, at))
        header = replace(header, sequence=newest.sequence + 1)
        os.pwrite(self._lease.fd, encode_header(header), at + copy * HEADER_COPY_BYTES)
        return header

    def _reserve_step(self, start: int, size: int) -> None:
        missing = 0 if self.is_allocated else size
        cause: OSError | None = None
        try:
            if not missing or block.capacities(self.path.parent)[0].nbytes >= missing:
                for at in range(start, start + size, _LOCKED_BYTES):
                    piece = min(_LOCKED_BYTES, start + size - at)
                    if missing:
                        os.posix_fallocate(self._fd, at, piece)
                    if self._next_hole < at + piece:
                        self._next_hole = fill_holes(self._fd, self.spec, at, at + piece)
                return
        except OSError as error:
            cause = error
        if not any(h.is_complete for h in self.headers()):
            self.remove_names()
        what = f"job {self.spec.job!r}, rank {self.spec.rank}"
        block.refuse_file_limit(start + size, what=what)
        least = block.capacities(self.path.parent)[0]
        raise block.insufficient_memory(self.path.parent, self.spec.nbytes - start, least, what=what) from cause


def _undo(segment: Segment | None, fd: int, memory: block.MappedBlock | None) -> None:
    if segment is None:
        os.close(fd)
        if memory is not None:
            memory.close()
    else:
        segment.close()
