"""One copy that two threads do together: each takes the next row until none is left."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from flashckpt.native import fallback
from flashckpt.native.copying import NATIVE, PYTHON, choose_level, part
from flashckpt.native.descriptors import Digests, Refusal, error_of, first_chunks_of, output_of, rows_of

_NOT_CHECKED = -1


class SharedCopy:
    """A `copy_and_digest` of many rows that another thread may join while it is under way.

    Args:
        descriptors: As `copy_and_digest`.
        digests: uint64[k] that digests go to.
        first_chunks: int64[n], needed: rows are not taken in order.
        level: As `copy_and_digest`.

    Raises:
        DescriptorError: A form is wrong.
        ConfigError: There is no such level here.
    """

    def __init__(self, descriptors: Any, digests: Digests, first_chunks: Any, *, level: str | None = None) -> None:
        self._rows = rows_of(descriptors)
        first = first_chunks_of(first_chunks, self._rows)
        assert first is not None  # the digests of rows that are taken in any order have their places
        self._first = first
        self._digests = output_of(digests, self._rows, self._first)
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
        return (NATIVE.index(self._level), *at, self._next.ctypes.data, check)

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
        return fallback.copy_rows(self._rows, self._first, self._digests, self._numbers)
