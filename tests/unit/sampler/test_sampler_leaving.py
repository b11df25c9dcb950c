"""Where an iteration begins follows from the committed position alone: loops that leave, look, fetch ahead and resume."""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from support.counting import Numbers
from support.sampling import unbroken, world
from torch.utils.data import DataLoader

from flashckpt.sampler import ElasticBatchSampler, ElasticSampler


class Loop:
    """All replicas of a run, each with a loader; the loop holds `depth` batches besides the one that it trains."""

    def __init__(
        self, samplers: list[ElasticSampler], *, micro: bool, workers: int = 0, persistent: bool = False
    ) -> None:
        self.samplers = samplers
        ranks, size = len(samplers), samplers[0].global_batch_size or 0
        extra: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
        self.loaders: list[DataLoader[Any]] = [
            DataLoader(Numbers(s.length), batch_sampler=ElasticBatchSampler(s, size), **extra)
            if micro
            else DataLoader(Numbers(s.length), batch_size=-(-size // ranks), sampler=s, **extra)
            for s in samplers
        ]
        self.leave(0)

    def leave(self, depth: int) -> None:
        """Drop the loaders' iterators and all that is in hand: `break`, or the end of `next(iter(loader))`."""
        self.depth = depth
        self.iterators: list[Any] = [None for _ in self.loaders]
        self.hands: list[deque[list[int]]] = [deque() for _ in self.loaders]

    def look(self) -> None:
        """Take a batch that nobody trains."""
        for loader in self.loaders:
            next(iter(loader), None)

    def _fetch(self, rank: int) -> list[int]:
        while True:
            if self.iterators[rank] is None:
                self.iterators[rank] = iter(self.loaders[rank])
            batch = next(self.iterators[rank], None)
            if batch is not None:
                return [int(number) for number in batch]
            self.iterators[rank] = None

    def step(self) -> list[int]:
        """Train and commit a global batch; return its samples in global order."""
        ranks, sampler = len(self.samplers), self.samplers[0]
        for rank, hand in enumerate(self.hands):
            while len(hand) <= self.depth:
                hand.append(self._fetch(rank))
        batches = [hand.popleft() for hand in self.hands]
        size = sampler.global_batch_size or 0
        size = min(size, sampler.tail_counts().remaining) if sampler.tail == "short" else size
        merged = [batches[k % ranks][k // ranks] for k in range(size)]
        for one in self.samplers:
            one.commit()
        return merged

    def state(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("look"), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 2)),
    st.tuples(st.just("resume"), st.integers(1, 3)),
)


def run(actions: list[tuple[str, int]], n: int, size: int, tail: str, *, seed: int = 0, **how: Any) -> None:
    loop, trained = Loop(world(n, 1, size, seed=seed, tail=tail), **how), []
    for action, number in actions:
        if action == "step":
            for _ in range(number):
                trained += loop.step()
                assert loop.samplers[0].position == len(trained)
        elif action == "leave":
            loop.leave(number)
        elif action == "resume":
            state = loop.state()
            ranks = number if tail == "span" else 1  # else some have a batch less
            loop = Loop(world(n, ranks, size, seed=seed, tail=tail), **how)
            loop.depth = 3 - number
            for sampler in loop.samplers:
                sampler.load_state_dict(state)
        else:
            loop.look()
    assert trained == unbroken(n, seed, len(trained))


@settings(
    max_examples=int(os.environ.get("SAMPLER_EXAMPLES", "60")), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    actions=st.lists(ACTIONS, max_size=25),
    n=st.integers(25, 50),
    size=st.sampled_from([1, 4, 6]),
    tail=st.sampled_from(["span", "short"]),
    micro=st.booleans(),
)
def test_every_sample_comes_once_however_a_loop_leaves_its_loader_and_begins_again(
    actions: list[tuple[str, int]], n: int, size: int, tail: str, micro: bool
) -> None:
    run(actions, n, size, tail, micro=micro)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("persistent", "micro", "tail"), [(False, False, "span"), (True, False, "short"), (False, True, "short")]
)
def test_workers_that_read_ahead_over_the_end_of_an_epoch_say_nothing_of_where_the_next_iteration_begins(
    persistent: bool, micro: bool, tail: str
) -> None:
    """Leaving after every few steps, looking between, with one batch in hand or none."""
    actions = [
        ("look", 0),
        ("step", 5),
        ("leave", 1),
        ("step", 2),
        ("leave", 0),
        ("look", 0),
        ("step", 3),
        ("leave", 1),
    ]
    run(actions * 2 + [("resume", 1), ("step", 9)], 26, 4, tail, micro=micro, workers=2, persistent=persistent)


@pytest.mark.parametrize("read_ahead", [4, 16, 17, 24, 40])
def test_an_iterator_that_is_drawn_from_by_hand_and_left(read_ahead: int) -> None:
    sampler = ElasticSampler(40, dp_rank=0, dp_size=1, global_batch_size=4, seed=7)
    got: list[int] = []
    for _ in range(25):
        iterator = iter(sampler)
        got += islice(iterator, 4)
        list(islice(iterator, read_ahead - 4))
        sampler.commit()
    assert got == unbroken(40, 7, 100)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_that_is_left_early_begins_again_whatever_its_workers_had_read(workers: int) -> None:
    sampler = ElasticSampler(12, dp_rank=0, dp_size=1, tail="short", shuffle=False, auto_commit=True)
    loader: DataLoader[Any] = DataLoader(Numbers(12), batch_size=4, sampler=sampler, num_workers=workers)
    first = [next(iter(loader)).tolist() for _ in range(2)]
    assert first == [[0, 1, 2, 3]] * 2
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert sampler.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_loader_drops_at_the_end_of_an_epoch_is_behind_the_position(workers: int) -> None:
    """`DataLoader(drop_last=True)`: else the position would be that much further behind training in every epoch."""
    sampler = ElasticSampler(22, dp_rank=0, dp_size=1)
    loader: DataLoader[Any] = DataLoader(
        Numbers(22), batch_size=4, sampler=sampler, drop_last=True, num_workers=workers
    )
    for epoch in range(3):
        for batch in loader:
            sampler.commit(len(batch))
        assert sampler.position == 22 * (epoch + 1)
