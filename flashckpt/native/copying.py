"""The one function, and the choice of what runs it."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashckpt.environment import env
from flashckpt.errors import ConfigError
from flashckpt.native import fallback
from flashckpt.native.descriptors import Digests, Refusal, error_of, first_chunks_of, output_of, rows_of

try:
    from flashckpt.native import _copy as _built
except ImportError:  # installed without a compiler, or on a machine that the C part does not know
    part: Any = None
else:
    part = _built
NATIVE: tuple[str, ...] = part.levels() if part is not None else ()

LEVEL_VARIABLE = "FLASHCKPT_COPY"
"""Environment variable that chooses a level by name, for measurements and for machines where the best one misbehaves."""
PYTHON = "python"
IMPLEMENTATIONS = ("", PYTHON, "native plain", "native avx2", "native avx512", "native neon", "native avx2-near")
"""Every answer of `implementation`, at the place that is its number in a control row; 0: not known. Only ever appended to."""


def levels() -> tuple[str, ...]:
    """Return the levels that work here, the best one last: "python", then those of the C part if it was built."""
    return (PYTHON, *NATIVE)


def implementation() -> str:
    """Return what copies: "python", or "native" and one of the C part's `levels` ("native avx512").

    Raises:
        ConfigError: FLASHCKPT_COPY names a level that does not work here.
    """
    name = choose_level(None)
    return name if name == PYTHON else f"native {name}"


def is_native() -> bool:
    """Return whether the C part copies. Raises as `implementation`."""
    return choose_level(None) != PYTHON


def copy_and_digest(
    descriptors: Any,
    *,
    digests: Digests | None = None,
    first_chunks: Any = None,
    digest: bool = True,
    check: bool = True,
    level: str | None = None,
) -> Digests:
    """Copy rows of memory and return their digests: the bytes are read once, and the GIL is not held.

    Every chunk of 1 MiB of a row, counted from the row's start, gets the digest that `core.digest` gives it. It is taken
    of the source, right behind the copy: a source that somebody writes meanwhile does not verify. All bytes are visible to
    other processes when this returns.

    Args:
        descriptors: int64[n, 3], contiguous: address of the source, address of the target (0: nothing is copied, the
            source is digested only), bytes. Must not change until this returns, nor may the memory go away.
        digests: uint64[k] that digests go to; None makes one that is large enough.
        first_chunks: int64[n]: per row the index of its first digest, -1 for a row that is copied only. None: the
            digests of all rows one behind another.
        digest: False copies only.
        check: Whether to compare the rows with this process's map of its memory, about half a millisecond per call. Leave
            it out only for memory that an earlier call has checked.
        level: What runs; None chooses the best one here, or what FLASHCKPT_COPY names.

    Returns:
        uint64[k]: `digests`, or the array made for None; empty without digests.

    Raises:
        DescriptorError: A form, size, address or index is wrong, or a target overlaps a source or another target.
        UnusableMemoryError: Memory is not mapped, not readable or writable, or its file was cut short before the call. One that is
            unmapped or cut short while this runs ends the process, as any other access would.
        ConfigError: There is no such level here.
    """
    rows = rows_of(descriptors)
    first = first_chunks_of(first_chunks, rows) if digest else None
    out = output_of(digests, rows, first) if digest else None
    name = choose_level(level)
    if name == PYTHON:
        finding = fallback.run(rows, first, out, check=check)
    else:
        at = [0 if array is None else array.ctypes.data for array in (rows, first, out)]
        room = 0 if out is None else len(out)
        finding = Refusal(*part.run(NATIVE.index(name), at[0], len(rows), at[1], at[2], room, 0, check))
    if finding.problem:
        raise error_of(finding, rows)
    return out if out is not None else np.zeros(0, np.uint64)


def digest_ranges(memory: Any, starts: Any, sizes: Any) -> Digests:
    """Return the digests of ranges of a buffer, those of one behind those of the other; raises as `copy_and_digest`.

    Args:
        memory: Contiguous bytes that this process has just read or written: they are not compared with its map of memory.
        starts: [n] byte where each range begins.
        sizes: [n] bytes of each.

    Raises:
        ValueError: A range is not in the buffer.
    """
    begin, size = np.asarray(starts, np.int64), np.asarray(sizes, np.int64)
    if not len(begin):
        return np.zeros(0, np.uint64)
    held = np.frombuffer(memory, np.uint8)
    if begin.min() < 0 or size.min() < 0 or (begin + size).max() > held.nbytes:
        raise ValueError(f"ranges to byte {(begin + size).max()} of a buffer of {held.nbytes} bytes")
    rows = np.column_stack((begin + held.ctypes.data, np.zeros_like(begin), size))
    return copy_and_digest(rows, check=False)


def choose_level(level: str | None) -> str:
    """Return the level of a name, or for None what FLASHCKPT_COPY names or the best one. Raises as `implementation`."""
    usable = levels()
    if name := level or env.FLASHCKPT_COPY:
        if name not in usable:
            raise ConfigError(
                f"unsupported copy implementation {name!r} on this CPU",
                found=f"{LEVEL_VARIABLE}={name}" if level is None else f"level={name!r}",
                expected=" or ".join(usable),
                state="Nothing was copied.",
                remedy=f"unset {LEVEL_VARIABLE}: the best one is chosen"
                if level is None
                else "leave it out: the best one is chosen",
            )
        return name
    return usable[-1]
