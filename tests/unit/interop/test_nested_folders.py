"""Dicts of frameworks in folders: the same back, whole or not at all, anything unknown refused by its place."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.nested import assert_same
from support.paths import ROOT

import flashckpt.dcp as flash_dcp
from flashckpt import faults
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.cli import main as cli
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, NoCheckpointError, UnsupportedStateError
from flashckpt.interop import nested_state, target
from flashckpt.interop.nested_state import read_folder, write_folder
from flashckpt.storage.posix import PosixStore


def save(tree: dict[Any, Any], path: Path) -> None:
    write_folder(tree, path, step=7, job="test", remedy=lambda place: f"see to {place}")


def channels_last(module: Any) -> Any:
    return module.to(memory_format=torch.channels_last)


def example() -> dict[Any, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(channels_last(torch.nn.Conv2d(3, 4, 3)), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    shared = torch.arange(6.0)
    return {
        "epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "callbacks": {"ModelCheckpoint{'monitor': 'a.b'}": {"best_k_models": {"/a b/x.ckpt": torch.tensor(0.5)}, "inf": -float("inf")}},
        "hyper_parameters": {"path": pathlib.Path("/data"), "shape": torch.Size([1, 2]), "pair": (1, (2.5, None)), "dtype": torch.bfloat16,
                             "at": torch.device("cpu"), "np": np.float32(3), "array": np.arange(4).reshape(2, 2), "nan": float("nan")},
        "tied": [shared, shared, shared[:3]],
        "own": {0: {"1": b"x", 1: True, None: 2**70, ("a", 1): []}, "file": io.BytesIO(b"bytes"), "__flashckpt__": "dict",
                "parameter": torch.nn.Parameter(torch.ones(2)), "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
                "leaf": torch.zeros(1, requires_grad=True), "empty": torch.zeros(0, 3), "half": torch.ones(3, dtype=torch.bfloat16),
                "sliced": torch.arange(8)[::2].clone(), "complex": torch.ones(2, dtype=torch.complex64).conj().resolve_conj()},
        "a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "a.b~1": torch.zeros(2),
        3: "a number", "aliases": {"x": 1}, "rng@rank0": 5, "nested": {"members": []}, "member3": 1, "": 0, "opt.groups": [1],
        collections.__name__: collections.OrderedDict(b=1, a=2), "counter": collections.Counter("aab"),
    }  # fmt: skip


def test_a_dict_comes_back_bit_for_bit_type_for_type(tmp_path: Path) -> None:
    tree = example()
    save(tree, tmp_path / "epoch=1-step=7.ckpt")
    found = read_folder(tmp_path / "epoch=1-step=7.ckpt")
    assert_same(found, tree)
    assert found["tied"][0] is found["tied"][1]
    assert found["state_dict"]._metadata["1"]["version"] == 2
    save({}, tmp_path / "empty")
    assert read_folder(tmp_path / "empty") == {}


def test_a_folder_is_a_root_that_the_command_line_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(example(), path := tmp_path / "a.ckpt")
    assert [(info.step, info.problem) for info in list_checkpoints(PosixStore(path))] == [(7, "")]
    to = str(tmp_path / "m.safetensors")
    taken = ["--only", "state_dict.*", "--strip", "state_dict."]
    for words in (["verify", str(path)], ["export", str(path), *taken, "--to", to]):
        with pytest.raises(SystemExit) as done:
            cli.main(words)
        assert not done.value.code, capsys.readouterr()
    from safetensors.torch import load_file

    weights = example()["state_dict"]
    found = load_file(to)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in found)


class Colour(enum.IntEnum):
    RED = 1


def with_attribute() -> Any:
    found: Any = collections.OrderedDict()
    found.other = 1
    return found


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: assert_same, "a builtins.function"),
    "class": (lambda: Path, "a builtins.type"),
    "enum": (lambda: Colour.RED, "Colour"),
    "namespace": (argparse.Namespace, "a argparse.Namespace"),
    "set": (lambda: {1}, "a builtins.set"),
    "default": (lambda: collections.defaultdict(int), "a collections.defaultdict"),
    "text": (lambda: "\ud800", "no Unicode"),
    "key": (lambda: {frozenset(): 1}, "builtins.frozenset"),
    "objects": (lambda: np.array([{}]), "dtype |O"),
    "sparse": (lambda: torch.ones(2).to_sparse(), "torch.sparse_coo"),
    "meta": (lambda: torch.ones(2, device="meta"), "on meta"),
    "attribute": (with_attribute, "an attribute of a dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_a_pickle_could_hold_is_refused_by_its_place_and_nothing_is_written(
    name: str, tmp_path: Path
) -> None:
    made, found = REFUSED[name]
    with pytest.raises(UnsupportedStateError, match="cannot be held in a checkpoint") as caught:
        save({"x": torch.ones(2), "hyper_parameters": {"loss": [1, made()]}}, tmp_path / "a.ckpt")
    assert "hyper_parameters.loss.1" in caught.value.problem
    assert found in caught.value.found
    assert caught.value.remedy.startswith("see to hyper_parameters.loss.1")
    assert list(tmp_path.iterdir()) == []


def test_a_dict_that_contains_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    tree["own"] = tree
    with pytest.raises(UnsupportedStateError):
        save(tree, tmp_path / "a.ckpt")


POINTS = (
    "save.before-index", "save.before-commit", "store.before-publish:3", "export.before-rename", "export.exchanged",
    "removal.renamed",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("replaces", [False, True])
def test_killed_anywhere_the_name_has_a_whole_checkpoint_or_none(point: str, replaces: bool, tmp_path: Path) -> None:
    path, old, new = tmp_path / "last.ckpt", {"w": torch.zeros(1000), "n": 1}, {"w": torch.ones(1000), "n": 2}
    if replaces:
        save(old, path)
    elif point == "export.exchanged":
        path.write_bytes(b"a file of another plugin")
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if point == "removal.renamed":
            save(new, path)
        faults.arm(point)
        target.remove_whole(path) if point == "removal.renamed" else save(new, path)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    if point == "removal.renamed" or (not replaces and point != "export.exchanged"):
        assert not path.exists()
    else:
        assert_same(read_folder(path), new if point == "export.exchanged" else old)
    assert [one.name for one in tmp_path.iterdir() if one != path], "what the killed process wrote, under a hidden name"
    save({"n": 3}, tmp_path / "another.ckpt")
    left = {one.name for one in tmp_path.iterdir()}
    assert left - {"last.ckpt"} == {"another.ckpt"}, "the next save removes it, whatever it is called"


WRITER = """
import sys, torch
from pathlib import Path
from flashckpt.interop.nested_state import write_folder
n = 0
while True:
    n += 1
    write_folder({"w": torch.full((300_000,), float(n)), "n": n}, Path(sys.argv[1]), step=n, job="test", remedy="")
    print(n, flush=True)
"""


def test_a_reader_of_a_folder_that_is_replaced_all_the_time_sees_whole_ones_and_so_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, env=environment
    ) as writer:
        assert writer.stdout is not None
        seen = 0
        for _ in range(12):
            seen = int(writer.stdout.readline())
            found = read_folder(path)
            assert found["n"] >= seen
            assert bool((found["w"] == found["n"]).all())
        writer.kill()
    found = read_folder(path)
    assert found["n"] >= seen
    assert bool((found["w"] == found["n"]).all())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_is_no_such_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="does not exist"):
        read_folder(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"PK")
    with pytest.raises(NoCheckpointError, match="is a file"):
        read_folder(tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="saving would remove them"):
        save({}, tmp_path / "mine")
    flash_dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "root/1", no_dist=True)
    with pytest.raises(NoCheckpointError, match="of another kind"):
        read_folder(tmp_path / "root")


def test_damage_is_found(tmp_path: Path) -> None:
    save({"w": torch.ones(100_000)}, tmp_path / "a.ckpt")
    pack = next((tmp_path / "a.ckpt").rglob("*.p0.fck"))
    raw = bytearray(pack.read_bytes())
    raw[50_000] ^= 1
    pack.write_bytes(raw)
    with pytest.raises(DamagedError):
        read_folder(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "values",
    [
        {"nested": 1},
        {"nested": {"members": [["a", "a"]], "notes": []}},
        {"nested": {"members": [["a", "a"]], "notes": [[[0], "spell", None]]}, "a": 1},
        {"nested": {"members": [["a", "a"]], "notes": [[[0], "size", None]]}, "a": "text"},
        {"nested": {"members": [["a", "a"]], "notes": [[[0], "tensor", {"strides": [9]}]]}, "a": {"__flashckpt__": "tensor", "name": "x"}},
    ],
)  # fmt: skip
def test_records_that_contradict_themselves_are_errors_of_ours(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nested_state, "take_apart", lambda tree, remedy: nested_state.TakenApart(values=values))
    save({}, tmp_path / "a.ckpt")
    with pytest.raises(FlashckptError):
        read_folder(tmp_path / "a.ckpt")


def test_a_disk_without_room_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"n": 1}, tmp_path / "a.ckpt")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": 5}))
    with pytest.raises(FlashckptError, match="is full") as caught:
        save({"n": 2}, tmp_path / "a.ckpt")
    assert "save_top_k" in caught.value.remedy
    assert read_folder(tmp_path / "a.ckpt") == {"n": 1}


def test_tensors_are_put_on_the_device_that_is_asked_for(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    assert nested_state.read_folder(tmp_path / "a.ckpt", device="meta")["w"].device.type == "meta"
