"""Where sources have the names that were planned, what follows by place is what a search by name finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from unit.planning.test_directory import manifest

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning.read_plan import SourceNames
from flashckpt.restore import requirements as module
from flashckpt.restore import votes
from flashckpt.restore.requirements import LiveState, Requirements, foreseen_state, requirements
from flashckpt.state import named_groups, optimizer_state
from flashckpt.state.placement import World
from flashckpt.state.registry import StateRegistry

Optimizer = torch.optim.Optimizer


def model_of(*shapes: tuple[int, ...], frozen: int = -1) -> nn.ParameterList:
    model = nn.ParameterList([torch.zeros(shape) for shape in shapes])
    if frozen >= 0:
        model[frozen].requires_grad = False
    return model


def in_two_groups(model: nn.ParameterList) -> Optimizer:
    params = list(model)
    return torch.optim.SGD([{"params": params[2:], "momentum": 0.9}, {"params": params[:2], "momentum": 0.0}], lr=0.1)


def planned(
    make: Callable[[nn.ParameterList], Optimizer], model: nn.ParameterList, **objects: object
) -> tuple[LiveState, list[Shard]]:
    """Return live state as a restore reads it, and the shards that were planned before."""
    tracked = StateRegistry(World())
    tracked.add("model", model)
    tracked.add("optimizer", make(model))
    for name, thing in objects.items():
        tracked.add(name, thing)
    tracked.settled(ahead=True)
    shards = [tracked.layout().table.shard(row) for row in range(len(tracked.layout().table))]
    return LiveState.read(tracked), shards


def groups_of(live: LiveState) -> dict[str, Any]:
    return live.tracked.capture().values


def described(required: Requirements) -> tuple[Any, ...]:
    """Return what is required, without the order of blocks and keys."""
    state = {
        (id(param), key.key): (fqn, key.kind, tuple(key.boxes), key.form, id(block.optimizer), id(block.group))
        for block in required.absent.blocks
        for key in block.keys
        for param, fqn in zip(block.params, key.fqns, strict=True)
    }
    rows = {required.wanted.shard(row) for row in range(len(required.wanted))}
    return rows, state, required.missing, required.unnamed, len(required.wanted)


CASES: list[tuple[Callable[[nn.ParameterList], Optimizer], nn.ParameterList]] = [
    (lambda model: torch.optim.AdamW(model.parameters()), model_of((3, 2), (4,), (3, 2), ())),
    (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), model_of((3, 2), (3, 2), frozen=1)),
    (lambda model: torch.optim.AdamW(model.parameters()), model_of((3, 2), (0, 2), (3, 2))),
    (in_two_groups, model_of((2,), (2,), (5, 1), (2,))),
    (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), model_of((2,), (3,))),
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("make", "model"), CASES)
def test_what_is_known_by_place_is_what_a_search_by_name_finds(
    make: Any, model: nn.ParameterList, monkeypatch: pytest.MonkeyPatch, *, exact: bool
) -> None:
    live, shards = planned(make, model)
    held = [manifest(0, shards, groups_of(live)), manifest(-1, shards, groups_of(live))]
    names = SourceNames(held)
    known = requirements(live, names, held, exact=exact)
    assert known.is_foreseen
    for one in held:  # the places that were noted are those that a look-up finds
        noted = one.table.places(known.wanted.fqns)
        assert noted.tolist() == one.table.places(list(known.wanted.fqns)).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(module, "foreseen_state", lambda *_: None)
        searched = requirements(live, names, held, exact=exact)
    assert not searched.is_foreseen
    assert described(known) == described(searched)
    quick, slow = (votes.compare_names(live, names, held, one, None) for one in (known, searched))
    assert quick.foreign == slow.foreign == frozenset()
    assert quick.own == slow.own
    assert quick.count >= len(quick.own)


class Giving:
    """Returns other tensors for every snapshot."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.arange(3), "more": [torch.zeros(2, 2)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_tensors_in_values_are_required_for_the_values() -> None:
    live, shards = planned(CASES[0][0], model_of((3, 2), (3, 2)), thing=Giving())
    inside = sorted(shard.fqn for shard in shards if shard.fqn.startswith("thing@"))
    assert len(inside) == 2
    held = [manifest(0, shards, groups_of(live))]
    names = SourceNames(held)
    known = requirements(live, names, held, in_values=inside)
    assert known.is_foreseen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "foreseen_state", lambda *_: None)
        searched = requirements(live, names, held, in_values=inside)
    assert described(known) == described(searched)
    assert known.in_values == searched.in_values == inside
    assert known.live.fqns == searched.live.fqns == ["model.0", "model.1"]


def other_order(table: ShardTable) -> ShardTable:
    return table.take(np.arange(len(table))[::-1])


def one_more(table: ShardTable) -> ShardTable:
    more = ShardTable.from_shards([replace(table.shard(0), fqn="optimizer.9.exp_avg")], [0])
    return ShardTable.stacked([table, more])


def one_less(table: ShardTable) -> ShardTable:
    return table.take(np.arange(len(table) - 1))


def of_one_rank(table: ShardTable) -> ShardTable:
    return table.renamed([*table.fqns[:-1], f"{table.fqns[-1]}@rank0"])


def of_two_kinds(table: ShardTable) -> ShardTable:
    """Return the table in which one tensor of state has another dtype than those like it."""
    shards = [table.shard(row) for row in range(len(table))]
    at = next(row for row, shard in enumerate(shards) if shard.fqn == "optimizer.1.exp_avg")
    shards[at] = replace(shards[at], dtype="bfloat16")
    return ShardTable.from_shards(shards, np.zeros(len(shards)))


@pytest.mark.parametrize("change", [other_order, one_more, one_less, of_one_rank, of_two_kinds])
def test_other_names_or_kinds_are_searched(change: Callable[[ShardTable], ShardTable]) -> None:
    live, shards = planned(lambda model: torch.optim.AdamW(model.parameters()), model_of((3, 2), (3, 2)))
    as_planned = manifest(0, shards)
    other = replace(as_planned, table=change(as_planned.table))

    def find(held: list[Manifest]) -> object:
        return foreseen_state(live.tracked, live.layout, SourceNames(held), held)

    assert find([as_planned]) is not None
    assert find([other]) is None
    if change is not of_two_kinds:  # the first source that has a name gives its kind
        assert find([as_planned, other]) is None


def test_recorded_forms_and_state_that_was_made_meanwhile_are_searched() -> None:
    live, shards = planned(lambda model: torch.optim.AdamW(model.parameters()), model_of((3, 2), (3, 2)))
    plain = [manifest(0, shards)]
    formed = [manifest(0, shards, {"optimizer.forms": {"1.exp_avg": ["", "cuda"]}})]
    assert foreseen_state(live.tracked, live.layout, SourceNames(formed), formed) is None
    assert live.tracked.foreseen() is not None
    (optimizer,) = live.tracked.all_optimizers()
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] = torch.zeros(())
    assert live.tracked.foreseen() is None
    assert foreseen_state(live.tracked, live.layout, SourceNames(plain), plain) is None


def test_a_group_with_a_parameter_of_no_live_optimizer_is_foreign_although_all_tensors_are_known() -> None:
    live, shards = planned(lambda model: torch.optim.AdamW(model.parameters()), model_of((3, 2), (3, 2)))
    values: dict[str, object] = {"optimizer.groups": [[{"params": ["0", "1", "2"]}]]}
    held = [manifest(0, shards, values)]
    names = SourceNames(held)
    known = requirements(live, names, held)
    assert known.is_foreseen
    assert votes.compare_names(live, names, held, known, None).foreign == {"optimizer.2"}
    assert votes.ungrouped(live.tracked, [manifest(0, shards, {"optimizer.groups": [[{"params": ["1"]}]]})]) == [
        "optimizer.0"
    ]


def test_groups_of_the_same_parameters_fit_as_they_do_by_name() -> None:
    model = model_of((2,), (2,), (5, 1), (2,))
    optimizer = in_two_groups(model)
    names = {id(param): str(k) for k, param in enumerate(model)}

    def recorded(lr: float) -> list[Any]:
        return [[{"params": ["2", "3"], "lr": lr}, {"params": ["0", "1"], "lr": 2 * lr}]]

    def fitting(values: list[Any], *, quickly: bool) -> Any:
        groups = named_groups.Groups(values)
        (match,) = groups.match([optimizer], names)
        if not quickly:
            homes = groups._homes[-1]
            match = replace(match, refs=[list(dict.fromkeys(map(homes.__getitem__, own))) for own in match.names])
        return [(live, groups[ref]) for _, live, ref in match.found()]

    for values in ([recorded(0.1)], [recorded(0.1), recorded(0.5)], [[[*recorded(0.3)[0][::-1]]]]):
        quick = fitting(values, quickly=True)
        assert fitting(values, quickly=False) == quick
        assert [group["params"] for _, group in quick] == [["2", "3"], ["0", "1"]]


def test_state_that_is_not_only_tensors_is_looked_at_one_by_one() -> None:
    model = model_of((2,), (2,))
    optimizer = torch.optim.AdamW(model.parameters())
    assert optimizer_state.has_only_tensors(optimizer)
    optimizer.state[model[0]]["exp_avg"] = torch.zeros(2)
    assert optimizer_state.has_only_tensors(optimizer)
    optimizer.state[model[1]]["step"] = 3
    assert not optimizer_state.has_only_tensors(optimizer)
    del optimizer.state[model[1]]["step"]
    optimizer.state["common"] = {"count": torch.zeros(())}  # type: ignore[index]  # as some optimizers do
    assert not optimizer_state.has_only_tensors(optimizer)
    assert optimizer_state.other_keys(optimizer) == ["common"]
