"""OFD locks as proof that their holder is alive: they end with the process and never cross a fork.

A lock says nothing about data: only headers and digests decide what may be read.
An open-file-description lock is shared by every descriptor of that description, so a lease opens its
own descriptor, which is never mapped (mmap keeps a duplicate) and is closed in forked children.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
import weakref
from pathlib import Path
from types import TracebackType

from flashckpt.core.manifest import Manifest, decode_manifest
from flashckpt.core.records import digest
from flashckpt.core.superblock import PAGE, SegmentSpec, SlotHeader, newest_copy
from flashckpt.errors import DamagedError
from flashckpt.native import GuardedMap
from flashckpt.native.guarding import kept_maps
from flashckpt.shm.private import open_file

_FLOCK = struct.Struct("hhqqi")  # l_type, l_whence, l_start, l_len, l_pid: native alignment of struct flock
_GUARD = threading.Lock()  # no fork between opening a lock descriptor and knowing it
_OPEN: weakref.WeakSet[Lease] = weakref.WeakSet()


class Lease:
    """A separate descriptor on `path`, for locks on single bytes; `close()` or garbage collection ends them all."""

    def __init__(self, path: str | Path, *, create: bool = False, dir_fd: int | None = None) -> None:
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        with _GUARD:
            self._cell = [open_file(path, flags, dir_fd=dir_fd)]
            _OPEN.add(self)
        weakref.finalize(self, _close, self._cell).atexit = False

    @property
    def fd(self) -> int:
        """The descriptor; -1 once closed, and in a forked child. Never map it: a mapping keeps a duplicate."""
        return self._cell[0]

    def exclusive(self, byte: int) -> bool:
        """Try to lock one byte for this lease alone; False if another lease holds it."""
        return self._set(fcntl.F_WRLCK, byte)

    def shared(self, byte: int, nbytes: int = 1) -> bool:
        """Try to lock bytes together with other sharers; False if one is held exclusively."""
        return self._set(fcntl.F_RDLCK, byte, nbytes)

    def release(self, byte: int, nbytes: int = 1) -> None:
        """Release bytes."""
        if self._cell[0] >= 0:
            self._set(fcntl.F_UNLCK, byte, nbytes)

    def held_by_other(self, byte: int) -> bool:
        """Return whether another lease holds the byte, shared or exclusively; takes nothing."""
        return self.first_held(byte, 1) is not None

    def first_held(self, byte: int, nbytes: int) -> tuple[int, int] | None:
        """Return the first range that another lease holds of these bytes, whole, as (start, stop); takes nothing."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, nbytes, 0)
        kind, _, start, size, _ = _FLOCK.unpack(fcntl.fcntl(self._cell[0], fcntl.F_OFD_GETLK, request))
        return None if kind == fcntl.F_UNLCK else (start, start + size)

    def close(self) -> None:
        """End every lock of this lease."""
        _OPEN.discard(self)
        _close(self._cell)

    def _set(self, kind: int, byte: int, nbytes: int = 1) -> bool:
        try:
            fcntl.fcntl(self._cell[0], fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, nbytes, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


def _close(cell: list[int]) -> None:
    fd, cell[0] = cell[0], -1
    if fd >= 0:
        os.close(fd)


def is_at(path: Path, fd: int) -> bool:
    """Return whether `path` still names the open file (st_nlink is not enough: `create` links)."""
    try:
        return path.lstat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """A forked child must hold no lease, or its dead rank would count as alive."""
    for lease in list(_OPEN):
        _close(lease._cell)  # noqa: SLF001 -- the same module
    _OPEN.clear()
    _GUARD.release()


os.register_at_fork(before=_GUARD.acquire, after_in_parent=_GUARD.release, after_in_child=_close_in_child)


# -- A reader's lease on one slot. Reads only what digests confirm; a pin keeps the bytes, never proves them -------


def extents_at(slot: int) -> int:
    """Return the byte whose lock stands for the first one of a slot's data area, far behind the end of every file."""
    return (1 + slot) << 56


class Pin:
    """A shared lease on a COMPLETE slot: its owner does not overwrite it until `close()` or the end of this process.

    It may give the slot back piece by piece (`keep_only`): then the owner writes its next snapshot where nothing is kept.

    Attributes:
        kept: The bytes of the data area that are still kept, as (start, stop), once some were given back; None before.
    """

    def __init__(self, path: Path, spec: SegmentSpec, fd: int, *, slot: int, header: SlotHeader, lease: Lease) -> None:
        """Made by `Segment.pin`. Takes over `fd` (not the lease's: mmap keeps a duplicate, and with it the lock)."""
        self.path, self.spec, self._fd, self.slot, self.header, self._lease = path, spec, fd, slot, header, lease
        self.kept: tuple[int, int] | None = None
        self._manifest: Manifest | None = None
        self._data: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._guarded: GuardedMap | None = None
        self._page = b""  # the page of headers when it was last found to be current

    def manifest_bytes(self) -> bytes:
        """Return the verified bytes of the manifest.

        Raises:
            DamagedError: They do not match the digest in the header, or the header has changed.
        """
        header, spec = self.header, self.spec
        if header.manifest_bytes > spec.manifest_capacity or header.data_bytes > spec.data_capacity:
            raise self._contradicts(
                f"{header.manifest_bytes} bytes of manifest, {header.data_bytes} bytes of data",
                f"at most {spec.manifest_capacity} and {spec.data_capacity}",
            )
        raw = os.pread(self._fd, header.manifest_bytes, spec.manifest_at(self.slot))
        if len(raw) != self.header.manifest_bytes or digest(raw) != self.header.manifest_digest:
            raise DamagedError(
                f"the snapshot of step {self.header.step} in memory is damaged",
                found=f"manifest digest {digest(raw):016x}",
                expected=f"{self.header.manifest_digest:016x} (slot {self.slot} of {self.path})",
                state="It was left unchanged and is not restored.",
            )
        if not self.is_current():
            raise DamagedError(
                f"the snapshot of step {self.header.step} was rolled back while it was read",
                found=f"slot {self.slot} of {self.path} has a newer header",
                state="Nothing was read from it.",
            )
        return raw

    def manifest(self) -> Manifest:
        """Return the verified manifest, which agrees with its slot; errors as `manifest_bytes`.

        It is read once: the owner may write over it when some of the slot was given back.
        """
        if self._manifest is None:
            self._manifest = self._read_manifest()
        return self._manifest

    def _read_manifest(self) -> Manifest:
        manifest, header = decode_manifest(self.manifest_bytes()), self.header
        found = (*manifest.identity, manifest.rank, manifest.world_size, manifest.objects)
        if found != (*header.identity, header.rank, header.world_size, []):
            raise self._contradicts(
                f"a manifest of step {manifest.step}, generation {manifest.generation}, rank {manifest.rank}"
                f" of {manifest.world_size}",
                f"step {header.step}, generation {header.generation}, rank {header.rank} of {header.world_size}",
            )
        table = manifest.table
        if (end := int((table.byte_offset + table.nbytes).max(initial=0))) > header.data_bytes:
            raise self._contradicts(f"rows up to byte {end}", f"at most {header.data_bytes} bytes of data")
        return manifest

    def _contradicts(self, found: str, expected: str) -> DamagedError:
        return DamagedError(
            f"the snapshot of step {self.header.step} in memory contradicts itself",
            found=f"{found} (slot {self.slot} of {self.path})",
            expected=expected,
            state="It was left unchanged and is not restored.",
        )

    def is_current(self) -> bool:
        """Whether the snapshot was not rolled back: the header is the one that was pinned, or that of a newer one in its place."""
        page = os.pread(self._fd, PAGE, self.spec.header_at(self.slot))
        if page == self._page:
            return True
        header = newest_copy(page)[0]
        if header != self.header and (self.kept is None or header.identity <= self.header.identity):
            return False
        self._page = page
        return True

    def keep_only(self, start: int, stop: int) -> None:
        """Give all of the data area but [start, stop) back to the slot's owner, for good; later calls only keep less.

        The bytes are held before the slot is let go, and the kernel lets go of both with this process.
        """
        at = extents_at(self.slot)
        if self.kept is None:
            self.manifest()
            if stop > start and not self._lease.shared(at + start, stop - start):
                return  # cannot be: who writes the slot holds its byte, as this lease does
            self.kept = start, stop
            self._lease.release(1 + self.slot)
            return
        first, last = self.kept
        low, high = (start, stop) if stop > start else (last, last)
        if low > first:
            self._lease.release(at + first, low - first)
        if last > high:
            self._lease.release(at + high, last - high)
        self.kept = start, stop

    @property
    def nbytes(self) -> int:
        """Used bytes of the data area.

        Raises:
            DamagedError: They are more than a slot has.
        """
        if (used := self.header.data_bytes) > self.spec.data_capacity:
            raise self._short(f"{used} bytes of data", f"at most {self.spec.data_capacity} bytes in a slot")
        return used

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy the data area from byte `start` into `out` by system calls: no other process can kill this one by SIGBUS.

        Raises:
            DamagedError: The file is shorter.
        """
        at, done = self.spec.data_at(self.slot) + start, 0
        while done < len(out):
            if not (count := os.preadv(self._fd, [out[done:]], at + done)):
                raise self._short(f"a file of {at + done} bytes", f"at least {at + len(out)} bytes")
            done += count

    def view(self) -> memoryview | None:
        """Return the read-only bytes of the data area without a copy, for a process that must outlive their loss.

        What another process cuts off while it is read reads as zeros: `check_whole` finds out.

        Returns:
            None where there is no such mapping here, or no byte: `read_into` reads them then.

        Raises:
            DamagedError: The file is shorter.
        """
        used = self.nbytes
        at = self.spec.data_at(self.slot)
        lead = at % mmap.ALLOCATIONGRANULARITY  # 0 unless the machine's pages are larger than 4 KiB
        if self._guarded is None and used:
            self._check_length()
            self._guarded = kept_maps.of(self._fd, lead + self.spec.data_capacity, at - lead)
        return None if self._guarded is None else memoryview(self._guarded)[lead : lead + used]

    def check_whole(self) -> None:
        """Raise DamagedError where a byte that `view` gave may not have been the slot's."""
        if self._guarded is None:
            return
        self._check_length()
        if self._guarded.is_lost:
            raise DamagedError(
                f"a page of the snapshot of step {self.header.step} in memory was lost while it was read",
                found=f"a bus error (slot {self.slot} of {self.path})",
                state="It was left unchanged and is not restored.",
                remedy="check the machine's memory (dmesg); the next snapshot is persisted as usual",
            )

    def _check_length(self) -> None:
        end, needed = os.fstat(self._fd).st_size, self.spec.data_at(self.slot) + self.nbytes
        if end < needed:  # a read behind the end of the file would raise SIGBUS
            raise self._short(f"a file of {end} bytes", f"at least {needed} bytes")

    @property
    def data(self) -> memoryview:
        """Read-only bytes of the data area, every page mapped on first use (3 GB/s fault by fault, 10 populated)."""
        return self.map(populate=True)

    def map(self, *, populate: bool, within: memoryview | None = None) -> memoryview:
        """Return the read-only bytes of the data area.

        Args:
            populate: Map every page now, in one thread. A caller that reads only parts, or with several threads,
                maps what it is about to read (`prefault.map_held`): mapping a page costs half of copying it.
            within: A mapping of the whole segment that this process has already; None makes one of the slot.
        """
        if self._view is None:
            at, used = self.spec.data_at(self.slot), self.nbytes
            lead = at % mmap.ALLOCATIONGRANULARITY  # 0 unless the machine's pages are larger than 4 KiB
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            size = max(1, lead + used)
            self._check_length()
            if within is not None:
                self._view = within[at : at + used].toreadonly()
                return self._view
            self._data = mmap.mmap(self._fd, size, flags=flags, prot=mmap.PROT_READ, offset=at - lead)
            self._view = memoryview(self._data)[lead : lead + used]
        return self._view

    def _short(self, found: str, expected: str) -> DamagedError:
        return DamagedError(
            f"the snapshot of step {self.header.step} in memory is truncated",
            found=found,
            expected=f"{expected} (slot {self.slot} of {self.path})",
            state="It was left unchanged and is not restored.",
        )

    def close(self) -> None:
        """Release the slot."""
        if self._view is not None:
            with contextlib.suppress(BufferError):
                self._view.release()
        if self._data is not None:
            with contextlib.suppress(BufferError):
                self._data.close()
        self._view = self._data = self._guarded = None  # what is still in use stays mapped until it is not
        self._lease.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Pin:  # noqa: PYI034 -- Self is not in typing before Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
