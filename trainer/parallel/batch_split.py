"""How the global batch of a step is cut into micro-batches of data-parallel replicas, whether it divides or not. Pure.

A row is a place in a micro-batch. Rows that are left over hold no sample: they have tokens but no targets, so they
weigh nothing, and the mean over the step is the mean over its samples.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that take whole rounds of micro-batches."""
FILLED = ("1F1B", "DualPipeV")
"""Schedules that take at least as many micro-batches as stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Which numbers of micro-batches a pipeline takes."""

    schedule: str
    pp: int
    stages: int

    def take(self, micro_batches: int) -> bool:
        """Return whether the schedule runs so many micro-batches."""
        if self.pp == 1:
            return True
        if self.schedule in WHOLE_ROUNDS and micro_batches % max(1, micro_batches // self.pp):
            return False
        return micro_batches >= (self.stages if self.schedule in FILLED else 1)


def split_batch(global_batch: int, replicas: int, micro_batch: int, rounds: Rounds) -> tuple[int, int]:
    """Return the micro-batches of each replica in a step, and the rows of each micro-batch.

    A replica has the ceiling of its share of the samples. It cuts them into the fewest micro-batches of at most
    `micro_batch` rows that the pipeline takes, all with equally many rows.
    """
    local = -(-global_batch // replicas)
    count = -(-local // micro_batch)
    while not rounds.take(count):
        count += 1
    return count, -(-local // count)
