"""Folders of torch_checkpointing in and out; those that the library itself writes are in tests/integration/frameworks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from unit.interop.test_interop import Captured, run, same

from flashckpt import Checkpointer
from flashckpt.dcp import direct_writer
from flashckpt.errors import DamagedError, FlashckptError, UnsupportedStateError
from flashckpt.interop.torch_checkpointing_folders import METADATA, read_folder


@pytest.fixture(autouse=True)
def _first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})


def sharded(
    folder: Path, whole: torch.Tensor, ranks: int, mesh_shape: tuple[int, ...], placements: Sequence[Any]
) -> None:
    """Write what `ranks` ranks would save of a model with one sharded and one plain tensor, as torch_checkpointing does."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape)
            count = mesh_shape[-1]
            local = whole.chunk(count)[rank % count].clone() if rank % count < len(whole.chunk(count)) else whole[:0]
            part = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            torch.save({"weight": part, "mask": torch.ones(3)}, folder / f"model_{rank}.pt")
        finally:
            dist.destroy_process_group()
        torch.save(7, folder / f"step_{rank}.pt")


@pytest.mark.parametrize(
    ("ranks", "mesh", "placements"),
    [(2, (2,), [Shard(0)]), (4, (2, 2), [Replicate(), Shard(0)]), (4, (4,), [Shard(0)])],
    ids=["sharded", "hybrid", "more ranks than rows"],
)
def test_parts_of_all_ranks_are_one_tensor(
    tmp_path: Path, capsys: Captured, ranks: int, mesh: tuple[int, ...], placements: list[Any]
) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    sharded(tmp_path / "step_7", whole, ranks, mesh, placements)
    code, document = run("import", tmp_path / "step_7", tmp_path / "root", capsys=capsys)
    assert (code, document["format"], document["step"], document["omitted"]) == (0, "torch_checkpointing", 7, [])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 4))
            self.register_buffer("mask", torch.zeros(3))

    model = Model()
    reader = Checkpointer.readonly(tmp_path / "root")
    reader.track(model=model)
    reader.restore()
    assert same(model.state_dict(), {"weight": whole, "mask": torch.ones(3)})


def test_a_missing_rank_or_part_is_named(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    sharded(tmp_path / "three", whole, 3, (3,), [Shard(0)])
    (tmp_path / "three" / "model_1.pt").unlink()
    with pytest.raises(DamagedError, match=r"lacks model_1\.pt"):
        read_folder(tmp_path / "three")
    (tmp_path / "three" / "model_2.pt").unlink()
    for name in ("step_1.pt", "step_2.pt"):
        (tmp_path / "three" / name).unlink()
    with pytest.raises(DamagedError, match=r"does not hold all of 'model\.weight'"):
        read_folder(tmp_path / "three")


def test_values_that_differ_between_ranks_are_said(tmp_path: Path, capsys: Captured) -> None:
    sharded(tmp_path / "step_7", torch.ones(4, 2), 2, (2,), [Shard(0)])
    torch.save(8, tmp_path / "step_7" / "step_1.pt")
    _, document = run("import", tmp_path / "step_7", tmp_path / "root", capsys=capsys)
    assert document["omitted"] == ["step of rank 1: other than that of the first rank, which is taken"]


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_nothing_of_a_folder_is_run(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "step_7"
    sharded(folder, torch.ones(4, 2), 2, (2,), [Shard(0)])
    (folder / METADATA).write_bytes(pickle.dumps({"version": "2.0", "world_size": 2, "metadata": {"x": _Evil()}}))
    with pytest.raises(FlashckptError, match="print"):
        read_folder(folder)
    (folder / METADATA).unlink()
    torch.save(_Evil(), folder / "step_0.pt")
    with pytest.raises(UnsupportedStateError, match="print"):
        read_folder(folder)
    assert "run" not in capsys.readouterr().out.split()


def test_other_layouts_are_found_by_the_metadata_or_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "step_7"
    folder.mkdir()
    (folder / "parts").mkdir()
    torch.save({"weight": torch.ones(2)}, folder / "parts" / "first.pt")

    def metadata(file: str, kind: str) -> None:
        layout = {"file_path": file, "serialization_format": {"type": kind}}
        item = {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: layout}}
        (folder / METADATA).write_bytes(pickle.dumps({"version": "2.0", "world_size": 1, "metadata": {"model": item}}))

    metadata("parts/first.pt", "TorchSerialization")
    assert [row.shard.fqn for row in read_folder(folder).tensors] == ["model.weight"]
    metadata("parts/first.pt", "SafetensorsSerialization")
    with pytest.raises(UnsupportedStateError, match=r"'model' of .* is not a file of torch\.save"):
        read_folder(folder)
    metadata("../elsewhere.pt", "TorchSerialization")
    with pytest.raises(DamagedError, match="elsewhere"):
        read_folder(folder)


def test_an_export_comes_back_bit_for_bit(tmp_path: Path, capsys: Captured) -> None:
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    torch.save(state, tmp_path / "first.pt")
    run("import", tmp_path / "first.pt", tmp_path / "root", "--step", "5", capsys=capsys)
    to = tmp_path / "step_5"
    code, document = run("export", tmp_path / "root", "--to", to, "--format", "torch_checkpointing", capsys=capsys)
    assert (code, document["values"] > 0) == (0, True)
    assert sorted(one.name for one in to.iterdir()) == ["epoch_0.pt", METADATA, "model_0.pt", "optimizer_0.pt"]
    assert same(torch.load(to / "model_0.pt", weights_only=True), dict(model.state_dict()))
    assert torch.load(to / "epoch_0.pt", weights_only=True) == 2
    code, document = run("import", to, tmp_path / "other", capsys=capsys)
    assert (code, document["step"]) == (0, 5)
    code, document = run("diff", tmp_path / "root", "5", "5", "--other", tmp_path / "other", capsys=capsys)
    assert (code, document["tensors"]) == (0, [])
