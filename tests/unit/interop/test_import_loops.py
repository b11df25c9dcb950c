"""Files as loops write them: imported, restored, and trained on bit for bit as the loop would have; or refused at the import."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from support.exact import bits
from torch import nn

from flashckpt import Checkpointer
from flashckpt.cli import main as cli
from flashckpt.dcp import direct_writer

Captured = pytest.CaptureFixture[str]
dcp: Any = torch.distributed.checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def _first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})


class Block(nn.Module):
    """Layers of equal shapes, a norm with buffers, an output tied to the input, an unused buffer of a weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    wide, flat = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    return [{"params": flat, "weight_decay": 0.0}, {"params": wide, "weight_decay": 0.1}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(by_dimension(model), lr=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01),
}


class Program:
    """A model, an optimizer and a scheduler whose state has keys that are numbers."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Block()
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    def train(self, steps: int) -> Any:
        """Return everything after some more steps."""
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn(4, 6)).pow(2).mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        states = [self.optimizer.state.get(param, {}) for param in self.model.parameters()]
        rates = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        return bits([dict(self.model.state_dict()), states, rates, self.scheduler.state_dict()])


def below(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


def inside(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict as if the blocks of the model had been compiled one by one."""
    return {name.replace("layers.0.", "layers.0._orig_mod."): value for name, value in state.items()}


LOOPS: dict[str, Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "readme": lambda m, o, s: {"model": m, "optimizer": o, "scheduler": s, "step": 3},
    "tutorial": lambda m, o, s: {
        "epoch": 1, "model_state_dict": m, "optimizer_state_dict": o, "scheduler_state_dict": s, "loss": torch.tensor(0.5)
    },
    "timm": lambda m, o, s: {
        "epoch": 1, "arch": "x", "state_dict": m, "optimizer": o, "version": 2, "lr_scheduler": s, "metric": 0.1,
        "state_dict_ema": {name: value.clone() for name, value in m.items()},
    },
    "open_clip": lambda m, o, s: {
        "epoch": 1, "name": "x", "state_dict": below("module.", m), "optimizer": o, "scheduler": s,
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    },
    "nanogpt": lambda m, o, s: {
        "model": below("_orig_mod.", m), "optimizer": o, "model_args": {"n_layer": 2, "params": 123}, "iter_num": 3,
        "best_val_loss": torch.tensor(1.0), "config": {"lr": 0.1}, "scheduler": s,
    },
    "blocks": lambda m, o, s: {"model": inside(m), "optimizer": o, "scheduler": s},
    "ddp of compiled": lambda m, o, s: {"model": below("module._orig_mod.", m), "optimizer": o, "scheduler": s},
    "compiled ddp": lambda m, o, s: {"model": below("_orig_mod.module.", m), "optimizer": o, "scheduler": s},
}  # fmt: skip


def run(*arguments: object, capsys: Captured) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as done:
        cli.main([*map(str, arguments), "--json"])
    out = capsys.readouterr()
    return int(done.value.code or 0), json.loads(out.out)


def restored(kind: str, root: Path) -> Program:
    program = Program(kind, 9)
    reader = Checkpointer.readonly(root)
    reader.track(model=program.model, optimizer=program.optimizer, scheduler=program.scheduler)
    reader.restore()
    return program


def saved(kind: str, loop: str) -> tuple[Program, dict[str, Any]]:
    program = Program(kind, 1)
    program.train(3)
    return program, LOOPS[loop](
        program.model.state_dict(), program.optimizer.state_dict(), program.scheduler.state_dict()
    )


CASES = [
    *itertools.product(["torch"], LOOPS, ["adamw"]), *itertools.product(["torch"], ["timm"], OPTIMIZERS),
    ("dcp", "readme", "adamw"), ("dcp", "open_clip", "named"), ("dcp", "compiled ddp", "momentum"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "loop", "kind"), dict.fromkeys(CASES))
def test_what_a_loop_saved_goes_on_as_it_would_have(
    tmp_path: Path, capsys: Captured, form: str, loop: str, kind: str
) -> None:
    program, state = saved(kind, loop)
    source = tmp_path / "last.pt"
    if form == "torch":
        torch.save(state, source)
    else:
        dcp.save(state, checkpoint_id=source)
    names = tmp_path / "names.txt"
    by_id = {id(param): name for name, param in program.model.named_parameters()}
    names.write_text("\n".join(by_id[id(p)] for group in program.optimizer.param_groups for p in group["params"]))
    expected = program.train(3)
    code, document = run("import", source, tmp_path / "root", "--step", 3, capsys=capsys)
    if form == "dcp" and code:  # its metadata does not say which tensors are one
        assert "--parameters" in document["error"]["expected"]
        code, document = run("import", source, tmp_path / "root", "--step", 3, "--parameters", names, capsys=capsys)
    assert code == 0, document
    assert restored(kind, tmp_path / "root").train(3) == expected


UNCERTAIN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a parameter was frozen": lambda s: {**s, "optimizer": without_first(s["optimizer"])},
    "no model": lambda s: {"optimizer": s["optimizer"]},
    "the file is the optimizer": lambda s: s["optimizer"],
    "inside another member": lambda s: {"state": s},
    "a list of optimizers": lambda s: {"model": s["model"], "optimizers": [s["optimizer"]]},
    "the model is another": lambda s: {**s, "model": {"w": torch.zeros(3)}},
}


def without_first(optimizer: dict[str, Any]) -> dict[str, Any]:
    group = {**optimizer["param_groups"][0], "params": optimizer["param_groups"][0]["params"][1:]}
    return {"state": {key: one for key, one in optimizer["state"].items() if key}, "param_groups": [group]}


@pytest.mark.parametrize("case", UNCERTAIN)
def test_numbers_without_certain_names_are_refused_at_the_import(tmp_path: Path, capsys: Captured, case: str) -> None:
    _, state = saved("momentum", "readme")
    torch.save(UNCERTAIN[case](state), tmp_path / "last.pt")
    code, document = run("import", tmp_path / "last.pt", tmp_path / "root", "--step", 3, capsys=capsys)
    assert code == 10
    assert not (tmp_path / "root").exists()
    if case in ("a parameter was frozen", "the model is another"):
        assert "--parameters" in document["error"]["expected"]
        arguments = ("--step", 3, "--only", "model.*")
        assert run("import", tmp_path / "last.pt", tmp_path / "root", *arguments, capsys=capsys)[0] == 0


def test_the_user_names_what_is_renamed_and_the_usual_names_are_said(tmp_path: Path, capsys: Captured) -> None:
    _, state = saved("adamw", "open_clip")
    torch.save(state, tmp_path / "last.pt")
    _, document = run("import", tmp_path / "last.pt", tmp_path / "a", "--step", 3, capsys=capsys)
    assert document["renamed"] == {"state_dict": "model"}
    for renames in (["--rename", "state_dict.=net."], ["--rename", "state_dict.module.=net."]):
        root = tmp_path / f"b{len(renames[1])}"
        run("import", tmp_path / "last.pt", root, "--step", 3, *renames, capsys=capsys)
        names = [one["fqn"] for one in run("inspect", root, capsys=capsys)[1]["tensors"]]
        assert "net.embed.weight" in names
        assert "optimizer.net.layers.0.0.weight.exp_avg" in names
