"""A layout is what planning shard by shard would give, made once per structure; plans are never changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.one_rank import agent_of_the_test, crash  # noqa: F401 -- a fixture
from torch import nn

from flashckpt import Checkpointer
from flashckpt.core.manifest import ShardTable, encode_table
from flashckpt.core.shard import layout_hash, place
from flashckpt.snapshot.copy import StalePlanError
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.state import state_layout
from flashckpt.state.placement import World
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout, need_of


class Mixed(nn.Module):
    """Parameters and buffers of many dtypes and shapes, one of them under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Linear(600, 7, bias=False))
        self.narrow = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.single = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        self.tied = self.body[0].weight
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("flags", torch.ones(11, dtype=torch.bool))


def tracked(world: World, *, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> StateRegistry:
    model, found = Mixed(), StateRegistry(world)
    found.add("model", model)
    found.add("optimizer", optimizer(model.parameters(), lr=0.1))  # type: ignore[call-arg]  # all of torch's take it
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("world", [World(), World(rank=1, size=3, replicated=True), World(rank=2, size=3)])
def test_columns_give_the_bytes_that_planning_shard_by_shard_gives(world: World, *, ahead: bool) -> None:
    found = tracked(world)
    structure, _ = found.settled(ahead=ahead)
    layout, shards = found.layout(), structure.shards
    assert [(s.fqn, s.offsets) for s in shards] == sorted((s.fqn, s.offsets) for s in shards)
    placement = place(shards)
    assert layout.total == placement.total
    assert layout.signature == layout_hash(shards)
    assert layout.table_bytes == encode_table(ShardTable.from_shards(shards, placement.offsets))
    assert [structure.names[i] for i in layout.row_tensors.tolist()] == [s.fqn for s in shards]
    assert layout.need(100) == need_of(structure.reserved(), value_bytes=100)
    assert {s.fqn for s in structure.reserved()} == {*structure.names, *structure.forecast.names}


def test_what_several_ranks_persist_is_cut_as_their_shares_say() -> None:
    worlds = [World(rank=rank, size=3, replicated=True) for rank in range(3)]
    written: dict[tuple[str, tuple[int, ...]], int] = {}
    for world in worlds:
        structure, _ = tracked(world).settled(ahead=True)
        for shard in structure.shards:
            written[shard.fqn, shard.offsets] = written.get((shard.fqn, shard.offsets), 0) + (shard.replica == 0)
    assert set(written.values()) == {1}
    assert len({fqn for fqn, _ in written}) < len(written), "some tensor is divided"


def test_a_plan_is_never_changed_and_binding_gives_another() -> None:
    found = tracked(World())
    structure, _ = found.settled(ahead=True)
    plan = CopyPlan.of(found.layout(), found.ahead.refused)
    assert plan.awaits
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.bound = []  # type: ignore[misc]  # on purpose
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.layout.total = 0  # type: ignore[misc]  # on purpose
    (optimizer,) = found.all_optimizers()
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = found.appeared()
    assert tensors is not None
    bound = plan.bind(tensors)
    assert plan.awaits
    assert not bound.awaits
    assert bound.layout is plan.layout
    live = {id(value) for state in optimizer.state.values() for value in state.values()}
    own = [item for item in bound.fenced if item.fqn.startswith("optimizer.")]
    assert {id(item.local) for item in own} == live
    for item in own:
        name, _, key = item.fqn.removeprefix("optimizer.").rpartition(".")
        param = dict(found.parts()[0].named_parameters())[name]
        assert item.local is optimizer.state[param][key], item.fqn
    assert len(bound.versions()) == len(live) + sum(name.startswith("model.") for name in fenced_names(structure))


def fenced_names(structure: Any) -> list[str]:
    return [name for name, fenced in zip(structure.names, structure.fenced, strict=True) if fenced]


def test_state_of_another_form_than_was_predicted_is_refused_by_the_bound_plan() -> None:
    found = tracked(World())
    found.settled(ahead=True)
    plan = CopyPlan.of(found.layout(), found.ahead.refused)
    tensors = [torch.zeros(2, 2, dtype=torch.float16) for _ in plan.layout.structure.awaited]
    with pytest.raises(StalePlanError, match="another form than was planned ahead"):
        plan.bind(tensors).runs.check_forms()


def test_the_state_is_planned_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"built": 0, "laid out": 0, "encoded": 0}

    def counting(name: str, function: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return counted

    monkeypatch.setattr("flashckpt.state.registry.build", counting("built", state_layout.build))
    monkeypatch.setattr(StateLayout, "of", counting("laid out", StateLayout.of))
    monkeypatch.setattr("flashckpt.state.state_layout.encode_table", counting("encoded", encode_table))
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(tmp_path, snapshot_every=1, job="t")
    ckpt.track(model=model, optimizer=optimizer, rng=True)
    assert ckpt.restore() is None
    for step in (1, 2, 3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        ckpt.step(step)
    assert counts == {"built": 1, "laid out": 1, "encoded": 1}
    assert "plans" not in ckpt.stats
    ckpt.fence()
    model.body.append(nn.Linear(7, 3))
    ckpt.step(4)
    assert counts == {"built": 2, "laid out": 2, "encoded": 2}
    crash(ckpt)


def test_a_structure_read_for_a_restore_is_the_one_that_was_planned_without_what_is_to_come() -> None:
    found = tracked(World())
    ahead, _ = found.settled(ahead=True)
    present, _ = found.settled()
    assert set(present.names) == {name for name in ahead.names if not name.startswith("optimizer.")}
    assert present.reserved() == ahead.shards
    assert found.settled()[0] is present
    (optimizer,) = found.all_optimizers()
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not found.holds(), "the state that appeared is seen"
    assert found.settled()[0].names == ahead.names


def test_a_tensor_given_another_form_behind_the_guard_is_planned_again() -> None:
    found = tracked(World())
    before, _ = found.settled()
    (model,) = found.parts()
    narrow = model.get_parameter("narrow")
    narrow.data = torch.zeros(6, 3, dtype=torch.bfloat16)
    after, _ = found.settled()
    assert after is not before
    assert np.array_equal([s.lengths for s in after.shards if s.fqn == "model.narrow"], [(6, 3)])
