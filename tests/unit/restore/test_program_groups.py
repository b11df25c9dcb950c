"""Groups in another order are found by their members, schedulers' entries too; other groups and classes are refused.

Every scheduler that torch has is in the matrix: one that a later torch adds fails here until it is.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine import parallel_net
from support.exact import bits, started, step_once
from support.one_rank import Holder, agent_of_the_test, crash  # noqa: F401 -- one is a fixture
from support.ranks import run_ranks, values
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from flashckpt import Checkpointer
from flashckpt.errors import FlashckptError
from flashckpt.state.placement import local_of
from flashckpt.state.value_reader import ValueReader

Rates = dict[str, float]
BASE = ("w", "b", "head")
RATE: Rates = {"w": 0.01, "b": 0.002, "head": 0.0005, "w1": 0.01, "w2": 0.01, "more": 0.03, "wb": 0.01}


class Decay:
    """A rate that is an object, with state of its own."""

    def __init__(self, by: float) -> None:
        self.by, self.calls = by, 0

    def __call__(self, _: int) -> float:
        self.calls += 1
        return 1 / (1 + self.by * self.calls)


def by_rate(groups: tuple[str, ...], factor: float) -> list[float]:
    return [RATE[group] * factor for group in groups]


def two(optimizer: Any) -> list[Any]:
    return [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.StepLR(optimizer, 2, 0.5)]


SCHEDULERS: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "LambdaLR": lambda o, g: schedulers.LambdaLR(o, [Decay(100 * rate) for rate in by_rate(g, 1)]),
    "MultiplicativeLR": lambda o, g: schedulers.MultiplicativeLR(o, [Decay(rate) for rate in by_rate(g, 1)]),
    "StepLR": lambda o, _: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o, _: schedulers.MultiStepLR(o, [1, 3, 5], 0.5),
    "ConstantLR": lambda o, _: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o, _: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o, _: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o, _: schedulers.SequentialLR(o, [*two(o), schedulers.ExponentialLR(o, 0.9)], [2, 4]),
    "PolynomialLR": lambda o, _: schedulers.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o, _: schedulers.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o, _: schedulers.ChainedScheduler(two(o)),
    "ReduceLROnPlateau": lambda o, g: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=by_rate(g, 0.3)),
    "CyclicLR": lambda o, g: schedulers.CyclicLR(o, by_rate(g, 0.1), by_rate(g, 1), 3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o, _: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o, g: schedulers.OneCycleLR(o, by_rate(g, 1), 12),
    "SWALR": lambda o, g: SWALR(o, by_rate(g, 0.3), 3),  # type: ignore[arg-type]  # one rate or a list
}  # fmt: skip


class OfOwn(schedulers.LRScheduler):
    """Somebody's scheduler, with a list per group that nothing names, one that is none, and one of which nobody can say it."""

    counts = False

    def __init__(self, optimizer: Any, floors: list[float]) -> None:
        self.floors, self.turns, self.steps = floors, [1, 2, 3], [len(f"{rate}") for rate in floors]
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        self.steps = [steps * (place + 2) for place, steps in enumerate(self.steps)] if self.counts else self.steps
        return [max(f, float(b) / (1 + self.last_epoch)) for f, b in zip(self.floors, self.base_lrs, strict=True)]


class Around:
    """No scheduler of torch's, but rates per group, and an optimizer in it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.first, self.n = optimizer, [group["lr"] for group in optimizer.param_groups], 0

    def step(self) -> None:
        self.n += 1
        for group, rate in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = rate / (1 + self.n)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.n = state["first"], state["n"]


class Program:
    """A model of three layers, of which one may not be trained, an optimizer of some groups, a scheduler."""

    def __init__(
        self, groups: tuple[str, ...], scheduler: str = "", optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        of: Any = dict(self.model.named_parameters())
        weights, biases = [of["0.weight"], of["2.weight"]], [of["0.bias"], of["2.bias"]]
        members = {
            "w": weights, "b": biases, "head": [of["3.weight"]], "w1": weights[:1], "w2": weights[1:], "more": [of["3.bias"]],
            "wb": weights + biases,
        }  # fmt: skip
        decay = {"w2": 0.5, "b": 0.0}
        self.optimizer = optimizer(
            [{"params": members[g], "lr": RATE[g], "weight_decay": decay.get(g, 0.1)} for g in groups]
        )  # type: ignore[call-arg]  # of every class of torch's that is used here
        make = SCHEDULERS.get(scheduler)
        self.scheduler = make(self.optimizer, groups) if make else None
        self.things: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, number: int) -> Any:
        loss = step_once(self.model, self.optimizer, number)
        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        elif self.scheduler is not None:
            self.scheduler.step()
        return loss

    def seen(self) -> Any:
        """Return weights, and state and settings by parameter."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        own = {names[id(p)]: group for group in self.optimizer.param_groups for p in group["params"]}
        settings = {name: {k: v for k, v in group.items() if k != "params"} for name, group in own.items()}
        state = {names[id(p)]: held for p, held in self.optimizer.state.items()}
        return bits([dict(self.model.state_dict()), settings, state])


def taken(root: Path, scheduler: str = "", **options: Any) -> Any:
    """Train three steps unbroken, and once more to die there; return what was seen after each later step."""
    unbroken, seen = Program(BASE, scheduler, **options), []
    for number in range(1, 7):
        unbroken.step(number)
        seen.append(unbroken.seen())
    dying = Program(BASE, scheduler, **options)
    ckpt, _ = started(root, **dying.things)
    for number in range(1, 4):
        dying.step(number)
        ckpt.step(number)
    crash(ckpt)
    return seen[2:]


def goes_on(root: Path, program: Program, seen: Any) -> None:
    """Restore, and compare with the unbroken run."""
    ckpt, report = started(root, **program.things)
    assert report is not None
    assert not report.overruled
    assert program.seen() == seen[0]
    for number, expected in enumerate(seen[1:], 4):
        program.step(number)
        assert program.seen() == expected
    crash(ckpt)


def is_refused(root: Path, build: Callable[[], Program], both: tuple[str, str] | None = None) -> None:
    """Restore in vain, then by each remedy that the error prints; the program then trains."""
    program = build()
    before = program.seen()
    with pytest.raises(FlashckptError) as refused:
        started(root, **program.things)
    assert program.seen() == before
    error = refused.value
    assert error.state == "Nothing was restored."
    assert both is None or (both[0] in error.found and both[1] in error.expected), str(error)
    remedies = re.findall(r"restore\((\w+)=([^)]*)\)", error.remedy)
    assert {name for name, _ in remedies} == {"strict", "only"}
    for name, value in remedies:
        again = build()
        ckpt = Checkpointer(str(root), snapshot_every=1, job="t")
        ckpt.track(**again.things)
        report = ckpt.restore(**{name: value == "True" if name == "strict" else value.strip("'\"")})
        assert report is not None
        assert name == "only" or report.missing or report.unexpected
        again.step(4)
        crash(ckpt)


def test_every_scheduler_of_torch_is_here() -> None:
    kinds = [
        kind for _, kind in inspect.getmembers(schedulers, inspect.isclass) if issubclass(kind, schedulers.LRScheduler)
    ]
    found = {kind.__name__ for kind in kinds} - {"LRScheduler", "_LRScheduler"}
    assert found == SCHEDULERS.keys() - {"SWALR"}


CHANGED = {"split": ("w1", "w2", "b", "head"), "merged": ("wb", "head"), "added": (*BASE, "more"), "removed": BASE[:2]}


@pytest.mark.matrix
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_groups_in_another_order_go_on_and_other_groups_are_refused(scheduler: str, tmp_path: Path) -> None:
    seen = taken(tmp_path, scheduler)
    for order in (BASE, BASE[::-1], ("b", "head", "w")):
        goes_on(tmp_path, Program(order, scheduler), seen)
    for groups in CHANGED.values():
        is_refused(tmp_path, functools.partial(Program, groups, scheduler))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adamax, torch.optim.LBFGS])
def test_another_class_of_optimizer_is_refused(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    taken(tmp_path, "StepLR")
    if kind is torch.optim.LBFGS:
        is_refused(tmp_path, Newton, ("LBFGS", "AdamW"))
    else:
        is_refused(tmp_path, functools.partial(Program, BASE, "StepLR", kind), (kind.__name__, "AdamW"))


class Newton(Program):
    """The same with an optimizer of one group."""

    def __init__(self) -> None:
        super().__init__(BASE)
        self.optimizer = torch.optim.LBFGS(self.model.parameters())
        self.things = {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize("kind", ["CosineAnnealingLR", "ChainedScheduler", "SequentialLR"])
def test_another_class_of_scheduler_is_refused_an_inner_one_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(tmp_path, "SequentialLR")
    if kind == "SequentialLR":
        monkeypatch.setattr(schedulers, "ExponentialLR", schedulers.ConstantLR)
    is_refused(
        tmp_path, functools.partial(Program, BASE, kind), (kind, "SequentialLR(LinearLR, StepLR, ExponentialLR)")
    )


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.Adagrad])
def test_a_checkpoint_without_a_record_of_classes_is_judged_by_its_state(
    kind: type[torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions before this record wrote them: what torch's own classes keep, and their settings, tell them apart."""
    monkeypatch.setattr(ValueReader, "_read_program", lambda _: {})
    seen = taken(tmp_path, "StepLR")
    for order in (BASE, BASE[::-1]):
        goes_on(tmp_path, Program(order, "StepLR"), seen)
    is_refused(tmp_path, functools.partial(Program, BASE, "StepLR", kind), (kind.__name__, "exp_avg"))


@pytest.mark.parametrize("make", [OfOwn, Around])
def test_lists_by_group_of_an_object_that_nobody_knows_follow_the_groups(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULERS, "own", lambda o, g: OfOwn(o, by_rate(g, 0.4)) if make is OfOwn else make(o))
    seen = taken(tmp_path, "own")
    for order in (BASE, BASE[::-1], ("b", "head", "w")):
        goes_on(tmp_path, Program(order, "own"), seen)


class Peaks:
    """No scheduler, and no optimizer in it: rates that no setting says, in any form."""

    form: Any
    decay = 1.0

    def __init__(self, groups: tuple[str, ...]) -> None:
        self.peaks, self.n = self.form[0](by_rate(groups, 7)), 0

    def step(self, optimizer: Any) -> None:
        self.n += 1
        rates = [rate * self.decay for rate in map(float, self.form[1](self.peaks))]
        self.peaks = self.peaks if self.decay == 1 else self.form[0](rates)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + self.n)

    def state_dict(self) -> dict[str, Any]:
        return {"peaks": self.peaks, "n": self.n, "turns": [3, 1, 2], "shadow": {"2.bias": torch.ones(3)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.peaks, self.n = state["peaks"], state["n"]


FORMS: dict[str, Any] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "by number": (lambda v: dict(enumerate(v)), lambda v: v.values()),
    "by name": (lambda v: {f"group_{i}": x for i, x in enumerate(v)}, lambda v: v.values()),
    "of dicts": (lambda v: [{"peak": x, "last": 0.0} for x in v], lambda v: [x["peak"] for x in v]),
    "nested": (lambda v: [list(v), [1, 2]], lambda v: v[0]),
    "array": (np.array, list),
    "tensor": (torch.tensor, list),
    "of tensors": (lambda v: [torch.tensor(x) for x in v], list),
}


class Helped(Program):
    """Its rates are set by an object that is given the optimizer at each step."""

    def __init__(self, groups: tuple[str, ...]) -> None:
        super().__init__(groups)
        self.peaks = self.things["scheduler"] = Peaks(groups)

    def step(self, number: int) -> Any:
        loss = super().step(number)
        self.peaks.step(self.optimizer)
        return loss


def helped(root: Path) -> Any:
    unbroken, dying, seen = Helped(BASE), Helped(BASE), []
    for number in range(1, 7):
        unbroken.step(number)
        seen.append(unbroken.seen())
    ckpt, _ = started(root, **dying.things)
    for number in range(1, 4):
        dying.step(number)
        ckpt.step(number)
    crash(ckpt)
    return seen[2:]


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("form", FORMS)
def test_lists_by_group_of_an_object_that_does_not_hold_the_optimizer_follow_the_groups_or_are_refused(
    form: str, decay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peaks, "form", FORMS[form], raising=False)
    monkeypatch.setattr(Peaks, "decay", decay)
    seen = helped(tmp_path)
    goes_on(tmp_path, Helped(BASE), seen)
    if decay == 1 and "a" not in form[:1] and "tensor" not in form:  # what arrays and tensors hold is not known in time
        goes_on(tmp_path, Helped(("b", "head", "w")), seen)
    else:
        is_refused(tmp_path, functools.partial(Helped, BASE[::-1]), ("scheduler.peaks", "the order"))


def test_lists_beside_two_optimizers_whose_groups_have_moved_are_refused(tmp_path: Path) -> None:
    def things(order: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
        made = [
            torch.optim.AdamW(
                [{"params": [p], "lr": lr} for p, lr in zip(layer.parameters(), (0.1, 0.2), strict=True)][::order]
            )
            for layer in model
        ]
        rates = Holder(peaks=[[group["lr"] for group in one.param_groups] for one in made])
        return {"model": model, "one": made[0], "other": made[1], "rates": rates}

    ckpt, _ = started(tmp_path, **things(1))
    ckpt.step(1)
    crash(ckpt)
    with pytest.raises(FlashckptError, match="'rates' has state by the place of a parameter group"):
        started(tmp_path, **things(-1))
    ckpt, report = started(tmp_path, **things(1))
    crash(ckpt)
    assert report is not None


def test_a_list_of_which_nobody_can_say_whose_its_entries_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULERS, "own", lambda o, g: OfOwn(o, by_rate(g, 0.4)))
    monkeypatch.setattr(OfOwn, "counts", True)
    seen = taken(tmp_path, "own")
    goes_on(tmp_path, Program(BASE, "own"), seen)
    is_refused(tmp_path, functools.partial(Program, BASE[::-1], "own"), ("scheduler.steps", "the order"))


def test_groups_that_say_the_same_may_be_split_and_put_together(tmp_path: Path) -> None:
    def program(*members: list[str]) -> Program:
        made = Program(BASE)
        of = dict(made.model.named_parameters())
        made.optimizer = torch.optim.AdamW([{"params": [of[name] for name in own]} for own in members], lr=0.01)
        made.scheduler = schedulers.StepLR(made.optimizer, 2, 0.5)
        made.things = {"model": made.model, "optimizer": made.optimizer, "scheduler": made.scheduler}
        return made

    every = [name for name, _ in Program(BASE).model.named_parameters()]
    halves, third = (every[::2], every[1::2]), (every[:2], every[2:4], every[4:])
    whole, dying = program(*halves), program(*halves)
    seen = []
    for number in range(1, 7):
        whole.step(number)
        seen.append(whole.seen())
    ckpt, _ = started(tmp_path, **dying.things)
    for number in range(1, 4):
        dying.step(number)
        ckpt.step(number)
    crash(ckpt)
    for members in ((every,), third, halves[::-1]):
        goes_on(tmp_path, program(*members), seen[2:])


def test_a_setting_that_the_program_has_changed_is_that_of_the_snapshot_and_one_line_says_so(tmp_path: Path) -> None:
    taken(tmp_path, "StepLR")
    for order in (BASE, BASE[::-1]):
        program = Program(order, "StepLR")
        group = program.optimizer.param_groups[order.index("b")]
        group.update(lr=0.5, initial_lr=0.5, weight_decay=0.25)
        ckpt, report = started(tmp_path, **program.things)
        crash(ckpt)
        assert report is not None
        place = f"(group {order.index('b')})"
        assert report.overruled == (
            f"optimizer: lr 0.5 in the program, 0.001 restored {place}",
            f"optimizer: weight_decay 0.25 in the program, 0.0 restored {place}",
            f"optimizer: initial_lr 0.5 in the program, 0.002 restored {place}",
        )
        assert report.overruled[1] in str(report)
        assert group["lr"] == 0.001


def test_parameters_in_another_row_are_refused_where_state_is_of_all_of_them_in_a_row(tmp_path: Path) -> None:
    def program(*, backwards: bool) -> Program:
        made = Program(BASE)
        parameters = list(made.model.parameters())
        made.optimizer = torch.optim.LBFGS(parameters[::-1] if backwards else parameters, history_size=3, max_iter=2)
        made.things = {"model": made.model, "optimizer": made.optimizer}
        return made

    dying = program(backwards=False)
    ckpt, _ = started(tmp_path, **dying.things)
    for number in range(1, 4):
        dying.step(number)
        ckpt.step(number)
    crash(ckpt)
    goes_on(tmp_path, program(backwards=False), [dying.seen()])
    is_refused(tmp_path, functools.partial(program, backwards=True), ("'3.bias', '3.weight'", "'0.weight', '0.bias'"))


def test_state_has_the_order_in_which_an_unbroken_run_makes_it(tmp_path: Path) -> None:
    unbroken = Program(BASE)
    unbroken.step(1)
    taken(tmp_path)
    program = Program(BASE)
    ckpt, _ = started(tmp_path, **program.things)
    crash(ckpt)

    def order(one: Program) -> list[Any]:
        names = {id(p): name for name, p in one.model.named_parameters()}
        return [(names[id(p)], list(held)) for p, held in one.optimizer.state.items()]

    assert order(program) == order(unbroken)
    program = Program(BASE[::-1])
    ckpt, _ = started(tmp_path, **program.things)
    crash(ckpt)
    unbroken = Program(BASE[::-1])
    unbroken.step(1)
    assert order(program) == order(unbroken)


def sharded_life(_rank: int, root: str, kind: str) -> dict[str, Any]:
    """Train unbroken; and three steps, to go on in another order of groups; return what differs."""

    def life(order: int, first: int, last: int, *, kept: bool) -> Any:
        model, mesh = parallel_net(kind)
        named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
        groups = [
            {"params": [p for n, p in named if n.endswith(end)], "lr": lr}
            for end, lr in (("bias", 0.01), ("weight", 0.1))
        ]
        optimizer = torch.optim.AdamW(groups[::order])
        scheduler = schedulers.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
        ckpt = Checkpointer(root, snapshot_every=1, job="t")
        if kept:
            ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler, mesh=mesh, rng=True)
            ckpt.restore()
        for number in range(first, last + 1):
            torch.manual_seed(number)
            optimizer.zero_grad()
            model(torch.randn(4, 24)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
            if kept:
                ckpt.step(number)
        held = {n: [p, *optimizer.state[p].values()] for n, p in named}
        of = {
            name: next(g["lr"] for g in optimizer.param_groups if any(p is q for q in g["params"])) for name, p in named
        }
        tensors = {n: [float(local_of(t.detach()).double().sum()).hex() for t in own] for n, own in held.items()}
        if kept:
            crash(ckpt)
        return [tensors, of]

    unbroken = life(1, 1, 5, kept=False)
    life(1, 1, 3, kept=True)
    restarted = life(-1, 4, 5, kept=True)
    return {"unbroken": unbroken, "restarted": restarted}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_groups_in_another_order_go_on_on_two_ranks(kind: str, tmp_path: Path) -> None:
    for found in values(run_ranks(sharded_life, 2, str(tmp_path), kind)):
        assert found["restarted"] == found["unbroken"]
