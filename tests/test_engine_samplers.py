"""Tracked samplers that move, and that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_rank import Holder, agent_of_the_test, crash, opened, opened_as  # noqa: F401 -- fixtures
from torch import nn

from flashckpt.errors import SamplerStateError


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
    from flashckpt.sampler import ElasticSampler

    sampler = ElasticSampler(20, dp_rank=0, dp_size=1, global_batch_size=8, tail="short")
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=sampler)
    for step in range(1, 10):  # three epochs, each with a short batch at its end
        ckpt.step(step)
    crash(ckpt)
    assert sampler.epoch == 3
