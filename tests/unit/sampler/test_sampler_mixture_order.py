"""The order of a mixture is that of dealing one source at a time, bit for bit: thousands of sources, any world, any weights."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from support.plain_order import PlainMixture, PlainSchedule, PlainSpans

from flashckpt.sampler import ElasticSampler, Mixture, Order
from flashckpt.sampler.order.mixture import MixtureStream, Schedule
from flashckpt.sampler.order.permutation import TABLE_BELOW
from flashckpt.sampler.order.spans import SkippedSpans

LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([TABLE_BELOW - 1, TABLE_BELOW, TABLE_BELOW + 1, 10**6, 10**12]))
ORDERS = [Order(), Order(kind="block", block_size=5, window_blocks=3), Order(kind="sequential")]


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 3000)), min_size=1, max_size=20).filter(any))
def test_the_schedule_is_that_of_sorting_exact_fractions(weights: list[int]) -> None:
    assert np.array_equal(Schedule(weights).source, PlainSchedule(weights).source)


@pytest.mark.parametrize("weights", [[65535, 1], [32768, 32767], [257] * 255, list(range(1, 361)), [40503, 25033]])
def test_long_periods_are_exact_too(weights: list[int]) -> None:
    """Neighbouring fractions differ least here; equal ones are many."""
    found, plain = Schedule(weights), PlainSchedule(weights)
    assert np.array_equal(found.source, plain.source)
    slots = np.array([0, 1, found.period - 1, found.period, 3 * found.period + 7])
    sources, before = found.ordinals(slots)
    expected = [int(plain.count(source, slots[k : k + 1])[0]) for k, source in enumerate(sources.tolist())]
    assert before.tolist() == expected


@settings(max_examples=80, deadline=None)
@given(data=st.data(), order=st.sampled_from(ORDERS))
def test_ids_and_counts_are_those_of_one_source_at_a_time(data: Any, order: Order) -> None:
    lengths = data.draw(st.lists(LENGTHS, min_size=1, max_size=12))
    some = st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)).filter(any)
    weights, seed = data.draw(some), data.draw(st.integers(0, 3))
    stream = MixtureStream(lengths, weights, seed=seed, order=order, length=sum(lengths))
    plain = PlainMixture(lengths, weights, seed=seed, order=order, length=sum(lengths))
    place = 0
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.sampled_from([place, place + 17, place // 2, place + 10**7]))
        changed = data.draw(some)
        stream.set_weights(place, changed)
        plain.set_weights(place, changed)
    base = data.draw(st.sampled_from([0, max(0, place - 40), 10**9]))
    positions = base + np.arange(data.draw(st.integers(0, 120)), dtype=np.int64) * data.draw(st.integers(1, 5))
    assert np.array_equal(stream.take(positions), plain.take(positions))
    spans = PlainSpans()
    for _ in range(data.draw(st.integers(0, 5))):
        first = base + data.draw(st.integers(0, 200))
        spans = spans.with_span(first, first + data.draw(st.integers(1, 50)))
    for position in (base, base + 60, base + 1000):
        assert stream.counts(position, SkippedSpans(spans=spans.spans)) == plain.counts(position, spans)


@pytest.mark.matrix
@pytest.mark.parametrize("order", ORDERS)
def test_a_thousand_sources_in_every_world_through_changes_and_a_restart(order: Order) -> None:
    """Samples of all replicas together are the plain order, with weights that change, spans skipped, and a resume."""
    lengths = [1 + k * k * 7 % 200_003 for k in range(1000)]
    weights = [k % 9 + (k % 100 == 0) * 400 for k in range(1000)]
    changed = [(k * 5) % 7 for k in range(1000)]
    plain = PlainMixture(lengths, weights, seed=3, order=order, length=sum(lengths))
    plain.set_weights(4000, changed)
    spans = PlainSpans().with_span(1000, 1300).with_span(4100, 4200)
    mixed = Mixture({f"s{k}": (range(n), w) for k, (n, w) in enumerate(zip(lengths, weights, strict=True))})
    state: dict[str, Any] | None = None
    found: list[int] = []
    for ranks in (1, 4, 64, 1):
        samplers = [
            ElasticSampler(mixed, ranks, rank, seed=3, order=order, global_batch_size=64) for rank in range(ranks)
        ]
        for sampler in samplers:
            if state is None:
                sampler.skip(1000, 1300)
                sampler.skip(4100, 4200)
                sampler.set_weights(dict(zip(mixed.names, changed, strict=True)), start=4000)
            else:
                sampler.load_state_dict(state)
        for _ in range(20):
            dealt = np.stack([sampler.next_ids() for sampler in samplers], axis=1)
            found += dealt.ravel().tolist()
            for sampler in samplers:
                sampler.commit()
        state = samplers[0].state_dict()
    expected = plain.take(spans.positions(0, np.arange(len(found), dtype=np.int64)))
    assert found == expected.tolist()
    assert list(samplers[0].source_counts().values()) == plain.counts(samplers[0].position, spans)


def test_a_batch_of_many_sources_asks_each_permutation_for_nothing_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost that grew with the sources: a call of numpy's for each. Long sources are dealt without one."""
    stream = MixtureStream([10**6] * 300, [1] * 300, seed=0, order=Order(), length=10**6)
    expected = stream.take(np.arange(300))
    monkeypatch.setattr("flashckpt.sampler.order.permutation.Network.forward_array", None)
    monkeypatch.setattr("flashckpt.sampler.order.permutation.Permutation.take", None)
    assert np.array_equal(stream.take(np.arange(300)), expected)
