"""Stand-ins for DLRover's checkpointers: its call shapes, the same state back through kills, on other numbers of ranks."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import agent_dir
from support.exact import bits, step_once
from support.one_rank import agent_of_the_test, crash  # noqa: F401 -- fixtures
from support.ranks import run_ranks, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flashckpt.errors import ConfigError
from flashckpt.integrations import dlrover_megatron, dlrover_megatron_dist_ckpt
from flashckpt.integrations.dlrover import (
    DdpCheckpointer,
    DeepSpeedCheckpointer,
    FsdpFullCheckpointer,
    FsdpShardCheckpointer,
    StorageType,
)

SHAPES: dict[tuple[Any, str], list[str]] = {
    (DdpCheckpointer, "__init__"): [
        "self", "checkpoint_dir", "local_shard_num=1", "global_shard_num=1", "comm_backend=''", "deletion_strategy=None",
        "save_timeout=600", "replica_count=0",
    ],
    (DdpCheckpointer, "save_checkpoint"): ["self", "step", "state_dict", "path=''", "storage_type=DISK"],
    (DdpCheckpointer, "load_checkpoint"): ["self", "resume_path=''"],
    (DdpCheckpointer, "wait_latest_checkpoint"): ["self", "timeout=1800", "max_steps=None"],
    (FsdpShardCheckpointer, "__init__"): [
        "self", "checkpoint_dir", "comm_backend=''", "deletion_strategy=None", "save_timeout=600",
    ],
    (FsdpShardCheckpointer, "save_checkpoint"): [
        "self", "step", "model", "optimizer", "extra_sd=None", "path=''", "storage_type=DISK",
    ],
    (FsdpShardCheckpointer, "load_checkpoint"): ["self", "model", "optimizer", "resume_path=''"],
    (FsdpShardCheckpointer, "wait_latest_checkpoint"): ["self", "timeout=1800", "max_steps=None"],
    (FsdpFullCheckpointer, "__init__"): [
        "self", "checkpoint_dir", "comm_backend=''", "deletion_strategy=None", "save_timeout=600",
    ],
    (FsdpFullCheckpointer, "save_checkpoint"): [
        "self", "step", "model", "optimizer", "extra_sd=None", "path=''", "storage_type=DISK",
    ],
    (FsdpFullCheckpointer, "load_checkpoint"): ["self", "model", "optimizer", "resume_path=''"],
    (FsdpFullCheckpointer, "wait_latest_checkpoint"): ["self", "timeout=1800", "max_steps=None"],
    (DeepSpeedCheckpointer, "__init__"): [
        "self", "engine", "checkpoint_dir", "comm_backend=''", "deletion_strategy=None", "save_timeout=600",
    ],
    (DeepSpeedCheckpointer, "save_checkpoint"): [
        "self", "save_dir", "tag=None", "client_state=None", "save_latest=True", "storage_type=DISK",
    ],
    (DeepSpeedCheckpointer, "load_checkpoint"): [
        "self", "load_dir", "tag=None", "load_module_strict=True", "load_optimizer_states=True",
        "load_lr_scheduler_states=True", "load_module_only=False", "custom_load_fn=None",
    ],
    (DeepSpeedCheckpointer, "wait_latest_checkpoint"): ["self", "timeout=1800", "max_steps=None"],
    (dlrover_megatron.MegatronCheckpointer, "__init__"): [
        "self", "checkpoint_dir", "storage=None", "comm_backend=''", "save_timeout=600", "replica_count=0",
    ],
    (dlrover_megatron, "save_checkpoint"): [
        "iteration", "model", "optimizer", "opt_param_scheduler", "num_floating_point_operations_so_far=0",
        "storage_type=DISK", "storage=None", "comm_backend=''", "save_timeout=600", "replica_count=0",
    ],
    (dlrover_megatron, "load_checkpoint"): [
        "model", "optimizer", "opt_param_scheduler", "load_arg='load'", "strict=True", "storage=None", "comm_backend=''",
        "save_timeout=600", "replica_count=0",
    ],
    (dlrover_megatron, "wait_latest_checkpoint"): ["timeout=1800"],
    (dlrover_megatron_dist_ckpt, "save_checkpoint"): [
        "iteration", "model", "optimizer", "opt_param_scheduler", "num_floating_point_operations_so_far",
        "storage_type=DISK", "comm_backend=''", "deletion_strategy=None", "save_timeout=600",
    ],
    (dlrover_megatron_dist_ckpt, "load_checkpoint"): [
        "model", "optimizer", "opt_param_scheduler", "load_arg='load'", "strict=True", "comm_backend=''",
        "deletion_strategy=None", "save_timeout=600",
    ],
    (dlrover_megatron_dist_ckpt, "wait_latest_checkpoint"): ["timeout=1800"],
}  # fmt: skip
"""Those of DLRover 0.6.1, but for the mutable defaults of `extra_sd` and `client_state`, which are empty dicts there."""
OURS = {"checkpoint_dir"}
"""Of the functions for Megatron, by keyword alone: where there is no `--save`."""


def shape(method: Any) -> list[str]:
    found = []
    for one in inspect.signature(method).parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            assert one.name in OURS
        elif one.kind is not inspect.Parameter.VAR_KEYWORD:
            default = one.default.name if isinstance(one.default, StorageType) else repr(one.default)
            found.append(one.name if one.default is inspect.Parameter.empty else f"{one.name}={default}")
    return found


@pytest.mark.parametrize(("kind", "name"), SHAPES, ids=lambda value: getattr(value, "__name__", value))
def test_arguments_names_and_defaults_are_dlrovers(kind: Any, name: str) -> None:
    assert shape(getattr(kind, name)) == SHAPES[kind, name]


def memory_made(flash: DdpCheckpointer | FsdpShardCheckpointer) -> None:
    """Wait for the memory of the state that was given first: a snapshot before that is left out."""
    session = flash.checkpointer._session
    assert session is not None
    assert session.memory.wait_first(60)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters())


def given(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "note": ("a", [1.5])}


def test_a_state_dict_comes_back_from_memory_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = built()
    flash = DdpCheckpointer(str(tmp_path), job="t")
    assert flash.load_checkpoint() == {}
    for step in (3, 6, 9):
        step_once(model, optimizer, step)
        expected = bits(given(model, optimizer, step))
        flash.save_checkpoint(step, given(model, optimizer, step), storage_type=StorageType.MEMORY)
        memory_made(flash)
    step_once(model, optimizer, 10)  # what was given is copied already
    crash(flash.checkpointer)
    again = DdpCheckpointer(str(tmp_path), job="t")
    found = again.load_checkpoint()
    assert bits(found) == expected
    other, of_other = built()
    other.load_state_dict(found["model"])
    of_other.load_state_dict(found["optimizer"])
    crash(again.checkpointer)


def test_a_load_after_a_save_or_a_load_is_refused_in_its_own_words(tmp_path: Path) -> None:
    model, optimizer = built()
    saved, loaded = (DdpCheckpointer(str(tmp_path / name), job=name) for name in ("saved", "loaded"))
    saved.save_checkpoint(1, {"w": torch.ones(3)}, storage_type=StorageType.MEMORY)
    assert loaded.load_checkpoint() == {}
    of_model = FsdpShardCheckpointer(str(tmp_path / "model"), job="model")
    of_model.save_checkpoint(1, model, optimizer, storage_type=StorageType.MEMORY)
    for flash, arguments in ((saved, ()), (loaded, ()), (of_model, (model, optimizer))):
        with pytest.raises(ConfigError, match=r"load_checkpoint\(\) after"):
            flash.load_checkpoint(*arguments)
        crash(flash.checkpointer)


def test_a_run_that_loads_nothing_begins_from_scratch(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        flash = DdpCheckpointer(str(tmp_path), job="t")
        for step in (1, 2):
            flash.save_checkpoint(step, {"w": torch.full((3,), value)}, storage_type=StorageType.MEMORY)
            memory_made(flash)
        crash(flash.checkpointer)
    flash = DdpCheckpointer(str(tmp_path), job="t")
    assert flash.load_checkpoint()["w"].tolist() == [2.0] * 3
    crash(flash.checkpointer)


def test_what_cannot_be_had_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="deletion strategy") as refused:
        DdpCheckpointer(str(tmp_path), deletion_strategy=object())
    assert "keep_last" in refused.value.remedy
    flash = DdpCheckpointer(str(tmp_path), job="t")
    with pytest.raises(ConfigError, match="from a path"):
        flash.load_checkpoint("/elsewhere/last.pt")
    flash.load_checkpoint()
    with pytest.raises(ConfigError):
        flash.load_checkpoint()
    with pytest.raises(ConfigError, match="unknown storage type"):
        flash.save_checkpoint(1, {}, storage_type="disk")  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, logger="flashckpt"):
        for step in (1, 2):
            flash.save_checkpoint(step, {}, path=f"/elsewhere/{step}.pt", storage_type=StorageType.MEMORY)
    assert caplog.text.count("is not used") == 1
    crash(flash.checkpointer)


def test_model_and_optimizer_are_the_same_objects_in_every_call(tmp_path: Path) -> None:
    model, optimizer = built()
    flash = FsdpShardCheckpointer(str(tmp_path), job="t")
    assert flash.load_checkpoint(model, optimizer) == {}
    with pytest.raises(ConfigError, match="another model or optimizer"):
        flash.save_checkpoint(1, *built(), storage_type=StorageType.MEMORY)
    crash(flash.checkpointer)


def train_sharded(rank: int, root: str, seed: int) -> tuple[dict[str, Any], list[Any]]:
    del rank
    agent_dir()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    flash = FsdpShardCheckpointer(root, job="t")
    extra = flash.load_checkpoint(model, optimizer)
    if not extra:
        for step in (2, 4):
            step_once(model, optimizer, step)
            extra = {"step": step, "epoch": 1}
            flash.save_checkpoint(step, model, optimizer, extra, storage_type=StorageType.MEMORY)
            memory_made(flash)
        flash.checkpointer.fence()
    crash(flash.checkpointer)
    parameters = [one for one in model.parameters() if isinstance(one, DTensor)]
    state = [one for p in parameters for _, one in sorted(optimizer.state[p].items())]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in [*parameters, *state]]
    return extra, [repr(bits(one.detach())) for one in whole]


@pytest.mark.timeout(120)
def test_shards_of_fsdp_come_back_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = values(run_ranks(train_sharded, 2, str(tmp_path), 0))
    assert first[0] == first[1]
    (alone,) = values(run_ranks(train_sharded, 1, str(tmp_path), 1))
    assert alone == first[0]
    assert alone[0] == {"step": 4, "epoch": 1}


class Args:
    """Megatron's arguments, as far as they are looked at."""

    save: str | None = None
    load: str | None = None
    finetune = no_load_optim = False
    consumed_train_samples = 0


def megatron_asked(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    args = Args()
    for key, value in given.items():
        setattr(args, key, value)
    monkeypatch.setattr(dlrover_megatron, "megatron_args", lambda: args)
    monkeypatch.setattr(dlrover_megatron, "_made", {})


@pytest.mark.parametrize(
    ("given", "call", "problem"),
    [
        ({}, {}, "where to keep checkpoints"),
        ({"save": "root", "finetune": True}, {}, "asks for part of the state"),
        ({"save": "root", "load": "elsewhere"}, {}, "another place than it is saved to"),
        ({"save": "root"}, {"strict": False}, "loaded whole"),
        ({"save": "root"}, {"storage": object()}, "a storage of DLRover"),
    ],
)
def test_what_megatron_cannot_have_is_refused(
    given: dict[str, Any], call: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    megatron_asked(monkeypatch, **given)
    with pytest.raises(ConfigError, match=problem):
        dlrover_megatron.load_checkpoint([], None, None, **call)


def test_a_deletion_strategy_is_refused_for_megatron_too(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron_asked(monkeypatch, save="root")
    with pytest.raises(ConfigError, match="deletion strategy"):
        dlrover_megatron_dist_ckpt.load_checkpoint([], None, None, deletion_strategy=object())
    with pytest.raises(ConfigError, match="deletion strategy"):
        dlrover_megatron_dist_ckpt.save_checkpoint(1, [], None, None, 0, deletion_strategy=object())
