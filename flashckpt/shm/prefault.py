"""Pages of this process's memory, created before they are needed: a first touch costs more than the copy after it.

Faulting memory in page by page runs at 1 to 2 GB/s, in one call at 4 or more, while warm memory is copied at 7 to 11.
Huge pages are not requested: 1.15 times as fast if the machine has them ready, 3 times as slow in a virtual machine
that must get them from its host first. Nothing here is needed for correctness: refusals of the kernel are ignored.
"""

from __future__ import annotations

import ctypes
from typing import Any

from flashckpt.core.superblock import PAGE

_POPULATE_READ, _POPULATE_WRITE = 22, 23
# not mmap.madvise: that one holds the GIL, and knows only its own mapping
_libc: Any = ctypes.CDLL(None, use_errno=True)


def populate(address: int, nbytes: int, *, write: bool = True) -> bool:
    """Map every page that [address, address + nbytes) touches; False where the kernel cannot (before 5.14).

    Args:
        address: Start, in bytes; need not be aligned.
        nbytes: Length.
        write: False maps what a file already holds without making it dirty, at half the cost.
    """
    return _advise(address // PAGE * PAGE, address + nbytes, _POPULATE_WRITE if write else _POPULATE_READ)


def is_mapped(address: int) -> bool:
    """Whether the page at `address` is mapped or cached."""
    seen = ctypes.c_ubyte(0)
    page = ctypes.c_void_p(address // PAGE * PAGE)
    return _libc.mincore(page, ctypes.c_size_t(PAGE), ctypes.byref(seen)) == 0 and bool(seen.value & 1)


def _advise(start: int, stop: int, advice: int) -> bool:
    return bool(_libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice) == 0)
