"""Exactly once, in the order of the unbroken run, through crashes, resizes and batch changes; loud refusals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.numbers import Numbers
from support.ranks import run_ranks, wait_for
from torch.utils.data import DataLoader

from flashckpt.errors import (
    ConfigError,
    DataError,
    FlashckptError,
    LayoutError,
    ReplicaMismatchError,
    SamplerStateError,
)
from flashckpt.sampler import (
    BlockPermutation,
    ElasticBatchSampler,
    ElasticSampler,
    Order,
    Permutation,
    check_same_samples,
)


def world(dataset: Any, dp_size: int, global_batch: int | None, **options: Any) -> list[ElasticSampler]:
    return [
        ElasticSampler(dataset, dp_rank=rank, dp_size=dp_size, global_batch_size=global_batch, **options)
        for rank in range(dp_size)
    ]


class Job:
    """All replicas of one run: prefetching loaders, a training loop, and what it has trained."""

    def __init__(self, samplers: list[ElasticSampler]) -> None:
        self.samplers = samplers
        self.queues: list[list[int]] = [[] for _ in samplers]
        self.iterators: list[Iterator[int]] | None = None

    def prefetch(self, each: int) -> None:
        """Pull samples ahead of training, as loader workers do."""
        if self.iterators is None:
            self.iterators = [iter(sampler) for sampler in self.samplers]
        for queue, iterator in zip(self.queues, self.iterators, strict=True):
            while len(queue) < each and (sample := next(iterator, None)) is not None:
                queue.append(sample)

    def step(self) -> list[int]:
        """Train one global batch and commit it; return its samples in global order."""
        size, ranks = self.samplers[0].global_batch_size or 0, len(self.samplers)
        self.prefetch(size // ranks)
        if not any(self.queues):  # the epoch is over: the loop begins the next one
            self.iterators = None
            self.prefetch(size // ranks)
        batches = [queue[: size // ranks] for queue in self.queues]
        self.queues = [queue[size // ranks :] for queue in self.queues]
        merged = [batches[k % ranks][k // ranks] for k in range(sum(map(len, batches)))]
        for sampler in self.samplers:
            sampler.commit()
        return merged

    def state(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return dict(json.loads(json.dumps(states[0])))


def unbroken(n: int, seed: int, count: int, order: str = "global") -> list[int]:
    """The stream as one process sees it, from the permutation alone."""
    kinds = {"global": Permutation, "block": BlockPermutation}
    epochs = [list(kinds[order](n, seed, e)) if order in kinds else list(range(n)) for e in range(count // n + 1)]
    return [sample for epoch in epochs for sample in epoch][:count]


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
        self.start(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))

    def start(self, ranks: int, micro: int, accumulation: int) -> None:
        self.job = Job(world(self.n, ranks, ranks * micro * accumulation, seed=self.seed, tail=self.tail))
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

    @rule(ranks=st.integers(1, 5), micro=st.integers(1, 3), accumulation=st.integers(1, 3))
    def crash_and_resume_on_another_layout(self, ranks: int, micro: int, accumulation: int) -> None:
        self.start(ranks, micro, accumulation)

    @rule(ranks=st.integers(1, 5), micro=st.integers(1, 3))
    def resize(self, ranks: int, micro: int) -> None:
        self.take_snapshot()
        self.start(ranks, micro, 1)

    @rule(micro=st.integers(1, 6))
    def change_the_batch_size_between_two_steps(self, micro: int) -> None:
        """Without a restart: the loader is made again, what it had prefetched is dropped."""
        samplers = self.job.samplers
        self.job = Job(samplers)  # the old loader's iterators go with the old job
        for sampler in samplers:
            sampler.set_global_batch_size(micro * len(samplers))

    @precondition(lambda self: len(self.skipped) < 100)
    @rule(ahead=st.integers(0, 30), length=st.integers(1, 30))
    def restore_and_skip_a_span(self, ahead: int, length: int) -> None:
        self.start(len(self.job.samplers), 1, 2)
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


# -- batches, ramp-up, replicas


def test_micro_batches_and_accumulation_do_not_change_the_global_batch() -> None:
    def first_steps(ranks: int, micro: int, accumulation: int) -> list[set[int]]:
        batches = [ElasticBatchSampler(sampler, micro, accumulation) for sampler in world(500, ranks, None)]
        iterators = [iter(batch) for batch in batches]
        steps = []
        for _ in range(10):
            steps.append({s for iterator in iterators for _ in range(accumulation) for s in next(iterator)})
            for batch in batches:
                batch.commit()
        return steps

    assert first_steps(1, 24, 1) == first_steps(2, 12, 1) == first_steps(4, 2, 3) == first_steps(3, 4, 2)


def test_ramp_up_changes_the_batch_at_its_position_and_survives_a_resume() -> None:
    ramp = [(40, 8), (100, 20)]
    job = Job(world(1000, 2, 4, ramp_up=ramp))
    sizes = [len(job.step()) for _ in range(20)]
    assert sizes == [4] * 10 + [8] * 8 + [20] * 2  # the batch that crosses 100 begins before it
    state = job.state()
    assert [s for s in state["segments"] if s[0] == "batch"] == [["batch", 0, 4], ["batch", 40, 8], ["batch", 100, 20]]
    resumed = ElasticSampler(1000, dp_rank=0, dp_size=2)  # no size of its own: takes the recorded schedule
    resumed.load_state_dict(state)
    assert resumed.global_batch_size == 20
    assert ElasticBatchSampler(ElasticSampler(1000, global_batch_size=4, ramp_up=ramp), 2).accumulation == 2


def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError):
        ElasticSampler(100, 3, 0, global_batch_size=8)
    with pytest.raises(LayoutError):
        ElasticBatchSampler(ElasticSampler(100, 2, 0, global_batch_size=8), 3)
    with pytest.raises(LayoutError):
        ElasticBatchSampler(ElasticSampler(100, global_batch_size=4, ramp_up=[(8, 6)]), 4)
    with pytest.raises(ConfigError):
        ElasticSampler(100, global_batch_size=4, ramp_up=[(8, 4), (8, 8)])


def test_wrong_arguments_are_refused() -> None:
    calls: list[tuple[type[FlashckptError], dict[str, Any]]] = [
        (DataError, {"dataset": []}),
        (DataError, {"dataset": 0}),
        (ConfigError, {"dataset": 5, "tail": "wrap"}),
        (ConfigError, {"dataset": 5, "order": "random"}),
        (LayoutError, {"dataset": 5, "num_replicas": 2}),
        (LayoutError, {"dataset": 5, "rank": 2, "num_replicas": 2}),
        (LayoutError, {"dataset": 5, "rank": 0, "dp_rank": 1, "dp_size": 2}),
    ]
    for error, arguments in calls:
        with pytest.raises(error):
            ElasticSampler(**arguments)


class Mesh:
    """The three questions the sampler asks of a DeviceMesh."""

    def __init__(self, **dimensions: tuple[int, int]) -> None:
        self.mesh_dim_names = tuple(dimensions)
        self._values = list(dimensions.values())

    def get_local_rank(self, dimension: int) -> int:
        return self._values[dimension][0]

    def size(self, dimension: int) -> int:
        return self._values[dimension][1]


def test_mesh_gives_the_replica_whatever_tp_and_pp_are() -> None:
    for tp in range(2):
        mesh = Mesh(pp=(1, 2), dp_replicate=(1, 2), dp_shard=(2, 3), tp=(tp, 2))
        sampler = ElasticSampler(100, mesh=mesh)
        assert (sampler.dp_rank, sampler.dp_size) == (5, 6)
    with pytest.raises(LayoutError):
        ElasticSampler(100, mesh=Mesh(tp=(0, 2)))
    with pytest.raises(LayoutError):
        ElasticSampler(100, mesh=mesh, dp_rank=0)


def _check_on_ranks(rank: int) -> list[str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    caught = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshed = ElasticSampler(100, mesh=mesh, global_batch_size=8)
    assert (meshed.dp_rank, meshed.dp_size) == (rank // 2, 2)
    check_same_samples(meshed.next_ids(), mesh.get_group("tp"))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sampler = ElasticSampler(100, dp_rank=rank // 2, dp_size=2, global_batch_size=8)
    check_same_samples(sampler.next_ids(), groups[rank // 2])
    wrong = ElasticSampler(100, dp_rank=rank, dp_size=4, global_batch_size=8)  # the global rank by mistake
    try:
        check_same_samples(wrong.next_ids(), groups[rank // 2])
    except ReplicaMismatchError as error:
        caught.append(error.found)
    try:
        ElasticSampler(100)
    except LayoutError as error:
        caught.append(error.found)
    return caught


def test_ranks_of_one_replica_with_other_samples_are_named() -> None:
    for result in run_ranks(_check_on_ranks, 4):
        assert result.ok, result.error
        assert "ranks [1] of the group differ" in result.value[0]
        assert "world of 4 ranks" in result.value[1]


# -- orders and state size


@pytest.mark.parametrize("n", [1, 2, 7, 64, 65, 1000, 4096, 5001])
@pytest.mark.parametrize(("block", "window"), [(1, 1), (7, 3), (64, 4), (10_000, 2)])
def test_block_order_is_a_bijection_that_stays_inside_its_windows(n: Any, block: Any, window: Any) -> None:
    permutation = BlockPermutation(n, 3, 1, block_size=block, window_blocks=window)
    values = permutation[:]
    assert np.array_equal(np.sort(values), np.arange(n))
    assert np.array_equal(permutation.index_of(values), np.arange(n))
    assert [permutation[i] for i in range(min(n, 20))] == values[:20].tolist()
    for start in range(0, n, block * window):
        opened = np.unique(values[start : start + block * window] // block)
        assert len(opened) <= window + 1, "a reader would have to open more blocks"
    if n > block * window and block > 1:
        assert not np.array_equal(values, np.sort(values))


def test_huge_block_order_is_random_access() -> None:
    permutation = BlockPermutation(10**12 + 7, 1, block_size=4096, window_blocks=8)
    places = np.array([0, 10**11, 10**12 + 6], np.int64)
    assert np.array_equal(permutation.index_of(permutation.take(places)), places)
    with pytest.raises(ConfigError):
        BlockPermutation(10, block_size=0)


def test_state_is_under_200_bytes_at_any_scale() -> None:
    sampler = ElasticSampler(2**61, seed=2**63, fingerprint="x" * 1000, global_batch_size=2**40, order="block")
    for _ in range(5):
        sampler.commit()
    assert len(msgpack.packb(sampler.state_dict())) < 200


def test_skipping_what_is_trained_or_handed_out_is_refused() -> None:
    sampler = ElasticSampler(100, global_batch_size=10)
    sampler.commit()
    with pytest.raises(SamplerStateError, match="trained already"):
        sampler.skip(5, 20)
    with pytest.raises(ConfigError):
        sampler.skip(20, 20)
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(SamplerStateError, match="while an iterator is running"):
        sampler.skip(50, 60)
    with pytest.raises(SamplerStateError, match="while an iterator is running"):
        sampler.set_global_batch_size(20)


def test_a_skipped_span_is_never_handed_out_and_everything_else_is() -> None:
    samplers = world(100, 2, 10)
    for sampler in samplers:
        sampler.skip(30, 50)
        sampler.skip(195, 205)
    job = Job(samplers)
    dealt = [s for _ in range(18) for s in job.step()]
    reference = unbroken(100, 0, 300)
    assert dealt == (reference[:30] + reference[50:195] + reference[205:])[:180]
