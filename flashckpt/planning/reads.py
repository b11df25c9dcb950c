"""Reads as values: one box from one row of one source, and many of them as columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.shard import Box

Ints = npt.NDArray[np.int64]


class SourceRow(NamedTuple):
    """A row of one of the tables that are read from."""

    source: int
    row: int


class Gap(NamedTuple):
    """A part of a wanted shard that is in no source."""

    target: int
    box: Box


class Read(NamedTuple):
    """One box that is read from one row of one source into one wanted shard.

    Attributes:
        target: Row of the wanted table.
        source: Index of the source table.
        row: Row of that table.
        box: In the index space of the global tensor.
    """

    target: int
    source: int
    row: int
    box: Box


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """Reads as columns; see `ReadPlan`."""

    target: Ints
    source: Ints
    row: Ints
    offsets: Ints
    lengths: Ints

    def of(self, source: int) -> Reads:
        """Return the same reads as those of source `source`."""
        return replace(self, source=np.full(len(self.target), source, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Reads], width: int) -> Reads:
        """Return several one after another."""
        flat = {
            name: np.concatenate([np.zeros(0, np.int64), *(getattr(part, name) for part in parts)])
            for name in ("target", "row", "source")
        }
        wide = {
            name: np.concatenate([np.zeros((0, width), np.int64), *(getattr(part, name) for part in parts)])
            for name in ("offsets", "lengths")
        }
        return cls(**flat, **wide)

    @classmethod
    def of_single(cls, reads: Sequence[Read], width: int) -> Reads:
        """Return single reads as columns."""
        offsets, lengths = np.zeros((len(reads), width), np.int64), np.ones((len(reads), width), np.int64)
        for k, read in enumerate(reads):
            ndim = len(read.box.offsets)
            offsets[k, :ndim], lengths[k, :ndim] = read.box
        columns = np.array([read[:3] for read in reads], np.int64).reshape(-1, 3)
        return cls(target=columns[:, 0], source=columns[:, 1], row=columns[:, 2], offsets=offsets, lengths=lengths)
