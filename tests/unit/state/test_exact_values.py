"""Modules and values over a restart, exact or refused; a plan that does not fit its slot moves no byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import bits, started, step_once
from support.one_rank import Holder, agent_of_the_test, crash, step_kept  # noqa: F401 -- fixtures
from torch import nn

from flashckpt import Checkpointer
from flashckpt.errors import DamagedError, SharedMemoryError, TensorMismatchError, UnsupportedStateError
from flashckpt.shm.segment import Segment
from flashckpt.state import pytree


class Counting(nn.Linear):
    """Its state beside parameters consists of tensors, and their number changes."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[torch.Tensor] = []

    def get_extra_state(self) -> Any:
        return {"n": len(self.seen), "seen": list(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_tensors_in_extra_state_come_back_from_the_first_snapshot_on(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        model = Counting()
        ckpt, report = started(tmp_path, model=model)
        assert (report.step if report else 0) == step - 1
        assert bits(model.seen) == bits([torch.full((2,), float(i)) for i in range(1, step)])
        model.seen.append(torch.full((2,), float(step)))
        ckpt.step(step)
        crash(ckpt)


def test_expanded_and_overlapping_buffers_come_back(tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = nn.Module()
        model.register_buffer("row", torch.full((1,), value).expand(5))
        model.register_buffer("grid", (torch.arange(3.0) * value)[:, None].expand(3, 4))
        model.register_buffer("windows", (torch.arange(6.0) * value).as_strided((4, 3), (1, 1)))
        model.register_buffer("nothing", torch.empty(1, 0).expand(3, 0))
        return model

    model = make(3.0)
    ckpt, _ = started(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    other = make(7.0)
    crash(started(tmp_path, model=other)[0])
    assert bits(dict(other.named_buffers())) == bits(dict(model.named_buffers()))
    assert [b.stride() for b in other.buffers()] == [b.stride() for b in model.buffers()]


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_values_nested_too_deeply_are_refused_before_training(kind: Any, tmp_path: Path) -> None:
    def nested(levels: int) -> Any:
        value: Any = 0
        for _ in range(levels):
            value = {"k": value} if kind is dict else kind([value])
        return value

    pytree.flatten(nested(pytree.DEEPEST), "x")
    with pytest.raises(UnsupportedStateError, match="nested too deeply"):
        started(tmp_path, thing=Holder(v=nested(200)))


class Deep(nn.Linear):
    """Extra state that is nested too deeply."""

    def get_extra_state(self) -> Any:
        return levels_of(200)

    def set_extra_state(self, state: Any) -> None: ...


def levels_of(count: int) -> Any:
    value: Any = (0,)
    for _ in range(count):
        value = [value]
    return value


def test_values_that_are_there_already_and_too_deep_are_refused_by_track(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    stateful, grouped = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    stateful.state[model.weight]["tree"] = levels_of(200)
    grouped.param_groups[0]["tree"] = levels_of(200)
    things: list[dict[str, Any]] = [
        {"thing": Holder(v=levels_of(200))},
        {"things": [Holder(v=1), Holder(v=levels_of(200))]},
        {"model": Deep(2, 2)},
        {"model": model, "optimizer": stateful},
        {"model": model, "optimizer": grouped},
    ]
    for one in things:
        with pytest.raises(UnsupportedStateError, match="nested too deeply"):
            Checkpointer(str(tmp_path), job="t").track(**one)


@pytest.mark.parametrize("levels", [pytree.DEEPEST - 1, pytree.DEEPEST])
def test_track_takes_what_a_snapshot_can_hold(levels: int, tmp_path: Path) -> None:
    value = levels_of(levels - 1)
    pytree.flatten(value, "x")
    Checkpointer(str(tmp_path), job="t").track(thing=Holder(v=levels_of(levels - 2)))


def test_track_asks_no_loader_for_its_state(tmp_path: Path) -> None:
    """A stateful loader begins an iterator then, and draws."""

    class Loader(Holder):
        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

    Checkpointer(str(tmp_path), job="t").track(loader=Loader())


@pytest.mark.parametrize("other", [torch.zeros(4, 6), torch.zeros(8, 6, dtype=torch.bfloat16), torch.zeros(24)])
def test_a_parameter_whose_data_is_of_another_form_now_is_planned_anew(other: torch.Tensor, tmp_path: Path) -> None:
    """As many bytes, of another shape or dtype: neither the object nor its version counter tells."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(8, 3))
    model.register_buffer("mean", torch.ones(8, 3))
    optimizer = torch.optim.SGD([model.weight], lr=0.0)
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    failures: list[Exception] = []
    ckpt.on_failure = failures.append
    ckpt.step(1)
    ckpt.fence()
    for name, tensor in (("weight", model.weight), ("mean", model.get_buffer("mean"))):
        count = len(failures)
        tensor.data = other.clone()
        step = 10 * (count + 1)
        ckpt.step(step)
        life = ckpt._session
        assert life is not None
        life._stager.finish()
        assert len(failures) == count + 1, name
        assert "another shape or storage" in str(failures[-1])
        ckpt.step(step + 1)
        life._stager.finish()
        assert len(failures) == count + 1, "planned again"
    crash(ckpt)


def test_keys_that_look_alike_and_a_tensor_at_two_places_stay_what_they_are() -> None:
    one = torch.ones(2)
    tree = {1: torch.zeros(1), "1": one, "a.b": torch.ones(3), "a": {"b": torch.ones(4)}, "again": [one]}
    skeleton, tensors = pytree.flatten(tree, "x")
    assert len(tensors) == 4
    back = pytree.unflatten(skeleton, lambda name: tensors[name].clone())
    assert bits(back) == bits(tree)
    assert back["1"] is back["again"][0]


def test_state_that_differs_each_time_it_is_read_is_refused(tmp_path: Path) -> None:
    class Restless(Holder):
        def state_dict(self) -> dict[str, Any]:
            self.state["n"] += 1
            return {"t": torch.ones(self.state["n"])}

    with pytest.raises(UnsupportedStateError, match="each time the state is read"):
        started(tmp_path, thing=Restless(n=0))


def test_a_lazy_module_and_a_wrapped_optimizer_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="uninitialized"):
        started(tmp_path, model=nn.LazyLinear(3))

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

    with pytest.raises(UnsupportedStateError, match="wraps another optimizer") as refused:
        started(tmp_path, optimizer=Wrapper(torch.optim.AdamW(nn.Linear(1, 1).parameters())))
    assert "'inner'" in str(refused.value)


class Container(torch.optim.Optimizer):
    """Passes its calls on to one optimizer for each part of a model, as torchtitan's does; holds no state itself."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step(closure)


def test_a_container_of_optimizers_is_the_optimizers_in_it(tmp_path: Path) -> None:
    def build() -> tuple[nn.Sequential, Container]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return model, Container(list(model))

    model, optimizer = build()
    unbroken = [step_once(model, optimizer, step) for step in range(1, 6)]
    model, optimizer = build()
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    for step in range(1, 4):
        assert step_once(model, optimizer, step) == unbroken[step - 1]
        step_kept(ckpt, step)
    crash(ckpt)
    model, optimizer = build()
    ckpt, report = started(tmp_path, model=model, optimizer=optimizer)
    assert report is not None
    assert report.step == 3
    assert all(set(one.state[p]) >= {"exp_avg", "exp_avg_sq"} for one in optimizer.optimizers for p in one.state)
    assert [step_once(model, optimizer, step) for step in (4, 5)] == unbroken[3:]
    crash(ckpt)


def test_a_container_with_state_of_its_own_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = Container(list(model))
    optimizer.state[next(model.parameters())]["mine"] = torch.zeros(1)
    with pytest.raises(UnsupportedStateError, match="wraps another optimizer") as refused:
        started(tmp_path, model=model, optimizer=optimizer)
    assert "'optimizers'" in str(refused.value)


def test_a_plan_larger_than_its_slot_discards_the_snapshot_before_a_byte_moves(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    failures: list[Exception] = []
    ckpt.on_failure = failures.append
    life = ckpt._session
    assert life is not None
    assert life._plans.plan is not None
    vars(life._plans.plan)["end"] = 1 << 40  # as if planned for another slot
    step_once(model, optimizer, 1)
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    assert [f.exit_code for f in failures] == [SharedMemoryError.exit_code]  # type: ignore[attr-defined]  # ours
    assert "internal error" in str(failures[0])
    report = started(tmp_path, model=nn.Linear(8, 8))[1]
    assert report is not None
    assert report.step == 2


def test_a_slot_whose_header_or_file_is_too_short_is_damaged_and_not_a_raw_error(tmp_path: Path, shm_dir: Path) -> None:
    model = nn.Linear(80, 80)
    ckpt, _ = started(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    (path,) = shm_dir.rglob("*.seg")
    segment = Segment.attach(path)
    slot = next(i for i, header in enumerate(segment.headers()) if header.is_complete)
    with segment.pin(slot) as pin:  # type: ignore[union-attr]  # it is COMPLETE
        os.truncate(path, segment.spec.data_at(slot))
        with pytest.raises(DamagedError, match="is truncated"):
            pin.map(populate=False)
    segment.close()


class Hiding(nn.Linear):
    """Saves a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.ones(1)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale


class HidingAsAWhole(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "count": 3}


class Telling(Hiding):
    """The same, and given out as extra state too."""

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


class Renaming(Hiding):
    """What it saves beside its tensors is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.bias


class Transient(nn.Linear):
    """Saves a buffer that is declared as none of its state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    _save_to_state_dict = Hiding._save_to_state_dict


@pytest.mark.parametrize(("kind", "key"), [(Hiding, "scale"), (HidingAsAWhole, "count"), (Transient, "scale")])
def test_state_that_only_a_module_itself_knows_how_to_save_is_refused_by_track(
    kind: type[nn.Module], key: str, tmp_path: Path
) -> None:
    ckpt = Checkpointer(str(tmp_path / "root"), job="hidden")
    with pytest.raises(UnsupportedStateError, match=f"(?s)'model.1' saves state .*'{key}' in the state dict"):
        ckpt.track(model=nn.Sequential(nn.Linear(4, 4), kind()))
    ckpt.close()


@pytest.mark.parametrize("kind", [Telling, Renaming])
def test_what_a_module_saves_in_its_own_way_and_gives_out_too_comes_back(kind: type[Hiding], tmp_path: Path) -> None:
    model, other = kind(), kind()
    with torch.no_grad():
        model.scale.fill_(7)
    ckpt, _ = started(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    crash(started(tmp_path, model=other)[0])
    assert bits([other.scale]) == bits([model.scale])


def test_the_remedy_for_a_sharding_optimizer_is_one_that_works(tmp_path: Path) -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params, lr=0.1)
            self.optim = torch.optim.SGD(params, lr=0.1)

    ckpt, model = Checkpointer(str(tmp_path / "root"), job="zero"), nn.Linear(4, 4)
    with pytest.raises(UnsupportedStateError, match="wraps another optimizer") as caught:
        ckpt.track(model=model, optimizer=ZeroRedundancyOptimizer(model.parameters()))
    assert "fully_shard" in str(caught.value)
    assert "track the one inside" not in str(caught.value)
    ckpt.close()


def test_a_buffer_that_changes_its_shape_is_named_before_a_restore_could_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(size: int) -> nn.Module:
        model = nn.Linear(8, 3)
        model.register_buffer("seen", torch.zeros(size))
        return model

    model = build(2)
    ckpt, _ = started(tmp_path, model=model)
    for step in (1, 2, 3):
        model.register_buffer("seen", torch.full((2 + step // 2,), float(step)))
        step_kept(ckpt, step)
    crash(ckpt)
    named = [record.getMessage() for record in caplog.records if "had the shape" in record.getMessage()]
    assert len(named) == 1
    assert "'model.seen' had the shape (2,) and has (3,) now" in named[0]
    with pytest.raises(TensorMismatchError, match=r"model\.seen"):
        started(tmp_path, model=build(2))
    other = build(3)
    crash(started(tmp_path, model=other)[0])
    assert torch.equal(other.get_buffer("seen"), model.get_buffer("seen"))
