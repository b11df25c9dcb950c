"""Mixtures: exact proportions, each source exactly once per its own epoch, weights and skips on the way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from flashckpt.errors import ConfigError, DataError, SamplerStateError
from flashckpt.sampler import ElasticSampler, Mixture, Order
from flashckpt.sampler.order.mixture import Schedule
from flashckpt.sampler.order.spans import SkippedSpans


class Named(list[str]):
    """A small data set of the user's own: samples that know where they come from."""

    def __init__(self, name: str, length: int) -> None:
        super().__init__(f"{name}{index}" for index in range(length))
        self.fingerprint = f"{name}-{length}"


def mixture(**sources: tuple[int, int]) -> Mixture:
    return Mixture({name: (Named(name, length), weight) for name, (length, weight) in sources.items()})


def deal(sampler: ElasticSampler, count: int) -> list[int]:
    """The next `count` ids in global order, committed."""
    ids = [
        int(i) for i in sampler.cursor.stream.take(sampler.cursor.skips.positions(sampler.position, np.arange(count)))
    ]
    sampler.commit(count)
    return ids


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_schedule_is_exact_per_period_and_even_inside(weights: Any) -> None:
    schedule = Schedule(weights)
    slots = np.arange(3 * schedule.period + 1)
    for source, weight in enumerate(schedule.weights):
        counts = np.concatenate([[0], np.cumsum(schedule.ordinals(slots[:-1])[0] == source)])
        before = schedule.ordinals(slots)[1][schedule.ordinals(slots)[0] == source]
        assert np.array_equal(before, np.arange(len(before))), "the turns of a source are counted one by one"
        assert counts[schedule.period] == weight
        assert np.abs(counts - slots * weight / schedule.period).max() <= len(weights), "not spread evenly"


@pytest.mark.parametrize("order", ["global", "block", "sequential"])
def test_each_source_comes_exactly_once_per_its_own_epoch(order: Any) -> None:
    mixed = mixture(code=(37, 5), prose=(11, 3), poems=(4, 0), maths=(100, 2))
    sampler = ElasticSampler(mixed, order=Order(kind=order, block_size=4, window_blocks=2), global_batch_size=10)
    names = [mixed.locate(i) for i in deal(sampler, 1000)]
    assert Counter(name for name, _ in names) == {"code": 500, "prose": 300, "maths": 200}
    for name, length in (("code", 37), ("prose", 11), ("maths", 100)):
        walk = [index for source, index in names if source == name]
        for epoch in range(len(walk) // length):
            assert sorted(walk[epoch * length : (epoch + 1) * length]) == list(range(length)), (name, epoch)
    assert sampler.source_counts() == {"code": 500, "prose": 300, "poems": 0, "maths": 200}
    if order != "sequential":
        first, second = ([i for s, i in names if s == "prose"][k * 11 : k * 11 + 11] for k in range(2))
        assert first != second, "each epoch of a source has its own order"


def test_it_reads_like_a_data_set() -> None:
    mixed = mixture(code=(3, 1), prose=(2, 1))
    assert len(mixed) == 5
    assert [mixed[i] for i in range(5)] == ["code0", "code1", "code2", "prose0", "prose1"]
    assert mixed.locate(3) == ("prose", 0)
    with pytest.raises(IndexError):
        mixed[5]


@pytest.mark.matrix
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_resumes_weight_changes_skips_and_resizes_keep_every_source_exact(data: Any) -> None:
    """Random changes, each behind a crash or not, against a walk that counts one slot at a time."""
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    names = [f"s{k}" for k in range(len(lengths))]
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths)))
    sources: dict[str, tuple[int, int]] = dict(zip(names, zip(lengths, weights, strict=True), strict=True))

    def make() -> ElasticSampler:
        return ElasticSampler(mixture(**sources), seed=5)

    sampler = make()
    changes: list[tuple[int, list[int]]] = [(0, weights)]
    hidden: set[int] = set()
    found: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        found += deal(sampler, data.draw(st.integers(1, 40)))
        match data.draw(st.sampled_from(["crash", "weights", "skip", "nothing"])):
            case "crash":
                state = sampler.state_dict()
                sampler = make()
                sampler.load_state_dict(state)
            case "weights":
                new = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)).filter(any))
                start = sampler.position + data.draw(st.integers(0, 20))
                sampler.set_weights(dict(zip(names, new, strict=True)), start=start)
                changes = [(at, w) for at, w in changes if at < start] + [(start, new)]
            case "skip":
                first = sampler.position + data.draw(st.integers(0, 20))
                last = first + data.draw(st.integers(1, 20))
                sampler.skip(first, last)
                hidden |= set(range(first, last))
    expected, counters = [], [0] * len(lengths)
    used = [0] * len(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    streams = [s.take(np.arange(900)) for s in sampler.cursor.stream._sources]  # type: ignore[attr-defined]
    for position in range(sampler.position):
        start, current = next((at, w) for at, w in reversed(changes) if at <= position)
        schedule = Schedule(current)
        source = int(schedule.source[(position - start) % schedule.period])
        if position not in hidden:
            expected.append(int(streams[source][counters[source]] + offsets[source]))
            used[source] += 1
        counters[source] += 1
    assert found == expected
    assert list(sampler.source_counts().values()) == used


def test_the_world_size_does_not_show_in_a_mixture() -> None:
    mixed = mixture(code=(37, 5), prose=(11, 3))
    reference = deal(ElasticSampler(mixed, global_batch_size=24), 24 * 6)
    for ranks in (2, 3, 4):
        samplers = [ElasticSampler(mixed, ranks, rank, global_batch_size=24) for rank in range(ranks)]
        iterators = [iter(sampler) for sampler in samplers]
        dealt = [[next(iterator) for _ in range(24 // ranks)] for iterator in iterators]
        assert [dealt[k % ranks][k // ranks] for k in range(24)] == reference[:24]
        assert len(samplers[0]) == 48 // ranks  # an epoch: as many samples as the sources hold, in whole batches


def test_epoch_length_decides_where_an_iteration_ends() -> None:
    mixed = Mixture({"a": (Named("a", 10), 1), "b": (Named("b", 1000), 1)}, epoch_length=40)
    sampler = ElasticSampler(mixed, global_batch_size=20, auto_commit=True)
    assert len(list(sampler)) == len(list(sampler)) == 40
    assert sampler.epoch == 2
    assert sampler.source_counts() == {"a": 40, "b": 40}


def test_resume_with_other_weights_or_sources_is_refused() -> None:
    sampler = ElasticSampler(mixture(a=(10, 1), b=(10, 2)), global_batch_size=3)
    sampler.commit()
    sampler.set_weights({"a": 2, "b": 1})
    state = sampler.state_dict()
    with pytest.raises(SamplerStateError, match="other mixture weights"):
        ElasticSampler(mixture(a=(10, 5), b=(10, 2))).load_state_dict(state)
    for other in (mixture(a=(10, 1), c=(10, 2)), mixture(b=(10, 1), a=(10, 2)), mixture(a=(9, 1), b=(11, 2))):
        with pytest.raises(SamplerStateError, match="fingerprint"):
            ElasticSampler(other).load_state_dict(state)
    for weights in ((1, 2), (2, 1)):  # as first written, or as they are by now
        resumed = ElasticSampler(mixture(a=(10, weights[0]), b=(10, weights[1])))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
    assert len(msgpack.packb(state)) < 200


def test_wrong_mixtures_are_refused() -> None:
    for bad in ((-1, 2), (0, 0), (1, 1 << 16)):
        with pytest.raises(ConfigError, match="cannot be scheduled"):
            mixture(a=(10, bad[0]), b=(10, bad[1]))
    with pytest.raises(DataError, match="'b' of the mixture is empty"):
        mixture(a=(10, 1), b=(0, 1))
    with pytest.raises(ConfigError):
        Mixture({})
    sampler = ElasticSampler(mixture(a=(10, 1), b=(10, 2)))
    with pytest.raises(ConfigError, match="do not match"):
        sampler.set_weights({"a": 1})
    sampler.commit(5)
    with pytest.raises(SamplerStateError, match="already trained"):
        sampler.set_weights({"a": 1, "b": 1}, start=3)
    with pytest.raises(ConfigError, match="not a mixture"):
        ElasticSampler(10).set_weights({"a": 1})
    assert ElasticSampler(10).source_counts() == {}


def test_counts_leave_out_what_is_skipped() -> None:
    sampler = ElasticSampler(mixture(a=(10, 1), b=(10, 1)))
    sampler.skip(2, 6)
    sampler.commit(6)
    assert sampler.position == 10
    assert sampler.source_counts() == {"a": 3, "b": 3}
    assert SkippedSpans(spans=((2, 6),)).count(0, 10) == 6


def test_a_mixture_of_a_trillion_samples_is_random_access() -> None:
    class Long:
        def __len__(self) -> int:
            return 10**12

    sources: dict[str, tuple[Any, int]] = {"a": (Long(), 997), "b": (Long(), 3)}
    sampler = ElasticSampler(Mixture(sources), global_batch_size=1000)
    sampler.load_state_dict(sampler.state_dict() | {"offset": 10**12 - 1000})
    assert len(sampler.next_ids()) == 1000
    assert sampler.source_counts()["b"] == (10**12 - 1000) * 3 // 1000
