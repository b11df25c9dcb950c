"""Which samples went into which state, along each lineage; and in which numbers became bad."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flashckpt.sampler import ElasticSampler
from simulation.states import BATCH, SAMPLES, State
from simulation.watches import Violation


class Samples:
    """The truth about the data of one simulation.

    Attributes:
        truth: The state and the world of each snapshot that was ever begun.
    """

    def __init__(self) -> None:
        self.truth: dict[State, tuple[str, int]] = {}
        self._drawn: dict[str, list[int]] = {}  # by state: how often each sample was trained
        self._to_skip: dict[str, tuple[int, list[int]]] = {}  # by state: at which step samples are left out, and which
        self._bad: dict[str, int] = {}  # states in which numbers are NaN: of all ranks, or of that one alone

    def trained_on(
        self, before: str, chain: str, drawn: list[int], *, step: int, poison: int, skip: tuple[int, list[int]] | None
    ) -> None:
        """A step turns one state into the next with some samples, those of all ranks.

        Args:
            before, chain: The states.
            drawn: The samples.
            step: Number of the step.
            poison: Above 0: numbers become bad, of one rank, or of all.
            skip: The generation that begins here leaves these samples out, at that step.
        """
        if bad := -1 if before in self._bad else poison:
            self._bad[chain] = bad
        counts = list(self._drawn.get(before, [0] * SAMPLES))
        at, left_out = skip or self._to_skip.get(before, (0, list[int]()))
        if left_out and step >= at:
            _count(counts, left_out)
        elif left_out:
            self._to_skip[chain] = at, left_out
        _count(counts, drawn)
        if len(drawn) != BATCH or max(counts) - min(counts) > 1:
            raise Violation("no sample twice or lost", f"{sorted(drawn)} after {sum(counts) - len(drawn)} samples")
        self._drawn[chain] = counts

    def is_bad(self, state: State, rank: int | None = None) -> bool:
        """Whether numbers are NaN in a snapshot, or in what one rank holds of it."""
        chain, world = self.truth[state]
        bad = self._bad.get(chain, 0)
        return bad != 0 if rank is None else bad < 0 or (bad > 0 and bad % world == rank)


def _count(counts: list[int], samples: Sequence[int]) -> None:
    for sample in samples:
        counts[sample] += 1


def sampler_at(data: str, rank: int = 0, world: int = 1) -> ElasticSampler:
    """Return the sampler of a rank at a recorded position; at the beginning without one."""
    made = ElasticSampler(SAMPLES, dp_rank=rank, dp_size=world, global_batch_size=BATCH)
    if data:
        made.load_state_dict(json.loads(data))
    return made


def left_out(done: int, data: str, steps: tuple[int, int]) -> tuple[int, list[int]] | None:
    """Return the samples of the steps that a start leaves out, in the order of one reader, and the step at which they would come."""
    first, last = steps
    if not data or last <= done:
        return None
    reader, found = sampler_at(data), list[int]()
    for step in range(done + 1, last + 1):
        ids = reader.next_ids().tolist()
        reader.commit()
        found += ids if step >= first else []
    return max(first, done + 1), found
