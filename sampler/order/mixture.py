"""Mixtures of data sets in fixed integer proportions, with the position as the only state.

Slots of the stream are dealt to the sources by a schedule that repeats after sum(weights) slots, each
source as evenly spaced as its weight allows. The number of slots of a source before a position is then a
closed form (whole periods times the weight, plus a table lookup), so each source's own counter, epoch and
shuffle follow from the position alone. Changed weights start a new segment at a position.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.order.permutation import Int64Array, derive_keys
from flashckpt.sampler.order.spans import SkippedSpans
from flashckpt.sampler.order.state import fingerprint_of
from flashckpt.sampler.order.stream import EpochStream, Order

MAX_PERIOD = 1 << 16


class Schedule:
    """Which source each slot belongs to, for one set of weights.

    Args:
        weights: Slots per period of each source; zero switches a source off.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = math.gcd(*weights) or 1
        self.weights = [weight // divisor for weight in weights]
        self.period = sum(self.weights)
        if min(weights) < 0 or not 0 < self.period <= MAX_PERIOD:
            raise ConfigError(
                "mixture weights cannot be scheduled",
                found=f"weights {list(weights)}",
                expected=f"integers of at least 0, not all 0, with a sum up to {MAX_PERIOD} (rounded percentages do)",
            )
        common = math.lcm(*(weight for weight in self.weights if weight))
        slots = sorted(  # the k-th of w slots is at (2k + 1) / 2w of the period
            ((2 * k + 1) * (common // weight), source)
            for source, weight in enumerate(self.weights)
            for k in range(weight)
        )
        self.source = np.array([source for _, source in slots], np.int64)
        self._before = np.zeros((len(weights), self.period + 1), np.int64)
        for source in range(len(weights)):
            np.cumsum(self.source == source, out=self._before[source, 1:])

    def count(self, source: int, slots: Int64Array) -> Int64Array:
        """Return how many of the first `slots` slots belong to `source`."""
        periods, rest = np.divmod(slots, self.period)
        return np.asarray(periods * self.weights[source] + self._before[source][rest])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSegment:
    """Weights in force from a position, and what each source had handed out before."""

    start: int
    weights: tuple[int, ...]
    schedule: Schedule
    base: tuple[int, ...]


class MixtureStream:
    """The stream of a mixture: sample ids count through the sources one after another.

    Args:
        lengths: Samples of each source.
        weights: Slots of each source.
        seed: Key of all orders; each source gets its own from it.
        order: Kind of the order inside each source.
        length: Samples that count as one epoch of the mixture.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[int], *, seed: int, order: Order, length: int) -> None:
        self.length, self.name = length, f"mixture:{order.name}"
        self._first_id = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._sources = [
            EpochStream(n, seed=_source_seed(seed, number), order=order) for number, n in enumerate(lengths)
        ]
        self.segments: list[ScheduleSegment] = []
        self.set_weights(0, weights)

    def set_weights(self, start: int, weights: Sequence[int]) -> None:
        """Apply `weights` from position `start`; segments that begin there or later are dropped."""
        kept = [segment for segment in self.segments if segment.start < start]
        base = tuple(self._count_in(kept, source, start) for source in range(len(self._sources)))
        kept.append(ScheduleSegment(start=start, weights=tuple(weights), schedule=Schedule(weights), base=base))
        self.segments = kept

    def take(self, positions: Int64Array) -> Int64Array:
        """Return the sample ids at `positions` (1-d)."""
        ids = np.empty_like(positions)
        starts = np.array([segment.start for segment in self.segments], np.int64)
        which = np.searchsorted(starts, positions, side="right") - 1
        for number in np.unique(which).tolist():
            segment, here = self.segments[number], np.flatnonzero(which == number)
            slots = positions[here] - segment.start
            sources = segment.schedule.source[slots % segment.schedule.period]
            for source in np.unique(sources).tolist():
                mine = sources == source
                ordinals = segment.base[source] + segment.schedule.count(source, slots[mine])
                ids[here[mine]] = self._sources[source].take(ordinals) + self._first_id[source]
        return ids

    def counts(self, position: int, skips: SkippedSpans) -> list[int]:
        """Return how many samples of each source come before `position` and are not skipped."""
        edges = [0, *(min(edge, position) for span in skips.spans for edge in span), position]
        used = zip(edges[::2], edges[1::2], strict=True)
        totals = np.zeros(len(self._sources), np.int64)
        for first, last in used:
            totals += self._before(last) - self._before(first)
        return [int(total) for total in totals]

    def _before(self, position: int) -> Int64Array:
        kept = [segment for segment in self.segments if segment.start <= position]
        return np.array([self._count_in(kept, source, position) for source in range(len(self._sources))], np.int64)

    @staticmethod
    def _count_in(segments: Sequence[ScheduleSegment], source: int, position: int) -> int:
        if not segments:
            return 0
        last = segments[-1]
        return last.base[source] + int(last.schedule.count(source, np.array([position - last.start], np.int64))[0])


class Mixture:
    """Several data sets in fixed proportions: a map-style data set, and the stream of a sampler.

    `ElasticSampler(mixture)` deals it; `mixture[id]` reads a sample. Each source is shuffled separately and
    starts its own next epoch when it is exhausted, so within a source every sample comes once per epoch.

    Args:
        sources: Name -> (data set, integer weight).
        epoch_length: Samples that count as one epoch of the mixture; default: all samples of all sources.

    Raises:
        ConfigError: no sources, or weights that are not small integers.
        DataError: a source is empty.
    """

    def __init__(self, sources: Mapping[str, tuple[Any, int]], *, epoch_length: int | None = None) -> None:
        if not sources:
            raise ConfigError("a mixture needs sources", found="none", expected='{"name": (data set, weight), ...}')
        self.names = list(sources)
        self.datasets = [dataset for dataset, _ in sources.values()]
        self.weights = [weight for _, weight in sources.values()]
        self.lengths = [len(dataset) for dataset in self.datasets]
        for name, length in zip(self.names, self.lengths, strict=True):
            if length < 1:
                raise DataError(f"source {name!r} of the mixture is empty", found="0 samples", expected="1 or more")
        Schedule(self.weights)  # raises for bad weights here, where the user gave them
        self._ends = np.cumsum(self.lengths).tolist()
        self.epoch_length = epoch_length or self._ends[-1]

    def __len__(self) -> int:
        """Samples of all sources together: the range of ids."""
        return int(self._ends[-1])

    def __getitem__(self, sample: int) -> Any:
        number, index = self._locate(sample)
        return self.datasets[number][index]

    def locate(self, sample: int) -> tuple[str, int]:
        """Return the source of a sample id and the index inside it."""
        number, index = self._locate(sample)
        return self.names[number], index

    def _locate(self, sample: int) -> tuple[int, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"{sample} is outside a mixture of {len(self)} samples")
        number = bisect_right(self._ends, sample)
        return number, sample - (self._ends[number] - self.lengths[number])

    @property
    def fingerprint(self) -> str:
        """Names, lengths and fingerprints of the sources; weights are not part of it."""
        parts = zip(self.names, self.lengths, self.datasets, strict=True)
        return ";".join(f"{name}={length}:{fingerprint_of(dataset)}" for name, length, dataset in parts)

    def stream(self, *, seed: int, order: Order) -> MixtureStream:
        """Return the stream of this mixture for a sampler."""
        return MixtureStream(self.lengths, self.weights, seed=seed, order=order, length=self.epoch_length)


def _source_seed(seed: int, number: int) -> int:
    keys = derive_keys("source", seed, number)
    return keys[0] | keys[1] << 32
