"""Mixtures of data sets in fixed integer proportions, with the position as the only state.

Slots of the stream are dealt to the sources by a schedule that repeats after sum(weights) slots, each
source as evenly spaced as its weight allows. The number of slots of a source before a position is then a
closed form (whole periods times the weight, plus a table lookup), so each source's own counter, epoch and
shuffle follow from the position alone. Changed weights start a new segment at a position.
All samples of a batch are dealt together, however many sources they come from.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.order.block import BlockCore
from flashckpt.sampler.order.permutation import (
    CHUNK,
    Cells,
    Int64Array,
    Network,
    Permutation,
    derive_keys,
    feistel_pass,
)
from flashckpt.sampler.order.spans import SkippedSpans
from flashckpt.sampler.order.state import fingerprint_of, whole
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
        counts = np.array(self.weights, np.int64)
        owners, turns = np.repeat(np.arange(len(counts)), counts), np.arange(self.period)
        turns -= np.repeat(np.cumsum(counts) - counts, counts)
        # The k-th of w slots is at (2k + 1) / 2w of the period. Quotients of integers below 2**18 that differ, differ
        # as float64 too, and those that are equal are equal: the order is exact, ties go to the first source.
        order = np.lexsort((owners, (2 * turns + 1) / (2 * counts[owners])))
        self.source, self.turn = owners[order], turns[order]
        self._counts = counts

    def ordinals(self, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each slot, and how many slots before it belong to the same source."""
        periods, rest = np.divmod(slots, self.period)
        sources = self.source[rest]
        return sources, periods * self._counts[sources] + self.turn[rest]

    def sums(self, slots: Int64Array, signs: Int64Array) -> Int64Array:
        """Return for every source the sum over `slots` of sign * (slots before it that belong to the source)."""
        periods, rest = np.divmod(slots, self.period)
        at = np.zeros(self.period + 1, np.int64)
        np.add.at(at, rest, signs)
        beyond = at.sum() - np.cumsum(at)[:-1]  # for every slot of the period: the signs of those that count it
        found = np.zeros(len(self._counts), np.int64)
        np.add.at(found, self.source, beyond)
        return np.asarray(found + (periods * signs).sum() * self._counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSegment:
    """Weights in force from a position, and what each source had handed out before."""

    start: int
    weights: tuple[int, ...]
    schedule: Schedule
    base: Int64Array


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
        self._lengths = np.array(lengths, np.int64)
        self._first_id = np.cumsum(self._lengths) - self._lengths
        self._sources = [
            EpochStream(n, seed=_source_seed(seed, number), order=order) for number, n in enumerate(lengths)
        ]
        self._is_shuffled = order.kind != "sequential"
        self.segments: list[ScheduleSegment] = []
        self.set_weights(0, weights)

    def set_weights(self, start: int, weights: Sequence[int]) -> None:
        """Apply `weights` from position `start`; segments that begin there or later are dropped."""
        kept = [segment for segment in self.segments if segment.start < start]
        schedule, base = Schedule(weights), self._sums(kept, np.array([start], np.int64), np.ones(1, np.int64))
        self.segments = [*kept, ScheduleSegment(start=start, weights=tuple(weights), schedule=schedule, base=base)]

    def take(self, positions: Int64Array) -> Int64Array:
        """Return the sample ids at `positions` (1-d)."""
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        for segment, here in _by_segment(self.segments, positions):
            dealt, before = segment.schedule.ordinals(positions[here] - segment.start)
            sources[here], ordinals[here] = dealt, before + segment.base[dealt]
        epochs, offsets = np.divmod(ordinals, self._lengths[sources])
        if self._is_shuffled and len(offsets):
            offsets = take_each(self._order_of, sources, epochs, offsets)
        return np.asarray(offsets + self._first_id[sources])

    def _order_of(self, source: int, epoch: int) -> Permutation:
        order = self._sources[source].of_epoch(epoch)
        assert order is not None, "only a sequential order has no permutation"
        return order

    def counts(self, position: int, skips: SkippedSpans) -> list[int]:
        """Return how many samples of each source come before `position` and are not skipped."""
        edges = [min(edge, position) for span in skips.spans if span[0] < position for edge in span]
        signs = np.ones(len(edges) + 1, np.int64)
        signs[1::2] = -1  # what is hidden lies between an even edge and the next one: the start adds, the end takes off
        sums = self._sums(self.segments, np.array([*edges, position], np.int64), signs)
        return [int(count) for count in sums]

    def _sums(self, segments: Sequence[ScheduleSegment], positions: Int64Array, signs: Int64Array) -> Int64Array:
        """Return for every source the sum over `positions` of sign * (samples of it before the position)."""
        total = np.zeros(len(self._sources), np.int64)
        for segment, here in _by_segment(segments, positions):
            total += segment.schedule.sums(positions[here] - segment.start, signs[here])
            total += segment.base * signs[here].sum()
        return total


def _by_segment(
    segments: Sequence[ScheduleSegment], positions: Int64Array
) -> Iterator[tuple[ScheduleSegment, Int64Array | slice]]:
    """Give each segment in which some positions lie, and which of them."""
    if len(segments) < 2:
        yield from ((segment, slice(None)) for segment in segments)
        return
    which = np.searchsorted(np.array([segment.start for segment in segments], np.int64), positions, side="right") - 1
    for number in np.unique(which).tolist():
        yield segments[number], np.flatnonzero(which == number)


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
        self.weights = [whole("a weight", weight) for _, weight in sources.values()]
        self.lengths = [len(dataset) for dataset in self.datasets]
        for name, length in zip(self.names, self.lengths, strict=True):
            if length < 1:
                raise DataError(f"source {name!r} of the mixture is empty", found="0 samples", expected="1 or more")
        Schedule(self.weights)  # raises for bad weights here, where the user gave them
        self._ends = np.cumsum(self.lengths).tolist()
        self.epoch_length = whole("epoch_length", epoch_length) or self._ends[-1]

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


def take_each(
    make: Callable[[int, int], Permutation], first: Int64Array, second: Int64Array, indices: Int64Array
) -> Int64Array:
    """Return for every i the value at `indices[i]` of the permutation `make(first[i], second[i])`; 1-d arrays.

    A batch of a mixture of a thousand sources has about one sample of each: asking each source's permutation
    separately would cost a thousand times the numpy calls of one. The results are those of `Permutation.take`.
    """
    order = np.lexsort((second, first))
    ones, others = first[order], second[order]
    starts = np.flatnonzero(np.diff(ones, prepend=-1) | np.diff(others, prepend=-1))
    permutations = [make(one, other) for one, other in zip(ones[starts].tolist(), others[starts].tolist(), strict=True)]
    values = np.empty_like(indices)
    values[order] = take_together(permutations, np.diff(starts, append=len(order)), indices[order])
    return values


def take_together(permutations: Sequence[Permutation], counts: Int64Array, indices: Int64Array) -> Int64Array:
    """Return the values at `indices`: the first `counts[0]` belong to `permutations[0]`, and so on."""
    values = np.empty_like(indices)
    networks: dict[int, Network] = {}
    blocks: dict[int, BlockCore] = {}
    stops = np.cumsum(counts)
    for number, (permutation, stop, count) in enumerate(
        zip(permutations, stops.tolist(), counts.tolist(), strict=True)
    ):
        core = permutation.core
        if isinstance(core, Network):
            networks[number] = core
        elif isinstance(core, BlockCore):
            blocks[number] = core
        else:
            values[stop - count : stop] = core.forward_array(indices[stop - count : stop])
    owners = np.repeat(np.arange(len(permutations)), counts)
    if networks:
        here = np.flatnonzero(np.isin(owners, list(networks)))
        mine = np.repeat(np.arange(len(networks)), counts[list(networks)])
        values[here] = _through_networks(list(networks.values()), mine, indices[here])
    if blocks:
        here = np.flatnonzero(np.isin(owners, list(blocks)))
        mine = np.repeat(np.arange(len(blocks)), counts[list(blocks)])
        values[here] = _through_blocks(list(blocks.values()), mine, indices[here])
    return values


def _through_networks(networks: Sequence[Network], owners: Int64Array, indices: Int64Array) -> Int64Array:
    """Return the values at `indices`, each in the network `owners` says; as `Network.forward_array`."""
    lengths = np.array([network.n for network in networks], np.int64)
    bits = np.array([network.right_bits for network in networks], np.uint64)
    rows = np.array([network.rows for network in networks], np.uint32)
    keys = np.array([network.keys for network in networks], np.uint32).T

    def send(values: Int64Array, mine: Int64Array) -> Int64Array:
        return feistel_pass(values, Cells.of(bits[mine], rows[mine]), list(enumerate(keys[:, mine])), 1)

    out = np.empty_like(indices)
    for start in range(0, len(indices), CHUNK):
        mine = owners[start : start + CHUNK]
        block, limit = send(indices[start : start + CHUNK], mine), lengths[mine]
        outside = np.flatnonzero(block >= limit)
        while len(outside):
            block[outside] = send(block[outside], mine[outside])
            outside = outside[block[outside] >= limit[outside]]
        out[start : start + CHUNK] = block
    return out


def _through_blocks(cores: Sequence[BlockCore], owners: Int64Array, indices: Int64Array) -> Int64Array:
    """Return the values at `indices`, each in the block order `owners` (ascending) says; as `BlockCore.forward_array`."""
    block, window, missing, short_at = np.array(
        [(core.block, core.window, core.missing, core.short_at) for core in cores], np.int64
    ).T[:, owners]
    windows, inside = np.divmod(indices, window)
    place = take_each(lambda owner, number: cores[owner].inside(number), owners, windows, inside) + windows * window
    place += np.where(place >= (short_at + 1) * block - missing, missing, 0)
    slots, rest = np.divmod(place, block)
    shuffled: Int64Array = take_each(lambda owner, _: cores[owner].order, owners, np.zeros_like(owners), slots)
    return np.asarray(shuffled * block + rest)
