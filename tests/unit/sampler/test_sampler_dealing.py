"""Global batches that do not divide: every sample once, padding is nobody's, and weights make the mean that of one process."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.sampling import unbroken, world
from torch.utils.data import DataLoader

from flashckpt.sampler import ElasticBatchSampler, ElasticSampler
from flashckpt.sampler.order.dealing import Dealing, samples_of
from flashckpt.sampler.order.schedule import AlikeBatches

WORLDS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6
)
"""Of each world: replicas, most rows of a micro-batch, steps that survive, steps that are lost in a crash."""


class Replica:
    """One rank of a training loop as docs/data.md writes it: micro-batches of a loader, weights, one commit per step."""

    def __init__(self, rank: int, ranks: int, n: int, batch: int, micro: int, state: Any, **options: Any) -> None:
        self.sampler = ElasticSampler(n, dp_rank=rank, dp_size=ranks, global_batch_size=batch, seed=4, **options)
        if state is not None:
            self.sampler.load_state_dict(state)
        self.batches = ElasticBatchSampler(self.sampler, micro)
        self.iterator = iter(self.batches)

    def step(self) -> tuple[list[int], list[list[int]], list[list[float]]]:
        """Return the samples it is to train as `next_ids` says, what it trains, and the weights."""
        own, weights = self.sampler.next_ids().tolist(), self.batches.weights.tolist()
        batches: list[list[int]] = []
        for _ in range(self.batches.accumulation):
            batch = next(self.iterator, None)
            if batch is None:  # the epoch is over: the loop begins the next one
                self.iterator = iter(self.batches)
                batch = next(self.iterator)
            batches.append(batch)
        return own, batches, weights


def check_step(parts: list[Any], batch: int) -> list[int]:
    """Return the samples that weigh something, in global order; the mean of all is that of one process."""
    ranks = len(parts)
    shapes = {(len(batches), *map(len, batches)) for _, batches, _ in parts}
    assert len(shapes) == 1, "all replicas run equally many micro-batches of equally many rows"
    dealt: list[list[int]] = []
    mean = 0.0
    for own, batches, weights in parts:
        rows = [
            (row, weight)
            for ids, each in zip(batches, weights, strict=True)
            for row, weight in zip(ids, each, strict=True)
        ]
        dealt.append([row for row, weight in rows if weight])
        assert dealt[-1] == own
        mean += sum((row + 1) * weight for row, weight in rows) / len(rows) / ranks
    merged = [dealt[k % ranks][k // ranks] for k in range(batch)]
    assert sum(map(len, dealt)) == batch
    assert mean == pytest.approx(sum(row + 1 for row in merged) / batch, rel=1e-6)
    return merged


@pytest.mark.matrix
@settings(max_examples=150, deadline=None)
@given(n=st.integers(3, 60), batch=st.integers(1, 17), worlds=WORLDS, tail=st.sampled_from(["span", "pad", "drop"]))
def test_every_sample_once_over_any_worlds(
    n: int, batch: int, worlds: list[tuple[int, int, int, int]], tail: str
) -> None:
    """Worlds that do not divide the batch, and worlds larger than it, whose last ranks have only padding."""
    batch = min(batch, n)
    trained: list[int] = []
    alone = ElasticSampler(n, dp_rank=0, dp_size=1, global_batch_size=batch, seed=4, tail=tail)
    wanted: list[int] = []
    state: Any = None
    for ranks, micro, steps, lost in worlds:
        replicas = [Replica(rank, ranks, n, batch, micro, state, tail=tail) for rank in range(ranks)]
        for number in range(steps + lost):
            merged = check_step([replica.step() for replica in replicas], batch)
            for replica in replicas:
                replica.batches.commit()
            if number < steps:
                trained += merged
                wanted += alone.next_ids().tolist()
                alone.commit()
                state = json.loads(json.dumps(replicas[0].sampler.state_dict()))
                assert all(replica.sampler.state_dict() == alone.state_dict() for replica in replicas)
    assert trained == wanted
    if tail == "span":
        assert trained == unbroken(n, 4, len(trained))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20)), min_size=1, max_size=4),
    replicas=st.integers(1, 25),
    is_padded=st.booleans(),
)
def test_dealing_covers_each_batch_and_counts_what_any_replica_has_handed_out(
    sizes: list[tuple[int, int]], replicas: int, is_padded: bool
) -> None:
    runs = [AlikeBatches(batches=batches, size=size) for batches, size in sizes]
    all_of_them = [Dealing(runs, rank=rank, replicas=replicas, is_padded=is_padded) for rank in range(replicas)]
    total = sum(run.samples for run in runs)
    if is_padded:
        assert len({dealing.rows for dealing in all_of_them}) == 1
    batch_of = [number for number, size in enumerate(s for b, s in sizes for _ in range(b)) for _ in range(size)]
    seen: list[int] = []
    for rank, dealing in enumerate(all_of_them):
        assert dealing.samples == dealing.reached(dealing.rows) == total
        ordinals = dealing.ordinals(0, dealing.rows).tolist()
        split = dealing.rows // 2
        assert ordinals == [*dealing.ordinals(0, split).tolist(), *dealing.ordinals(split, dealing.rows).tolist()]
        row = 0
        while row < dealing.rows:
            size, left = dealing.left_of_batch(row)
            mine = ordinals[row : row + left]
            assert len({batch_of[ordinal] for ordinal in mine}) == 1
            assert all(
                dealing.reached(row + done) > max(mine[:done]) for done in range(1, left + 1) if done * replicas <= size
            )
            seen += mine[: samples_of(size, rank, replicas)]
            row += left
        assert dealing.left_of_batch(row) == (0, 0)
    assert sorted(seen) == list(range(total))


def test_where_the_batch_divides_every_weight_is_one_to_the_bit() -> None:
    for ranks, batch, micro in ((1, 7, 7), (3, 12, 2), (7, 49, 1), (6, 96, 8)):
        for sampler in world(100, ranks, batch):
            weights = ElasticBatchSampler(sampler, micro).weights
            assert weights.shape == (batch // ranks // micro, micro)
            assert bool((weights == 1).all())
            assert bool((sampler.weights == 1).all())


def test_weights_of_a_batch_that_does_not_divide() -> None:
    """100 samples over 99 ranks: two rows each, of which all ranks but the first have one to fill."""
    samplers = world(1000, 99, 100)
    assert [sampler.weights.tolist() for sampler in samplers[:2]] == [
        pytest.approx([1.98, 1.98]),
        pytest.approx([1.98, 0.0]),
    ]
    assert [len(list(sampler)) for sampler in samplers[:2]] == [len(samplers[0])] * 2 == [20, 20]
    with_a_schedule = ElasticSampler(1000, 3, 2, global_batch_size=4, ramp_up=[(8, 7)])
    assert with_a_schedule.weights.tolist() == [1.5, 0.0]
    with_a_schedule.commit()
    with_a_schedule.commit()
    assert with_a_schedule.weights.tolist() == pytest.approx([9 / 7, 9 / 7, 0.0])


@pytest.mark.parametrize(("batch", "is_read", "warned"), [(7, False, 1), (7, True, 0), (6, False, 0)])
def test_loop_that_does_not_read_the_weights_of_a_batch_that_does_not_divide_is_warned_once(
    batch: int, is_read: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ElasticSampler(1000, 3, 0, global_batch_size=batch)
    for _ in range(3):
        if is_read:
            assert sampler.weights.shape == (3,)
        sampler.commit()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert caplog.text.count("global batch of 7 samples does not divide over 3 replicas") == warned


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_that_reads_ahead_resumes_at_the_committed_sample(workers: int) -> None:
    """A plain loader over the sampler: each batch has the rows of a step, whatever its workers have fetched."""
    data: Any = range(100)
    trained: list[int] = []
    state: Any = None
    for ranks in (3, 7, 2, 3):
        samplers = world(100, ranks, 5, seed=4)
        rows = len(samplers[0].weights)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        loaders = [DataLoader(data, rows, sampler=s, num_workers=workers if s is samplers[0] else 0) for s in samplers]
        iterators = [iter(loader) for loader in loaders]
        for _ in range(3):
            dealt = []
            for sampler, iterator in zip(samplers, iterators, strict=True):
                ids, weights = next(iterator).tolist(), sampler.weights.tolist()
                dealt.append([number for number, weight in zip(ids, weights, strict=True) if weight])
            trained += [dealt[k % ranks][k // ranks] for k in range(5)]
            for sampler in samplers:
                sampler.commit()
        del iterators, loaders
        state = samplers[-1].state_dict()
    assert trained == unbroken(100, 4, len(trained))
