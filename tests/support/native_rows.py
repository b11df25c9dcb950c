"""What the tests of the native copy share: levels, rows of addresses, pages whose rights change.

Importing this puts the build under test in place: see support.sanitized.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from support import sanitized

__all__ = ["LEVELS", "PAGE", "RANDOM", "aligned", "at", "every_level", "pages", "protect", "rows", "sanitized", "xxh3"]

LEVELS = sanitized.levels()
PAGE = mmap.PAGESIZE
every_level = pytest.mark.parametrize("level", LEVELS)
RANDOM = np.random.default_rng(7).integers(0, 256, (4 << 20) + 4096, dtype=np.uint8)


def at(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def xxh3(array: np.ndarray) -> int:
    """Return what the xxhash package says of an array's bytes."""
    return int(xxhash.xxh3_64_intdigest(array.data))


def rows(*them: tuple[int, int, int]) -> np.ndarray:
    return np.array(them, np.int64).reshape(-1, 3)


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Return zeroes that start at a multiple of `alignment`."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    return raw[-at(raw) % alignment :][:nbytes]


@pytest.fixture
def pages() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 4 * PAGE) as memory:
        yield memory


def protect(address: int, nbytes: int, rights: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), rights) == 0
