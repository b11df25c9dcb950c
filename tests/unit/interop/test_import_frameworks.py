"""`flashckpt import` of what training frameworks write, laid out as they document it: restored by name, bit for bit.

tests/integration/frameworks/all_imports.py does the same with files that the frameworks themselves wrote.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from torch import nn
from unit.interop.test_interop import Captured, Exploit, run, same

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError
from flashckpt.interop import optimizer_names
from flashckpt.interop.incoming import open_foreign
from flashckpt.interop.selection import Selection
from flashckpt.state import rng

dcp: Any = torch.distributed.checkpoint
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own formats


@pytest.fixture(autouse=True)
def _exploited(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail every test in which code of a file was run."""
    mark = tmp_path_factory.mktemp("code") / "exploited"
    monkeypatch.setenv("EXPLOITED", str(mark))
    yield
    assert not mark.exists()


class Program:
    """A model with layers of equal shapes, an optimizer of two groups, a scheduler; after so many steps."""

    def __init__(self, steps: int = 0) -> None:
        torch.manual_seed(5 + steps)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.25}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.125 if steps else 9.0)
        factor = functools.partial(pow, 0.5)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        for _ in range(steps):
            self.model(torch.randn(3, 6)).pow(2).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def assert_equals(self, other: Program, *, settings: bool = True) -> None:
        assert same(dict(self.model.state_dict()), dict(other.model.state_dict()))
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            assert self.optimizer.state[mine]
            assert same(self.optimizer.state[mine], other.optimizer.state[theirs])
        if settings:
            for own, group in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
                assert (own["lr"], own["weight_decay"]) == (group["lr"], group["weight_decay"])
            assert self.scheduler.state_dict() == other.scheduler.state_dict()

    def names(self) -> list[str]:
        by_id = {id(p): name for name, p in self.model.named_parameters()}
        return [by_id[id(p)] for group in self.optimizer.param_groups for p in group["params"]]


def restored(root: Path) -> Program:
    """Return a program that a Checkpointer filled from `root`."""
    other = Program()
    reader = Checkpointer.readonly(str(root))
    reader.track(model=other.model, optimizer=other.optimizer, scheduler=other.scheduler)
    reader.restore()
    return other


def imported(path: Path, capsys: Captured, *options: object) -> dict[str, Any]:
    code, document = run("import", path, path.parent / "root", *options, capsys=capsys)
    assert code == 0, document
    found: dict[str, Any] = document
    return found


def refused(path: Path, capsys: Captured, *options: object) -> dict[str, Any]:
    code, document = run("import", path, path.parent / "root", *options, capsys=capsys)
    assert code in (10, 16, 32), document
    assert not (path.parent / "root").exists()
    error: dict[str, Any] = document["error"]
    return error


# -- Hugging Face Trainer --------------------------------------------------------------------------------


def trainer_folder(folder: Path, program: Program, *, weights: str) -> Path:
    """Write what Trainer writes at step 3."""
    folder.mkdir()
    state = {name: value.contiguous() for name, value in program.model.state_dict().items()}
    if weights == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif weights == "bin":
        torch.save(program.model.state_dict(), folder / "pytorch_model.bin")
    else:
        parts = {
            "pytorch_model-00001-of-00002.bin": list(state)[:4],
            "pytorch_model-00002-of-00002.bin": list(state)[4:],
        }
        for name, keys in parts.items():
            torch.save({key: state[key] for key in keys}, folder / name)
        where = {key: name for name, keys in parts.items() for key in keys}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    torch.save(program.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(program.scheduler.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 0.5}))
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}  # noqa: NPY002 -- as Trainer does
    torch.save(generators, folder / "rng_state.pth")
    torch.save({"any": "thing"}, folder / "training_args.bin")
    return folder


def test_trainer_folder_gives_model_optimizer_scheduler_generators_and_step(tmp_path: Path, capsys: Captured) -> None:
    program = Program(3)
    random.seed(7)
    np.random.seed(8)  # noqa: NPY002 -- the generator that Trainer saves
    folder = trainer_folder(tmp_path / "checkpoint-3", program, weights="bin")
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 -- as above
    document = imported(folder, capsys)
    assert (document["format"], document["step"]) == ("trainer", 3)
    assert document["omitted"] == ["training_args.bin: made again by the program"]
    assert run("verify", tmp_path / "root", capsys=capsys)[0] == 0
    program.assert_equals(restored(tmp_path / "root"))
    rng.restore(open_foreign(folder, "trainer", Selection()).values["rng@rank0"])
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected  # noqa: NPY002 -- as above


@pytest.mark.parametrize("weights", ["safetensors", "several"])
def test_numbers_without_an_order_need_names_and_the_names_are_checked(
    tmp_path: Path, capsys: Captured, weights: str
) -> None:
    program = Program(3)
    folder = trainer_folder(tmp_path / "checkpoint-3", program, weights=weights)
    error = refused(folder, capsys)
    assert "identifies parameters by number" in error["problem"]
    assert "--only 'model.*'" in error["remedy"]
    for wrong, text in (
        (program.names()[:-1], "are not those of this optimizer"),
        (program.names()[::-1], "does not fit parameter 0"),
        (["nothing.here", *program.names()[1:]], "does not fit parameter 0"),
    ):
        (tmp_path / "names.txt").write_text("\n".join(wrong))
        assert text in refused(folder, capsys, "--parameters", tmp_path / "names.txt")["problem"]
    assert "cannot be read" in refused(folder, capsys, "--parameters", tmp_path / "no.txt")["problem"]
    (tmp_path / "names.txt").write_text("\n".join(program.names()))
    imported(folder, capsys, "--parameters", tmp_path / "names.txt")
    program.assert_equals(restored(tmp_path / "root"))


def test_the_model_alone_needs_no_names_and_reads_no_other_file(tmp_path: Path, capsys: Captured) -> None:
    program = Program(3)
    folder = trainer_folder(tmp_path / "checkpoint-3", program, weights="safetensors")
    torch.save({"state": Exploit()}, folder / "optimizer.pt")
    document = imported(folder, capsys, "--only", "model.*")
    assert document["tensors"] == len(program.model.state_dict())


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "pytorch_model.bin"])
def test_code_in_a_file_of_a_trainer_is_refused_by_its_class(tmp_path: Path, capsys: Captured, name: str) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-3", Program(3), weights="bin")
    torch.save({"x": Exploit()}, folder / name)
    error = refused(folder, capsys)
    assert f"{os.system.__module__}.system" in error["found"]
    assert name in error["problem"]


def test_generators_that_need_code_are_left_out_and_said_so(tmp_path: Path, capsys: Captured) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-3", Program(3), weights="bin")
    torch.save({"python": Exploit()}, folder / "rng_state.pth")
    assert imported(folder, capsys)["omitted"][0].startswith("rng_state.pth: ")


def test_a_folder_of_a_trainer_without_weights_or_with_a_bad_step_is_refused(tmp_path: Path, capsys: Captured) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-3", Program(3), weights="bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": -1}))
    assert "global_step is -1" in refused(folder, capsys)["found"]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    (folder / "pytorch_model.bin").unlink()
    assert "holds no weights" in refused(folder, capsys)["problem"]


def test_fsdp_folders_of_a_trainer_are_read_by_name(tmp_path: Path, capsys: Captured) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    program, folder = Program(3), tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    dcp.save({"model": program.model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    optimizer = get_optimizer_state_dict(program.model, program.optimizer)
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0")
    torch.save(program.scheduler.state_dict(), folder / "scheduler.pt")
    assert imported(folder, capsys)["step"] == 3
    program.assert_equals(restored(tmp_path / "root"))


def test_tied_weights_are_taken_once_and_found_under_both_names(tmp_path: Path, capsys: Captured) -> None:
    def tied() -> Any:
        model: Any = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, folder = tied(), tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert imported(folder, capsys, "--only", "model.*")["tensors"] == 1
    alone: Any = nn.ModuleDict({"head": nn.Linear(4, 6, bias=False)})
    for other in (tied(), alone):
        reader = Checkpointer.readonly(str(tmp_path / "root"))
        reader.track(model=other)
        reader.restore(strict="embed" in other)
        assert torch.equal(other["head"].weight, model["embed"].weight)


# -- Lightning -------------------------------------------------------------------------------------------


def lightning_file(path: Path, program: Program, **more: Any) -> Path:
    torch.save(
        {
            "epoch": 1,
            "global_step": 3,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": program.model.state_dict(),
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
            "callbacks": {},
            "optimizer_states": [program.optimizer.state_dict()],
            "lr_schedulers": [program.scheduler.state_dict()],
            **more,
        },
        path,
    )
    return path


def test_lightning_file_gives_module_optimizer_scheduler_and_step(tmp_path: Path, capsys: Captured) -> None:
    program = Program(3)
    document = imported(lightning_file(tmp_path / "last.ckpt", program, callbacks={"Stop": {"wait": 1}}), capsys)
    assert (document["format"], document["step"]) == ("lightning", 3)
    assert document["omitted"] == ["callbacks: belongs to Lightning's own objects"]
    program.assert_equals(restored(tmp_path / "root"))
    assert run("export", tmp_path / "root", "--to", tmp_path / "back.pt", capsys=capsys)[0] == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["scheduler"] == program.scheduler.state_dict()
    assert same(back["model"], dict(program.model.state_dict()))


def test_a_given_step_wins_and_several_optimizers_find_their_parameters(tmp_path: Path, capsys: Captured) -> None:
    program = Program(3)
    one = torch.optim.SGD(list(program.model[0].parameters()), lr=0.5, momentum=0.5)
    two = torch.optim.SGD([*program.model[1].parameters(), *program.model[2].parameters()], lr=0.25, momentum=0.5)
    program.model(torch.randn(3, 6)).sum().backward()
    one.step()
    two.step()
    path = lightning_file(tmp_path / "last.ckpt", program, optimizer_states=[one.state_dict(), two.state_dict()])
    (tmp_path / "names.txt").write_text("\n".join(name for name, _ in program.model.named_parameters()))
    assert imported(path, capsys, "--step", 70, "--parameters", tmp_path / "names.txt")["step"] == 70
    other = Program()
    own = [
        torch.optim.SGD(list(other.model[0].parameters()), lr=9, momentum=0.1),
        torch.optim.SGD([*other.model[1].parameters(), *other.model[2].parameters()], lr=9, momentum=0.1),
    ]
    reader = Checkpointer.readonly(str(tmp_path / "root"))
    reader.track(model=other.model, optimizer=own)
    reader.restore()
    assert [optimizer.param_groups[0]["lr"] for optimizer in own] == [0.5, 0.25]
    for mine, theirs in zip(program.model.parameters(), other.model.parameters(), strict=True):
        held = {**one.state, **two.state}[mine]
        assert same(held, {**own[0].state, **own[1].state}[theirs])


def test_a_damaged_lightning_file_is_refused(tmp_path: Path, capsys: Captured) -> None:
    path = lightning_file(tmp_path / "last.ckpt", Program(3), global_step="3")
    assert "not a whole checkpoint of Lightning" in refused(path, capsys)["problem"]
    path = lightning_file(tmp_path / "last.ckpt", Program(3), optimizer_states=[{"state": {}}])
    assert "cannot be read as a checkpoint of Lightning" in refused(path, capsys)["problem"]


# -- DeepSpeed -------------------------------------------------------------------------------------------


class LossScaler:
    """Stands for DeepSpeed's class of this name: an object in a file of settings."""

    def __init__(self) -> None:
        self.cur_scale = 1.0


LossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"


def universal_folder(root: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write what `ds_to_universal.py` writes for step 3."""
    folder = root / "global_step3_universal"
    for name, param in program.model.named_parameters():
        place = folder / "zero" / name
        place.mkdir(parents=True)
        torch.save({"param": param.detach(), "cat_dim": 0}, place / "fp32.pt")
        own = program.optimizer.state[param]
        torch.save({"param": own["exp_avg"], "cat_dim": 0}, place / "exp_avg.pt")
        torch.save({"param": own["exp_avg_sq"], "cat_dim": 0}, place / "exp_avg_sq.pt")
        torch.save(3, place / "step.pt")
    parts = LossScaler.__module__.split(".")
    groups = [{"lr": 0.5, "weight_decay": 0.0, "params": [0]}]
    with monkeypatch.context() as there:  # so that it can be pickled, and not be found again
        for count in range(1, len(parts) + 1):
            there.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
        there.setattr(sys.modules[LossScaler.__module__], "LossScaler", LossScaler, raising=False)
        torch.save({"param_groups": groups, "loss_scaler": LossScaler()}, folder / "zero" / "optimizer_state.pt")
    buffers = [name for name, _ in program.model.named_buffers()]
    rank = {
        "module": program.model.state_dict(),
        "buffer_names": buffers,
        "global_steps": 3,
        "param_shapes": [{name: p.shape for name, p in program.model.named_parameters()}],
        "lr_scheduler": program.scheduler.state_dict(),
    }
    torch.save(rank, folder / "mp_rank_00_model_states.pt")
    (root / "latest_universal").write_text(folder.name)
    return folder


@pytest.mark.parametrize("place", ["folder", "parent"])
def test_universal_checkpoint_of_deepspeed_gives_weights_moments_settings_and_step(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    program = Program(3)
    (tmp_path / "run").mkdir()
    folder = universal_folder(tmp_path / "run", program, monkeypatch)
    path = folder if place == "folder" else tmp_path / "run"
    code, document = run("import", path, tmp_path / "root", capsys=capsys)
    assert code == 0, document
    assert (document["format"], document["step"], document["omitted"]) == ("deepspeed", 3, [])
    other = restored(tmp_path / "root")
    program.assert_equals(other, settings=False)
    assert other.optimizer.param_groups[0]["lr"] == 0.5
    assert other.scheduler.state_dict() == program.scheduler.state_dict()


def test_a_moment_of_another_shape_and_shards_of_zero_are_refused(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = universal_folder(tmp_path, Program(3), monkeypatch)
    torch.save({"param": torch.zeros(3)}, folder / "zero" / "0.weight" / "exp_avg.pt")
    assert "does not belong to its parameter" in refused(folder, capsys)["problem"]
    plain = tmp_path / "global_step4"
    plain.mkdir()
    (plain / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"whatever")
    error = refused(plain, capsys)
    assert "in the shards of the ranks" in error["problem"]
    assert "ds_to_universal" in error["remedy"]


# -- Megatron --------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """As Megatron names its layers: decoder.layers.N."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(8, 6)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))


def test_torch_dist_folder_of_megatron_gives_each_layer_its_tensors(tmp_path: Path, capsys: Captured) -> None:
    model = Layers(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    torch.stack([p.pow(2).sum() for p in model.parameters()]).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
    optimizer.step()
    layers: Any = model.decoder.layers
    stacked = {key: torch.stack([getattr(layer, key).detach() for layer in layers]) for key in ("weight", "bias")}
    state: dict[str, Any] = {f"decoder.layers.{key}": value for key, value in stacked.items()}
    state["embedding.weight"] = model.embedding.weight.detach()
    for moment in ("exp_avg", "exp_avg_sq"):
        for key in ("weight", "bias"):
            own = torch.stack([optimizer.state[getattr(layer, key)][moment] for layer in layers])
            state[f"optimizer.state.{moment}.decoder.layers.{key}"] = own
        state[f"optimizer.state.{moment}.embedding.weight"] = optimizer.state[model.embedding.weight][moment]
    state["rng_state/shard_0_1"] = Exploit()
    folder = tmp_path / "iter_0000003"
    dcp.save(state, checkpoint_id=folder)
    torch.save({"iteration": 3, "args": Exploit()}, folder / "common.pt")
    document = imported(folder, capsys)
    assert (document["format"], document["step"], document["tensors"]) == ("megatron", 3, 7 + 2 * 7)
    assert document["omitted"][0].startswith("common.pt: ")
    assert "rng_state/shard_0_1" in document["omitted"][1]
    other = Layers(2)
    again = torch.optim.AdamW(other.parameters(), lr=9.0)
    reader = Checkpointer.readonly(str(tmp_path / "root"))
    reader.track(model=other, optimizer=again)
    reader.restore(strict=False)
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[mine][moment], again.state[theirs][moment])


# -- names and steps -------------------------------------------------------------------------------------


def test_a_name_is_given_only_where_no_other_fits() -> None:
    square, wide = (4, 4), (8, 4)
    order = {"a.weight": square, "a.bias": (4,), "b.weight": wide, "c.weight": square, "n.running_mean": (4,)}
    sure = optimizer_names.by_order([[0, 1, 2, 3]], {0: square, 1: (4,), 2: wide, 3: square}, order)
    assert sure == {0: "a.weight", 1: "a.bias", 2: "b.weight", 3: "c.weight"}
    assert optimizer_names.by_order([[0]], {0: square}, order) is None  # a or c: one of them is frozen
    assert optimizer_names.by_order([[0], [1]], {0: wide, 1: wide}, order) is None
    assert optimizer_names.by_order([[0]], {}, order) is None
    assert optimizer_names.by_order([[0, 1]], {0: wide, 1: (4,)}, order) is None  # not the order of the model
    with pytest.raises(ConfigError, match="are not those of this optimizer"):
        optimizer_names.as_given([[0, 1]], {}, ["a.weight", "a.weight"], order)


def test_names_that_the_optimizer_recorded_are_used_where_they_are_those_of_the_model() -> None:
    shapes = {0: (4, 4), 1: (4, 4)}
    known = {"a.weight": (4, 4), "b.weight": (4, 4), "c.bias": (4,)}
    groups: list[dict[str, Any]] = [
        {"params": [0], "param_names": ["b.weight"]},
        {"params": [1], "param_names": ["a.weight"]},
    ]
    assert optimizer_names.as_recorded(groups, shapes, known) == {0: "b.weight", 1: "a.weight"}
    for wrong in (["module.a.weight"], ["b.weight"], ["c.bias"], [], None):
        groups[1]["param_names"] = wrong
        assert optimizer_names.as_recorded(groups, shapes, known) is None


def test_an_optimizer_with_named_parameters_needs_no_list(tmp_path: Path, capsys: Captured) -> None:
    program = Program(3)
    folder = trainer_folder(tmp_path / "checkpoint-3", program, weights="safetensors")
    state, names = program.optimizer.state_dict(), iter(program.names())
    for group in state["param_groups"]:
        group["param_names"] = [next(names) for _ in group["params"]]
    torch.save(state, folder / "optimizer.pt")
    imported(folder, capsys)
    program.assert_equals(restored(tmp_path / "root"))


def test_files_are_read_only_where_their_names_are_wanted() -> None:
    assert Selection().may_take("optimizer")
    for pattern in ("optimizer.*", "*", "opt*", "optimizer", "*.weight"):
        assert Selection(only=("model.*", pattern)).may_take("optimizer"), pattern
    assert not Selection(only=("model.*", "scheduler")).may_take("optimizer")


def test_a_step_is_asked_for_where_nothing_says_it(tmp_path: Path, capsys: Captured) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    assert "--step N" in refused(tmp_path / "w.safetensors", capsys)["remedy"]
    assert (
        "of no use here"
        in refused(tmp_path / "w.safetensors", capsys, "--step", 1, "--parameters", "/dev/null")["problem"]
    )


def test_an_adapter_gets_the_names_of_the_live_module(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"modules_to_save": ["score"]}))
    prefix = "base_model.model"
    names = {
        f"{prefix}.q.lora_A.weight": f"{prefix}.q.lora_A.default.weight",
        f"{prefix}.e.lora_embedding_A": f"{prefix}.e.lora_embedding_A.default",
        f"{prefix}.score.weight": f"{prefix}.score.modules_to_save.default.weight",
    }
    save_file({name: torch.ones(2) for name in names}, folder / "adapter_model.safetensors")
    assert imported(folder, capsys, "--step", 1)["format"] == "peft"
    found = run("inspect", tmp_path / "root", capsys=capsys)[1]["tensors"]
    assert {one["fqn"] for one in found} == {f"model.{name}" for name in names.values()}
