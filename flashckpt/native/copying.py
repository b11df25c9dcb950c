"""The one function, and the choice of what runs it."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.environment import env
from flashckpt.errors import ConfigError
from flashckpt.native import fallback
from flashckpt.native.descriptors import (
    Digests,
    Figures,
    Kinds,
    Refusal,
    error_of,
    figures_of,
    first_chunks_of,
    output_of,
    rows_of,
)

try:
    from flashckpt.native import _copy as _built
except ImportError:  # installed without a compiler, or on a machine that the C part does not know
    part: Any = None
else:
    part = _built if hasattr(_built, "kinds") else None  # one that was built of older sources takes other arguments
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
    kinds: Kinds | None = None,
    figures: Figures | None = None,
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
        kinds: uint8[n]: how the numbers of each row are read, of `descriptors.KINDS`; 0 for a row without figures. None: no figures.
        figures: `descriptors.FIGURES` of the same length as `digests`, that figures go to.

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
    noted = figures_of(kinds, figures, rows, out)
    name = choose_level(level)
    if name == PYTHON:
        finding = fallback.run(rows, first, out, check=check, noted=noted)
    else:
        at = [0 if array is None else array.ctypes.data for array in (rows, first, out, *(noted or (None, None)))]
        room = 0 if out is None else len(out)
        finding = Refusal(*part.run(NATIVE.index(name), at[0], len(rows), at[1], at[2], room, 0, at[3], at[4], check))
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
    is_first = np.ones(len(begin), np.bool_)  # of a row: chunks that follow each other are read side by side
    is_first[1:] = (begin[1:] != begin[:-1] + CHUNK_BYTES) | (size[:-1] != CHUNK_BYTES)
    first = np.flatnonzero(is_first)
    rows = np.column_stack((begin[first] + held.ctypes.data, np.zeros_like(first), np.add.reduceat(size, first)))
    return copy_and_digest(rows, check=False)


def choose_level(level: str | None) -> str:
    """Return the level of a name, or for None what FLASHCKPT_COPY names or the best one. Raises as `implementation`."""
    if name := level or env.FLASHCKPT_COPY:
        if name not in (usable := levels()):
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
    return NATIVE[-1] if NATIVE else PYTHON


# -- One copy that two threads do together: each takes the next row until none is left -----------------------------

_NOT_CHECKED = -1


class SharedCopy:
    """A `copy_and_digest` of many rows that another thread may join while it is under way.

    Args:
        descriptors: As `copy_and_digest`.
        digests: uint64[k] that digests go to.
        first_chunks: int64[n], needed: rows are not taken in order.
        level, kinds, figures: As `copy_and_digest`.

    Raises:
        DescriptorError: A form is wrong.
        ConfigError: There is no such level here.
    """

    def __init__(
        self,
        descriptors: Any,
        digests: Digests,
        first_chunks: Any,
        *,
        level: str | None = None,
        kinds: Kinds | None = None,
        figures: Figures | None = None,
    ) -> None:
        self._rows = rows_of(descriptors)
        first = first_chunks_of(first_chunks, self._rows)
        assert first is not None  # the digests of rows that are taken in any order have their places
        self._first = first
        self._digests = output_of(digests, self._rows, self._first)
        self._noted = figures_of(kinds, figures, self._rows, self._digests)
        self._level = choose_level(level)
        self._next = np.full(1, _NOT_CHECKED, np.int64)
        self._numbers = iter(range(len(self._rows)))
        self._checked, self._is_refused = threading.Event(), False

    def run(self, *, check: bool = True) -> None:
        """Check all rows, open them to whoever joins, and take rows; call it once, and `join` from other threads.

        Rows that another thread has taken may still be on their way when this returns.

        Raises:
            DescriptorError, UnusableMemoryError: As `copy_and_digest`; nothing was copied, by nobody.
        """
        try:
            finding = (
                self._run_python(check=check)
                if self._level == PYTHON
                else Refusal(*part.run(*self._native(check=check)))
            )
        finally:
            if self._next[0] == _NOT_CHECKED:  # it did not get there: nobody may wait for it
                self._next[0] = len(self._rows)
        if finding.problem:
            raise error_of(finding, self._rows)

    def join(self) -> int:
        """Take rows too, until none is left; wait for their check if `run` has begun or will at once. Returns bytes copied."""
        if self._level != PYTHON:
            return int(part.join(*self._native(check=False)))
        self._checked.wait()
        return 0 if self._is_refused else self._take_python()

    def _native(self, *, check: bool) -> tuple[Any, ...]:
        rows, digests = self._rows, self._digests
        at = (rows.ctypes.data, len(rows), self._first.ctypes.data, digests.ctypes.data, len(digests))
        noted = self._noted
        kinds, figures = (0, 0) if noted is None else (noted.kinds.ctypes.data, noted.figures.ctypes.data)
        return (NATIVE.index(self._level), *at, self._next.ctypes.data, kinds, figures, check)

    def _run_python(self, *, check: bool) -> Refusal:
        self._is_refused = True  # unless the check comes to its end
        try:
            finding, _ = fallback.checked(self._rows, self._first, self._digests, check=check)
            self._is_refused = bool(finding.problem)
        finally:
            self._checked.set()
        if not finding.problem:
            self._take_python()
        return finding

    def _take_python(self) -> int:
        return fallback.copy_rows(self._rows, self._first, self._digests, self._numbers, self._noted)


# -- Walks over very many Python objects by the C part; the callers have the same in Python for where there is none

_same_members = getattr(part, "same_members", None)  # a C part that was built of older sources lacks both
_read_counters = getattr(part, "read_counters", None)


class CounterPath(NamedTuple):
    """How memory leads from a Python object to a counter of 4 bytes: bytes from the start of each to the next one's address.

    Attributes:
        to_body: From the object.
        to_counter: From what is there.
        to_value: From what is there.
    """

    to_body: int
    to_counter: int
    to_value: int


def same_members(dicts: list[Any], lists: list[Any], held: list[Any]) -> bool | None:
    """Return whether the values of the dicts, then the elements of the lists, are the very objects of `held`, in order.

    Returns:
        None where the C part cannot say it: it does not run here, or a container is of a class that may iterate in its own way.
    """
    if _same_members is None or not is_native():
        return None
    found: bool | None = _same_members(dicts, defaultdict, lists, held)
    return found


def read_counters(objects: list[Any], path: CounterPath) -> npt.NDArray[np.uint32] | None:
    """Return the counter that `path` leads to from each object; None where one leads nowhere, or there is no C part.

    The path must have been found to be right for objects of this kind: memory is read without being asked for.
    """
    if _read_counters is None:
        return None
    found = np.empty(len(objects), np.uint32)
    return found if _read_counters(objects, *path, found.ctypes.data) else None
