"""Which rank persists which part of replicated state: each byte once, equally many bytes per rank. Pure.

The tensors of one replica set are ordered by name, each with the bytes of its optimizer state, and the
sequence is cut into as many equal parts as there are ranks. Every rank of the set computes the same
partition from the same list. At most one tensor per cut is divided, along its first dimension, and what a
rank writes is contiguous in its slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CUT_BYTES = 256 << 10
"""Tensors below this size are assigned whole: the cut moves to the nearer end of such a tensor."""
LEAST_PIECE_BYTES = 128 << 10
"""No cut leaves a smaller piece: pieces above 64 KiB start on their own page in slot and pack."""
ROW_BYTES = 256 << 20
"""Boxes above this size are persisted in several rows, so that no pack is larger than a pack may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePart:
    """One tensor of a replica set.

    Attributes:
        name: Unique in the set.
        rows: Places where it can be divided, plus one: the length of the dimension that is cut.
        nbytes: Bytes of the tensor on each rank.
        weight: Bytes that follow it: its own and those of its optimizer state.
    """

    name: str
    rows: int
    nbytes: int
    weight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteShare:
    """What one rank of the set persists of a tensor: rows `start` to `stop` of the dimension that is cut."""

    start: int
    stop: int
    writer: int


def cut_dimension(lengths: Sequence[int]) -> int:
    """Return the dimension along which a box is cut: the first one longer than 1, so that pieces are contiguous."""
    for dim, length in enumerate(lengths):
        if length > 1:
            return dim
    return 0


def partition_writes(parts: Sequence[WritePart], writers: int) -> dict[str, tuple[WriteShare, ...]]:
    """Return for each tensor which of `writers` ranks persists which of its rows; the order of `parts` does not matter.

    The largest load exceeds the mean by less than CUT_BYTES (weighted as the tensor), or one row of a cut tensor.
    """
    total = sum(part.weight for part in parts)
    found: dict[str, tuple[WriteShare, ...]] = {}
    begin = writer = 0
    for part in sorted(parts, key=lambda part: part.name):
        shares: list[WriteShare] = []
        at = 0
        while writer + 1 < writers and (goal := total * (writer + 1) // writers) < begin + part.weight:
            stop = _cut(part, goal - begin, at)
            if stop > at:
                shares.append(WriteShare(start=at, stop=stop, writer=writer))
            at, writer = stop, writer + 1
        if at < part.rows or not shares:
            shares.append(WriteShare(start=at, stop=part.rows, writer=writer))
        found[part.name] = tuple(shares)
        begin += part.weight
    return found


def _cut(part: WritePart, goal: int, at: int) -> int:
    """Return the row, `at` or later, before which `part` is cut so that about `goal` of its weight precedes the cut."""
    if part.nbytes < CUT_BYTES:
        return part.rows if 2 * goal >= part.weight else at
    row = (2 * goal * part.rows + part.weight) // (2 * part.weight)
    least = -(-LEAST_PIECE_BYTES * part.rows // part.nbytes)
    if row - at < least:
        return at
    return part.rows if part.rows - row < least else row


def split_rows(rows: int, nbytes: int, limit_bytes: int = ROW_BYTES) -> list[tuple[int, int]]:
    """Return (start, stop) of the fewest equal runs of rows of at most `limit_bytes`; single rows if one is larger."""
    pieces = max(1, min(rows, -(-nbytes // limit_bytes)))
    if rows and math.ceil(rows / pieces) * nbytes > limit_bytes * rows:  # rows do not divide evenly
        pieces = min(rows, math.ceil(rows / max(1, limit_bytes * rows // nbytes)))
    return [(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]
