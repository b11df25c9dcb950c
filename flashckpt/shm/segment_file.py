"""A segment as a file: its size, its first pages, the checks before it is read, the prefaulting of the rest."""

from __future__ import annotations

import functools
import os
import uuid
from pathlib import Path

import numpy as np

from flashckpt.core.superblock import PAGE, SegmentSpec, Superblock
from flashckpt.errors import DamagedError, SharedMemoryError
from flashckpt.shm import prefault

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


def address_of(mapping: memoryview) -> int:
    """Return the address of the mapping without keeping an export of it, so that it can be closed."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


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
    prefault.map_held(address + start, size)
