"""What a snapshot has and the program has not is named, over all ranks together; what was never tracked is no mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import agent_dir
from support.exact import started, state_of, step_once
from support.one_rank import Holder, agent_of_the_test, crash  # noqa: F401 -- fixtures
from support.ranks import run_ranks, values
from torch import nn

from flashckpt import Checkpointer
from flashckpt.errors import FlashckptError, ShardGapError, UnexpectedStateError


def net(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])


def taken(root: Path, model: nn.Module, optimizer: Any, **things: Any) -> None:
    """Take one snapshot after one step, and die."""
    ckpt, _ = started(root, model=model, optimizer=optimizer, **things)
    step_once(model, optimizer, 1)
    ckpt.step(1)
    crash(ckpt)


def test_a_layer_that_the_program_has_not_is_named_and_left_behind_only_on_request(tmp_path: Path) -> None:
    model = net(3)
    taken(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    smaller = net(2)
    optimizer = torch.optim.SGD(smaller.parameters(), lr=0.5)
    before = state_of(smaller, optimizer)
    with pytest.raises(UnexpectedStateError, match=r"model\.2\.bias") as refused:
        started(tmp_path, model=smaller, optimizer=optimizer)
    assert refused.value.exit_code == 38
    assert "strict=False" in refused.value.remedy
    assert state_of(smaller, optimizer) == before, "nothing was restored"
    ckpt, report = started(tmp_path, strict=False, model=smaller, optimizer=optimizer)
    crash(ckpt)
    assert report is not None
    assert report.unexpected == ("model.2.bias", "model.2.weight", "optimizer.2.bias", "optimizer.2.weight")
    assert "4 names that the program lacks were not restored" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(smaller.parameters(), model.parameters(), strict=False))


def test_a_group_of_the_snapshot_that_the_optimizer_has_not_is_named_even_without_any_state(tmp_path: Path) -> None:
    for momentum, named in ((0.0, "optimizer.0.bias"), (0.9, "optimizer.0.bias.momentum_buffer")):
        root = tmp_path / str(momentum)
        model = net()
        groups: Any = [{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.5}]
        ckpt = Checkpointer(str(root), snapshot_every=1, job=f"t{momentum}")
        ckpt.track(model=model, optimizer=(optimizer := torch.optim.SGD(groups, lr=0.1, momentum=momentum)))
        ckpt.restore()
        step_once(model, optimizer, 1)
        ckpt.step(1)
        crash(ckpt)
        other = net()
        again = Checkpointer(str(root), snapshot_every=1, job=f"t{momentum}")
        fewer = torch.optim.SGD(other[1].parameters(), lr=0.1, momentum=momentum)
        again.track(model=other, optimizer=fewer)
        with pytest.raises(UnexpectedStateError) as refused:
            again.restore()
        assert named in refused.value.found
        report = again.restore(strict=False)
        crash(again)
        assert report is not None
        assert named in report.unexpected


def test_a_step_that_fits_better_is_not_chosen_in_place_of_the_newest(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model[1].parameters())
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    step_once(model, optimizer, 1)
    ckpt.step(1)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    step_once(model, optimizer, 2)
    ckpt.step(2)
    crash(ckpt)
    other = net()
    with pytest.raises(UnexpectedStateError, match="step 2"):
        started(tmp_path, model=other, optimizer=torch.optim.AdamW(other[1].parameters()))


def test_parameters_that_no_recorded_group_has_are_missing(tmp_path: Path) -> None:
    model = net()
    taken(tmp_path, model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    other = net()
    with pytest.raises(ShardGapError, match=r"optimizer\.0\.bias"):
        started(tmp_path, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    ckpt, report = started(tmp_path, strict=False, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    crash(ckpt)
    assert report is not None
    assert report.missing == ("optimizer.0.bias", "optimizer.0.weight")


def test_groups_of_other_settings_are_not_made_one_without_a_word(tmp_path: Path) -> None:
    model = net()
    groups: Any = [{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.5}]
    taken(tmp_path, model, torch.optim.SGD(groups, lr=0.1))
    other = net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    before = state_of(other, optimizer)
    with pytest.raises(ShardGapError, match="groups that differ") as refused:
        started(tmp_path, model=other, optimizer=optimizer)
    assert refused.value.state == "Nothing was restored."
    assert state_of(other, optimizer) == before


class Counting(nn.Linear):
    """A module with state beside its tensors."""

    def get_extra_state(self) -> Any:
        return {"n": 3, "t": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.got = state


def test_extra_state_that_no_module_has_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(8, 8))
    taken(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = net(1)
    with pytest.raises(UnexpectedStateError, match=r"model\.0\._extra_state"):
        started(tmp_path, model=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1))


def test_extra_state_that_no_snapshot_has_is_missing(tmp_path: Path) -> None:
    plain = net(1)
    taken(tmp_path, plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model = nn.Sequential(Counting(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(plain_of(model), optimizer)
    with pytest.raises(ShardGapError, match=r"model\.0\._extra_state"):
        started(tmp_path, model=model, optimizer=optimizer)
    assert state_of(plain_of(model), optimizer) == before, "nothing was restored"


def plain_of(model: nn.Module) -> nn.Module:
    """Return a module with the same tensors and no extra state."""
    plain = nn.Module()
    for name, parameter in model.named_parameters():
        plain.register_parameter(name.replace(".", "_"), parameter)
    return plain


def test_an_object_that_no_snapshot_has_is_missing_before_anything_is_written(tmp_path: Path) -> None:
    taken(tmp_path, model := net(1), torch.optim.SGD(model.parameters(), lr=0.1))
    other = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = state_of(other, optimizer)
    with pytest.raises(ShardGapError, match="'counter'"):
        started(tmp_path, model=other, optimizer=optimizer, counter=Holder(n=1))
    assert state_of(other, optimizer) == before


class Tied(nn.Module):
    """Two names: of one parameter, or of two."""

    def __init__(self, value: float, head: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.full((3, 3), value))
        self.head = self.embedding if head is None else nn.Parameter(torch.full((3, 3), head))


def test_two_weights_that_differ_are_not_made_one_without_a_word(tmp_path: Path) -> None:
    root = tmp_path / "root"
    ckpt, _ = started(root, model=Tied(1.0, 2.0))
    ckpt.step(1)
    crash(ckpt)
    tied = Tied(5.0)
    with pytest.raises(UnexpectedStateError, match=r"model\.head"):
        started(root, model=tied)
    assert torch.equal(tied.embedding, torch.full((3, 3), 5.0)), "nothing was restored"
    ckpt, report = started(root, strict=False, model=tied)
    crash(ckpt)
    assert report is not None
    assert report.unexpected == ("model.head",)
    assert torch.equal(tied.embedding, torch.full((3, 3), 1.0))


def test_two_weights_of_the_same_bytes_may_become_one(tmp_path: Path) -> None:
    """A tied weight is two tensors where its ends lie on two pipeline stages."""
    ckpt, _ = started(tmp_path, model=Tied(1.0, 1.0))
    ckpt.step(1)
    crash(ckpt)
    ckpt, report = started(tmp_path, model=(tied := Tied(5.0)))
    crash(ckpt)
    assert report is not None
    assert report.unexpected == ()
    assert torch.equal(tied.head, torch.full((3, 3), 1.0))


def test_what_is_not_tracked_at_all_or_not_asked_for_is_no_mistake(tmp_path: Path) -> None:
    model = net(3)
    taken(tmp_path, model, torch.optim.AdamW(model.parameters()), ema=net(1))
    whole = net(3)
    ckpt, report = started(tmp_path, model=whole)
    crash(ckpt)
    assert report is not None
    assert report.unexpected == ()
    part = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    part.track(model=net(2))
    report = part.restore(only="model.*.weight")
    crash(part)
    assert report is not None
    assert report.unexpected == ("model.2.weight",)


def _stages(rank: int, root: str, layers: list[list[int]], dim: str, mode: str = "strict") -> Any:
    """Train rank's own layers of a pipeline for a step; return the step restored and what was left behind."""
    agent_dir()
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    mine = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in layers[rank]})
    grid = init_device_mesh("cpu", (len(layers),), mesh_dim_names=(dim,)) if dim else None
    optimizer = torch.optim.AdamW(mine.parameters())
    ckpt = Checkpointer(root, snapshot_every=1, job="t")
    ckpt.track(model=mine, optimizer=optimizer, mesh=grid, rng=True)
    try:
        report = ckpt.restore(strict=mode == "strict")
    except FlashckptError as error:
        return type(error).__name__, error.found
    torch.stack([p.square().sum() for p in mine.parameters()]).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
    optimizer.step()
    ckpt.step(1 if report is None else report.step + 1)
    crash(ckpt)
    return (None, ()) if report is None else (report.step, report.unexpected)


def test_layers_of_other_stages_are_at_home_on_other_ranks_and_a_layer_of_none_is_named_by_all(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert values(run_ranks(_stages, 2, root, [[0, 1], [2, 3]], "pp")) == [[None, []]] * 2
    assert values(run_ranks(_stages, 2, root, [[0, 2, 3], [1]], "pp")) == [[1, []]] * 2, "redistributed"
    refused = values(run_ranks(_stages, 2, root, [[0], [1, 2]], "pp"))
    assert {name for name, _ in refused} == {"UnexpectedStateError"}
    assert all("model.3.bias" in found for _, found in refused)
    left = values(run_ranks(_stages, 2, root, [[0], [1, 2]], "pp", "lenient"))
    for step, names in left:
        assert step == 2
        assert {"model.3.bias", "model.3.weight", "optimizer.3.weight.exp_avg"} <= set(names)
        assert not [name for name in names if ".3." not in name]


def test_state_of_one_rank_is_at_home_wherever_its_name_is(tmp_path: Path) -> None:
    root = str(tmp_path)
    values(run_ranks(_stages, 2, root, [[0, 1], [0, 1]], ""))
    assert values(run_ranks(_stages, 1, root, [[0, 1]], "")) == [[1, []]], "another world size"
    refused = values(run_ranks(_stages, 2, root, [[0], [0]], ""))
    assert {name for name, _ in refused} == {"UnexpectedStateError"}


def _grown(rank: int, root: str, step: int, width: int) -> Any:
    """Take the snapshot of one step with a layer whose width on rank 1 is `width`."""
    agent_dir()
    layer = nn.Linear(3, width if rank else 3)
    ckpt = Checkpointer(root, snapshot_every=1, job="t")
    ckpt.track(model=nn.ModuleDict({str(rank): layer}), mesh=_pipeline())
    try:
        report = ckpt.restore()
    except FlashckptError as error:
        return type(error).__name__, str(error)
    ckpt.step(step)
    crash(ckpt)
    return None if report is None else (report.step, report.passed_over)


def _pipeline() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))


def test_a_tensor_of_another_shape_on_one_rank_is_refused_by_all_and_no_older_step_is_chosen(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert values(run_ranks(_grown, 2, root, 1, 3)) == [None, None]
    assert values(run_ranks(_grown, 2, root, 2, 3)) == [[1, []]] * 2
    refused = values(run_ranks(_grown, 2, root, 3, 4))
    assert [name for name, _ in refused] == ["TensorMismatchError"] * 2
    assert "step 2 of generation 2 does not match this program (see rank 1)" in refused[0][1]
    assert "'model.1." in refused[0][1]
    assert "model.1" in refused[1][1]
    assert "(4,)" in refused[1][1] or "(4, 3)" in refused[1][1]
