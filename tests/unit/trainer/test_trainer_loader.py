"""The trainer's own loader: exactly once over crashes, resizes, rollbacks and failing reads; its thread and its memory."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.ranks import wait_for
from support.training import run_config

from flashckpt.errors import DataError, SamplerStateError
from flashckpt.sampler import ElasticSampler, Mixture
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.data.windows import Batch
from flashckpt.trainer.prepare.shards import prepare
from flashckpt.trainer.train.phased_data import PhasedData, PhasedSampler
from flashckpt.trainer.train.phases import phases_of

GLOBAL = 4
REPLICAS = [1, 2, 3, 4, 6]
"""Of 3 one has a row of padding more than the others have samples; of 6, two have nothing else."""


class CountingData:
    """Samples that are their own numbers; counts its reads, and fails when it is told to."""

    channels = ("a", "b")

    def __init__(self) -> None:
        self.samples = Mixture({"a": (range(13), 3), "b": (range(7), 1)})
        self.reads = 0
        self.failures = 0

    def batch(self, ids: Sequence[int] | np.ndarray) -> Batch:
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise DataError("the storage is gone", found="nothing", expected="a file")
        numbers = np.asarray(ids, dtype=np.int64)
        tokens = torch.from_numpy(numbers.copy())[:, None]
        return Batch(tokens=tokens, targets=torch.cat([tokens + 1, tokens % 2], 1), ids=numbers, documents=tokens + 7)

    def channel_ids(self, channel: int, count: int) -> Any:
        raise NotImplementedError

    def text_bytes(self, ids: Any) -> Any:
        raise NotImplementedError


def loader(data: Any, *, rank: int = 0, replicas: int = 1, ahead: int = 2) -> TrainingData:
    rows = -(-GLOBAL // replicas)
    return TrainingData(data, dp_rank=rank, dp_size=replicas, global_batch=GLOBAL, rows=rows, seed=3, ahead=ahead)


def order(count: int) -> list[int]:
    """The order of the run, dealt by nobody's loader."""
    sampler = ElasticSampler(CountingData().samples, dp_rank=0, dp_size=1, seed=3, global_batch_size=GLOBAL)
    found: list[int] = []
    while len(found) < count:
        found += sampler.next_ids().tolist()
        sampler.commit()
    return found[:count]


ORDER = order(400)


def check_padding(batch: Batch, replicas: int) -> list[int]:
    """Return the samples of a rank's batch; rows behind them have no target and are one document."""
    own = len(batch.ids)
    assert len(batch.tokens) == len(batch.targets) == -(-GLOBAL // replicas)
    assert batch.tokens[:own, 0].tolist() == batch.ids.tolist()
    assert bool((batch.targets[:own, :-1] >= 0).all())
    assert bool((batch.targets[own:, :-1] == -100).all())
    assert bool((batch.targets[own:, -1] == 0).all())
    assert batch.documents is not None
    assert not batch.documents[own:].any()
    return [int(number) for number in batch.ids]


class Training(RuleBasedStateMachine):
    """What was trained is always the order of the run up to the committed position, without what was skipped."""

    @initialize(replicas=st.sampled_from(REPLICAS), ahead=st.integers(0, 3))
    def begin(self, replicas: int, ahead: int) -> None:
        self.data = CountingData()
        self.trained: list[int] = []  # stream positions
        self.skipped: set[int] = set()
        self._start(replicas, ahead)
        self.snapshot = (self.ranks[0].sampler.state_dict(), 0)

    def _start(self, replicas: int, ahead: int) -> None:
        self.ranks = [loader(self.data, rank=rank, replicas=replicas, ahead=ahead) for rank in range(replicas)]

    def _next(self) -> list[int]:
        before = [rank.sampler.state_dict() for rank in self.ranks]
        parts = [check_padding(rank.next(), len(self.ranks)) for rank in self.ranks]
        assert [rank.sampler.state_dict() for rank in self.ranks] == before  # the committed position stays
        batch = [parts[number % len(parts)][number // len(parts)] for number in range(GLOBAL)]
        assert sum(map(len, parts)) == GLOBAL
        assert all(rank.global_ids() == batch for rank in self.ranks)
        return batch

    def _coming(self) -> list[int]:
        position = self.ranks[0].sampler.position
        found: list[int] = []
        while len(found) < GLOBAL:
            if position not in self.skipped:
                found.append(position)
            position += 1
        return found

    @rule()
    def look_and_die(self) -> None:
        assert self._next() == [ORDER[position] for position in self._coming()]

    @rule(steps=st.integers(1, 3))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            coming = self._coming()
            assert self._next() == [ORDER[position] for position in coming]
            self.trained += coming
            for rank in self.ranks:
                rank.sampler.commit()

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = (self.ranks[0].sampler.state_dict(), len(self.trained))

    @rule(replicas=st.sampled_from(REPLICAS), ahead=st.integers(0, 3))
    def crash_and_resize(self, replicas: int, ahead: int) -> None:
        for rank in self.ranks:
            rank.close()
        self._start(replicas, ahead)
        self._restore()

    @rule()
    def roll_back_over_a_spike(self) -> None:
        end = self._coming()[-1] + 1
        self._next()
        steps = (len(self.trained) - self.snapshot[1]) // GLOBAL + 1
        self._restore()
        first = self.ranks[0].sampler.position
        assert {rank.sampler.leave_out(7, 8, 7 + steps)[0] for rank in self.ranks} == {steps * GLOBAL}
        self.skipped |= set(range(first, end))
        self.take_snapshot()

    @rule()
    def a_read_fails(self) -> None:
        """It is raised once, and the next try reads the same batch."""
        for rank in self.ranks:
            rank.close()
        self.data.failures = 1
        with pytest.raises(DataError, match="the storage is gone"):
            self._next()
        self.look_and_die()

    def _restore(self) -> None:
        state, count = self.snapshot
        for rank in self.ranks:
            rank.sampler.load_state_dict(state)
        del self.trained[count:]

    @invariant()
    def nothing_is_lost_or_repeated(self) -> None:
        if hasattr(self, "ranks"):
            end = max([*self.trained, -1]) + 1
            assert sorted(set(range(end)) - self.skipped) == self.trained

    def teardown(self) -> None:
        for rank in getattr(self, "ranks", []):
            rank.close()


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_no_more_than_the_batches_asked_for_are_held_and_each_is_read_once() -> None:
    data = CountingData()
    run = loader(data, ahead=3)
    for step in range(1, 9):
        run.next()
        wait_for(lambda: data.reads == step + 3, what="the reader is as far ahead as it may be")  # noqa: B023 -- asked at once
        assert len(run._coming) == 3
        run.sampler.commit()
    run.close()
    assert data.reads == 8 + 3


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_the_thread_is_no_daemon_and_ends_with_the_loader_or_its_error() -> None:
    data = CountingData()
    run = loader(data)
    run.next()
    (thread,) = [one for one in threading.enumerate() if one.name.startswith("read-ahead")]
    assert not thread.daemon
    run.close()
    assert not reading_threads()
    data.failures = 1
    with pytest.raises(DataError, match="the storage is gone"):
        run.next()
    run.close()
    assert not reading_threads()
    run.next()
    del run, thread  # nobody closed it
    gc.collect()  # the error above holds the frames that it went through
    wait_for(lambda: not reading_threads(), what="the thread of a loader that is gone ends")
    loader(data, ahead=0).next()
    assert not reading_threads()


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_samples_of_a_step_are_named_without_dealing_them_again(monkeypatch: Any, ahead: int) -> None:
    """What the reporting rank asks for its trace is what the reader dealt: as many deals as on every other rank."""
    deals: list[int] = []
    deal = ElasticSampler.next_ids

    def counted(sampler: ElasticSampler) -> Any:
        deals.append(sampler.dp_size)
        return deal(sampler)

    monkeypatch.setattr(ElasticSampler, "next_ids", counted)
    counts = []
    for is_reporter in (False, True):
        deals.clear()
        data = loader(CountingData(), rank=1, replicas=2, ahead=ahead)
        for step in range(3):
            data.next()
            if is_reporter:
                assert data.global_ids() == ORDER[GLOBAL * step : GLOBAL * (step + 1)]
            data.sampler.commit()
        data.close()
        counts.append(deals.count(2))
        assert deals.count(1) <= 3 + ahead
    assert counts == [3, 3]


def test_windows_of_each_phase_are_read_through_what_keeps_them(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{n} bottles on the wall, {n} bottles"}) for n in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    sources = [{"kind": "jsonl", "urls": [str(tmp_path / "text.jsonl")], "channel": "songs"}]
    config = run_config(
        tmp_path,
        data={"sources": sources, "source": ["stdlib"]},
        train={"steps": 9},
        phase={"each": [{"from_step": 5, "seq_len": 32}]},
    )
    prepare(config.data)
    phases, seen = phases_of(config), list[int]()

    class Through:
        def __init__(self, samples: Any) -> None:
            self.samples = samples

        def __getitem__(self, number: int) -> Any:
            seen.append(number)
            return self.samples[number]

    def build(of_phase: Any, seed: int) -> TrainingData:
        return TrainingData(open_data(of_phase, "train"), dp_rank=0, dp_size=1, global_batch=4, seed=seed)

    data = PhasedData(phases, build)
    data.keep(Through)
    for phase in phases:
        if phase.number:
            data.enter(phase)
        batch = data.next()
        assert seen == batch.ids.tolist()
        assert batch.tokens.shape[1] == phase.config.train.seq_len
        seen.clear()


def test_groups_that_train_shares_leave_nothing_out() -> None:
    """What one leaves out of its share another would train."""
    sampler = PhasedSampler(SimpleNamespace(in_shares=True))  # type: ignore[arg-type]  # a part of it
    with pytest.raises(SamplerStateError, match="the share of one group ends where that of another begins"):
        sampler.leave_out(7, 8, 9)
