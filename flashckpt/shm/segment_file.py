"""A segment as a file: its size, its first pages, the checks before it is read, the prefaulting of the rest."""

from __future__ import annotations

import ctypes
import functools
import os
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.core.superblock import PAGE, SegmentSpec, Superblock
from flashckpt.errors import DamagedError, SharedMemoryError
from flashckpt.native.copying import PYTHON, copy_and_digest, implementation

_ZEROS = memoryview(bytes(1 << 20))


@functools.cache  # a process does not outlast a boot, and a restore asks for every segment of the node
def boot_id() -> bytes:
    """Return the 16 bytes that name this boot of the machine."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def lay_out(fd: int, spec: SegmentSpec) -> None:
    """Set the size of the file, and reserve the pages that are read before the rest is reserved."""
    os.ftruncate(fd, spec.nbytes)
    try:
        for at in (0, *(spec.header_at(slot) for slot in range(spec.slots))):
            os.posix_fallocate(fd, at, PAGE)
    except OSError as error:
        raise SharedMemoryError(
            "not even the headers of a segment fit into shared memory", found=str(error), remedy="flashckpt gc"
        ) from error


def check_place(fd: int, block: Superblock, path: Path) -> None:
    """Reject a segment that is truncated (reading it would raise SIGBUS), another user's, or from an earlier boot."""
    status = os.fstat(fd)
    left = "It was left unchanged."
    if status.st_size != block.spec.nbytes:
        raise DamagedError(
            f"segment {path} has the wrong size", found=f"{status.st_size} bytes", expected=f"{block.spec.nbytes} bytes",
            state=left,
        )  # fmt: skip
    if status.st_uid != os.getuid() or block.uid != os.getuid():
        raise DamagedError(
            f"segment {path} belongs to another user",
            found=f"file of uid {status.st_uid}, made by uid {block.uid}",
            expected=f"uid {os.getuid()}",
            state=left,
        )
    if block.boot_id != boot_id():
        raise DamagedError(
            f"segment {path} is from an earlier boot of this machine",
            found=block.boot_id.hex(),
            expected=boot_id().hex(),
            state=left,
            remedy="remove it: flashckpt gc",
        )


def describe_process(pid: int) -> str:
    """Return "process <pid> (<command line>)" for error texts."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return f"process {pid}" + (f" ({words[:120]})" if words else "")


def address_of(memory: memoryview | npt.NDArray[np.uint8]) -> int:
    """Return the address of the first byte, without keeping an export of a mapping, so that it can be closed."""
    array = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


def fill_holes(fd: int, spec: SegmentSpec, start: int, stop: int) -> int:
    """Write zeros where slots have no bytes yet, in [start, stop): half the cost of a page fault for each page.

    A hole is what the kernel calls one: nothing was ever written there, and no slot that it is in has been given out.
    System calls take no lock on the address space, for which training would wait whenever it asks for memory.

    Returns:
        Where the next hole begins, at `stop` or behind it: up to there nothing is to be done. To search costs more than to fill.
    """
    areas = [(spec.manifest_at(slot), spec.manifest_at(slot) + spec.slot_bytes - PAGE) for slot in range(spec.slots)]
    at = start
    while at < stop and (at := os.lseek(fd, at, os.SEEK_HOLE)) < stop:
        until = min(stop, _next_data(fd, at))
        for low, high in areas:
            _write_zeros(fd, max(at, low), min(until, high))
        at = until
    return at


def _write_zeros(fd: int, at: int, until: int) -> None:
    while at < until:
        at += os.pwrite(fd, _ZEROS[: until - at], at)


def _next_data(fd: int, at: int) -> int:
    """Return where bytes begin behind a hole; the end of the file where none do."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:  # ENXIO
        return os.fstat(fd).st_size


def touch(mapping: memoryview, address: int, start: int, size: int) -> None:
    """Map every page now, so that the first snapshot is as fast as the second.

    Reading them is enough if they were written before: the mapping is shared and writable.
    """
    assert len(mapping) >= start + size
    map_held(address + start, size)


# -- Pages of this process's memory, created before they are needed: a first touch costs more than the copy after
#    it
#
# Processor seconds per GB on one core of an AMD EPYC: memory made page by page 0.30 in one call, in huge pages
# 0.04; mapping what a file on tmpfs holds 0.06 page by page, 0.03 by one access per 64 KiB; copied and digested
# 0.08. Nothing here is needed for correctness: refusals of the kernel are ignored.

_POPULATE_READ, _POPULATE_WRITE, _HUGE_PAGE, _NO_HUGE_PAGE = 22, 23, 14, 15
_AROUND = 64 << 10
"""What the kernel maps around one access to a page that a file holds (fault_around_bytes)."""
_ONE_CALL = 1 << 20
HUGE = 2 << 20
HUGE_FROM = 8 << 20
"""Smaller memory is left alone: each range of huge pages becomes a separate mapping, and a process may have some 65,000."""
_TRIAL_BYTES = 4 << 20
_SLOW_S_PER_BYTE = 0.5e-9
"""Huge pages that cost more come from a host, or from memory that has to be tidied up: small ones are quicker there."""
# not mmap.madvise: that one holds the GIL, and knows only its own mapping
_libc: Any = ctypes.CDLL(None, use_errno=True)
Ints = npt.NDArray[np.int64]


def populate(address: int, nbytes: int, *, write: bool = True) -> bool:
    """Map every page that [address, address + nbytes) touches; False where the kernel cannot (before 5.14).

    Args:
        address: Start, in bytes; need not be aligned.
        nbytes: Length.
        write: False maps what a file already holds without making it dirty.
    """
    return _advise(address // PAGE * PAGE, address + nbytes, _POPULATE_WRITE if write else _POPULATE_READ)


def map_held(address: int, nbytes: int) -> None:
    """Map what a file on tmpfs holds: one access per 64 KiB, without the GIL, and without a lock on the address space.

    Args:
        address: Start, in bytes, within a mapping of the file.
        nbytes: Length; the file must be as long, as for any other access.
    """
    if nbytes < _ONE_CALL or implementation() == PYTHON:
        populate(address, nbytes, write=False)
        return
    at = np.arange(address // _AROUND * _AROUND, address + nbytes, _AROUND)
    at[0] = address
    copy_and_digest(np.column_stack((at, np.zeros_like(at), np.ones_like(at))), check=False)


def is_mapped(address: int) -> bool:
    """Whether the page at `address` is mapped or cached."""
    seen = ctypes.c_ubyte(0)
    page = ctypes.c_void_p(address // PAGE * PAGE)
    return _libc.mincore(page, ctypes.c_size_t(PAGE), ctypes.byref(seen)) == 0 and bool(seen.value & 1)


class FreshMemory:
    """Memory that is about to be filled, some of which was never touched: that is made piece by piece, in huge pages where they are quick.

    Huge pages are asked for within a range alone, so that none costs a byte more. Any thread may call `make`.

    Args:
        addresses: int64[n], where each range starts; 0 for one that is none.
        nbytes: int64[n].
    """

    def __init__(self, addresses: Ints, nbytes: Ints) -> None:
        self._huge: list[tuple[int, int]] = []
        self._made_bytes, self._made_s = 0, 0.0
        for k in np.flatnonzero((nbytes >= HUGE_FROM) & (addresses > 0)).tolist():
            start = -(-int(addresses[k]) // HUGE) * HUGE
            stop = (int(addresses[k]) + int(nbytes[k])) // HUGE * HUGE
            touched = any(map(is_mapped, (start, (start + stop) // 2, stop - 1)))
            if not touched and _advise(start, stop, _HUGE_PAGE):
                self._huge.append((start, stop))

    @property
    def huge_bytes(self) -> int:
        """Bytes for which huge pages are asked."""
        return sum(stop - start for start, stop in self._huge)

    def make(self, address: int, nbytes: int) -> None:
        """Make what is not there yet of [address, address + nbytes), which costs less than page by page under a copy."""
        start, end = address, address + nbytes
        while start < end:
            stop = min(end, (start // HUGE + 1) * HUGE)
            if not is_mapped(stop - 1):
                began = time.thread_time()
                populate(start, stop - start)
                if self._huge:
                    self._weigh(stop - start, time.thread_time() - began)
            start = stop

    def _weigh(self, nbytes: int, seconds: float) -> None:
        """Give huge pages up where all of them so far were slow: the next ones come from where the last one came from."""
        self._made_bytes, self._made_s = self._made_bytes + nbytes, self._made_s + seconds
        if self._made_bytes >= _TRIAL_BYTES and self._made_s > _SLOW_S_PER_BYTE * self._made_bytes:
            ranges, self._huge = self._huge, []
            for start, stop in ranges:
                _advise(start, stop, _NO_HUGE_PAGE)


def _advise(start: int, stop: int, advice: int) -> bool:
    return bool(_libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice) == 0)
