"""Figures of the numbers in a row, gathered by the pass that digests it: per chunk the largest magnitude, and squares.

In: bytes and how they are read. Out: FIGURES, and in Python what the C part (numbers.c) finds. No torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.core.figures import TensorFigures
from flashckpt.core.shard_table import ShardTable

FIGURES = np.dtype([("top", "<u8"), ("squares", "<f8")])
"""Of one chunk: the largest bit pattern without the sign, which orders magnitudes, infinity and NaN behind all numbers;
and the sum of squares: of a chunk of up to 4 KiB, or of 128 numbers in every 64 KiB, in proportion to the whole."""
_ORDER = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
)
KINDS = {name: 1 + place for place, name in enumerate(_ORDER)} | {"complex32": 3, "complex64": 2, "complex128": 1}
"""The number by which the C part knows how bytes are read (`enum kind`); a complex number is two. 0, no figures: any other."""
_WIDTHS = (1, 8, 4, 2, 2, 1, 1, 1, 1)
_FIRST_NAN = (0, 0x7FF << 52, 0xFF << 23, 0x1F << 10, 0xFF << 7, 0x7C, 0x7F, 0xFF, 0xFF)  # or infinity
_WHOLE, _APART, _NUMBERS = 4096, 65536, 128  # as in copy.c
Patterns = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def kind_of(dtype: object) -> int:
    """Return how the bytes of a dtype are read: by its name, which torch says behind `torch.`."""
    return KINDS.get(str(dtype).removeprefix("torch."), 0)


def kinds_of(table: ShardTable) -> npt.NDArray[np.uint8]:
    """Return how the bytes of each row are read."""
    kinds: npt.NDArray[np.uint8] = np.array([kind_of(name) for name in table.dtypes], np.uint8)[table.dtype_id]
    return kinds


def figures_of_rows(table: ShardTable, chunks: npt.NDArray[np.void]) -> TensorFigures:
    """Return the figures of the rows of a table from those of their chunks; nobody is suspect yet."""
    found = TensorFigures.unknown(len(table))
    kinds = kinds_of(table)
    held = np.flatnonzero(table.nbytes > 0)  # their chunks lie one after another
    if not held.size:
        return found
    first = table.first_chunk[held]
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.add.reduceat(chunks["squares"], first)
        found.largest[held] = _narrowed(largest(kinds[held], np.maximum.reduceat(chunks["top"], first)))
        found.norm[held] = np.where(kinds[held] > 0, _narrowed(np.sqrt(squares)), 0)
    return found


def _narrowed(values: Floats) -> npt.NDArray[np.float32]:
    """Return float32 in which what was finite still is."""
    most = np.finfo(np.float32).max
    narrow = values.astype(np.float32)
    wide = np.isinf(narrow) & np.isfinite(values)
    narrow[wide] = np.copysign(most, values[wide])
    return narrow


def largest(kinds: npt.NDArray[np.uint8], tops: npt.NDArray[np.uint64]) -> Floats:
    """Return the magnitude that each pattern is; infinity for one that is not finite, -1 where the kind is 0."""
    found = np.full(len(kinds), -1.0)
    for kind in {*kinds.tolist()} - {0}:
        rows = kinds == kind
        finite = tops[rows] < _FIRST_NAN[kind]
        found[rows] = np.where(finite, _values(kind, np.where(finite, tops[rows], 0)), np.inf)
    return found


def look(kind: int, chunk: Any) -> tuple[int, float]:
    """Return the figures of one chunk, as numbers.c does."""
    width = _WIDTHS[kind]
    bits = np.frombuffer(chunk, f"<u{width}")
    ordered, sign = bits.view(f"<i{width}"), 1 << (8 * width - 1)
    top = max(int(ordered.max()), int(bits.max()) % sign)  # of the positive and of the negative ones: no copy is made
    if _FIRST_NAN[kind] == 0xFF and ordered.min() == -sign:
        top = 0xFF
    whole = bits.nbytes <= _WHOLE
    some = bits if whole else np.concatenate([bits[at : at + _NUMBERS] for at in range(0, len(bits), _APART // width)])
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.square(_values(kind, some % bits.dtype.type(sign))).sum()) * (len(bits) / len(some))
    return top, squares


def _values(kind: int, bits: Patterns) -> Floats:
    """Return the numbers of patterns without sign."""
    if kind <= 2:
        return bits.astype(f"<u{_WIDTHS[kind]}").view(f"<f{_WIDTHS[kind]}").astype(np.float64)
    if kind == 4:
        return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
    # as float16 whose exponent is read as that of float32: no pattern of it is special then, which fnuz types need
    shift, scale = {3: (13, 0), 5: (21, 0), 6: (20, 8), 7: (21, -1), 8: (20, 7)}[kind]
    values: Floats = (bits.astype("<u4") << np.uint32(shift)).view("<f4").astype(np.float64) * 2.0 ** (112 + scale)
    return values
