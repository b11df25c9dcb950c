"""An optimizer that changes tracked parameters and is not tracked is named; one that is harmless is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from flashckpt.session.coverage import UntrackedOptimizers
from flashckpt.state.placement import World
from flashckpt.state.registry import StateRegistry


class Wrapped:
    """What a framework tracks in place of an optimizer: an object that holds it somewhere."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parts = {"all": [optimizer]}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture
def watched() -> Iterator[Callable[..., UntrackedOptimizers]]:
    made: list[UntrackedOptimizers] = []

    def watch(**things: Any) -> UntrackedOptimizers:
        tracked = StateRegistry(World(rank=0, size=1))
        for name, thing in things.items():
            tracked.add(name, thing)
        made.append(UntrackedOptimizers(tracked))
        return made[-1]

    yield watch
    for one in made:
        one.remove()


def train(model: nn.Module, *optimizers: Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_an_optimizer_in_place_of_the_tracked_one_is_named_once(watched: Any, caplog: Any) -> None:
    model = nn.Linear(3, 3)
    first = AdamW(model.parameters())
    watch = watched(model=model, optimizer=first)
    train(model, first)
    watch.check()
    assert not caplog.records
    second = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, second)
        watch.check()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("SGD took a step with 'model.weight' and is not tracked")


def test_of_two_optimizers_the_one_that_was_left_out_is_named(watched: Any, caplog: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    one, two = SGD(model[0].parameters(), lr=0.1), AdamW(model[1].parameters())
    watch = watched(model=model, optimizer=one)
    train(model, one, two)
    watch.check()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("AdamW took a step with 'model.1.weight' and is not tracked")


def harmless(model: nn.Module) -> dict[str, tuple[dict[str, Any], list[Optimizer]]]:
    plain, other = AdamW(model.parameters()), copy.deepcopy(model)
    inner = SGD(model.parameters(), lr=0.1)
    return {
        "the tracked one": ({"optimizer": plain}, [plain]),
        "of another model": ({"optimizer": plain}, [plain, SGD(other.parameters(), lr=0.1)]),
        "beside the tracked one": ({"optimizer": plain}, [plain, inner]),
        "inside of a tracked object": ({"optimizer": Wrapped(inner)}, [inner]),
        "two in turn": ({"optimizer": [plain, inner]}, [inner]),
    }


@pytest.mark.parametrize("case", harmless(nn.Linear(3, 3)))
def test_a_harmless_one_is_not(case: str, watched: Any, caplog: Any) -> None:
    model = nn.Linear(3, 3)
    things, stepping = harmless(model)[case]
    watch = watched(model=model, **things)
    for _ in range(3):
        train(model, *stepping)
        watch.check()
    assert not caplog.records


def test_a_checkpointer_that_is_gone_looks_no_longer(watched: Any) -> None:
    model = nn.Linear(3, 3)
    watch = watched(model=model, optimizer=AdamW(model.parameters()))
    watch.remove()
    train(model, SGD(model.parameters(), lr=0.1))
    assert not watch.others
