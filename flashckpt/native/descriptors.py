"""The arguments of a copy and the figures it notes: their form, and the error for each thing that can be wrong with a row."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.schema import TensorFigures
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import FlashckptError, SharedMemoryError

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


@functools.lru_cache(maxsize=1)  # the same table at each snapshot
def _held_of(table: ShardTable) -> tuple[Integers, npt.NDArray[np.uint8], Integers]:
    """Return the rows that have bytes, how each is read and its first chunk: their chunks lie one after another."""
    held = np.flatnonzero(table.nbytes > 0)
    return held, kinds_of(table)[held], table.first_chunk[held]


def figures_of_rows(table: ShardTable, chunks: npt.NDArray[np.void]) -> TensorFigures:
    """Return the figures of the rows of a table from those of their chunks; nobody is suspect yet."""
    found = TensorFigures.unknown(table.nbytes.size)
    held, kinds, first = _held_of(table)
    if not held.size:
        return found
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.add.reduceat(chunks["squares"], first)
        found.largest[held] = _narrowed(largest(kinds, np.maximum.reduceat(chunks["top"], first)))
        found.norm[held] = np.where(kinds > 0, _narrowed(np.sqrt(squares)), 0)
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


Integers = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
Kinds = npt.NDArray[np.uint8]
Figures = npt.NDArray[np.void]


class DescriptorError(FlashckptError):
    """The rows of a copy contradict themselves: a fault of the program that made them, found before a byte was copied."""


class UnusableMemoryError(FlashckptError):
    """Memory of a copy is not mapped, or not with the rights it needs; found before a byte was copied."""

    exit_code = SharedMemoryError.exit_code


class Refusal(NamedTuple):
    """What a check found: an index into PROBLEMS (0: nothing), the row, and the other row where there are two."""

    problem: int
    row: int = 0
    other: int = 0


class Noted(NamedTuple):
    """How the numbers of each row are read, and where the figures of its chunks go."""

    kinds: Kinds
    figures: Figures


@dataclass(frozen=True, slots=True)
class Problem:
    """What an error says about a row."""

    kind: type[FlashckptError]
    problem: str
    expected: str


_FORM, _MEMORY = DescriptorError, UnusableMemoryError
PROBLEMS: tuple[Problem | None, ...] = (
    None,
    Problem(_FORM, "a size is negative", "0 bytes or more"),
    Problem(_FORM, "an address is outside the address space", "a source above 0, a target of 0 or more"),
    Problem(_FORM, "there is nothing to do for a row", "a target, or digests"),
    Problem(_FORM, "digests would lie outside their array", "room for one digest per MiB of the row"),
    Problem(_FORM, "a target lies over a source", "sources and targets that are apart"),
    Problem(_FORM, "two targets lie over each other", "targets that are apart"),
    Problem(_MEMORY, "a source is not mapped", "memory of this process"),
    Problem(_MEMORY, "a source cannot be read", "memory that may be read"),
    Problem(_MEMORY, "a source lies behind the end of its file", "a file that was not cut short"),
    Problem(_MEMORY, "a target is not mapped", "memory of this process"),
    Problem(_MEMORY, "a target is read-only", "memory that may be written"),
    Problem(_MEMORY, "a target lies behind the end of its file", "a file that was not cut short"),
)
"""By number, as `enum problem` of check.h has them."""
(
    FINE,
    NEGATIVE_SIZE,
    BAD_ADDRESS,
    NOTHING_TO_DO,
    DIGEST_OUTSIDE,
    OVERLAP_SOURCE,
    OVERLAP_TARGET,
    SOURCE_UNMAPPED,
    SOURCE_UNREADABLE,
    SOURCE_CUT_SHORT,
    TARGET_UNMAPPED,
    TARGET_READ_ONLY,
    TARGET_CUT_SHORT,
) = range(len(PROBLEMS))


def rows_of(descriptors: Any) -> Integers:
    """Return the rows as an array; DescriptorError where it is not a contiguous int64[n, 3]."""
    rows = np.asarray(descriptors)
    if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != 3 or not rows.flags.c_contiguous:
        raise _wrong_form("the descriptors", rows, "int64[n, 3], contiguous: source, target, bytes")
    return rows


def first_chunks_of(first_chunks: Any, rows: Integers) -> Integers | None:
    """Return where each row's digests start; DescriptorError where it is not a contiguous int64[n]."""
    if first_chunks is None:
        return None
    first = np.asarray(first_chunks)
    if first.dtype != np.int64 or first.shape != (len(rows),) or not first.flags.c_contiguous:
        raise _wrong_form("the indexes of digests", first, f"int64[{len(rows)}], contiguous: one per row")
    return first


def output_of(digests: Any, rows: Integers, first: Integers | None) -> Digests:
    """Return the array that digests go to, a new one for None; DescriptorError where it cannot be written to."""
    if digests is None:
        counts = -(-np.maximum(rows[:, 2], 0) // CHUNK_BYTES)
        total = int(counts.sum()) if first is None else int((first + counts)[first >= 0].max(initial=0))
        return np.zeros(total, np.uint64)
    out = np.asarray(digests)
    if out.dtype != np.uint64 or out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        raise _wrong_form("the array of digests", out, "uint64[k], contiguous, writable")
    return out


def figures_of(kinds: Any, figures: Any, rows: Integers, digests: Digests | None) -> Noted | None:
    """Return what figures are noted of and where, None for none; DescriptorError where they do not fit rows and digests."""
    if kinds is None or figures is None or digests is None:
        return None
    read, out = np.asarray(kinds), np.asarray(figures)
    if read.dtype != np.uint8 or read.shape != (len(rows),) or not read.flags.c_contiguous:
        raise _wrong_form("the kinds of rows", read, f"uint8[{len(rows)}], contiguous: one per row")
    if out.dtype != FIGURES or out.shape != digests.shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise _wrong_form("the array of figures", out, f"{FIGURES}[{len(digests)}], contiguous, writable")
    return Noted(read, out)


def _wrong_form(what: str, array: npt.NDArray[Any], expected: str) -> DescriptorError:
    form = f"{array.dtype}{list(array.shape)}"
    if not array.flags.c_contiguous:
        form += ", not contiguous"
    if not array.flags.writeable:
        form += ", read-only"
    return DescriptorError(
        f"{what} of a copy have another form", found=form, expected=expected, state="Nothing was copied."
    )


def error_of(finding: Refusal, rows: Integers) -> FlashckptError:
    """Return the error for what a check found."""
    problem = PROBLEMS[finding.problem]
    assert problem is not None
    found = _row_text(rows, finding.row)
    if finding.other != finding.row:
        found += f"; {_row_text(rows, finding.other)}"
    return problem.kind(
        f"{problem.problem} in a copy",
        found=found,
        expected=problem.expected,
        state="Nothing was copied.",
    )


def _row_text(rows: Integers, row: int) -> str:
    source, target, nbytes = rows[row].tolist()
    return f"row {row} of {len(rows)}: {nbytes} bytes from {source:#x} to {target:#x}"
