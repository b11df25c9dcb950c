"""Plans of snapshots: state that appears, changes shape or storage, and what restore() plans ahead."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import digest
from support.one_rank import agent_of_the_test, crash, opened, opened_as, step_kept  # noqa: F401 -- fixtures
from torch import nn

from flashckpt import Checkpointer


def test_state_that_appears_and_parameters_that_are_added_or_frozen_are_in_the_next_snapshot(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    model[1].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def one(step: int, ckpt: Checkpointer) -> None:
        model(torch.randn(2, 50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)

    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    one(1, ckpt)
    model[1].requires_grad_(requires_grad=True)
    one(2, ckpt)
    model.append(nn.Linear(50, 3000))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    one(3, ckpt)  # its memory is made meanwhile: the next step has room
    assert ckpt._alive().memory.wait_first(60)
    one(4, ckpt)
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50), nn.Linear(50, 3000))
    groups: Any = [{"params": [*other[0].parameters(), *other[1].parameters()]}, {"params": other[2].parameters()}]
    fresh = torch.optim.AdamW(groups)
    again = opened(tmp_path, model=other, optimizer=fresh)
    crash(again)
    assert digest(other, fresh) == kept
    assert fresh.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("at", [1, 2])
def test_an_optimizer_that_loads_its_own_state_in_mid_run_is_kept_as_it_is_from_then_on(
    tmp_path: Path, at: int
) -> None:
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    for step in range(1, 5):
        model(torch.randn(2, 50)).sum().backward()
        optimizer.step()
        if step == at:  # a rollback by hand, as after a spike of the loss
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_kept(ckpt, step)
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Linear(50, 50)
    fresh = torch.optim.AdamW(other.parameters())
    crash(opened(tmp_path, model=other, optimizer=fresh))
    assert digest(other, fresh) == kept


def test_a_parameter_with_another_storage_discards_one_snapshot_and_is_planned_anew(tmp_path: Path) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    ckpt.step(1)
    ckpt.fence()
    model.weight.data = torch.ones(4, 8)
    ckpt.step(2)
    ckpt.step(3)
    crash(ckpt)
    assert "model.weight" in str(failures[0])
    assert len(failures) == 1
    other = nn.Linear(8, 4, bias=False)
    crash(opened(tmp_path, model=other))
    assert torch.equal(next(other.parameters()), torch.ones(4, 8))


OPTIMIZERS: list[Any] = [
    torch.optim.AdamW,
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
]


def steps(ckpt: Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        model(torch.full((2, 6), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_that_the_first_step_makes_was_planned_in_restore(make: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.BatchNorm1d(6))
    optimizer = make(model.parameters())
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    steps(ckpt, model, optimizer, 1, 3)
    assert "plans" not in ckpt.stats, "nothing was planned in step()"
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.BatchNorm1d(6))
    fresh = make(other.parameters())
    again = opened(tmp_path, model=other, optimizer=fresh)
    assert digest(other, fresh) == kept
    steps(again, other, fresh, 4, 5)
    assert "plans" not in again.stats, "nor after a restore"
    assert again.stats["snapshots"] >= 1
    crash(again)


class InHalves(torch.optim.SGD):
    """Keeps its state in another form than its base class."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16().float().reshape(-1)
        return result


def test_state_in_another_form_than_predicted_is_planned_when_it_is_there(tmp_path: Path) -> None:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    model.bias.requires_grad = False  # will have no state, against the prediction
    steps(ckpt, model, optimizer, 1, 2)
    assert ckpt.stats["plans"] == 1
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Linear(6, 6)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    crash(opened(tmp_path, model=other, optimizer=fresh))
    assert digest(other, fresh) == kept


def test_state_of_another_shape_than_predicted_discards_one_snapshot_and_is_planned_anew(tmp_path: Path) -> None:
    model = nn.Linear(6, 6, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(36)
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    assert len(failures) == 1
    assert "another form" in str(failures[0])
    assert opened_as(tmp_path, "t", model=nn.Linear(6, 6, bias=False)) == 2


def test_state_that_is_no_tensor_against_the_prediction_is_planned_as_it_is(tmp_path: Path) -> None:
    """Older releases of torch kept `step` as an int, and so do programs that set it themselves."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = 1
    ckpt.step(1)
    crash(ckpt)
    other = nn.Linear(6, 6)
    fresh = torch.optim.AdamW(other.parameters())
    crash(opened(tmp_path, model=other, optimizer=fresh))
    assert [state["step"] for state in fresh.state.values()] == [1, 1]
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_subclass_of_a_known_optimizer_is_planned_as_it_is(tmp_path: Path) -> None:
    model = nn.Linear(6, 6)
    optimizer = InHalves(model.parameters(), lr=0.1, momentum=0.9)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    ckpt.step(1)
    crash(ckpt)
    assert not failures
    assert opened_as(tmp_path, "t", model=nn.Linear(6, 6)) == 1
