"""Tracked samplers that move, and that do not."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.counting import Numbers
from support.one_rank import (  # noqa: F401 -- fixtures
    Holder,
    agent_of_the_test,
    crash,
    finished,
    opened,
    opened_as,
    step_kept,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from flashckpt import Checkpointer, collectives
from flashckpt.commands.status import describe
from flashckpt.errors import ConfigError, LayoutError, SamplerStateError
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler
from flashckpt.state.samplers import Commits, leave_out, refuse_gaps


class Stuck(Holder):
    """A sampler whose position moves only while `moves` is set."""

    moves = True

    def commit(self, samples: int | None = None) -> None:
        self.state = {"offset": self.state["offset"] + (samples or 0) * self.moves}


def test_a_tracked_sampler_that_does_not_move_for_two_steps_is_an_error_and_for_one_is_not(tmp_path: Path) -> None:
    sampler = Stuck(offset=0)
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=sampler)
    ckpt.step(1, samples=8)
    sampler.moves = False
    ckpt.step(2, samples=8)
    sampler.moves = True
    ckpt.step(3, samples=8)
    sampler.moves = False
    ckpt.step(4, samples=8)
    with pytest.raises(SamplerStateError, match=r"'data' has not moved for 2 steps") as stuck:
        ckpt.step(5, samples=8)
    assert "step 5" in str(stuck.value)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=nn.Linear(2, 2), data=sampler) == 4, "step 5 was not taken"


class InPlace(Holder):
    """A sampler that gives out the very state it goes on changing, a tensor among it."""

    def commit(self, samples: int | None = None) -> None:
        self.state["offset"] += samples or 0


@pytest.mark.parametrize("first", [0, torch.zeros(2)], ids=["number", "tensor"])
def test_a_sampler_that_changes_its_state_in_place_is_seen_to_move(first: Any, tmp_path: Path) -> None:
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=InPlace(offset=first))
    for step in range(1, 5):
        ckpt.step(step, samples=8)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=nn.Linear(2, 2), data=InPlace(offset=first)) == 4


def test_an_elastic_sampler_that_is_committed_by_every_step_is_never_stuck(tmp_path: Path) -> None:
    sampler = ElasticSampler(20, dp_rank=0, dp_size=1, global_batch_size=8, tail="short")
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=sampler)
    for step in range(1, 10):  # three epochs, each with a short batch at its end
        sampler.next_ids()
        ckpt.step(step)
    crash(ckpt)
    assert sampler.epoch == 3


@pytest.mark.parametrize("micro_batch", [0, 4])
def test_a_step_does_not_read_the_whole_state_of_an_elastic_sampler(
    micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ElasticSampler(1000, dp_rank=0, dp_size=1, global_batch_size=4)
    thing = ElasticBatchSampler(sampler, micro_batch) if micro_batch else sampler
    commits = Commits(is_alone=True)
    with monkeypatch.context() as patch:
        patch.setattr(ElasticSampler, "state_dict", lambda _: pytest.fail("16 bytes and 4 us for each skipped span"))
        for step in range(1, 4):
            sampler.next_ids()
            commits.commit({"data": thing}, None, step)
        patch.setattr(ElasticSampler, "commit", lambda *_: None)
        commits.commit({"data": thing}, None, 4)
    monkeypatch.setattr(ElasticSampler, "commit", lambda *_: None)
    with pytest.raises(SamplerStateError, match="'data' has not moved for 2 steps") as stuck:
        commits.commit({"data": thing}, None, 5)
    assert "'offset': 12" in str(stuck.value)


def test_an_elastic_sampler_that_nothing_is_drawn_from_is_an_error(tmp_path: Path) -> None:
    sampler = ElasticSampler(64, dp_rank=0, dp_size=1, global_batch_size=4)
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=ElasticBatchSampler(sampler, 4))
    ckpt.step(1)
    with pytest.raises(SamplerStateError, match=r"'data' is committed and nothing was drawn from it") as never:
        ckpt.step(2)
    assert "sampler=sampler" in str(never.value)
    crash(ckpt)


def test_of_several_ranks_one_may_get_its_batches_from_another_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler, commits = ElasticSampler(64, dp_rank=0, dp_size=1, global_batch_size=4), Commits(is_alone=False)
    for step in range(1, 6):
        commits.commit({"data": sampler}, None, step)
    assert sampler.position == 20
    (said,) = [record.getMessage() for record in caplog.records]
    assert "'data' is committed and nothing was drawn from it; it is right only if another rank" in said


@pytest.mark.parametrize(("fetched", "workers", "said"), [(0, 0, 0), (1, 0, 1), (0, 2, 0), (1, 2, 0)])
def test_a_loop_that_fetches_its_batches_ahead_is_told_so_once_and_workers_that_do_are_not(
    fetched: int, workers: int, said: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = multiprocessing.active_children
    others = children()  # of tests before this one
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [one for one in children() if one not in others])
    sampler, commits = ElasticSampler(64, dp_rank=0, dp_size=1, global_batch_size=4), Commits(is_alone=True)
    loader: DataLoader[Any] = DataLoader(range(64), batch_size=4, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]  # indexable
    batches = (batch for _ in range(3) for batch in loader)
    for _ in range(fetched):
        next(batches)
    for step in range(1, 25):
        next(batches)
        commits.commit({"data": sampler}, None, step)
    found = [r.getMessage() for r in caplog.records]
    assert len(found) == said
    assert not said or "'data' has 4 samples that are fetched and not committed" in found[0]


GAPS = [  # what each rank tracks, and whether together they deal everything
    ([(0, 1)], True),
    ([(0, 2)], False),
    ([(1, 2)], False),
    ([(0, 2), (1, 2)], True),
    ([(0, 2), (0, 2)], False),
    ([(0, 1), (0, 1)], True),  # tensor-parallel
    ([(0, 2), (0, 2), (1, 2), (1, 2)], True),
    ([(0, 4), (1, 4), (2, 4), (2, 4)], False),
    ([(0, 2), None, (1, 2), None], True),  # pipeline stages that get theirs from others
    ([(0, 2), None], False),
    ([(0, 3), (1, 3), (0, 1)], False),
]


@pytest.mark.parametrize(("places", "covers"), GAPS)
@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: ElasticBatchSampler(s, 2), lambda s: DataLoader(Numbers(64), sampler=s)]
)
def test_places_that_leave_samples_to_nobody_are_refused_on_every_rank(
    places: list[Any], covers: bool, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_ranks = [
        {} if place is None else {"data": wrap(ElasticSampler(64, dp_rank=place[0], dp_size=place[1]))}
        for place in places
    ]
    said: list[Any] = []
    monkeypatch.setattr(collectives, "all_gather", lambda mine: [said.append(mine), mine][1:])  # type: ignore[func-returns-value]
    for objects in of_ranks:
        with contextlib.suppress(LayoutError):
            refuse_gaps(objects)
    monkeypatch.setattr(collectives, "all_gather", lambda _: said[: len(of_ranks)])
    for objects in of_ranks:
        if covers:
            refuse_gaps(objects)
            continue
        with pytest.raises(LayoutError, match="nobody trains a part of what the tracked sampler 'data' deals"):
            refuse_gaps(objects)


def test_a_dp_size_above_the_ranks_of_the_run_is_refused_by_restore(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="dp_size 2, and dp_rank 0 on the 1 ranks"):
        opened(tmp_path, model=nn.Linear(2, 2), data=ElasticSampler(64, dp_rank=0, dp_size=2, global_batch_size=4))


@pytest.mark.parametrize("of", [int, np.int64, np.int32, np.uint8])
def test_steps_settings_and_samples_may_be_numbers_of_numpy(of: Any, tmp_path: Path) -> None:
    sampler = ElasticSampler(64, dp_rank=of(0), dp_size=of(1), seed=of(3))
    ckpt = Checkpointer(tmp_path, job="t", snapshot_every=of(1), persist_every=of(50), keep_last=of(2))
    ckpt.track(model=nn.Linear(2, 2), data=sampler)
    ckpt.restore()
    for step in (1, 2, 3):
        next(iter(sampler))
        ckpt.step(of(step), samples=of(1))
    crash(ckpt)
    again = ElasticSampler(64, dp_rank=0, dp_size=1, seed=3)
    assert opened_as(tmp_path, "t", model=nn.Linear(2, 2), data=again) == 3
    assert again.position == 3


def ddp_over(ranks: int) -> nn.Module:
    """What is asked of DDP: the group of its ranks."""
    module = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(module)
    module.process_group = SimpleNamespace(size=lambda: ranks)  # type: ignore[assignment]  # all that is asked
    return nn.Sequential(module)


@pytest.mark.parametrize("ranks", [0, 2, 4])
def test_a_place_of_the_process_group_is_taken_where_ddp_says_that_every_rank_is_a_replica(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(collectives, "all_gather", lambda _: [[["data", rank, 4]] for rank in range(4)])
    sampler = ElasticSampler(64, global_batch_size=8)
    assert (sampler.dp_rank, sampler.dp_size) == (1, 4)
    refuse_gaps({"data": ElasticBatchSampler(sampler, 2)}, [ddp_over(ranks) if ranks else nn.Linear(2, 2)])
    if ranks == 4:
        assert len(sampler.next_ids()) == 2
        return
    with pytest.raises(LayoutError, match="needs its data-parallel rank"):
        sampler.next_ids()


@pytest.mark.parametrize("tail", ["span", "short", "pad", "drop"])
def test_what_is_left_out_are_the_samples_that_so_many_steps_would_train(tail: str) -> None:
    """Also over the end of an epoch: 10 samples in batches of 4."""
    for steps in range(1, 7):
        trained, left = (
            ElasticSampler(10, dp_rank=0, dp_size=1, shuffle=False, global_batch_size=4, tail=tail) for _ in range(2)
        )
        for _ in range(steps):
            trained.commit()
        assert left.leave_out(7, 8, 7 + steps)[0] == trained.position
        assert left.next_ids().tolist()[:1] == trained.next_ids().tolist()[:1]


def test_samples_are_left_out_where_a_sampler_can_and_the_others_are_named(tmp_path: Path) -> None:
    known, unknown = (ElasticSampler(100, dp_rank=0, dp_size=1, global_batch_size=size) for size in (4, None))
    loader = DataLoader(Numbers(100), batch_sampler=ElasticBatchSampler(known, 4))
    text = leave_out({"data": loader, "other": unknown, "mine": Stuck(offset=0)}, 10, 0, 13)
    assert "steps 11 to 13" in text
    assert "12 of 'data' (positions 0 to 11 of the stream)" in text
    assert "none of 'other'" in text
    assert "mine" not in text
    assert known.state_dict() != unknown.state_dict()
    assert leave_out({"mine": Stuck(offset=0)}, 10, 11, 13) == ""


def test_a_restore_leaves_out_the_samples_up_to_the_step_that_the_agent_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> tuple[ElasticSampler, Checkpointer]:
        sampler = ElasticSampler(100, dp_rank=0, dp_size=1, shuffle=False, global_batch_size=4)
        return sampler, opened(tmp_path, model=nn.Linear(2, 2), data=sampler)

    sampler, ckpt = job()
    for step in (1, 2):
        sampler.next_ids()
        ckpt.step(step)
    crash(ckpt)
    for steps, ids in (("0-2", [8, 9, 10, 11]), ("0-5", [20, 21, 22, 23]), ("3-3", [12, 13, 14, 15])):
        monkeypatch.setenv("FLASHCKPT_BACK", "1")  # so that step 1 is restored
        monkeypatch.setenv("FLASHCKPT_LEAVE_OUT", steps)
        sampler, ckpt = job()
        found = sampler.next_ids().tolist()
        if steps == "3-3":
            assert found == [4, 5, 6, 7]
            step_kept(ckpt, 2)
            finished(ckpt)
            assert any(one.endswith("8 to 11 of the stream)") for one in describe(ckpt._alive().directory)["notes"])
            found = sampler.next_ids().tolist()
        assert found == ids
        crash(ckpt)
    said = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert ["16 of 'data' (positions 4 to 19 of the stream)" in one for one in said] == [True, False]


def test_a_loop_leaves_out_samples_behind_the_restored_state_alone(tmp_path: Path) -> None:
    """As dlrun does, by a call of one's own."""

    def job() -> tuple[ElasticSampler, Checkpointer]:
        sampler = ElasticSampler(100, dp_rank=0, dp_size=1, shuffle=False, global_batch_size=4)
        return sampler, opened(tmp_path, model=nn.Linear(2, 2), data=sampler)

    sampler, ckpt = job()
    for step in (1, 2):
        sampler.next_ids()
        step_kept(ckpt, step)
    crash(ckpt)
    for first, last, ids in ((1, 2, [8, 9, 10, 11]), (1, 3, [12, 13, 14, 15]), (3, 4, [16, 17, 18, 19])):
        sampler, ckpt = job()
        ckpt.leave_out(first, last)
        assert sampler.next_ids().tolist() == ids
        crash(ckpt)
    sampler, ckpt = job()
    with pytest.raises(ConfigError, match=r"no step is to be left out(?s:.*)first=4, last=3"):
        ckpt.leave_out(4, 3)
    assert sampler.next_ids().tolist() == [8, 9, 10, 11]
    crash(ckpt)
