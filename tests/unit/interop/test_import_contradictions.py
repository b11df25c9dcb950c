"""Files whose parts say different things, or more than names and shapes: used, listed, or refused by file and place."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file, save_model
from support.exact import bits
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from flashckpt import Checkpointer
from flashckpt.cli import main as cli
from flashckpt.dcp import direct_writer
from flashckpt.interop.incoming import open_foreign
from flashckpt.interop.selection import Selection

Captured = pytest.CaptureFixture[str]
dcp: Any = torch.distributed.checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def _first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})


def run(path: Path, capsys: Captured, *options: object) -> tuple[int, Any]:
    """Import with --json; return (exit code, document)."""
    with pytest.raises(SystemExit) as done:
        cli.main(["import", str(path), str(path.parent / "root"), "--step", "1", *map(str, options), "--json"])
    return int(done.value.code or 0), json.loads(capsys.readouterr().out)


def refused(path: Path, capsys: Captured, *options: object) -> str:
    code, document = run(path, capsys, *options)
    assert code in (10, 16, 32), document
    assert not (path.parent / "root").exists()
    return str(document["error"]["problem"]) + ": " + str(document["error"]["found"])


# -- safetensors and its index ---------------------------------------------------------------------------


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(i)) for i, name in enumerate("abcd")}


def folder_of(path: Path, kind: str = "safetensors") -> Path:
    """Write two files and their index; of torch in a Trainer's folder."""
    path.mkdir()
    held, names = weights(), (FIRST, SECOND)
    if kind == "bin":
        names = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
        (path / "trainer_state.json").write_text('{"global_step": 1}')
    write(path / names[0], {name: held[name] for name in "ab"})
    write(path / names[1], {name: held[name] for name in "cd"})
    where = dict(zip("abcd", (names[0], names[0], names[1], names[1]), strict=True))
    document = {"metadata": {"total_size": 4 * 24}, "weight_map": where}
    (path / (INDEX if kind == "safetensors" else "pytorch_model.bin.index.json")).write_text(json.dumps(document))
    return path


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = next(folder.glob("*.index.json"))
    document = json.loads(index.read_text())
    change(document)
    index.write_text(json.dumps(document))


def more_in(folder: Path, number: int, **tensors: torch.Tensor) -> None:
    path = sorted(one for one in folder.iterdir() if "-of-" in one.name)[number]
    write(path, {name: weights()[name] for name in ("ab", "cd")[number]} | tensors)


CONTRADICTIONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the map names a tensor that no file has": (lambda f: changed(f, lambda d: d["weight_map"].update(e=d["weight_map"]["a"])), "'e'"),
    "the map lacks a tensor": (lambda f: changed(f, lambda d: d["weight_map"].pop("b")), "'b'"),
    "the map lacks a file": (lambda f: changed(f, lambda d: [d["weight_map"].pop(name) for name in "cd"]), ""),
    "the map names the other file": (lambda f: changed(f, lambda d: d["weight_map"].update(b=d["weight_map"]["c"])), "'b'"),
    "a tensor is in both files": (lambda f: more_in(f, 1, a=torch.ones(2, 3)), "'a'"),
    "a file has one tensor more": (lambda f: more_in(f, 0, z=torch.ones(2, 3)), "'z'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_an_index_and_its_files_that_differ_are_refused_by_name(
    tmp_path: Path, capsys: Captured, case: str, kind: str
) -> None:
    folder, (change, named) = folder_of(tmp_path / "folder", kind), CONTRADICTIONS[case]
    change(folder)
    if case == "the map lacks a file":
        code, document = run(folder, capsys)
        assert (code, any("00002-of-00002" in one for one in document["omitted"])) == (0, True)
    else:
        assert named in refused(folder, capsys)


def test_numbered_files_without_an_index_are_all_there_or_refused(tmp_path: Path, capsys: Captured) -> None:
    folder = folder_of(tmp_path / "folder")
    (folder / INDEX).unlink()
    assert run(folder, capsys)[0] == 0
    (tmp_path / "more").mkdir()
    other = folder_of(tmp_path / "more" / "folder")
    (other / INDEX).unlink()
    (other / FIRST).unlink()
    assert "1 of the 2 files" in refused(other, capsys)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_one_of_several_numbered_files_is_said_to_be_one_of_several(
    kind: str, tmp_path: Path, capsys: Captured
) -> None:
    folder = folder_of(tmp_path / "folder", kind)
    code, document = run(next(folder.glob("*-00001-of-*")), capsys)
    assert code == 0
    assert any("is one of 2 files" in one for one in document["omitted"])


@pytest.mark.parametrize("file", ["model.safetensors", "other.safetensors"])
def test_two_sets_of_weights_are_refused(tmp_path: Path, capsys: Captured, file: str) -> None:
    folder = folder_of(tmp_path / "folder")
    if file == "other.safetensors":
        (folder / INDEX).unlink()
    save_file(weights(), folder / file)
    assert file in refused(folder, capsys)


def test_what_a_folder_holds_besides_is_listed_and_a_size_that_differs_is_said(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = folder_of(tmp_path / "folder")
    changed(folder, lambda document: document["metadata"].update(total_size=5))
    (folder / "config.json").write_text("{}")
    code, document = run(folder, capsys)
    assert code == 0
    assert "config.json: not read" in document["omitted"]
    assert any("total_size" in one and "96 bytes" in one for one in document["omitted"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight


def test_tensors_that_a_file_says_are_one_are_found_under_both_names(tmp_path: Path, capsys: Captured) -> None:
    model, other = Tied(), Tied()
    other.head.weight = nn.Parameter(torch.zeros(3, 3))  # a program in which they are two
    save_model(model, str(tmp_path / "model.safetensors"))
    assert run(tmp_path / "model.safetensors", capsys, "--rename", "=model.")[0] == 0
    reader = Checkpointer.readonly(tmp_path / "root")
    reader.track(model=other)
    reader.restore()
    assert bits(other.head.weight) == bits(other.embed.weight) == bits(model.embed.weight)


def header_of(path: Path, change: Callable[[dict[str, Any]], Any], data: bytes = bytes(24)) -> Path:
    header: dict[str, Any] = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    text = change(header)
    raw = (text if isinstance(text, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize(("change", "named"), [
    (lambda h: h.update(__metadata__={"format": "flax"}), "flax"),
    (lambda h: h.update(__metadata__={"format": "tf"}), "tf"),
    (lambda h: h.update(__metadata__={"step": 3}), "__metadata__"),
    (lambda h: h.update(__metadata__=["pt"]), "__metadata__"),
    (lambda h: h["a"].update(shape=[3], data_offsets=[12, 24]), "of no tensor"),
    (lambda h: h["a"].update(shape=[3], data_offsets=[0, 12]), "of no tensor"),
    (lambda h: json.dumps(h)[:-1] + "," + json.dumps(h)[1:], "twice"),
])  # fmt: skip
def test_a_header_that_says_otherwise_is_refused(tmp_path: Path, capsys: Captured, change: Any, named: str) -> None:
    assert named in refused(header_of(tmp_path / "w.safetensors", change), capsys)


def test_what_a_header_says_more_is_listed(tmp_path: Path, capsys: Captured) -> None:
    path = header_of(tmp_path / "w.safetensors", lambda h: h.update(__metadata__={"format": "pt", "base": "x"}))
    code, document = run(path, capsys)
    assert (code, document["omitted"]) == (0, ["metadata of w.safetensors: base"])


# -- Accelerate ------------------------------------------------------------------------------------------


class Program:
    def __init__(self, seed: int, steps: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        for _ in range(steps):
            self.model(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> Any:
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        return bits([dict(self.model.state_dict()), states, self.scheduler.state_dict()])


def accelerate_folder(path: Path, program: Program, weights: str) -> Path:
    """Write what `Accelerator.save_state` writes."""
    path.mkdir()
    write(path / weights, program.model.state_dict())
    torch.save(program.optimizer.state_dict(), path / "optimizer.bin")
    torch.save(program.scheduler.state_dict(), path / "scheduler.bin")
    random.seed(3)
    torch.save({
        "step": 0, "random_state": random.getstate(), "numpy_random_seed": np.random.RandomState(4).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(5).get_state(),
    }, path / "random_states_0.pkl")  # fmt: skip
    torch.save({"at": 1}, path / "custom_checkpoint_0.pkl")
    return path


def test_a_folder_of_accelerate_gives_model_optimizer_scheduler_and_generators(
    tmp_path: Path, capsys: Captured
) -> None:
    program = Program(1, 3)
    folder = accelerate_folder(tmp_path / "checkpoint_0", program, "pytorch_model.bin")
    code, document = run(folder, capsys)
    assert (code, document["format"], document["omitted"]) == (0, "accelerate", ["custom_checkpoint_0.pkl: not read"])
    other = Program(2)
    reader = Checkpointer.readonly(tmp_path / "root")
    reader.track(model=other.model, optimizer=other.optimizer, scheduler=other.scheduler)
    reader.restore()
    assert other.state() == program.state()
    state = open_foreign(folder, "accelerate", Selection()).values["rng@rank0"]
    assert state["torch"] == torch.Generator().manual_seed(5).get_state().numpy().tobytes()
    assert state["python"][1] == np.asarray(random.Random(3).getstate()[1], "<u4").tobytes()


def test_no_file_of_an_optimizer_is_left_out_without_being_asked_for(tmp_path: Path, capsys: Captured) -> None:
    program = Program(1, 3)
    folder = accelerate_folder(tmp_path / "checkpoint_0", program, "model.safetensors")
    assert "optimizer.bin" in refused(folder, capsys)  # its names are not certain
    (folder / "optimizer_1.bin").write_bytes((folder / "optimizer.bin").read_bytes())
    assert "optimizer_1.bin" in refused(folder, capsys, "--only", "model.*")
    (folder / "optimizer_1.bin").unlink()
    code, document = run(folder, capsys, "--only", "model.*")
    assert (code, "optimizer.bin: not read" in document["omitted"]) == (0, True)
    plain = tmp_path / "more" / "folder"
    plain.mkdir(parents=True)
    save_file(weights(), plain / "model.safetensors")
    torch.save({}, plain / "my_optim.pth")
    assert "my_optim.pth" in refused(plain, capsys)
    code, document = run(plain, capsys, "--format", "safetensors")
    assert (code, document["omitted"]) == (0, ["my_optim.pth: not read"])


# -- metadata of dcp and Megatron ------------------------------------------------------------------------


def dcp_folder(path: Path, change: Callable[[Metadata], Any]) -> Path:
    dcp.save({"w": torch.ones(4, 2), "v": torch.zeros(4, 2), "n": 3}, checkpoint_id=path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def chunks(metadata: Metadata, *boxes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    kind: Any = metadata.state_dict_metadata["w"]
    place = metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]
    kind.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    del metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]
    for number, (offsets, _) in enumerate(boxes):
        own = replace(place, offset=place.offset + number, length=1)
        metadata.storage_data[MetadataIndex("w", torch.Size(offsets))] = own


@pytest.mark.parametrize(("change", "named"), [
    (lambda m: chunks(m, ((0, 0), (2, 2))), "leave some of it out"),
    (lambda m: chunks(m, ((0, 0), (3, 2)), ((2, 0), (2, 2))), "overlap"),
    (lambda m: chunks(m, ((0, 0), (4, 1)), ((0, 0), (4, 1))), "share bytes|overlap"),
    (lambda m: chunks(m, ((0, 0), (2, 2)), ((3, 0), (2, 2))), "beyond"),
    (lambda m: m.storage_data.update({MetadataIndex("w", torch.Size([0, 0])): m.storage_data[MetadataIndex("v", torch.Size([0, 0]))]}), "share bytes"),
    (lambda m: setattr(m, "mcore_data", {"w": {"nd_reformulated_orig_global_shape": (8,)}}), "another shape"),
    (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.int32), "is not what its metadata says"),
])  # fmt: skip
def test_metadata_of_dcp_that_contradicts_itself_or_its_files_is_refused(
    tmp_path: Path, capsys: Captured, change: Any, named: str
) -> None:
    code, document = run(dcp_folder(tmp_path / "d", change), capsys)
    text = document["error"]["problem"] + ": " + document["error"]["found"]
    assert code in (16, 32)
    assert any(one in text for one in named.split("|")), text


def test_a_file_of_dcp_that_is_missing_is_named(tmp_path: Path, capsys: Captured) -> None:
    folder = dcp_folder(tmp_path / "d", lambda _: None)
    next(folder.glob("*.distcp")).unlink()
    assert ".distcp cannot be read" in refused(folder, capsys)


def test_names_without_a_shape_are_listed(tmp_path: Path, capsys: Captured) -> None:
    code, document = run(dcp_folder(tmp_path / "d", lambda m: m.state_dict_metadata.pop("v")), capsys)
    assert code == 0
    assert document["omitted"] == ["1 names of which .metadata gives no shape: v"]


def megatron_folder(path: Path, *, backend: str = "torch_dist", more: dict[str, torch.Tensor] | None = None) -> Path:
    dcp.save({"decoder.layers.weight": torch.ones(2, 3, 3), **(more or {})}, checkpoint_id=path)
    torch.save({"iteration": 3}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "common_backend": "torch"}))
    return path


def test_what_megatron_says_besides_the_tensors_is_used_said_or_refused(tmp_path: Path, capsys: Captured) -> None:
    assert "zarr" in refused(megatron_folder(tmp_path / "iter_0000001", backend="zarr"), capsys)
    twice = megatron_folder(tmp_path / "iter_0000002", more={"decoder.layers.1.weight": torch.zeros(3, 3)})
    assert "decoder.layers.1.weight" in refused(twice, capsys)
    code, document = run(megatron_folder(tmp_path / "iter_0000004"), capsys)
    assert code == 0
    assert any("common.pt says 3" in one for one in document["omitted"])
