"""What the numbers of a snapshot are, per row of its manifest: magnitude, norm, and whether they became non-finite. Pure.

An optional record: a manifest of an earlier release has none, and an earlier release leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class TensorFigures(NamedTuple):
    """One entry per row of a table.

    Attributes:
        largest: The largest magnitude; infinity where some number is not finite, -1 where nothing is known.
        norm: The square root of the sum of squares.
        suspect: Whether it holds numbers that are not finite, and a tensor of that name did not before.
    """

    largest: Floats
    norm: Floats
    suspect: npt.NDArray[np.bool_]

    @classmethod
    def unknown(cls, rows: int) -> TensorFigures:
        """Return those of rows of which nothing is known."""
        return cls(np.full(rows, -1, np.float32), np.zeros(rows, np.float32), np.zeros(rows, np.bool_))

    def sizes(self, wanted: Any = True) -> tuple[float, float]:
        """Return the norm and the largest magnitude of all wanted rows of which both are known and finite; 0 where none is."""
        at = (self.largest >= 0) & np.isfinite(self.largest) & np.isfinite(self.norm) & wanted
        squares = np.square(self.norm[at], dtype=np.float64).sum()
        return float(np.sqrt(squares)), float(self.largest[at].max(initial=0.0))

    def take(self, rows: Any) -> TensorFigures:
        """Return those of some rows."""
        at = np.asarray(rows, np.int64)
        return TensorFigures(self.largest[at], self.norm[at], self.suspect[at])

    def packed(self) -> dict[str, Any]:
        """Return them as msgpack types."""
        largest, norm = (np.ascontiguousarray(one, "<f4").tobytes() for one in (self.largest, self.norm))
        return {"largest": largest, "norm": norm, "suspect": np.flatnonzero(self.suspect).tolist()}


def figures_from(packed: dict[Any, Any], rows: int) -> TensorFigures:
    """Return what `TensorFigures.packed` gave; ValueError, TypeError or KeyError where it does not fit so many rows."""
    largest, norm = (np.frombuffer(packed[name], "<f4") for name in ("largest", "norm"))
    suspect = np.zeros(rows, np.bool_)
    if not len(largest) == len(norm) == rows:
        raise ValueError(f"figures of {len(largest)} and {len(norm)} rows for {rows}")
    listed = packed["suspect"]
    if type(listed) is not list or not all(type(row) is int and 0 <= row < rows for row in listed):
        raise ValueError("a suspect row is not one of the table")
    suspect[listed] = True
    return TensorFigures(largest, norm, suspect)


def stacked(parts: Sequence[tuple[TensorFigures | None, int]]) -> TensorFigures | None:
    """Return those of several tables one after another, each with its number of rows; None where no table has any."""
    if all(figures is None for figures, _ in parts):
        return None
    found = [TensorFigures.unknown(rows) if figures is None else figures for figures, rows in parts]
    return TensorFigures(*(np.concatenate(column) for column in zip(*found, strict=True)))
