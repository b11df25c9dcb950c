"""The order of mixtures and skipped spans in its plainest form, one source and one span at a time: slow, and the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashckpt.sampler.order.permutation import Int64Array, derive_keys
from flashckpt.sampler.order.stream import EpochStream, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSpans:
    """Spans [first, last) of excluded positions: sorted, disjoint and not adjacent."""

    spans: tuple[tuple[int, int], ...] = ()

    def with_span(self, first: int, last: int) -> PlainSpans:
        """Return these spans and [first, last), merged."""
        merged: list[tuple[int, int]] = []
        for span in sorted([*self.spans, (first, last)]):
            if merged and span[0] <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], span[1]))
            else:
                merged.append(span)
        return PlainSpans(spans=tuple(merged))

    def count(self, first: int, last: int) -> int:
        """Return how many positions of [first, last) are used."""
        hidden = sum(max(0, min(last, end) - max(first, start)) for start, end in self.spans)
        return max(0, last - first) - hidden

    def advance(self, position: int, count: int) -> int:
        """Return the position after the next `count` used positions from `position` (`position` itself for 0)."""
        end = position + count
        for start, stop in self.spans:
            if stop <= position:
                continue
            begin = max(start, position)
            if begin >= end:
                break
            end += stop - begin
        return end

    def positions(self, position: int, ordinals: Int64Array) -> Int64Array:
        """Return the positions of the k-th used samples from `position`, for every k of `ordinals` (ascending)."""
        out = ordinals + position
        for start, stop in self.spans:
            if stop <= position:
                continue
            begin = max(start, position)
            out[out >= begin] += stop - begin
        return out


class PlainSchedule:
    """Which source each slot belongs to, for one set of weights.

    Args:
        weights: Slots per period of each source; zero switches a source off.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = math.gcd(*weights) or 1
        self.weights = [weight // divisor for weight in weights]
        self.period = sum(self.weights)
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
class PlainSegment:
    """Weights in force from a position, and what each source had handed out before."""

    start: int
    weights: tuple[int, ...]
    schedule: PlainSchedule
    base: tuple[int, ...]


class PlainMixture:
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
        self.segments: list[PlainSegment] = []
        self.set_weights(0, weights)

    def set_weights(self, start: int, weights: Sequence[int]) -> None:
        """Apply `weights` from position `start`; segments that begin there or later are dropped."""
        kept = [segment for segment in self.segments if segment.start < start]
        base = tuple(self._count_in(kept, source, start) for source in range(len(self._sources)))
        kept.append(PlainSegment(start=start, weights=tuple(weights), schedule=PlainSchedule(weights), base=base))
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

    def counts(self, position: int, skips: PlainSpans) -> list[int]:
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
    def _count_in(segments: Sequence[PlainSegment], source: int, position: int) -> int:
        if not segments:
            return 0
        last = segments[-1]
        return last.base[source] + int(last.schedule.count(source, np.array([position - last.start], np.int64))[0])


def _source_seed(seed: int, number: int) -> int:
    keys = derive_keys("source", seed, number)
    return keys[0] | keys[1] << 32
