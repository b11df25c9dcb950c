"""Skipped spans, however many: what they hide is the same as if they were gone through one by one."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from support.plain_order import PlainSpans

from flashckpt.errors import ConfigError
from flashckpt.sampler import ElasticSampler
from flashckpt.sampler.order import cursor
from flashckpt.sampler.order import spans as spans_module
from flashckpt.sampler.order.spans import SkippedSpans


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few spans fill a run, so that a short test splits and joins runs."""
    monkeypatch.setattr(spans_module, "MOST", 4)


@pytest.mark.matrix
@pytest.mark.usefixtures("short_runs")
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_answer_is_that_of_going_through_all_spans(data: Any) -> None:
    """Spans that touch, overlap, cover many others and lie anywhere; questions in between."""
    long = st.integers(1, 300) if data.draw(st.booleans()) else st.integers(1, 6)
    spans, plain = SkippedSpans(), PlainSpans()
    for _ in range(data.draw(st.integers(0, 40))):
        first = data.draw(st.integers(0, 300))
        last = first + data.draw(long)
        spans.add(first, last)
        plain = plain.with_span(first, last)
        if data.draw(st.booleans()):
            compare(spans, plain, data)
    compare(spans, plain, data)
    compare(SkippedSpans(spans=plain.spans), plain, data)


def compare(spans: SkippedSpans, plain: PlainSpans, data: Any) -> None:
    assert spans.spans == plain.spans
    first, last, count = (data.draw(st.integers(0, 700)) for _ in range(3))
    assert spans.count(first, last) == plain.count(first, last)
    assert spans.advance(first, count) == plain.advance(first, count)
    assert spans.end_of(first) == next((stop for start, stop in plain.spans if start <= first < stop), first)
    ordinals = np.arange(count % 7, count, 1 + last % 5, dtype=np.int64)
    turned = np.roll(ordinals, last)  # rows that fill a batch come from its start: the last is not the largest
    assert np.array_equal(spans.positions(first, turned), plain.positions(first, turned))


def test_real_run_lengths_give_the_same_answers() -> None:
    """Thousands of spans in no order, so that runs are split; then one that covers most of them."""
    draw = random.Random(1)
    starts = draw.sample(range(0, 100_000, 10), 5_000)
    spans, expected = SkippedSpans(), PlainSpans(spans=tuple((at, at + 3) for at in sorted(starts)))
    for at in starts:
        spans.add(at, at + 3)
    assert spans.spans == expected.spans
    ordinals = np.arange(0, 50_000, 3, dtype=np.int64)
    for at in (0, 5, 33_333, 99_999, 200_000):
        assert spans.count(at, 150_000) == expected.count(at, 150_000)
        assert spans.advance(at, 12_345) == expected.advance(at, 12_345)
        assert np.array_equal(spans.positions(at, ordinals), expected.positions(at, ordinals))
    spans.add(500, 99_000)
    expected = expected.with_span(500, 99_000)
    assert spans.spans == expected.spans
    assert spans.advance(7, 1000) == expected.advance(7, 1000)


def test_what_fills_a_batch_that_does_not_divide_moves_no_sample_past_a_skipped_span() -> None:
    """Of 5 samples from position 0 without 2, rank 1 of two has 1 and 4, and fills its third row with the first again."""
    for ranks, size in ((2, 5), (3, 4), (5, 7)):
        samplers = [
            ElasticSampler(6, dp_rank=rank, dp_size=ranks, global_batch_size=size, order="sequential")
            for rank in range(ranks)
        ]
        for sampler in samplers:
            sampler.skip(2, 3)
        used = [0, 1, 3, 4, 5, 0, 1][:size]
        rows = -(-size // ranks)
        for rank, sampler in enumerate(samplers):
            iterator = iter(sampler)
            assert [next(iterator) for _ in range(rows)] == [used[(row * ranks + rank) % size] for row in range(rows)]


def test_an_empty_span_is_refused_and_changes_nothing() -> None:
    spans = SkippedSpans(spans=((2, 4),))
    for first, last in ((3, 3), (5, 4), (-1, 2)):
        with pytest.raises(ConfigError, match="must end after it begins"):
            spans.add(first, last)
    assert spans.spans == ((2, 4),)


def lines_of(call: Any) -> int:
    """Return how many lines of Python a call runs: work that no machine's speed changes."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("past", [False, True])
def test_work_per_step_and_per_added_span_does_not_grow_with_the_spans(past: bool) -> None:
    """A hundred times as many spans, all ahead or all behind: next_ids, commit and skip run as many lines."""
    work = []
    for count in (500, 50_000):
        sampler = ElasticSampler(10**9, global_batch_size=64)
        state = sampler.state_dict()
        state["segments"] = [["skip", 1000 * k + 100, 1000 * k + 200] for k in range(count)]
        state["offset"] = 10**8 if past else 0
        sampler.load_state_dict(state)
        first = sampler.position + 777_010
        sampler.next_ids()  # sums are made once
        done = [
            lines_of(sampler.next_ids),
            lines_of(sampler.commit),
            lines_of(partial(sampler.skip, first, first + 9)),
        ]
        work.append(done)
    assert all(large <= small + 20 for small, large in zip(*work, strict=True)), work


@settings(max_examples=50, deadline=None)
@given(cuts=st.sets(st.integers(0, 10**12), min_size=4, max_size=40))
def test_many_spans_are_recorded_as_text_which_is_made_once_and_gives_the_same_spans(cuts: set[int]) -> None:
    ends = sorted(cuts)[: len(cuts) // 2 * 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cursor, "PACKED_FROM", 2)
        sampler = ElasticSampler(10**13, global_batch_size=64)
        for first, last in zip(ends[::2], ends[1::2], strict=True):
            sampler.skip(first, last)
        recorded, spans = sampler.state_dict(), sampler.cursor.skips.spans
        with pytest.MonkeyPatch.context() as once:
            once.setattr(SkippedSpans, "spans", None)
            assert sampler.state_dict() == recorded, "it is not made again"
        assert recorded["version"] == 2
        again = ElasticSampler(10**13, global_batch_size=64)
        again.load_state_dict(json.loads(json.dumps(recorded)))
        assert again.cursor.skips.spans == spans
        assert again.state_dict() == recorded
        again.skip(2 * 10**12, 2 * 10**12 + 1)
        assert again.state_dict()["segments"] != recorded["segments"], "it is made again after a change"


def test_few_spans_are_recorded_as_before() -> None:
    sampler = ElasticSampler(10**9, global_batch_size=64)
    for at in range(cursor.PACKED_FROM - 1):
        sampler.skip(100 * at, 100 * at + 10)
    assert sampler.state_dict()["version"] == 1
    assert sampler.state_dict()["segments"][:2] == [["skip", 0, 10], ["skip", 100, 110]]
    sampler.skip(10**6, 10**6 + 1)
    assert [kind for kind, _ in sampler.state_dict()["segments"]] == ["skips"]


def test_an_epoch_that_is_skipped_whole_is_passed_in_one_step() -> None:
    """Short epochs and a long span: the position is the first one that is used."""
    sampler = ElasticSampler(3, global_batch_size=1)
    sampler.skip(1, 3 * 10**12 + 2)
    assert sampler.position == 0
    sampler.commit()
    assert sampler.position == 3 * 10**12
    assert sampler.next_ids().shape == (1,)
