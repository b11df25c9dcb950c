"""Frozen state that is left out of snapshots on request: neither held, nor wanted, nor overwritten."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import agent_dir
from support.exact import step_once
from support.one_rank import agent_of_the_test, crash  # noqa: F401 -- fixtures
from support.ranks import run_ranks, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError, ShardGapError, TensorMismatchError
from flashckpt.report import RestoreReport


class Adapted(nn.Module):
    """A frozen layer with a pair of narrow ones beside it that are trained."""

    def __init__(self, base_seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        torch.manual_seed(1)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(batch) + self.up(self.down(batch))
        return out


def opened(
    root: Path, model: nn.Module, exclude: str | Sequence[str] = (), *, strict: bool = True
) -> tuple[Checkpointer, Any, RestoreReport | None]:
    optimizer = torch.optim.AdamW(model.parameters())  # the frozen ones too, as many programs do
    ckpt = Checkpointer(str(root), snapshot_every=1, job="t")
    ckpt.track(model=model, optimizer=optimizer, exclude=exclude)
    return ckpt, optimizer, ckpt.restore(strict=strict)


def trained(root: Path, exclude: str | Sequence[str] = (), *, steps: int = 2) -> Adapted:
    """Train, and die with the last snapshot in memory."""
    model = Adapted()
    ckpt, optimizer, _ = opened(root, model, exclude)
    for step in range(1, steps + 1):
        step_once(model, optimizer, step)
        ckpt.step(step)
    crash(ckpt)
    return model


def held(ckpt: Checkpointer) -> set[str]:
    return set(ckpt._tracked.layout().structure.names)


@pytest.mark.parametrize("exclude", ["base.*", "model.base.*", ["base.bias", "model.base.weight"], "*base*"])
def test_what_is_left_out_is_not_in_snapshots_and_stays_as_it_is(tmp_path: Path, exclude: str | list[str]) -> None:
    before = trained(tmp_path, exclude)
    other = Adapted(base_seed=8)
    base = {name: one.clone() for name, one in other.base.state_dict().items()}
    ckpt, optimizer, report = opened(tmp_path, other, exclude, strict=False)
    assert report is not None
    assert (report.step, report.missing, report.unexpected) == (2, (), ())
    assert all(torch.equal(base[name], one) for name, one in other.base.state_dict().items())
    assert torch.equal(other.up.weight, before.up.weight)
    assert torch.equal(other.down.weight, before.down.weight)
    assert set(optimizer.state[other.up.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert {name for name in held(ckpt) if name.startswith("model.")} == {"model.down.weight", "model.up.weight"}
    crash(ckpt)


@pytest.mark.parametrize("change", ["seed", "dtype", "shape", "one element"])
def test_another_base_model_is_refused_before_anything_is_read(tmp_path: Path, change: str) -> None:
    trained(tmp_path, "base.*")
    other = Adapted(base_seed=8 if change == "seed" else 7)
    with torch.no_grad():
        if change == "dtype":
            other.base.bfloat16()
        if change == "shape":
            other.base = nn.Linear(9, 8).requires_grad_(requires_grad=False)
        if change == "one element":
            other.base.bias[1] += 1
    up = other.up.weight.clone()
    with pytest.raises(TensorMismatchError, match=r"model\.base\.\w+' is left out by exclude=") as refused:
        opened(tmp_path, other, "base.*")
    assert "load the base model" in refused.value.remedy
    assert "loaded before restore()" in refused.value.expected
    assert torch.equal(other.up.weight, up)


def test_buffers_and_what_has_no_elements_yet_are_not_compared(tmp_path: Path) -> None:
    """Running means of a frozen model may change; a base on the meta device may be loaded after the restore."""

    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.ModuleDict({"base": nn.BatchNorm1d(4).requires_grad_(requires_grad=False), "up": nn.Linear(4, 4)})

    model = made()
    ckpt, _, _ = opened(tmp_path, model, "base.*")
    ckpt.step(1)
    crash(ckpt)
    other = made()
    torch.add(other["base"].running_mean, 1, out=other["base"].running_mean)  # type: ignore[index]
    ckpt, _, report = opened(tmp_path, other, "base.*")
    crash(ckpt)
    assert report is not None
    later = made()
    later["base"].to("meta")  # type: ignore[index]
    ckpt, _, report = opened(tmp_path, later, "base.*")
    crash(ckpt)
    assert report is not None


def test_the_losses_after_a_restart_are_those_of_a_run_without_one(tmp_path: Path) -> None:
    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters())
    unbroken = [step_once(model, optimizer, step) for step in range(1, 6)]
    trained(tmp_path, "base.*", steps=3)
    again = Adapted()
    ckpt, optimizer, report = opened(tmp_path, again, "base.*")
    assert report is not None
    assert [step_once(again, optimizer, step) for step in range(report.step + 1, 6)] == unbroken[report.step :]
    crash(ckpt)


def test_a_whole_checkpoint_is_read_without_what_is_left_out(tmp_path: Path) -> None:
    before = trained(tmp_path)
    other = Adapted(base_seed=8)
    base = other.base.weight.clone()
    ckpt, _, report = opened(tmp_path, other, "base.*")
    crash(ckpt)
    assert report is not None
    assert report.unexpected == ()
    assert torch.equal(other.base.weight, base)
    assert torch.equal(other.up.weight, before.up.weight)


def test_a_program_that_wants_all_of_it_hears_of_exclude(tmp_path: Path) -> None:
    trained(tmp_path, "base.*")
    with pytest.raises(ShardGapError, match=r"model\.base\.bias") as refused:
        opened(tmp_path, Adapted())
    assert "exclude=" in refused.value.remedy


def test_trained_state_is_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'model\.up\.weight' is left out by exclude= and is trained"):
        opened(tmp_path, Adapted(), "up.*")


def test_state_that_is_trained_later_ends_the_step_that_would_lose_it(tmp_path: Path) -> None:
    model = Adapted()
    ckpt, optimizer, _ = opened(tmp_path, model, "base.*")
    step_once(model, optimizer, 1)
    ckpt.step(1)
    model.base.requires_grad_(requires_grad=True)
    step_once(model, optimizer, 2)
    with pytest.raises(ConfigError, match="is left out by exclude= and is trained"):
        ckpt.step(2)
    crash(ckpt)


@pytest.mark.parametrize("exclude", [[""], [3], [None]])
def test_what_is_no_pattern_is_refused(tmp_path: Path, exclude: Any) -> None:
    with pytest.raises(ConfigError, match="exclude= is not a pattern"):
        opened(tmp_path, Adapted(), exclude)


def test_what_is_left_out_is_said_and_a_pattern_that_matches_nothing_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flashckpt"):
        ckpt, *_ = opened(tmp_path, Adapted(), ["base.*", "bsae.*", "bias"])
    crash(ckpt)
    assert "left out of snapshots: 2 tensors, 0.0 MB" in caplog.text
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [text for text in warned if "exclude" in text] == [
        "exclude='bias' matches no parameter or buffer of a tracked module",
        "exclude='bsae.*' matches no parameter or buffer of a tracked module",
    ]


def test_a_tied_weight_is_held_under_the_name_that_is_not_left_out(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    ckpt.track(model=model, exclude="embed.*")
    ckpt.restore()
    assert held(ckpt) == {"model.head.weight"}
    crash(ckpt)


class Peculiar(nn.Module):
    """Keeps state in its own way, and some more besides."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.arange(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "hidden"] = self.hidden


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


def test_state_that_cannot_be_held_and_extra_state_may_be_left_out(tmp_path: Path) -> None:
    model = nn.ModuleDict({"base": nn.ModuleList([Peculiar(), Extra()]), "up": nn.Linear(2, 2)})
    for step in (1, 2):
        ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
        ckpt.track(model=model, exclude="base.*")
        report = ckpt.restore()
        assert (report.step if report else 0) == step - 1
        ckpt.step(step)
        crash(ckpt)
    assert held(ckpt) == {"model.up.bias", "model.up.weight"}
    assert not [name for name in ckpt._tracked.capture().values if "base" in name]


def train_sharded(rank: int, root: str, steps: int, base_seed: int) -> tuple[Any, Any, list[str]]:
    del rank
    agent_dir()
    model = Adapted(base_seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.base, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ckpt, optimizer, report = opened(Path(root), model, "base.*", strict=base_seed == 7)
    first = report.step if report else 0
    restored = [one.full_tensor().clone() for one in model.parameters() if isinstance(one, DTensor)]
    for step in range(first + 1, first + 1 + steps):
        step_once(model, optimizer, step)
        ckpt.step(step)
    after = [one.full_tensor().tolist() for one in model.parameters() if isinstance(one, DTensor)]
    names = sorted(held(ckpt))
    crash(ckpt)
    return [one.tolist() for one in restored], after, names


def train_sharded_elsewhere(rank: int, root: str) -> str:
    """With shards of another base model on another number of ranks."""
    del rank
    agent_dir()
    model = Adapted(8)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    try:
        opened(Path(root), model, "base.*")
    except TensorMismatchError as error:
        return type(error).__name__
    return ""


@pytest.mark.timeout(120)
def test_shards_of_fsdp_are_left_out_and_the_rest_is_resharded(tmp_path: Path) -> None:
    (_, after, names), _ = values(run_ranks(train_sharded, 2, str(tmp_path), 2, 7))
    assert not [name for name in names if "base" in name]
    base, bias, down, up = after
    values(run_ranks(train_sharded, 1, str(tmp_path), 0, 7))
    refused = run_ranks(train_sharded_elsewhere, 1, str(tmp_path))
    assert values(refused) == ["TensorMismatchError"]
    ((restored, _, _),) = values(run_ranks(train_sharded, 1, str(tmp_path), 0, 8))
    assert restored[2:] == [down, up]
    assert base not in restored
    assert bias not in restored
