"""What `flashckpt check` sees of a script: wherever it keeps something that moves, one named leaf moves with it."""

from __future__ import annotations

import _random
import array
import collections
import ctypes
import functools
import itertools
import multiprocessing
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from flashckpt import Checkpointer
from flashckpt.exactness import leaves
from flashckpt.exactness.insides import is_own
from flashckpt.exactness.leaves import LONGEST, Leaf, Walk

Made = tuple[Any, Callable[[], Any]]
"""A thing, and what moves it."""
COUNT = [0]


class Config:
    """Settings that a script changes in the class itself."""

    heat = 1.0


class Slotted:
    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0

    def move(self) -> None:
        self.at += 1


class Placed:
    def __init__(self) -> None:
        self._at = [0]

    def move(self) -> None:
        self._at = [self._at[0] + 1]

    def get_state(self) -> dict[str, int]:
        return {"at": self._at[0]}

    def set_state(self, state: dict[str, int]) -> None:
        self._at = [state["at"]]


class Fails:
    """Makes what it is asked for, and fails: as torch.classes does."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def counts() -> int:
    COUNT[0] += 1
    return COUNT[0]


def by_default() -> Made:
    def noisy(x: float, made: list[float] = []) -> float:  # noqa: B006 -- what is looked for
        made.append(x)
        return x

    return noisy, lambda: noisy(1.0)


def by_keyword() -> Made:
    def noisy(x: float, *, noise: torch.Generator) -> float:
        return x + float(torch.rand((), generator=noise))

    partly = functools.partial(noisy, noise=torch.Generator())
    return partly, lambda: partly(1.0)


def by_frame() -> Made:
    def draws() -> Iterator[float]:
        noise = np.random.default_rng(1)
        while True:
            yield float(noise.random())

    made = draws()
    next(made)
    return made, lambda: next(made)


def by_first_call() -> Made:
    def counts() -> Iterator[int]:
        at = 0
        while True:
            at += 1
            yield at

    made = counts()
    return made, lambda: next(made)


def by_later_round() -> Made:
    made = itertools.cycle([1, 2, 3])
    for _ in range(4):
        next(made)
    return made, lambda: next(made)


def by_iterator(made: Any) -> Made:
    return made, lambda: next(made)


def by_method(made: Any, name: str, *given: Any) -> Made:
    return made, functools.partial(getattr(made, name), *given)


def by_shared(made: Any) -> Made:
    return made, lambda: setattr(made, "value", made.value * 0.9)


def by_class() -> Made:
    return Config(), lambda: setattr(Config, "heat", Config.heat * 0.9)


KINDS: dict[str, tuple[Callable[[], Made], str]] = {
    "default argument": (by_default, "made of noisy()"),
    "keyword of a partial function": (by_keyword, "it['it'].noise"),
    "generator function": (by_frame, "it['it']: noise"),
    "generator function not begun": (by_first_call, "it['it']: begun"),
    "endless iterator in a later round": (by_later_round, "it['it']: left of the round"),
    "iterator of a list": (lambda: by_iterator(iter([1, 2, 3])), "it['it']"),
    "count": (lambda: by_iterator(itertools.count()), "it['it']"),
    "bytearray": (lambda: by_method(bytearray(2), "append", 1), "it['it']"),
    "slots": (lambda: by_method(Slotted(), "move"), "it['it'].at"),
    "class": (by_class, "Config.heat"),
    "global of a function": (lambda: (counts, counts), "test_leaves.COUNT"),
    "method": (lambda: by_method(Slotted().move, "__call__"), "it['it'].__self__.at"),
    "queue": (lambda: by_method(queue.Queue(), "put", torch.ones(2)), "len(script(): it['it'].queue)"),
    "list that grows": (lambda: by_method([], "append", torch.ones(2)), "len(script(): it['it'])"),
    "deque of tensors that grows": (
        lambda: by_method(collections.deque([torch.ones(1)]), "append", torch.ones(1)), "len(script(): it['it'])",
    ),
    "long list of arrays": (
        lambda: by_method([(np.zeros(2), i) for i in range(LONGEST + 1)], "__setitem__", 3, (np.ones(2), 3)),
        "it['it']",
    ),
    "array": (lambda: by_method(array.array("d", [1.0]), "append", 2.0), "it['it']"),
    "numbers of C": (lambda: by_method((ctypes.c_double * 2)(), "__setitem__", 0, 1.0), "it['it']"),
    "number that loader workers share": (
        lambda: by_shared(multiprocessing.Value("d", 0.1)), "it['it']._obj",
    ),
    "endless iterator": (lambda: by_iterator(itertools.cycle([1, 2, 3])), "it['it']: cycle.0"),
    "numbered iterator": (lambda: by_iterator(enumerate([1, 2, 3])), "it['it']: enumerate.0"),
    "iterators side by side": (lambda: by_iterator(zip([1, 2], [3, 4], strict=True)), "it['it']: zip.1"),
    "generator written in C": (lambda: by_method(_random.Random(3), "random"), "it['it']"),
    "place by other names": (lambda: by_method(Placed(), "move"), "it['it'].state.at"),
    "number in a tensor": (lambda: by_method(torch.zeros(()), "add_", 1), "it['it']"),
}  # fmt: skip


def seen(ckpt: Checkpointer, **things: Any) -> dict[str, Leaf]:
    """Return what is seen of a script with these variables: in a thread, below which is nothing of the tests' own."""
    found: dict[str, Leaf] = {}

    def script() -> None:
        it = things  # noqa: F841 -- a variable is what is looked at
        found.update(Walk(ckpt._tracked, reads_sources=True).run(sys._getframe()))

    thread = threading.Thread(target=script)
    thread.start()
    thread.join()
    return found


@pytest.fixture
def ckpt(tmp_path: Path) -> Checkpointer:
    return Checkpointer(str(tmp_path / "root"))


def moved(ckpt: Checkpointer, move: Callable[[], Any], **things: Any) -> dict[str, str]:
    """Return the leaves that are other ones after `move`, with their kinds."""
    before = seen(ckpt, **things)
    move()
    after = seen(ckpt, **things)
    return {path: leaf.kind for path, leaf in after.items() if path not in before or leaf != before[path]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_leaf_moves_with_whatever_keeps_a_place(
    kind: str, ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "heat", 1.0)
    make, path = KINDS[kind]
    thing, move = make()
    assert any(name.endswith(path) for name in moved(ckpt, move, it=thing))
    assert moved(ckpt, lambda: None, it=thing) == {}


class Layer(torch.nn.Linear):
    run: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._calls = 0
        self.register_buffer("run", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        self.run = self.run + 1
        return super().forward(x)


class Slow(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = torch.zeros(2)


class Partly:
    """Leaves something out of its state."""

    def __init__(self) -> None:
        self.kept, self.lost = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.kept = state["kept"]


def test_what_tracked_objects_have_beside_their_state_is_seen(ckpt: Checkpointer) -> None:
    model, counted = Layer(), list[int]()
    optimizer, partly = Slow(model.parameters()), Partly()
    model.register_forward_hook(lambda *_: counted.append(1))
    average = model.weight.average = torch.zeros(2)  # type: ignore[attr-defined]
    ckpt.track(model=model, optimizer=optimizer, partly=partly)

    def move() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.slow.add_(1)
        partly.lost += 1
        average.add_(1)

    found = moved(ckpt, move)
    assert found == {
        "model.run, of persistent=False,": "tensor",
        "gradients of model": "gradient",
        "model.weight.average": "tensor",
        "model._calls": "value",
        "counted of <lambda>()": "value",
        "optimizer.slow": "tensor",
        "partly.lost": "value",
    }


@pytest.mark.parametrize(
    ("folder", "own"), [("lib/python3.11/site-packages", False), ("dist-packages", False), ("src", True)]
)
def test_what_is_installed_is_not_the_users_also_where_another_environment_has_it(
    folder: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"module_in_{folder.rpartition('/')[2].replace('-', '_')}"
    module = ModuleType(name)
    module.__file__ = f"/another/{folder}/{name}.py"
    monkeypatch.setitem(sys.modules, name, module)
    assert is_own(name) is own


def test_an_object_that_fails_when_it_is_asked_is_passed(ckpt: Checkpointer) -> None:
    assert seen(ckpt, fails=Fails())


def test_the_module_of_a_generator_is_no_other_one(ckpt: Checkpointer) -> None:
    assert moved(ckpt, random.random, it=random) == {"Python's generator": "generator"}


def test_what_a_module_is_beside_its_tensors_is_seen(ckpt: Checkpointer) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    ckpt.track(model=model)

    def moves() -> None:
        model[0].bias.requires_grad = False
        model[0].eval()

    other = {"frozen parameters of model": "value", "modules in evaluation mode of model": "value"}
    assert moved(ckpt, moves) == other


def test_what_is_nearest_has_its_shortest_name(ckpt: Checkpointer) -> None:
    """An array that is reached through many objects and by one variable is named by the variable."""
    array = np.zeros(2)
    deep: Any = array
    for _ in range(leaves.DEEPEST - 2):
        deep = [deep]
    found = seen(ckpt, deep=deep, near=array)
    assert [path for path, leaf in found.items() if leaf.kind == "tensor"] == ["script(): it['near']"]
