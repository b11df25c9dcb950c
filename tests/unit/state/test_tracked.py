"""What is tracked, under which names, and what is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.state import named_groups, pytree, rng
from flashckpt.state.placement import LocalBox, contiguous_runs, current_world
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout
from flashckpt.state.structure import Structure


def tracked(**things: object) -> StateRegistry:
    found = StateRegistry(current_world())
    for name, thing in things.items():
        found.add(name, thing)
    return found


class Counting:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def structure(found: StateRegistry) -> Structure:
    found.structure(found.capture())
    return found.structure(found.capture())


def names(found: StateRegistry) -> list[str]:
    return [row.entry.fqn for row in structure(found).rows]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...] = (4, 4)) -> None:
    model(torch.randn(shape)).sum().backward()
    optimizer.step()


def test_parts_of_a_pipeline_merge_under_global_names() -> None:
    class Stage(nn.Module):
        def __init__(self, *layers: int) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in layers})

    assert names(tracked(model=[Stage(0), Stage(3)])) == [
        "model.layers.0.bias", "model.layers.0.weight", "model.layers.3.bias", "model.layers.3.weight"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.weight"):
        names(tracked(model=[Stage(0), Stage(0)]))


def test_wrapper_segments_are_stripped_and_a_module_named_module_is_not() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Module()
    inner.module = checkpoint_wrapper(nn.Linear(2, 2, bias=False))
    compiled = torch.compile(inner, backend="eager")
    assert names(tracked(model=compiled)) == ["model.module.weight"]


def test_tied_parameters_are_held_once_with_an_alias() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    found = tracked(model=model)
    assert names(found) == ["model.0.weight"]
    assert found.capture().values["aliases"] == {"model.1.weight": "model.0.weight"}


def test_parameters_that_share_one_storage_are_held_once_each_with_optimizer_state_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(next(model[0].parameters()).data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, optimizer)
    assert names(tracked(model=model, optimizer=optimizer)) == [
        "model.0.weight", "optimizer.0.weight.momentum_buffer", "optimizer.1.weight.momentum_buffer"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
    ],
)
def test_the_forecast_of_optimizer_state_is_what_the_first_step_makes(make: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())
    found = tracked(model=model, optimizer=optimizer)
    forecast = structure(found).reserved()
    one_step(model, optimizer)
    assert structure(found).shards == forecast
    assert not structure(found).forecast


def test_a_changed_structure_is_seen_and_an_unchanged_one_is_not_planned_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    found = tracked(model=model, optimizer=optimizer)
    structure(found)
    assert found.holds()
    one_step(model, optimizer)
    assert not found.holds(), "state appeared"
    structure(found)
    one_step(model, optimizer)
    assert found.holds()
    model.append(nn.Linear(4, 4))
    assert not found.holds(), "a layer was added"
    structure(found)
    model[0].observer = nn.BatchNorm1d(4, affine=False)
    assert not found.holds(), "a layer without submodules got one"
    structure(found)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert not found.holds(), "a parameter was replaced"


def _loads_its_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _names_other_parameters(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]


@pytest.mark.parametrize("replace", [_loads_its_state, _names_other_parameters])
def test_what_an_optimizer_replaces_as_a_whole_is_seen(replace: Callable[[torch.optim.Optimizer], None]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    found = tracked(model=model, optimizer=optimizer)
    structure(found)
    assert found.holds()
    replace(optimizer)
    assert not found.holds()


def planned_ahead() -> tuple[StateRegistry, nn.Sequential, torch.optim.Optimizer, StateLayout]:
    """Return objects whose structure was planned with state to come and then read without it, as a restore does."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    found = tracked(model=model, optimizer=optimizer)
    found.settled(ahead=True)
    layout = found.layout()
    found.settled()
    assert len(found.layout().table) < len(layout.table)
    return found, model, optimizer, layout


@pytest.mark.parametrize("is_by_name", [False, True])
def test_state_that_was_made_as_foreseen_takes_its_place_and_nothing_is_planned_again(*, is_by_name: bool) -> None:
    found, model, optimizer, before = planned_ahead()
    one_step(model, optimizer)
    if is_by_name:  # keys and parameters in another order than a step makes them in
        made = {param: dict(sorted(state.items())) for param, state in reversed(optimizer.state.items())}
        optimizer.state.clear()
        optimizer.state.update(made)
    now, _ = found.settled(ahead=True)
    assert found.layout().table is before.table
    built = structure(tracked(model=model, optimizer=optimizer))
    assert list(now.names) == list(built.names)
    assert all(a is b for a, b in zip(now.tensors, built.tensors, strict=True))
    assert now.shards == built.shards
    assert now.fenced.tolist() == built.fenced.tolist()
    assert not len(now.awaited)
    assert not now.forecast
    again = StateLayout.of(built)
    assert (found.layout().signature, found.layout().table_bytes) == (again.signature, again.table_bytes)
    one_step(model, optimizer)
    assert found.holds()
    assert found.settled(ahead=True)[0] is now
    optimizer.state[next(model.parameters())]["exp_avg"] = torch.zeros(4, 4)
    assert not found.holds(), "state was replaced"


def in_half_precision(model: Any, state: Any) -> None:
    state["exp_avg"] = state["exp_avg"].bfloat16()


def with_another_key(model: Any, state: Any) -> None:
    state["more"] = torch.zeros(4, 4)


def under_another_key(model: Any, state: Any) -> None:
    state["other"] = state.pop("exp_avg")


def with_a_number(model: Any, state: Any) -> None:
    state["step"] = 1


def with_another_layer(model: Any, state: Any) -> None:
    model.append(nn.Linear(4, 4))


def with_a_wider_parameter(model: Any, state: Any) -> None:
    model[0].weight.data = torch.zeros(4, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "change",
    [in_half_precision, with_another_key, under_another_key, with_a_number, with_another_layer, with_a_wider_parameter],
)
def test_state_that_was_made_otherwise_than_foreseen_is_planned_again(change: Any) -> None:
    found, model, optimizer, before = planned_ahead()
    one_step(model, optimizer)
    change(model, optimizer.state[next(model.parameters())])
    now, _ = found.settled(ahead=True)
    assert found.layout().table is not before.table
    built = structure(tracked(model=model, optimizer=optimizer))
    assert now.shards == built.shards


def test_state_made_as_one_tensor_under_two_names_is_refused_although_its_form_was_foreseen() -> None:
    found, model, optimizer, _ = planned_ahead()
    one_step(model, optimizer)
    state = optimizer.state[next(model.parameters())]
    state["exp_avg_sq"] = state["exp_avg"]
    with pytest.raises(UnsupportedStateError, match="is the same tensor as"):
        found.settled(ahead=True)


def test_a_parameter_of_no_tracked_module_is_refused_with_its_optimizer() -> None:
    foreign = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="optimizer"):
        structure(tracked(model=nn.Linear(2, 2), optimizer=torch.optim.SGD([foreign], lr=0.1)))


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3, device="meta"), torch.eye(3).to_sparse()],
)
def test_a_tensor_without_plain_bytes_is_refused_by_its_key(tensor: torch.Tensor) -> None:
    model = nn.Module()
    model.register_buffer("odd", tensor)
    with pytest.raises(UnsupportedStateError, match=r"model\.odd"):
        structure(tracked(model=model))


def test_a_value_that_cannot_be_held_is_refused_by_its_key() -> None:
    class Thing:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [1, {"bad": object()}]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(UnsupportedStateError, match=r"thing@rank0\.deep\.1\.bad"):
        tracked(thing=Thing()).capture()


def test_a_thing_without_state_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="number"):
        tracked(number=3)
    found = tracked(model=nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="already used"):
        found.add("model", nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["aliases", "dcp", "rng", "", "a.b", "a@rank0", "model"])
@pytest.mark.parametrize("thing", [nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]), Counting()])
def test_a_name_that_snapshots_use_for_something_else_is_refused(name: str, thing: Any) -> None:
    with pytest.raises(ConfigError, match="cannot track anything under the name") as caught:
        tracked(model=nn.Linear(1, 1)).add(name, thing)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "make", [torch.Generator, random.Random, np.random.default_rng, np.random.RandomState, Counting]
)
def test_the_generators_of_the_process_are_tracked_and_not_one_of_the_users(make: Any, tmp_path: Path) -> None:
    generator = make()
    Checkpointer(tmp_path, job="rng-of-a-user").track(rng=np.True_)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rng") as caught:
        Checkpointer(tmp_path, job="rng-of-a-user").track(rng=generator)
    assert type(generator).__name__ in caught.value.found


@pytest.mark.parametrize("fenced", ["mdl", ("model", "ema")])
def test_what_is_declared_fenced_is_one_of_the_names(fenced: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fenced") as caught:
        Checkpointer(tmp_path, job="fenced-names").track(model=nn.Linear(1, 1), fenced=fenced)
    assert caught.value.found in ("'mdl'", "'ema'")


def test_one_name_is_fenced_as_a_whole_and_not_each_name_inside_it(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, job="fenced-name")
    ckpt.track(model=nn.Linear(1, 1), model_ema=nn.Linear(1, 1), fenced="model_ema")
    assert ckpt._tracked.fenced == {"model_ema"}


def test_a_state_dict_comes_back_as_it_was() -> None:
    import numpy as np

    tree: dict[str, Any] = {
        "t": torch.arange(3), "n": np.arange(4.0).reshape(2, 2), "s": np.float32(1.5), "tuple": (1, (2, "x")),
        "ints": {1: "a", (2, 3): b"z"}, "dtype": torch.bfloat16, "device": torch.device("cpu"), "none": None,
        "inf": float("inf"), "big": 1 << 100, "size": torch.Size((2, 3)),
    }  # fmt: skip
    skeleton, tensors = pytree.flatten(tree, "thing")
    assert sorted(tensors) == ["thing.n", "thing.t"]
    back = pytree.unflatten(skeleton, tensors.__getitem__)
    assert torch.equal(back.pop("t"), tree.pop("t"))
    assert np.array_equal(back.pop("n"), tree.pop("n"))
    assert tuple(back.pop("size")) == tuple(tree.pop("size"))
    assert back == tree


def test_hyperparameters_follow_their_parameters_through_another_order_of_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    a, b = model[0].weight, model[1].weight
    old = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}], lr=1.0)
    new = torch.optim.SGD([{"params": [b]}, {"params": [a]}], lr=1.0)
    named = {id(a): "0.weight", id(b): "1.weight"}
    value, _ = named_groups.groups([old], named_groups.group_names([old], named), "optimizer.groups")
    recorded = named_groups.Groups([value])
    (match,) = recorded.match([new], named)
    for _, group, ref in match.found():
        named_groups.set_group(group, recorded[ref])
    assert recorded.order(match) == named_groups.GroupOrder(2, ((1,), (0,)))
    assert [g["lr"] for g in new.param_groups] == [0.2, 0.1]


def test_random_state_comes_back_bit_for_bit() -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [*torch.randn(3).tolist(), random.gauss(0, 1), *np.random.standard_normal(3).tolist()]  # noqa: NPY002 -- the global generator is what is captured

    draw()
    state = rng.capture()
    first = draw()
    assert rng.capture() != state
    rng.restore(state)
    assert draw() == first


def test_random_state_is_of_the_instant_it_was_read_however_late_it_is_packed() -> None:
    """A snapshot packs it in the copy thread, while the training thread draws already."""
    import random

    import numpy as np

    found = tracked(model=nn.Linear(2, 2))
    found.rng = True
    expected = rng.capture()
    captured = found.capture()
    torch.randn(700)
    random.gauss(0, 1)
    np.random.standard_normal(701)  # noqa: NPY002 -- the global generator is what is captured
    assert captured.read.packed() == captured.values
    (state,) = (value for key, value in captured.read.packed().items() if key.startswith("rng@"))
    assert state == expected != rng.capture()


def test_pieces_of_a_strided_shard_become_runs() -> None:
    assert contiguous_runs([0, 1, 4, 5, 6]) == [(0, 2), (4, 3)]
    assert contiguous_runs([]) == [(0, 0)]


def test_a_box_knows_where_it_starts_in_its_tensor() -> None:
    (row,) = structure(tracked(model=nn.Linear(3, 2, bias=False))).rows
    assert row.box == LocalBox(global_shape=(2, 3), offsets=(0, 0), lengths=(2, 3), starts=(0, 0))


def test_a_sampler_and_its_batch_sampler_are_refused_together_and_the_remedy_names_the_inner_one() -> None:
    from flashckpt.sampler import ElasticBatchSampler, ElasticSampler

    sampler = ElasticSampler(100, dp_rank=0, dp_size=1)
    batches = ElasticBatchSampler(sampler, batch_size=4)
    for first, second in (("sampler", "batches"), ("batches", "sampler")):
        things = {"sampler": sampler, "batches": batches}
        found = tracked(**{first: things[first]})
        with pytest.raises(ConfigError, match=r"leave 'sampler' out") as refused:
            found.add(second, things[second])
        assert "'batches'" in str(refused.value)
        assert list(found.objects) == [first]
    with pytest.raises(ConfigError, match="twice in every step"):
        tracked(a=sampler, b=sampler)
    tracked(a=sampler, b=ElasticSampler(100, dp_rank=0, dp_size=1))
