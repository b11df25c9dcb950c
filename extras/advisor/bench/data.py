"""Data to measure with: random mantissas and signs, exponents as trained weights have them.

Zeros would be compressed or deduplicated away by disks and servers; uniform random bytes would be NaNs.
"""

from __future__ import annotations

import numpy as np

_STEP_BYTES = 4 << 20


def _exponents() -> np.ndarray:
    """Return 256 exponents, geometric below that of 2^-5: half of the values within a factor of two, and so on."""
    below = np.floor(-np.log2((np.arange(256) + 0.5) / 256)).astype(np.uint32)
    return (122 - below).astype(np.uint32)


def fill(buffer: memoryview, dtype: str, seed: int) -> None:
    """Fill `buffer` with values of `dtype` ("float32" or "bfloat16"), different for every seed."""
    rng = np.random.Generator(np.random.SFC64(seed))
    wide = dtype == "float32"
    word = np.dtype(np.uint32 if wide else np.uint16)
    shift = 23 if wide else 7
    table = (_exponents() << shift).astype(word)
    keep = word.type(~(0xFF << shift) & (2 ** (8 * word.itemsize) - 1))
    out = np.frombuffer(buffer, np.uint8)
    whole = out.nbytes // word.itemsize
    words = out[: whole * word.itemsize].view(word)
    step = _STEP_BYTES // word.itemsize
    for start in range(0, whole, step):
        part = words[start : start + step]
        raw = np.frombuffer(rng.bytes(part.nbytes), word)
        np.bitwise_or(raw & keep, table[(raw >> shift) & 0xFF], out=part)
    out[whole * word.itemsize :] = 0
