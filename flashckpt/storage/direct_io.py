"""One large local file, written durably and read: O_DIRECT with page-aligned memory, or buffered if that is refused.

Measured (docs/storage.md): 16 MiB extents by two threads reach the disk with 10 to 20 times less
CPU than buffered writes and leave the page cache to the trainer. O_DIRECT requires memory, file
offset and length in multiples of the block size. Slots and packs are laid out in pages, so that
nothing is copied; unaligned data goes through one aligned bounce buffer per thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.shm.private import open_file

EXTENT_BYTES = 16 << 20
PAGE_BYTES = 4096
WRITERS = 2
DIRECT_READ_BYTES = 1 << 20
BOUNCE_BYTES = 4 << 20

_local = threading.local()
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def write_durable(path: Path, parts: Iterable[memoryview], nbytes: int | None) -> int:
    """Create `path` with the bytes of `parts`, fsync and close it; return its size in bytes.

    The caller removes a file that could not be written completely: after a failed fsync the kernel may
    have dropped the dirty pages, so the only remedy is to write everything again.

    Raises:
        OSError: as reported by the kernel (ENOSPC, EIO, EROFS, ...).
    """
    fd, direct = _open(path)
    try:
        if nbytes:
            _reserve(fd, nbytes)
        try:
            written = _write_extents(fd, parts, direct=direct)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT:
                raise
            # open accepted O_DIRECT and the first write refused it (some FUSE and network file systems)
            os.close(fd)
            fd, direct = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC), False
            written = _write_extents(fd, parts, direct=False)
        os.ftruncate(fd, written)
        os.fsync(fd)
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return written


def read_file(path: Path, start: int, out: memoryview) -> int:
    """Fill `out` as `read_direct` does, but first with what the page cache already has; return the number of bytes.

    A file that was just copied or downloaded is there, and a copy out of memory costs a fraction of a read of the disk.
    """
    done = _read_cached(path, start, out) if len(out) >= DIRECT_READ_BYTES else 0
    if done == len(out):
        return done
    done = max(0, done - (start + done) % PAGE_BYTES)  # the rest begins at a page of the file, as O_DIRECT needs it
    return done + read_direct(path, start + done, out[done:])


def _read_cached(path: Path, start: int, out: memoryview) -> int:
    """Read up to the first byte that the page cache has not; 0 where the kernel or file system cannot say."""
    fd = open_file(path, os.O_RDONLY, follow=True)
    done = 0
    try:
        while done < len(out) and (count := os.preadv(fd, [out[done:]], start + done, os.RWF_NOWAIT)):
            done += count
    except OSError as error:
        if error.errno not in (errno.EAGAIN, *_NO_DIRECT):
            raise
    finally:
        os.close(fd)
    return done


def read_direct(path: Path, start: int, out: memoryview) -> int:
    """Fill `out` with the bytes from `start`; return their number. Uses O_DIRECT for 1 MiB and more if possible.

    O_DIRECT reads at the rate of the disk for a fifth of the CPU and leaves the page cache to the
    trainer. Unaligned ends go through an aligned buffer of this thread.
    """
    if len(out) >= DIRECT_READ_BYTES:
        try:
            fd = open_file(path, os.O_RDONLY | os.O_DIRECT, follow=True)
            try:
                return _read_pages(fd, start, out)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
    fd = open_file(path, os.O_RDONLY, follow=True)
    try:
        return _read_all(fd, start, out)
    finally:
        os.close(fd)


def _read_pages(fd: int, start: int, out: memoryview) -> int:
    """Read whole pages directly into `out` if it is aligned, and the rest through the buffer."""
    done = _read_aligned(fd, start, out) if start % PAGE_BYTES == 0 and _address(out) % 512 == 0 else 0
    buffer = _bounce()
    target = np.frombuffer(out, np.uint8)
    while done < len(out):
        at = start + done
        lead = at % PAGE_BYTES
        wanted = min(-(-(lead + len(out) - done) // PAGE_BYTES) * PAGE_BYTES, len(buffer))
        with memoryview(buffer) as whole_view, whole_view[:wanted] as view:
            count = min(_read_all(fd, at - lead, view, direct=True) - lead, len(out) - done)
        if count <= 0:
            break
        np.copyto(target[done : done + count], np.frombuffer(buffer, np.uint8, count, lead))
        done += count
    return done


def _read_aligned(fd: int, start: int, out: memoryview) -> int:
    """Read as one request: a separate request for the last partial page would queue after the large reads of other threads."""
    buffer = _bounce()
    whole = len(out) - len(out) % PAGE_BYTES
    with memoryview(buffer) as view, view[:PAGE_BYTES] as last:
        count = min(os.preadv(fd, [out[:whole], last] if whole < len(out) else [out], start), len(out))
    if count > whole:
        np.copyto(np.frombuffer(out, np.uint8)[whole:count], np.frombuffer(buffer, np.uint8, count - whole))
    return count


def _bounce() -> mmap.mmap:
    if not hasattr(_local, "bounce"):
        _local.bounce = mmap.mmap(-1, BOUNCE_BYTES)
    buffer: mmap.mmap = _local.bounce
    return buffer


def extents(parts: Iterable[memoryview], nbytes: int = EXTENT_BYTES) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the file, view) of at most `nbytes` each, in order; parts are cut, never joined."""
    offset = 0
    for part in parts:
        flat = part.cast("B") if part.ndim != 1 or part.format != "B" else part
        for begin in range(0, len(flat), nbytes):
            piece = flat[begin : begin + nbytes]
            yield offset, piece
            offset += len(piece)


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644), False


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve the space at once, so that a full disk is noticed before anything is written."""
    try:
        _fallocate(fd, nbytes)
    except OSError as error:
        if error.errno not in (*_NO_DIRECT, errno.ENOSYS):
            raise


def _fallocate(fd: int, nbytes: int) -> None:
    """Ask the kernel, not the C library: where a file system cannot, that one writes a byte into each page.

    On NFS before 4.2 each of these is a request to the server.
    """
    libc: Any = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))


class _Writers:
    """Threads that write extents, with as many queued as there are threads; the first error stops all."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd, self._direct = fd, direct
        self._queue: queue.Queue[tuple[int, memoryview] | None] = queue.Queue(maxsize=WRITERS)
        self.error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"flashckpt-write-{index}", daemon=True)
            for index in range(WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, item: tuple[int, memoryview]) -> None:
        self._queue.put(item)  # cannot block forever: after an error the workers continue to drain
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        bounce: mmap.mmap | None = None
        try:
            while (item := self._queue.get()) is not None:
                if self.error is not None:
                    continue
                try:
                    offset, view = item
                    if not self._direct or _is_aligned(offset, view):
                        _write_all(self._fd, view, offset)
                    else:
                        bounce = bounce or mmap.mmap(-1, EXTENT_BYTES)
                        _write_bounced(self._fd, view, offset, bounce)
                except BaseException as error:  # noqa: BLE001 -- passed to the thread that owns the write
                    self.error = error
                del item
        finally:
            if bounce is not None:
                bounce.close()


def _write_extents(fd: int, parts: Iterable[memoryview], *, direct: bool) -> int:
    writers, end = _Writers(fd, direct=direct), 0
    try:
        for offset, view in _aligned_extents(parts) if direct else extents(parts):
            writers.put((offset, view))
            end = offset + len(view)
    finally:
        writers.finish()
    if writers.error is not None:
        raise writers.error
    return end


def _aligned_extents(parts: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield extents that start at page offsets; parts of odd length are joined in a buffer."""
    offset, carry = 0, bytearray()
    for _, part in extents(parts):
        view = part
        if not carry:
            whole = len(view) - len(view) % PAGE_BYTES
            if whole:
                yield offset, view[:whole]
                offset, view = offset + whole, view[whole:]
        carry += view
        if len(carry) >= EXTENT_BYTES or len(carry) % PAGE_BYTES == 0:
            whole = len(carry) - len(carry) % PAGE_BYTES
            block = memoryview(bytes(memoryview(carry)[:whole]))
            del carry[:whole]
            for begin in range(0, whole, EXTENT_BYTES):
                piece = block[begin : begin + EXTENT_BYTES]
                yield offset, piece
                offset += len(piece)
    for begin in range(0, len(carry), EXTENT_BYTES):
        piece = memoryview(bytes(memoryview(carry)[begin : begin + EXTENT_BYTES]))
        yield offset, piece
        offset += len(piece)


def _is_aligned(offset: int, view: memoryview) -> bool:
    return not (offset % PAGE_BYTES or len(view) % PAGE_BYTES or _address(view) % PAGE_BYTES)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]) if len(view) else 0


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _write_bounced(fd: int, view: memoryview, offset: int, bounce: mmap.mmap) -> None:
    """Copy into aligned memory, padded with zeros to a page; the padding is cut off by ftruncate."""
    length = len(view)
    padded = -(-length // PAGE_BYTES) * PAGE_BYTES
    target = np.frombuffer(bounce, dtype=np.uint8)
    np.copyto(target[:length], np.frombuffer(view, dtype=np.uint8))
    target[length:padded] = 0
    del target
    with memoryview(bounce) as whole, whole[:padded] as block:
        _write_all(fd, block, offset)


def _read_all(fd: int, start: int, out: memoryview, *, direct: bool = False) -> int:
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], start + done)
        done += count
        if count == 0 or (direct and done % 512):  # the end of the file: O_DIRECT rejects unaligned offsets
            break
    return done
