"""How the samples of an iteration are dealt to replicas, batch by batch, whether a batch divides or not. Pure.

An *ordinal* counts the samples of an iteration over all replicas from 0. Sample i of a global batch goes to replica
i mod dp_size. A *row* counts what one replica hands out: its samples and, where a batch does not divide, samples of
the same batch once more, so that all replicas have equally many rows. Such padding is nobody's sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashckpt.sampler.order.permutation import Int64Array
from flashckpt.sampler.order.schedule import AlikeBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Alike batches as one replica sees it: where it begins, and the replica's rows in each of its batches."""

    batches: int
    size: int
    rows: int
    first_row: int
    first_ordinal: int

    @property
    def end_row(self) -> int:
        return self.first_row + self.batches * self.rows

    def place(self, row: int) -> tuple[int, int]:
        return divmod(row - self.first_row, self.rows)


class Dealing:
    """One replica's rows of an iteration.

    Args:
        runs: The batches of the iteration.
        rank: Index of the replica.
        replicas: Number of replicas.
        is_padded: Whether every replica gets the ceiling of a batch that does not divide; else only its samples.
    """

    def __init__(self, runs: Sequence[AlikeBatches], *, rank: int, replicas: int, is_padded: bool) -> None:
        self._rank, self._replicas = rank, replicas
        self._parts: list[_Part] = []
        row = ordinal = 0
        for run in runs:
            own = samples_of(run.size, rank, replicas)
            rows = -(-run.size // replicas) if is_padded else own
            if rows:
                part = _Part(batches=run.batches, size=run.size, rows=rows, first_row=row, first_ordinal=ordinal)
                self._parts.append(part)
                row = part.end_row
            ordinal += run.batches * run.size
        self.rows, self.samples = row, ordinal
        uneven = [number for number, run in enumerate(runs) if run.size % replicas]
        is_short = not is_padded and bool(runs) and runs[-1].batches == 1
        self._is_even = not uneven or (is_short and uneven == [len(runs) - 1])  # one formula for all batches

    def ordinals(self, first: int, last: int) -> Int64Array:
        """Return the ordinals of the rows `first` to `last` (exclusive)."""
        if self._is_even:
            return np.arange(first, last, dtype=np.int64) * self._replicas + self._rank
        found = []
        for part in self._parts:
            rows = np.arange(max(first, part.first_row), min(last, part.end_row), dtype=np.int64) - part.first_row
            if len(rows):
                batch, row = np.divmod(rows, part.rows)
                sample = (row * self._replicas + self._rank) % part.size  # padding: the batch from its start again
                found.append(part.first_ordinal + batch * part.size + sample)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def reached(self, rows: int) -> int:
        """Return how many samples any replica can have handed out when this one has handed out so many rows."""
        if rows >= self.rows:
            return self.samples
        part = next(part for part in self._parts if rows < part.end_row)
        batch, row = part.place(rows)
        return part.first_ordinal + batch * part.size + min(row * self._replicas, part.size)

    def left_of_batch(self, row: int) -> tuple[int, int]:
        """Return the size of the batch of a row, and the rows of it from there on; (0, 0) behind the last row."""
        part = next((part for part in self._parts if row < part.end_row), None)
        return (0, 0) if part is None else (part.size, part.rows - part.place(row)[1])


def samples_of(size: int, rank: int, replicas: int) -> int:
    """Return how many samples of a batch go to a replica."""
    return max(0, -(-(size - rank) // replicas))


def micro_batches_of(size: int, replicas: int, micro: int) -> tuple[int, int]:
    """Return the number of micro-batches of a replica in a step, and the rows of each: `micro` at most, all alike."""
    rows = -(-size // replicas)
    count = -(-rows // micro)
    return count, -(-rows // count)


def weights_of(size: int, rank: int, replicas: int, micro: int) -> npt.NDArray[np.float64]:
    """Return what each row of a step weighs, (micro-batches, rows of each): 0 is padding, 1 where nothing is padded.

    The mean of loss times weight over the rows, the micro-batches and the replicas is the mean over the samples.
    """
    count, rows = micro_batches_of(size, replicas, micro)
    own = np.arange(count * rows) < samples_of(size, rank, replicas)
    return np.where(own, count * rows * replicas / size, 0.0).reshape(count, rows)
