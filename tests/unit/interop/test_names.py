"""Names of any characters go through every format and back: what is in one checkpoint is in the other, under its name."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from support.exact import bits
from support.one_rank import Holder
from torch import nn

from flashckpt import Checkpointer
from flashckpt.cli import main as cli
from flashckpt.core.shard import split_owner
from flashckpt.dcp import FlashStorageReader, direct_writer
from flashckpt.errors import ConfigError
from flashckpt.state.placement import World, current_world
from flashckpt.state.registry import StateRegistry

Captured = pytest.CaptureFixture[str]
dcp: Any = torch.distributed.checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
_SEVERAL = ["x@rank0", "x@rank1", "x@y", "@", "@@", "x@pp0", "rng@rank0", "a/b", "a b", "*", "[0]", "__metadata__", "é" * 40,
            "param_groups", "state", "groups", "extra", "forms", "model", "optimizer", "0", "module", "~", "@rank0@rank1"]  # fmt: skip


@pytest.fixture(autouse=True)
def _first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})


def run(*arguments: object, capsys: Captured) -> Any:
    with pytest.raises(SystemExit) as done:
        cli.main([*map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert not done.value.code, out.err
    return json.loads(out.out)


def some_names() -> list[str]:
    """Return names of one printable character of each thousand, of all ASCII punctuation, and some made of several."""
    printable = [c for c in map(chr, range(sys.maxunicode)) if c.isprintable() and c != "."]
    dice = random.Random(7)
    single = [c for c in printable if c.isascii() and (not c.isalnum() or c in "09azAZ")] + dice.sample(printable, 40)
    mixed = [
        "".join(dice.choices(["@", "rank", "0", "/", " ", "pp1", *dice.sample(printable, 3)], k=5)) for _ in range(30)
    ]
    return list(dict.fromkeys([*_SEVERAL, *single, *mixed]))


class Program:
    """A model of many names, its optimizer after `steps`, and an object whose keys are of several types."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(steps)
        self.model = nn.Module()
        for name in some_names():
            self.model.add_module(name, nn.Linear(1, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 + steps)
        self.kept = Holder(**{"a@rank0": steps, "b": {1: steps, 7: 2}, "c": {}, "d@x": [steps, {"e@rank1": 3}]})
        for _ in range(steps):
            for param in self.model.parameters():
                param.grad = torch.rand(param.shape)
            self.optimizer.step()

    def things(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "kept": self.kept}

    def state(self) -> Any:
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        return bits(
            [dict(self.model.state_dict()), states, self.optimizer.param_groups[0]["lr"], self.kept.state_dict()]
        )


@pytest.fixture
def trained(tmp_path: Path) -> Program:
    program = Program(2)
    with Checkpointer(tmp_path / "root", snapshot_every=1, persist_every=1) as ckpt:
        ckpt.track(**program.things())
        ckpt.restore()
        ckpt.step(1)
        ckpt.wait()
    return program


def restored(root: Path) -> Program:
    program = Program(1)
    reader = Checkpointer.readonly(root)
    reader.track(**program.things())
    reader.restore()
    return program


@pytest.mark.matrix
def test_any_name_goes_through_every_format_and_back(tmp_path: Path, trained: Program, capsys: Captured) -> None:
    root = tmp_path / "root"
    assert restored(root).state() == trained.state()
    weights = dict(trained.model.state_dict())
    for kind, to in (("torch", "all.pt"), ("dcp", "folder"), ("safetensors", "all.safetensors")):
        document = run("export", root, "--to", tmp_path / to, "--format", kind, capsys=capsys)
        assert [name for name in document["left_out"] if name.startswith("model.")] == []
        again = tmp_path / f"from-{kind}"
        run("import", tmp_path / to, again, "--step", 1, capsys=capsys)
        if kind == "torch":
            assert restored(again).state() == trained.state()
    assert bits(torch.load(tmp_path / "all.pt", weights_only=True)["model"]) == bits(weights)
    found = {name.removeprefix("model."): one for name, one in load_file(tmp_path / "all.safetensors").items()}
    assert bits({name: found[name] for name in weights}) == bits(weights)
    for reader in (FlashStorageReader(root), FlashStorageReader(tmp_path / "from-dcp")):
        state = {"model": {name: torch.zeros_like(one) for name, one in weights.items()}}
        dcp.load(state, storage_reader=reader)
        assert bits(state["model"]) == bits(weights)


def test_what_one_rank_has_alone_is_named_after_it_whatever_else_is_in_its_name() -> None:
    model = nn.Module()
    for name in ("x@rank0", "y@z", "w"):
        model.add_module(name, nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    found = StateRegistry(World(rank=1, size=2))
    found.add("model", model)
    found.add("optimizer", optimizer)
    names = ["x@rank0.weight", "y@z.weight", "w.weight"]
    expected = {
        *(f"model.{name}@rank1" for name in names),
        *(f"optimizer.{name}.momentum_buffer@rank1" for name in names),
    }
    fqns = {row.entry.fqn for row in found.structure(found.capture()).rows}
    assert fqns == expected
    assert {split_owner(fqn)[0] for fqn in fqns} == {fqn.removesuffix("@rank1") for fqn in expected}


@pytest.mark.parametrize("name", ["x@rank0", "v@v2", "x@pp0.tp1"])
def test_a_tensor_named_as_state_of_a_rank_is_refused_when_it_is_tracked(name: str) -> None:
    model = nn.Module()
    first, _, leaf = name.partition(".")
    if leaf:
        model.add_module(first, nn.Module())
    (getattr(model, first) if leaf else model).register_parameter(leaf or first, nn.Parameter(torch.zeros(1)))
    found = StateRegistry(current_world())
    found.add("model", model)
    with pytest.raises(ConfigError, match="state of one rank"):
        found.structure(found.capture())


def test_a_coordinate_is_only_at_the_end_of_a_name() -> None:
    assert split_owner("w@rank3") == ("w", "rank3")
    assert split_owner("a.b@pp0.dp1.tp0") == ("a.b", "pp0.dp1.tp0")
    assert split_owner("a@x.w@rank3") == ("a@x.w", "rank3")
    assert split_owner("rng@pp0@rank3") == ("rng", "pp0@rank3")
    for name in ("x@rank0.weight", "x@y", "@", "a@0", "w", "thing@rank0.deep.w"):
        assert split_owner(name) == (name, "")
