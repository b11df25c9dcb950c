"""DLRover's ElasticTrainer by its call shape: fewer ranks accumulate, and a Checkpointer tracks what it returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashckpt import Checkpointer
from flashckpt.errors import LayoutError
from flashckpt.integrations.dlrover_trainer import ElasticTrainer

BATCHES = 8


class Loop:
    """A small run; `kept` are the parameters after each micro-batch."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(4, 1)
        plain = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.trainer = ElasticTrainer(self.model)
        self.optimizer, self.scheduler = self.trainer.prepare(plain, torch.optim.lr_scheduler.StepLR(plain, 1, 0.5))
        assert self.optimizer is plain
        self.kept: list[list[float]] = []

    def micro_batch(self, number: int) -> None:
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        with self.trainer.step(fix_total_batch_size=True):
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.kept.append(self.model.weight.flatten().tolist())


def test_one_rank_in_the_place_of_two_takes_two_micro_batches_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_NUM", "2")
    loop = Loop()
    begun = loop.model.weight.flatten().tolist()
    for number in range(4):
        loop.micro_batch(number)
    assert loop.trainer.gradient_accumulation_steps == 2
    assert loop.kept[0] == begun
    assert loop.kept[1] == loop.kept[2] != begun
    assert loop.kept[3] != loop.kept[2]
    assert (loop.trainer.num_steps, loop.scheduler.last_epoch) == (2, 2)
    assert loop.scheduler.get_last_lr() == [0.025]


def test_without_dlrovers_variable_each_micro_batch_is_a_step() -> None:
    loop = Loop()
    for number in range(3):
        loop.micro_batch(number)
    assert (loop.trainer.gradient_accumulation_steps, loop.trainer.num_steps) == (1, 3)


def test_what_prepare_returns_is_tracked_and_continues_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_NUM", "2")

    def run(root: Path, first: int, last: int) -> Loop:
        loop = Loop()
        ckpt = Checkpointer(root, snapshot_every=1, persist_every=1)
        ckpt.track(model=loop.model, optimizer=loop.optimizer, scheduler=loop.scheduler)
        report = ckpt.restore()
        loop.trainer.num_steps = report.step if report else 0
        for number in range(first, last):
            loop.micro_batch(number)
            if loop.trainer.sync_gradients:
                ckpt.step(loop.trainer.num_steps)
        ckpt.wait()
        ckpt.close()
        return loop

    whole = run(tmp_path / "whole", 0, BATCHES)
    run(tmp_path / "parts", 0, 4)
    rest = run(tmp_path / "parts", 4, BATCHES)
    assert rest.trainer.num_steps == whole.trainer.num_steps == BATCHES // 2
    assert rest.kept == whole.kept[4:]
    assert rest.scheduler.state_dict() == whole.scheduler.state_dict()


def test_ranks_that_would_take_different_numbers_of_micro_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_NUM", "3")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(LayoutError, match="does not divide over these ranks"):
        ElasticTrainer(torch.nn.Linear(1, 1)).prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
