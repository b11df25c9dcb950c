"""Exactly once, in the order of the unbroken run, through crashes, resizes and batch changes; loud refusals."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.counting import Numbers
from support.ranks import wait_for
from support.sampling import Job, unbroken, world
from torch.utils.data import DataLoader

from flashckpt.errors import (
    SamplerStateError,
)
from flashckpt.sampler import (
    ElasticSampler,
    Order,
    Permutation,
)
from flashckpt.sampler.order.spans import SkippedSpans

# -- the property


class Elastic(RuleBasedStateMachine):
    """Random runs of crashes, resumes, resizes, batch changes, prefetching, skips and epoch ends."""

    @initialize(n=st.integers(1, 50), seed=st.integers(0, 9), tail=st.sampled_from(["span", "short"]), data=st.data())
    def begin(self, n: int, seed: int, tail: str, data: st.DataObject) -> None:
        self.n, self.seed, self.tail = n, seed, tail
        self.trained: list[int] = []  # positions
        self.skipped: set[int] = set()
        self.reference = unbroken(n, seed, 3000 + n)
        self.snapshot: tuple[dict[str, Any], int, set[int]] | None = None
        self.start(data.draw(st.integers(1, 7)), data.draw(st.integers(1, 20)))

    def start(self, ranks: int, size: int) -> None:
        self.job = Job(world(self.n, ranks, size, seed=self.seed, tail=self.tail))
        if self.snapshot is None:
            self.trained, self.skipped = [], set()
            return
        state, count, self.skipped = self.snapshot[0], self.snapshot[1], set(self.snapshot[2])
        self.trained = self.trained[:count]
        for sampler in self.job.samplers:
            sampler.load_state_dict(state)

    def upcoming(self) -> list[int]:
        size = self.job.samplers[0].global_batch_size or 0
        position = self.job.samplers[0].position
        end = (position // self.n + 1) * self.n if self.tail == "short" else len(self.reference)
        return [p for p in range(position, end) if p not in self.skipped][:size]

    @precondition(lambda self: len(self.trained) < 600)
    @rule(steps=st.integers(1, 12))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            positions = self.upcoming()
            assert self.job.step() == [self.reference[p] for p in positions]
            self.trained += positions

    @rule(each=st.integers(1, 40))
    def prefetch(self, each: int) -> None:
        before = self.job.state()
        self.job.prefetch(each)
        assert self.job.state() == before, "prefetching moved the position"

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = (self.job.state(), len(self.trained), set(self.skipped))

    @rule(ranks=st.integers(1, 7), size=st.integers(1, 20))
    def crash_and_resume_on_another_layout(self, ranks: int, size: int) -> None:
        """The batch need not divide, and there may be more ranks than samples in it."""
        self.start(ranks, size)

    @rule(ranks=st.integers(1, 7))
    def resize(self, ranks: int) -> None:
        self.take_snapshot()
        self.start(ranks, self.job.samplers[0].global_batch_size or 1)

    @rule(size=st.integers(1, 20))
    def change_the_batch_size_between_two_steps(self, size: int) -> None:
        """Without a restart: the loader is made again, what it had prefetched is dropped."""
        samplers = self.job.samplers
        self.job = Job(samplers)  # the old loader's iterators go with the old job
        for sampler in samplers:
            sampler.set_global_batch_size(size)

    @precondition(lambda self: len(self.skipped) < 100)
    @rule(ahead=st.integers(0, 30), length=st.integers(1, 30))
    def restore_and_skip_a_span(self, ahead: int, length: int) -> None:
        self.start(len(self.job.samplers), 2 * len(self.job.samplers))
        first = self.job.samplers[0].position + ahead
        for sampler in self.job.samplers:
            sampler.skip(first, first + length)
        self.skipped |= set(range(first, first + length))

    @invariant()
    def every_sample_once_in_the_order_of_the_unbroken_run(self) -> None:
        if not hasattr(self, "job"):
            return
        position = self.job.samplers[0].position
        done = [p for p in range(position) if p not in self.skipped]
        assert self.trained == done


Elastic.TestCase.settings = settings(
    max_examples=int(os.environ.get("SAMPLER_EXAMPLES", "80")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestElastic = Elastic.TestCase


def test_batch_size_changed_after_a_loader_fetched_the_whole_epoch_goes_on_where_training_is() -> None:
    """What the loader had fetched is dropped with it: it is trained, not taken for trained."""
    for steps in (10, 11, 12, 13, 14):
        job = Job(world(5, 1, 1, seed=0))
        trained = [sample for _ in range(steps) for sample in job.step()]
        job.prefetch(16)
        job = Job(job.samplers)
        job.samplers[0].set_global_batch_size(1)
        trained += [sample for _ in range(6) for sample in job.step()]
        assert trained == unbroken(5, 0, steps + 6)


# -- the four traps: second resume, epoch boundary, changed world, load after iter


def test_two_crashes_and_three_world_sizes_lose_and_repeat_nothing() -> None:
    trained, state = [], None
    for ranks, batch, steps in ((4, 12, 31), (3, 9, 40), (5, 10, 44)):
        job = Job(world(1000, ranks, batch, seed=3))
        if state is not None:
            for sampler in job.samplers:
                sampler.load_state_dict(state)
        for _ in range(steps):
            job.prefetch(32)
            trained += job.step()
        state = job.state()
    assert trained == unbroken(1000, 3, len(trained))
    assert len(trained) == 31 * 12 + 40 * 9 + 44 * 10


@pytest.mark.parametrize("order", ["global", "block", "sequential"])
def test_state_at_exactly_the_epoch_end_resumes_with_the_next_epoch(order: Any) -> None:
    job = Job(world(24, 2, 8, order=order))
    for _ in range(3):
        job.step()
    assert (job.samplers[0].epoch, job.samplers[0].offset) == (1, 0)
    resumed = Job(world(24, 3, 6, order=order))
    for sampler in resumed.samplers:
        sampler.load_state_dict(job.state())
    assert [s for _ in range(4) for s in resumed.step()] == unbroken(24, 0, 48, order)[24:]


def test_load_after_iter_is_refused_until_the_loader_is_dropped() -> None:
    sampler = ElasticSampler(100, global_batch_size=10)
    state = sampler.state_dict()
    iterator = iter(sampler)
    sampler.load_state_dict(state)  # nothing handed out yet: a stateful loader does this
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(SamplerStateError, match="while an iterator is running"):
        sampler.load_state_dict(state)
    del iterator
    sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"dataset": 101}, "samples per epoch 101"),
        ({"seed": 8}, "seed 8"),
        ({"fingerprint": "b"}, "fingerprint"),
        ({"order": "block"}, "order block:1024x16"),
        ({"order": Order(kind="block", block_size=8)}, "order block:8x16"),
        ({"shuffle": False}, "order sequential"),
    ],
)
def test_another_data_set_seed_or_order_is_refused_and_both_sides_are_named(other: Any, named: Any) -> None:
    base: dict[str, Any] = {"dataset": 100, "seed": 7, "fingerprint": "a"}
    state = ElasticSampler(**base).state_dict()
    sampler = ElasticSampler(**(base | other), global_batch_size=4)
    sampler.commit()
    with pytest.raises(SamplerStateError) as refused:
        sampler.load_state_dict(state)
    assert named in refused.value.found
    assert "as recorded" in refused.value.expected
    assert sampler.offset == 4  # untouched


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("offset"),
        lambda s: s.update(version=2),
        lambda s: s.update(offset=100),
        lambda s: s.update(offset=-1),
        lambda s: s.update(epoch=1.0),
        lambda s: s.update(segments=[["what", 1]]),
        lambda s: s.update(segments=[["skip", 1]]),
        lambda s: s.update(segments=[["skips", SkippedSpans(spans=[(1, 5)]).packed]]),
        lambda s: s.update(version=2, segments=[["skips", "AAAA"]]),
        lambda s: s.update(version=2, segments=[["skips", "no base 64"]]),
        lambda s: s.update(version=2, segments=[["skips", ""]]),
        lambda s: s.update(yielded=5),
    ],
)
def test_a_damaged_state_is_refused(damage: Any) -> None:
    sampler = ElasticSampler(100)
    state = sampler.state_dict()
    damage(state)
    with pytest.raises(SamplerStateError):
        sampler.load_state_dict(state)


def _train_until_killed(log: Path) -> None:
    """One replica with a loader worker; each finished step is one line: its samples and the state behind it."""
    sampler = ElasticSampler(Numbers(300), global_batch_size=4, seed=9)
    lines = log.read_text().splitlines() if log.exists() else []
    if lines:
        sampler.load_state_dict(json.loads(lines[-1])["state"])
    loader = DataLoader(Numbers(300), 4, sampler=sampler, num_workers=1, prefetch_factor=8)
    with log.open("ab", buffering=0) as file:
        while True:
            for batch in loader:
                sampler.commit()
                record = {"ids": batch.tolist(), "state": sampler.state_dict()}
                file.write(json.dumps(record).encode() + b"\n")  # one write: the snapshot of this test


def _has_steps(log: Path, count: int) -> bool:
    return log.exists() and log.read_bytes().count(b"\n") >= count


def test_killed_under_prefetch_the_next_run_trains_what_was_in_flight(tmp_path: Any) -> None:
    """SIGKILL while loader workers hold batches that no step has trained; twice, over two epoch ends."""
    log = tmp_path / "steps"
    for goal in (40, 100, 160):
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _train_until_killed(log)
            finally:
                os._exit(1)
        try:
            wait_for(partial(_has_steps, log, goal), what=f"{goal} steps")
        finally:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    trained = [i for line in log.read_text().splitlines() for i in json.loads(line)["ids"]]
    assert len(trained) >= 640
    assert trained == unbroken(300, 9, len(trained))


# -- commits


def test_iterated_but_never_committed_is_an_error() -> None:
    sampler = ElasticSampler(10)
    assert sorted(sampler) == list(range(10))
    for call in (lambda: iter(sampler), lambda: sampler.set_epoch(1)):
        with pytest.raises(SamplerStateError, match="never committed"):
            call()


def test_looking_at_one_batch_of_a_tiny_epoch_then_beginning_it_is_allowed() -> None:
    """The prefetch of one look can exhaust a small epoch; set_epoch says that it begins again."""
    sampler = ElasticSampler(10, global_batch_size=2)
    list(sampler)
    sampler.set_epoch(0)
    assert len(list(sampler)) == 10


def test_looking_at_one_batch_first_is_allowed() -> None:
    sampler = ElasticSampler(10, global_batch_size=2)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first


def test_auto_commit_counts_an_exhausted_iterator() -> None:
    sampler = ElasticSampler(10, 3, 1, tail="short", auto_commit=True)
    epochs = [list(sampler) for _ in range(3)]
    assert epochs == [[Permutation(10, 0, e)[i] for i in (1, 4, 7)] for e in range(3)]
    assert sampler.position == 30


def test_committing_more_than_was_handed_out_is_refused() -> None:
    """A caller that passes samples where it means micro-batches, or steps counted twice."""
    sampler = ElasticSampler(1000, dp_rank=0, dp_size=4, global_batch_size=8)
    iterator = iter(sampler)
    [next(iterator) for _ in range(2)]
    with pytest.raises(SamplerStateError, match="handed out"):
        sampler.commit(16)
    sampler.commit()
    with pytest.raises(SamplerStateError, match="handed out"):
        sampler.commit()
    assert sampler.offset == 8


def test_a_rank_that_never_iterates_commits_with_the_others() -> None:
    """Tensor-parallel peers that get their batch by broadcast still track the same state."""
    reader, peer = world(100, 1, 10)[0], world(100, 1, 10)[0]
    iterator = iter(reader)
    for _ in range(7):
        [next(iterator) for _ in range(10)]
        reader.commit()
        peer.commit()
    assert reader.state_dict() == peer.state_dict()


def test_the_size_of_a_step_must_be_known() -> None:
    with pytest.raises(SamplerStateError, match="size of the step"):
        ElasticSampler(10).commit()
    with pytest.raises(SamplerStateError, match="size of the step"):
        ElasticSampler(10, global_batch_size=2).commit(0)
    sampler = ElasticSampler(10)
    sampler.commit(3)
    assert sampler.offset == 3


def test_going_back_to_a_trained_epoch_is_refused() -> None:
    sampler = ElasticSampler(10, global_batch_size=10)
    sampler.set_epoch(4)
    sampler.set_epoch(1)  # nothing is trained yet
    sampler.commit()
    sampler.set_epoch(2)  # already there
    with pytest.raises(SamplerStateError, match="goes back"):
        sampler.set_epoch(1)
    sampler.set_epoch(5)
    assert (sampler.epoch, sampler.offset) == (5, 0)


# -- the end of an epoch


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 7, 24, 25])
@pytest.mark.parametrize("tail", ["span", "short", "pad", "drop"])
def test_tails_report_what_they_do(n: Any, ranks: Any, tail: Any) -> None:
    samplers = world(n, ranks, 4 * ranks, tail=tail)
    counts = samplers[0].tail_counts()
    dealt = [list(sampler) for sampler in samplers]
    merged = [dealt[k % ranks][k // ranks] for k in range(sum(map(len, dealt)))]
    assert [len(part) for part in dealt] == [len(sampler) for sampler in samplers]
    reference = unbroken(n, 0, 50 * n)
    assert merged[:n] == reference[: min(n, len(merged))]
    assert counts.remaining == n
    assert len(merged) == n + counts.padded + counts.borrowed - counts.dropped
    assert (counts.padded > 0) <= (tail == "pad")
    assert (counts.dropped > 0) <= (tail == "drop")
    assert (counts.borrowed > 0) <= (tail == "span")
    if tail == "span":
        assert merged == reference[: len(merged)]
    if tail == "pad":
        assert merged[n:] == [reference[k % n] for k in range(counts.padded)]


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_a_resume_neither_pads_nor_drops_again(tail: Any) -> None:
    """The end of the epoch is the same whether or not the run was broken, and len() never changes."""
    whole, broken = Job(world(103, 4, 8, tail=tail)), Job(world(103, 4, 8, tail=tail))
    expected = [whole.step() for _ in range(30)]
    found = [broken.step() for _ in range(9)]
    state = broken.state()
    broken = Job(world(103, 4, 8, tail=tail))
    for sampler in broken.samplers:
        sampler.load_state_dict(state)
    assert len(broken.samplers[0]) == len(whole.samplers[0])
    assert found + [broken.step() for _ in range(21)] == expected


def test_short_tail_gives_evaluation_every_sample_once() -> None:
    dealt = [sample for sampler in world(103, 8, None, tail="short") for sample in sampler]
    assert sorted(dealt) == list(range(103))
