"""Optimizer state over a restart, exact or refused: kinds that nobody foresees, odd members, lists, shared tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import segments
from support.exact import check_restart, started, state_of, step_once
from support.one_rank import agent_of_the_test, crash, step_kept  # noqa: F401 -- one is a fixture
from torch import nn

from flashckpt.errors import TensorMismatchError, UnexpectedStateError, UnsupportedStateError


def net(width: int = 90) -> nn.Sequential:
    """Wide enough that state outgrows the slack of a slot."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 8))


class Own(torch.optim.Optimizer):
    """Somebody's optimizer; `update` makes the state of one parameter."""

    def __init__(self, params: Any, update: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **defaults})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.update(self.state, param), alpha=-float(group["lr"]))


def lion(state: Any, p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    average = state[p].setdefault("exp_avg", torch.zeros_like(p))
    return torch.as_tensor(average.lerp_(p.grad, 0.1).sign())


def rebound(state: Any, p: torch.Tensor) -> torch.Tensor:
    """A new tensor each step beside a Python number, as transformers' Adafactor does."""
    assert p.grad is not None
    one = state[p]
    one["step"] = one.get("step", 0) + 1
    one["avg"] = one.get("avg", torch.zeros_like(p)) * 0.9 + p.grad
    return torch.as_tensor(one["avg"])


def appearing(state: Any, p: torch.Tensor) -> torch.Tensor:
    """A value that is None, then a number, then a tensor; and tensors deep inside."""
    assert p.grad is not None
    one = state[p]
    one["n"] = one.get("n", 0) + 1
    one["late"] = None if one["n"] == 1 else 0.5 if one["n"] == 2 else torch.full_like(p, one["n"])
    one["deep"] = {"a": [(p.grad.clone(), one["n"])], 3: {"x": torch.ones(()) * one["n"]}, "none": None}
    return p.grad.add(one["late"] if isinstance(one["late"], torch.Tensor) else 0.0)


def twice(state: Any, p: torch.Tensor) -> torch.Tensor:
    """One tensor at two places of a list: after a restart it must still be one."""
    assert p.grad is not None
    pair = state[p].setdefault("pair", [buffer := torch.zeros_like(p), buffer])
    pair[0].add_(p.grad)
    return torch.as_tensor(pair[1])


def other_kinds(state: Any, p: torch.Tensor) -> torch.Tensor:
    import numpy as np

    assert p.grad is not None
    one = state[p]
    count = int(one.get("count", np.int32(0))) + 1
    one.update(
        count=np.int32(count), array=np.arange(count, dtype=np.float16), dtype=torch.bfloat16, name="ä", raw=b"\0",
        flag=count > 1, half=p.grad.bfloat16(), small=p.grad.to(torch.float8_e4m3fn), empty=p.new_empty(0, 3),
        scalar=p.grad.norm(), counter=torch.tensor(count), device=torch.device("cpu"),
        view=p.grad.clone().t() if p.dim() == 2 else p.grad.clone()[::2], big=1 << 80, nan=float("nan"),
    )  # fmt: skip
    return torch.as_tensor(one["half"].float())


def shared_by_all(state: Any, p: torch.Tensor) -> torch.Tensor:
    """State that belongs to no parameter."""
    assert p.grad is not None
    state["count"] = state.get("count", 0) + 1
    state["total"] = state.get("total", torch.zeros(())) + p.grad.norm()
    return torch.as_tensor(p.grad * state["count"] + state["total"])


class Counting(Own):
    """It counts in attributes that only its own state_dict() knows: a number, a tensor, and nothing before the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, self._count)
        self.count, self.total = 0, torch.zeros(3)
        self.first: int | None = None

    def _count(self, state: Any, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        state[p].setdefault("seen", torch.zeros_like(p)).add_(1)
        self.count, self.first = self.count + 1, self.count
        self.total = self.total * 0.5 + p.grad.norm()
        return torch.as_tensor(p.grad * self.count + self.total.sum())

    def state_dict(self) -> dict[str, Any]:
        first: dict[str, Any] = {} if self.first is None else {"first": self.first}
        return {**super().state_dict(), "count": self.count, "sums": {"total": self.total}, **first}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.count, self.total = state_dict["count"], state_dict["sums"]["total"]
        self.first = state_dict.get("first")


def hooked(m: nn.Module) -> torch.optim.Optimizer:
    """Its counter goes in and out by torch's hooks."""
    counts = {"n": 0}

    def update(_: Any, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        counts["n"] += 1
        return torch.as_tensor(p.grad * counts["n"])

    optimizer = Own(m.parameters(), update)
    optimizer.register_state_dict_post_hook(lambda _, said: {**said, "n": counts["n"]})
    optimizer.register_load_state_dict_post_hook(lambda o: None)
    optimizer.register_load_state_dict_pre_hook(lambda _, said: counts.update(n=said.pop("n", counts["n"])))
    return optimizer


OWN = [lion, rebound, appearing, twice, other_kinds, shared_by_all]
KINDS: dict[str, Any] = {
    "muon": lambda m: [
        torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in m.parameters() if p.ndim != 2]),
    ],
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), t0=1),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=2, history_size=3),
    "lbfgs wolfe": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
    "own state_dict": lambda m: Counting(m.parameters()),
    "two with an own state_dict": lambda m: [Counting(list(m.parameters())[:2]), Counting(list(m.parameters())[2:])],
    "state_dict hooks": hooked,
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), capturable=False),
    **{update.__name__: lambda m, update=update: Own(m.parameters(), update) for update in OWN},
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_nobody_foresaw_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = net()
        return model, KINDS[kind](model)

    check_restart(tmp_path, build)


@pytest.mark.parametrize("kind", ["muon", "lion", "rebound"])
def test_a_restart_reserves_one_segment_for_what_the_snapshot_says(kind: str, tmp_path: Path, shm_dir: Path) -> None:
    model = net()
    ckpt, _ = started(tmp_path, model=model, optimizer=(optimizers := KINDS[kind](model)))
    step_once(model, optimizers, 1)
    step_kept(ckpt, 1)
    crash(ckpt)
    before = segments(shm_dir)
    model = net()
    ckpt, _ = started(tmp_path, model=model, optimizer=(optimizers := KINDS[kind](model)))
    step_once(model, optimizers, 2)
    step_kept(ckpt, 2)
    crash(ckpt)
    assert segments(shm_dir) == before
    assert ckpt._session is not None
    assert ckpt._session.stats.get("plans", 0) <= (kind == "rebound"), "planned in restore(), not in step()"


def test_sparse_adam_comes_back_bit_for_bit(tmp_path: Path) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(300, 8, sparse=True)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.table(batch.abs().mul(50).long().clamp(max=299)))

    def build() -> tuple[nn.Module, Any]:
        model = Bag()
        return model, torch.optim.SparseAdam(model.parameters())

    check_restart(tmp_path, build)


def test_a_layer_that_is_unfrozen_later_finds_room_after_a_restart(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = net()
        model[0].requires_grad_(requires_grad=False)
        model[2].requires_grad_(requires_grad=False)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build()
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    step_once(model, optimizer, 1)
    model.requires_grad_(requires_grad=True)
    for step in (2, 3):
        step_once(model, optimizer, step)
        step_kept(ckpt, step)
    crash(ckpt)
    other, fresh = build()
    ckpt, _ = started(tmp_path, model=other, optimizer=fresh)
    assert state_of(other, fresh) == state_of(model, optimizer)
    other.requires_grad_(requires_grad=True)
    assert step_once(other, fresh, 4) == step_once(model, optimizer, 4)
    step_kept(ckpt, 4)
    crash(ckpt)
    third, again = build()
    crash(started(tmp_path, model=third, optimizer=again)[0])
    assert state_of(third, again) == state_of(model, optimizer)


def test_lists_that_grow_do_not_take_a_new_segment_each_step(tmp_path: Path, shm_dir: Path) -> None:
    model = net(30)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=40)
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    for step in range(1, 25):
        step_once(model, optimizer, step)
        step_kept(ckpt, step)
    crash(ckpt)
    assert len(segments(shm_dir)) <= 6
    other = net(30)
    fresh = torch.optim.LBFGS(other.parameters(), max_iter=1, history_size=40)
    ckpt, report = started(tmp_path, model=other, optimizer=fresh)
    crash(ckpt)
    assert report is not None
    assert report.step == 24
    assert state_of(other, fresh) == state_of(model, optimizer)


@pytest.mark.parametrize(
    ("put", "named"),
    [
        (lambda s, p, q: s[p].update({0: torch.ones(2)}), "a key of type int"),
        (lambda s, p, q: s[p].update({"a.b": 1}), "'.' or '@' in it"),
        (lambda s, p, q: (s[p].update(x=(t := torch.ones(3))), s[q].update(x=t)), "the same tensor as"),
        (lambda s, p, q: s[p].update(x=torch.eye(2).to_sparse()), "layout torch.sparse_coo"),
        (lambda s, p, q: s[p].update(x={1, 2}), "builtins.set"),
        (lambda s, p, q: s[p].update(x=object()), "builtins.object"),
    ],
)  # fmt: skip
def test_state_that_could_not_come_back_is_refused_at_the_step_that_makes_it(
    put: Any, named: str, tmp_path: Path
) -> None:
    model = net(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    step_once(model, optimizer, 1)
    first, second, *_ = model.parameters()
    put(optimizer.state, first, second)
    with pytest.raises(UnsupportedStateError, match=r"0\.weight|0\.bias") as refused:
        step_kept(ckpt, 1)
    crash(ckpt)
    assert named in str(refused.value)


class Forgetful(Counting):
    """It says what it counts, and does not take it back."""

    def load_state_dict(self, state_dict: Any) -> None:
        torch.optim.Optimizer.load_state_dict(self, state_dict)
        del self.count

    def state_dict(self) -> dict[str, Any]:
        return {**torch.optim.Optimizer.state_dict(self), **({"count": self.count} if hasattr(self, "count") else {})}


class NeedsState(Counting):
    """Its load_state_dict() wants what only a trained optimizer has."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.first = state_dict["state"][0]["seen"]


@pytest.mark.parametrize(("kind", "named"), [(Forgetful, "'count' is gone"), (NeedsState, "KeyError: 0")])
def test_an_optimizer_that_does_not_take_back_what_it_says_is_refused(kind: Any, named: str, tmp_path: Path) -> None:
    model = net(4)
    optimizer = kind(model.parameters())
    before = vars(optimizer) | {}
    with pytest.raises(UnsupportedStateError, match="does not restore") as refused:
        started(tmp_path, model=model, optimizer=optimizer)
    assert named in str(refused.value)
    assert optimizer.state is before["state"]
    assert optimizer.param_groups is before["param_groups"]


def test_state_that_an_optimizer_copies_to_say_nothing_more_is_read_until_its_first_step_only(tmp_path: Path) -> None:
    class Copying(Own):
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict()

    model = net(4)
    optimizer = Copying(model.parameters(), lion)
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    for step in range(1, 4):
        step_once(model, optimizer, step)
        ckpt.step(step)
    asked = optimizer.asked
    for step in range(4, 9):
        step_once(model, optimizer, step)
        ckpt.step(step)
    crash(ckpt)
    assert optimizer.asked == asked


def test_counters_of_an_optimizer_that_the_program_has_no_more_are_named(tmp_path: Path) -> None:
    model = net(4)
    optimizer = Counting(model.parameters())
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    step_once(model, optimizer, 1)
    step_kept(ckpt, 1)
    crash(ckpt)
    other = net(4)
    with pytest.raises(TensorMismatchError, match="another optimizer"):
        started(tmp_path, model=other, optimizer=Own(other.parameters(), lion))
    namesake = type("Counting", (Own,), {})
    with pytest.raises(UnexpectedStateError, match=r"optimizer\.extra"):
        started(tmp_path, model=other, optimizer=namesake(other.parameters(), lion))


@pytest.mark.parametrize("says", [False, True])
def test_a_counter_that_no_state_dict_has_is_named_once(
    says: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(Own):
        calls, ratio, _private, count = 0, 0.5, 0, 0

        def step(self, closure: Any = None) -> Any:
            self.calls, self._private = self.calls + 1, self._private + 1
            return super().step(closure)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), **({"calls": self.calls} if says else {})}

        def load_state_dict(self, state_dict: Any) -> None:
            self.calls = state_dict.get("calls", 0)

    model = net(4)
    optimizer = Silent(model.parameters(), lion)
    optimizer.calls = 0
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    for step in range(1, 6):
        step_once(model, optimizer, step)
        ckpt.step(step)
    crash(ckpt)
    named = [record.getMessage() for record in caplog.records if "in attributes that" in record.getMessage()]
    assert [says, len(named)] in ([True, 0], [False, 1])
    assert says or "Silent changes 'calls' in" in named[0]
