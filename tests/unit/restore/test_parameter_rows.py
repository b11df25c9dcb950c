"""State by the place of a parameter: refused where the parameters stand in another row; and what has been frozen since."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import bits, started, step_once
from support.one_rank import agent_of_the_test, crash  # noqa: F401 -- a fixture
from torch import nn

from flashckpt.errors import TensorMismatchError


class Average:
    """As torch_ema and diffusers keep it: a list in the order of the parameters."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.shadow = [param.detach().clone() for param in self.params]

    def update(self) -> None:
        self.shadow = [a.lerp(p.detach(), 0.5) for a, p in zip(self.shadow, self.params, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Around:
    """No optimizer itself: torch numbers the state of the one inside by place."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class Program:
    """Two layers of one shape, made in either order."""

    def __init__(self, kind: type, *, swapped: bool = False) -> None:
        torch.manual_seed(0)
        layers = {"query": nn.Linear(8, 8), "key": nn.Linear(8, 8)}
        self.model = nn.ModuleDict(dict(sorted(layers.items(), reverse=not swapped)))
        self.model.forward = lambda batch: layers["key"](layers["query"](batch).tanh())
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.average = Average(self.model.parameters())
        own = {"average": self.average, "optimizer": self.optimizer}
        around = {"optimizer": Around(self.optimizer)}
        self.things: dict[str, Any] = {"model": self.model, **(own if kind is Average else around)}

    def step(self, number: int) -> None:
        step_once(self.model, self.optimizer, number)
        self.average.update()

    def seen(self) -> Any:
        names = {id(p): name for name, p in self.model.named_parameters()}
        state = {names[id(p)]: held for p, held in self.optimizer.state.items()}
        shadow = {names[id(p)]: one for p, one in zip(self.average.params, self.average.shadow, strict=True)}
        return bits([dict(self.model.state_dict()), state, shadow if "average" in self.things else {}])


@pytest.mark.parametrize("kind", [Average, Around])
def test_it_goes_on_in_the_same_row_and_is_refused_in_another(kind: type, tmp_path: Path) -> None:
    dying = Program(kind)
    ckpt, _ = started(tmp_path, **dying.things)
    for number in (1, 2):
        dying.step(number)
        ckpt.step(number)
    crash(ckpt)
    program = Program(kind, swapped=True)
    before = program.seen()
    with pytest.raises(
        TensorMismatchError, match="has state by the place of a parameter, and the parameters are in"
    ) as refused:
        started(tmp_path, **program.things)
    assert program.seen() == before
    assert ("'average.shadow'" if kind is Average else "'optimizer.state'") in refused.value.found
    again = Program(kind)
    ckpt, report = started(tmp_path, **again.things)
    assert report is not None
    assert again.seen() == dying.seen()
    for program in (dying, again):
        program.step(3)
    assert again.seen() == dying.seen()
    crash(ckpt)


@pytest.mark.parametrize("thaws_again", [False, True])
def test_what_was_unfrozen_in_the_middle_and_is_frozen_now_is_said(
    thaws_again: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def made() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        model[0].requires_grad_(requires_grad=False)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    model.requires_grad_(requires_grad=True)
    step_once(model, optimizer, 1)
    ckpt.step(1)
    crash(ckpt)
    model, optimizer = made()
    model.requires_grad_(requires_grad=thaws_again)
    with caplog.at_level(logging.WARNING, logger="flashckpt"):
        ckpt, report = started(tmp_path, model=model, optimizer=optimizer)
    crash(ckpt)
    assert report is not None
    said = [one.getMessage() for one in caplog.records if "frozen" in one.getMessage()]
    assert len(said) == (not thaws_again)
    assert all("4 parameters of 'optimizer'" in text and "'optimizer.0.weight'" in text for text in said)
