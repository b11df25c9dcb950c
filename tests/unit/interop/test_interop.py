"""`flashckpt export` and `import`: users can leave and come, and what they take along is what they had, bit for bit."""

from __future__ import annotations

import io
import json
import os
import pickle
import platform
import shutil
import signal
import struct
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashckpt import Checkpointer, faults
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.cli import main as cli
from flashckpt.dcp import FlashStorageWriter, direct_writer
from flashckpt.errors import FlashckptError
from flashckpt.interop import safetensors_files, target
from flashckpt.interop.outgoing import cast
from flashckpt.interop.selection import Selection, parse_selection
from flashckpt.storage.factory import open_store

Captured = pytest.CaptureFixture[str]
dcp: Any = torch.distributed.checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def _first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})


def run(*arguments: object, capsys: Captured) -> tuple[int, Any]:
    """Run the command in this process with --json; return (exit code, document)."""
    with pytest.raises(SystemExit) as done:
        cli.main([*map(str, arguments), "--json"])
    out = capsys.readouterr()
    return int(done.value.code or 0), json.loads(out.out) if out.out else out.err


class Trained:
    """A model, its optimizer after a step, and their state dict as torch users write it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(700, 600), torch.nn.BatchNorm1d(600))
        small = torch.nn.Linear(5, 4, dtype=torch.bfloat16)
        self.model.add_module("small", small)
        self.model.register_buffer("mask", torch.tensor([True, False]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.125)
        self.model[1](self.model[0](torch.randn(3, 700))).pow(2).sum().backward()
        small(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": optimizer, "epoch": 4, "names": ("a", None)}


@pytest.fixture
def trained() -> Trained:
    return Trained()


@pytest.fixture
def root(tmp_path: Path, trained: Trained) -> str:
    dcp.save(trained.state(), storage_writer=FlashStorageWriter(str(tmp_path / "root"), step=120))
    return str(tmp_path / "root")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


# -- export ----------------------------------------------------------------------------------------------


def test_export_safetensors_is_what_the_library_reads(
    tmp_path: Path, root: str, trained: Trained, capsys: Captured
) -> None:
    path = tmp_path / "model.safetensors"
    code, document = run("export", root, "--to", path, "--only", "model.*", "--strip", "model.", capsys=capsys)
    assert (code, document["format"], document["step"]) == (0, "safetensors", 120)
    assert same(load_file(path), dict(trained.model.state_dict()))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "flashckpt.step": "120", "flashckpt.generation": "1"}
    assert list(tmp_path.glob(".*")) == []


def test_export_safetensors_folder_is_sharded_as_hugging_face_does(
    tmp_path: Path, root: str, trained: Trained, capsys: Captured
) -> None:
    folder = tmp_path / "out"
    options = ("--format", "safetensors", "--max-shard-size", "1.7MB")
    code, document = run("export", root, "--to", folder, *options, capsys=capsys)
    assert code == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded: dict[str, torch.Tensor] = {}
    for name in files:
        part = load_file(folder / name)
        assert all(index["weight_map"][key] == name for key in part)
        loaded |= part
    assert same({k[6:]: v for k, v in loaded.items() if k.startswith("model.")}, dict(trained.model.state_dict()))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in loaded.values()) == document["nbytes"]
    assert "optimizer.groups" in document["left_out"]


def test_export_torch_file_loads_with_weights_only_and_is_nested_as_the_user_saved_it(
    tmp_path: Path, root: str, trained: Trained, capsys: Captured
) -> None:
    assert run("export", root, "--to", tmp_path / "all.pt", capsys=capsys)[0] == 0
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    state = trained.state()
    assert same(dict(loaded["model"]), dict(state["model"]))
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    moments = state["optimizer"]["state"]["0.weight"]
    assert same(loaded["optimizer"]["state"]["0.weight"], moments)
    assert (loaded["epoch"], loaded["names"]) == (4, ("a", None))
    assert same(dict(torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)["model"]), dict(state["model"]))
    flat = ("--only", "model.*", "--strip", "model.")
    assert run("export", root, "--to", tmp_path / "model.pth", *flat, capsys=capsys)[0] == 0
    trained.model.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True))


def test_export_dcp_folder_is_read_by_torchs_own_reader(
    tmp_path: Path, root: str, trained: Trained, capsys: Captured
) -> None:
    assert run("export", root, "--to", tmp_path / "d", "--format", "dcp", capsys=capsys)[0] == 0
    state = trained.state()
    found = {**trained.state(), "epoch": 0, "names": None}
    found["model"] = {key: torch.zeros_like(value) for key, value in state["model"].items()}
    dcp.load(found, checkpoint_id=tmp_path / "d")
    assert same(dict(found["model"]), dict(state["model"]))
    assert (found["epoch"], found["names"]) == (4, ("a", None))
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float64"])
def test_export_casts_floating_point_tensors_as_torch_does(
    tmp_path: Path, root: str, trained: Trained, capsys: Captured, wanted: str
) -> None:
    path = tmp_path / "m.safetensors"
    options = ("--only", "model.*", "--strip", "model.", "--dtype", wanted)
    assert run("export", root, "--to", path, *options, capsys=capsys)[0] == 0
    dtype = getattr(torch, wanted)
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in trained.model.state_dict().items()}
    assert same(load_file(path), state)


def test_casts_round_as_torch_does_for_every_kind_of_number() -> None:
    specials = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65520.0, 1e-8, 3.4e38, 1e39, 1 + 2**-8]
    numbers = torch.cat([torch.tensor(specials, dtype=torch.float64), torch.randn(5000, dtype=torch.float64) * 1e3])
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    for source in kinds:
        held = numbers.to(source)
        raw: Any = held.view(torch.uint8).numpy()
        for wanted in kinds:
            if (source, wanted) == (torch.float64, torch.float16):
                continue  # numpy rounds once where torch goes through float32
            out = cast(raw, str(source)[6:], str(wanted)[6:])
            expected: Any = held.to(wanted)
            got = torch.frombuffer(bytearray(out), dtype=wanted)
            assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7)), (source, wanted)
            assert torch.equal(got.isnan(), expected.isnan())


def test_export_finds_damage_and_leaves_nothing(tmp_path: Path, root: str, capsys: Captured) -> None:
    pack = next(Path(root).rglob("*.fck"))
    raw = bytearray(pack.read_bytes())
    raw[1_200_000] ^= 1
    pack.write_bytes(raw)
    for to, kind in (("a.safetensors", "safetensors"), ("a.pt", "torch"), ("d", "dcp")):
        code, document = run("export", root, "--to", tmp_path / to, "--format", kind, capsys=capsys)
        assert (code, document["error"]["type"]) == (32, "DamagedError")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


def test_export_overwrites_nothing_unasked(tmp_path: Path, root: str, capsys: Captured) -> None:
    path, folder = tmp_path / "m.safetensors", tmp_path / "f"
    path.write_text("mine")
    folder.mkdir()
    for to in (path, folder):
        code, document = run("export", root, "--to", to, "--format", "safetensors", capsys=capsys)
        assert (code, document["error"]["problem"]) == (10, f"{to} is there already")
    assert path.read_text() == "mine"
    (folder / "thesis.tex").write_text("mine")
    force = ("--format", "safetensors", "--force")
    assert run("export", root, "--to", folder, *force, capsys=capsys)[1]["error"]["found"] == "thesis.tex"
    (folder / "thesis.tex").unlink()
    for to in (path, folder, folder):
        assert run("export", root, "--to", to, *force, capsys=capsys)[0] == 0
    assert (folder / "model.safetensors").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "m.safetensors", "root"]


def test_export_killed_before_the_rename_the_old_file_is_whole(tmp_path: Path, root: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_text("old")
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faults.arm("export.before-rename")
        cli.main(["export", root, "--to", str(path), "--force"])
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert path.read_text() == "old"


@pytest.mark.parametrize("point", ["export.before-rename", "export.exchanged", "export.between-renames"])
def test_export_killed_while_it_replaces_a_folder_a_whole_one_is_there_and_both_where_the_disk_cannot_swap(
    point: str, tmp_path: Path, root: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, args = tmp_path / "f", ("--format", "safetensors")
    assert run("export", root, "--to", path, *args, capsys=capsys)[0] == 0
    whole = load_file(path / "model.safetensors")
    if point == "export.between-renames":
        monkeypatch.setattr(target, "_exchange", lambda one, other: False)
    pid = os.fork()
    if pid == 0:
        faults.arm(point)
        cli.main(["export", root, "--to", str(path), *args, "--force"])
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    beside = [one for one in tmp_path.iterdir() if one.name.startswith(".f.")]
    if point == "export.between-renames":
        assert not path.exists()
        assert sorted(one.suffix for one in beside) == [".old", ".tmp"]
    else:
        beside.append(path)
    assert len(beside) == 2
    assert all(same(load_file(one / "model.safetensors"), whole) for one in beside)
    assert run("export", root, "--to", path, *args, "--force", capsys=capsys)[0] == 0
    assert path.is_dir()
    left = [one.suffix for one in tmp_path.iterdir() if one.name.startswith(".f.")]
    assert left == ([".old"] if point == "export.between-renames" else []), "the next export removes temporaries"


def test_export_leaves_temporaries_of_a_machine_of_the_same_name_alone(
    tmp_path: Path, root: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers that share a file system are often all called "localhost", and their process ids mean nothing here."""
    monkeypatch.setattr(platform, "node", lambda: "localhost")
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    others = tmp_path / f".f.localhost.{dead}-0123abcd.tmp"
    others.mkdir()
    mine = tmp_path / f"{target._ours(tmp_path / 'f')}{dead}-0123abcd.tmp"
    mine.mkdir()
    assert run("export", root, "--to", tmp_path / "f", "--format", "safetensors", capsys=capsys)[0] == 0
    assert others.exists()
    assert not mine.exists()


def test_export_to_a_full_disk_says_what_is_needed(
    tmp_path: Path, root: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 5_000_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, document = run("export", root, "--to", tmp_path / "m.safetensors", capsys=capsys)
    assert (code, document["error"]["found"]) == (41, "0.005 GB free")
    monkeypatch.setattr(target, "_sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    code, document = run("export", root, "--to", tmp_path / "m.safetensors", "--only", "model.1*", capsys=capsys)
    assert (code, document["error"]["type"]) == (41, "StoreError")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


def test_export_refuses_names_that_clash_patterns_without_match_and_types_without_name(
    tmp_path: Path, capsys: Captured
) -> None:
    root = str(tmp_path / "root")
    state = {"a": {"w": torch.zeros(2)}, "b": {"w": torch.ones(2)}, "z": torch.zeros(2, dtype=torch.complex128)}
    dcp.save(state, storage_writer=FlashStorageWriter(root))
    to = ("--to", tmp_path / "m.safetensors")
    code, document = run("export", root, *to, "--strip", "a.", "--strip", "b.", capsys=capsys)
    assert (code, document["error"]["problem"]) == (10, "the name 'b.w' would become 'w', as 'a.w' does")
    code, document = run("export", root, *to, "--only", "c.*", capsys=capsys)
    assert (code, document["error"]["expected"]) == (10, "a pattern of names such as a.w, b.w, z")
    code, document = run("export", root, *to, capsys=capsys)
    assert (code, document["error"]["problem"]) == (16, "safetensors cannot hold 'z'")
    assert run("export", root, "--to", tmp_path / "x", capsys=capsys)[1]["error"]["exit_code"] == 10
    assert run("export", root, *to, "--dtype", "int3", capsys=capsys)[1]["error"]["found"] == "int3"


def test_fp8_and_64_bit_types_go_through_safetensors_and_back(tmp_path: Path, capsys: Captured) -> None:
    kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.int64, torch.bool, torch.complex64]
    state = {f"t{i}": torch.arange(7).to(kind) for i, kind in enumerate(kinds)}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    dcp.save(state, storage_writer=FlashStorageWriter(str(tmp_path / "root")))
    path = tmp_path / "m.safetensors"
    assert run("export", tmp_path / "root", "--to", path, "--dtype", "bfloat16", capsys=capsys)[0] == 0
    found = load_file(path)
    assert found["scalar"].dtype == torch.bfloat16
    assert {k: v.dtype for k, v in found.items() if k[0] == "t"} == {
        k: v.dtype for k, v in state.items() if k[0] == "t"
    }
    assert run("import", path, tmp_path / "again", "--step", 1, capsys=capsys)[0] == 0
    assert run("export", tmp_path / "again", "--to", tmp_path / "n.safetensors", capsys=capsys)[0] == 0
    assert {k: v.tobytes() for k, v in numpy_of(path).items()} == {
        k: v.tobytes() for k, v in numpy_of(tmp_path / "n.safetensors").items()
    }


def numpy_of(path: Path) -> dict[str, Any]:
    return {key: value.view(torch.uint8).numpy() if value.dim() else value[None].view(torch.uint8).numpy()
            for key, value in load_file(path).items()}  # fmt: skip


# -- import ----------------------------------------------------------------------------------------------


def restored(root: str, trained: Trained, *, only: str | None = None) -> Trained:
    """Return a model and optimizer that a Checkpointer filled from `root`."""
    other = Trained()
    with torch.no_grad():
        for value in other.model.state_dict().values():
            value.zero_()
    other.optimizer.param_groups[0]["lr"] = 9.0
    other.optimizer.state.clear()
    reader = Checkpointer.readonly(root)
    reader.track(model=other.model, **({} if only else {"optimizer": other.optimizer}))
    reader.restore(only=only)
    return other


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_import_safetensors_and_a_checkpointer_restores_the_model(
    tmp_path: Path, trained: Trained, capsys: Captured, kind: str
) -> None:
    weights = {key: value.contiguous() for key, value in trained.model.state_dict().items()}
    if kind == "file":
        source = tmp_path / "w.safetensors"
        save_file(weights, source)
    else:
        source = tmp_path / "hf"
        source.mkdir()
        halves = [dict(list(weights.items())[:3]), dict(list(weights.items())[3:])]
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        for name, half in zip(names, halves, strict=True):
            save_file(half, source / name)
        where = {key: name for name, half in zip(names, halves, strict=True) for key in half}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        (source / "config.json").write_text("{}")
    root = str(tmp_path / "root")
    code, document = run("import", source, root, "--step", 7, "--rename", "=model.", capsys=capsys)
    assert (code, document["prefix"], document["tensors"]) == (0, "step-000000007.g1", len(weights))
    assert run("verify", root, capsys=capsys)[0] == 0
    assert same(dict(restored(root, trained, only="model.*").model.state_dict()), dict(trained.model.state_dict()))


@pytest.mark.parametrize("kind", ["torch", "legacy", "dcp"])
def test_import_torch_file_and_dcp_folder_and_a_checkpointer_goes_on_with_the_optimizer(
    tmp_path: Path, trained: Trained, capsys: Captured, kind: str
) -> None:
    source = tmp_path / ("state.pt" if kind != "dcp" else "folder")
    if kind == "dcp":
        dcp.save(trained.state(), checkpoint_id=source)
    else:
        torch.save(trained.state(), source, _use_new_zipfile_serialization=kind == "torch")
    root = str(tmp_path / "root")
    code, document = run("import", source, root, "--step", 1200, capsys=capsys)
    assert code == 0, document
    assert document["format"] == ("dcp" if kind == "dcp" else "torch")
    other = restored(root, trained)
    assert same(dict(other.model.state_dict()), dict(trained.model.state_dict()))
    assert other.optimizer.param_groups[0]["lr"] == 0.125
    for mine, theirs in zip(trained.model.parameters(), other.model.parameters(), strict=True):
        assert same(other.optimizer.state[theirs], trained.optimizer.state[mine])
    assert run("export", root, "--to", tmp_path / "back.pt", capsys=capsys)[0] == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert (back["epoch"], back["names"]) == (4, ("a", None))


def test_import_of_a_dcp_checkpoint_in_shards_keeps_the_shards(tmp_path: Path, capsys: Captured) -> None:
    from support.ranks import run_ranks, values

    values(run_ranks(_save_sharded, 2, str(tmp_path / "d")))
    root = str(tmp_path / "root")
    assert run("import", tmp_path / "d", root, "--step", 1, capsys=capsys)[0] == 0
    (tensor,) = run("inspect", root, capsys=capsys)[1]["tensors"]
    assert (tensor["fqn"], tensor["shape"], tensor["shards"]) == ("w", [5, 3], 2)
    assert run("export", root, "--to", tmp_path / "w.safetensors", capsys=capsys)[0] == 0
    assert load_file(tmp_path / "w.safetensors")["w"].tolist() == torch.arange(15.0).reshape(5, 3).tolist()


def _save_sharded(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"w": distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])}, checkpoint_id=folder)


class Exploit:
    def __reduce__(self) -> Any:
        return os.system, ("touch " + os.environ["EXPLOITED"],)


def test_import_never_runs_code_of_a_file(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPLOITED", str(tmp_path / "exploited"))
    torch.save({"w": torch.zeros(2), "x": Exploit()}, tmp_path / "bad.pt")
    torch.save({"w": torch.zeros(2), "x": Exploit()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Exploit()))
    dcp.save({"w": torch.zeros(2), "x": Exploit()}, checkpoint_id=tmp_path / "values")
    for name in ("bad.pt", "old.pt", "folder", "values"):
        code, document = run("import", tmp_path / name, tmp_path / "root", "--step", 1, capsys=capsys)
        assert (code, document["error"]["type"]) == (16, "UnsupportedStateError"), name
        assert "running their code" in document["error"]["problem"]
    assert not (tmp_path / "exploited").exists()
    assert not (tmp_path / "root").exists()


def test_an_export_writes_several_tensors_at_a_time(
    root: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, write = threading.Barrier(2), safetensors_files._write

    def meet(place: tuple[Path, int, Any], source: Any) -> None:
        if place[2].name in ("model.0.weight", "model.0.bias"):
            met.wait(30)
        write(place, source)

    monkeypatch.setattr(safetensors_files, "_write", meet)
    code, _ = run("export", root, "--to", tmp_path / "w.safetensors", "--only", "model.*", capsys=capsys)
    assert (code, met.broken) == (0, False)


def test_import_names_what_is_damaged_missing_or_unknown(tmp_path: Path, capsys: Captured) -> None:
    good = tmp_path / "g.safetensors"
    save_file({"w": torch.arange(1000.0)}, good)
    raw = good.read_bytes()
    cases = {
        "cut.safetensors": (raw[:-100], 32, "the file is cut short"),
        "short.safetensors": (raw[:4], 32, "a file of 4 bytes"),
        "length.safetensors": (struct.pack("<Q", 1 << 60) + raw[8:], 32, "whose header would have"),
        "json.safetensors": (raw[:8] + b"}" + raw[9:], 32, "is not JSON"),
        "what.bin": (b"no idea", 32, "cannot be read as a file of torch.save"),
        "what.txt": (b"no idea", 10, "is no checkpoint that can be imported"),
        "cut.pt": (_torch_bytes()[:-50], 32, "cannot be read as a file of torch.save"),
    }
    for name, (content, exit_code, text) in cases.items():
        (tmp_path / name).write_bytes(content)
        code, document = run("import", tmp_path / name, tmp_path / "root", "--step", 1, capsys=capsys)
        assert code == exit_code, (name, document)
        assert text in " ".join(map(str, document["error"].values())), (name, document)
    for name in ("nothing", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert run("import", tmp_path / name, tmp_path / "root", "--step", 1, capsys=capsys)[0] == 10
    (tmp_path / "hf").mkdir()
    index = {"weight_map": {"w": "gone.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    options = ("--step", 1, "--format", "safetensors")
    code, document = run("import", tmp_path / "hf", tmp_path / "root", *options, capsys=capsys)
    assert (code, document["error"]["found"]) == (32, "it names 'gone.safetensors', which is not in the folder")
    assert list_checkpoints(open_store(tmp_path / "root")) == []


def _torch_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, buffer)
    return buffer.getvalue()


def test_a_truncated_shard_found_while_reading_commits_nothing(tmp_path: Path, capsys: Captured) -> None:
    dcp.save({"w": torch.arange(4000.0)}, checkpoint_id=tmp_path / "d")
    data = tmp_path / "d" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:8000])
    code, document = run("import", tmp_path / "d", tmp_path / "root", "--step", 1, capsys=capsys)
    assert (code, document["error"]["type"]) == (32, "DamagedError")
    assert list_checkpoints(open_store(tmp_path / "root"), damaged=True) == []


def test_import_becomes_the_newest_and_never_replaces(tmp_path: Path, root: str, capsys: Captured) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    direct_writer._claims.clear()  # the command is a process of its own
    code, document = run("import", tmp_path / "w.safetensors", root, "--step", 120, capsys=capsys)
    assert (code, document["prefix"]) == (0, "step-000000120.g2")
    assert [i.prefix for i in list_checkpoints(open_store(root))] == ["step-000000120.g2", "step-000000120.g1"]


def test_exported_torch_file_is_a_sound_zip(tmp_path: Path, root: str, capsys: Captured) -> None:
    run("export", root, "--to", tmp_path / "all.pt", capsys=capsys)
    assert zipfile.ZipFile(tmp_path / "all.pt").testzip() is None


def test_selection_renames_once_by_the_first_that_fits() -> None:
    selection = parse_selection((), ("model.",), ("opt.=optimizer.", "=x."))
    assert [selection.rename(n) for n in ("model.model.w", "opt.w", "w")] == ["model.w", "optimizer.w", "x.w"]
    with pytest.raises(FlashckptError, match="--rename cannot be read"):
        parse_selection((), (), ("ab",))
    assert not Selection(only=("model.*",)).takes("modelx")
