"""torch.distributed.checkpoint through our storage: layouts, values without pickle, crashes, two savers, async."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from support.engine import agent_dir, net, parallel_net
from support.ranks import run_ranks, values
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import flashckpt.dcp
from flashckpt import Checkpointer, faults
from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.dcp import FlashStorageReader, FlashStorageWriter, direct_writer
from flashckpt.dcp.names import default_path, optimizer_labels, to_dcp, to_ours
from flashckpt.errors import ConfigError, FlashckptError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.storage.factory import open_store

dcp: Any = torch.distributed.checkpoint  # torch exports its functions without saying so
Failed = dcp.CheckpointException
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def _first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is a process of its own as far as lives on roots go."""
    monkeypatch.setattr(direct_writer, "_claims", {})


def trained(kind: str, lr: float = 1e-2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = parallel_net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.randn(8, 24, generator=torch.Generator().manual_seed(1))).pow(2).mean().backward()
    optimizer.step()
    return model, optimizer


def whole(state: dict[str, Any]) -> dict[str, str]:
    """Return every tensor of a nested state dict, gathered, as hex of its bytes."""
    found: dict[str, str] = {}
    for key, value in sorted(state.items()):
        if isinstance(value, dict):
            found |= {f"{key}.{name}": text for name, text in whole(value).items()}
        elif isinstance(value, torch.Tensor):
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[key] = float(full.detach().double().sum()).hex()
    return found


def save_rank(rank: int, kind: str, root: str, step: int, crash: str | None = None) -> dict[str, str]:
    model, optimizer = trained(kind)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    sums = whole(state)
    faults.arm(crash)
    dcp.save({**state, "step": step, "note": ("text", 1 << 70)}, storage_writer=FlashStorageWriter(root, step=step))
    return sums


def load_rank(rank: int, kind: str, root: str, step: int | None) -> dict[str, Any]:
    model, optimizer = trained(kind, lr=5.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    state |= {"step": 0, "note": None}
    reader = FlashStorageReader(root, step=step)
    dcp.load(state, storage_reader=reader)
    assert (state["step"], state["note"], reader.step) == (reader.step, ("text", 1 << 70), reader.step)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )  # the reader's values must satisfy torch
    assert optimizer.param_groups[0]["lr"] == 1e-2
    return whole(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))


def restore_rank(rank: int, kind: str, root: str) -> dict[str, str]:
    model, mesh = parallel_net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    reader = Checkpointer.readonly(root)
    reader.track(model=model, optimizer=optimizer, mesh=mesh)
    reader.restore()
    assert optimizer.param_groups[0]["lr"] == 1e-2
    return whole(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))


@pytest.mark.matrix
def test_saved_under_fsdp_loads_under_every_other_layout_and_verifies(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    (sums, *rest) = values(run_ranks(save_rank, 4, "fsdp", root, 7))
    assert all(other == sums for other in rest)
    for kind, world in (("fsdp_tp", 4), ("tp", 2), ("plain", 1)):
        for found in values(run_ranks(load_rank, world, kind, root, 7)):
            assert found == sums, kind
    command = [sys.executable, "-m", "flashckpt.cli.main", "verify", root, "--json"]
    document = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert document["checkpoints"][0]["damaged"] == []
    table = read_manifest(open_store(root), "step-000000007.g1").table
    assert len(table.rows("model.0.weight")) == 4


@pytest.mark.matrix
def test_checkpointer_restores_what_dcp_saved(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    (sums, *_) = values(run_ranks(save_rank, 4, "fsdp_tp", root, 3))
    for kind, world in (("fsdp", 2), ("plain", 1)):
        for found in values(run_ranks(restore_rank, world, kind, root)):
            assert found == sums, kind


def checkpointer_rank(rank: int, kind: str, root: str) -> dict[str, str]:
    if rank == 0:
        os.environ["FLASHCKPT_SHM_DIR"] += "/job"
        Path(os.environ["FLASHCKPT_SHM_DIR"]).mkdir()
    dist.barrier()
    os.environ["FLASHCKPT_SHM_DIR"] = os.environ["FLASHCKPT_SHM_DIR"].removesuffix("/job") + "/job"
    model, mesh = parallel_net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9)
    with Checkpointer(root, snapshot_every=1, persist_every=1) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler, rng=True, mesh=mesh)
        ckpt.restore()
        model(torch.randn(8, 24)).pow(2).mean().backward()
        optimizer.step()
        ckpt.step(1)
        ckpt.wait()
    return whole(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))


def load_ours_rank(rank: int, kind: str, root: str) -> dict[str, str]:
    model, optimizer = trained(kind, lr=5.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load({**state, "scheduler": scheduler}, storage_reader=FlashStorageReader(root))
    assert scheduler.step_size == 9
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-2
    return whole(state)


@pytest.mark.matrix
def test_dcp_loads_what_a_checkpointer_wrote(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    (sums, *_) = values(run_ranks(checkpointer_rank, 2, "fsdp", root, timeout_s=90))
    for found in values(run_ranks(load_ours_rank, 4, "fsdp_tp", root)):
        assert found == sums


@pytest.mark.parametrize(
    "point", ["save.during-pack", "save.before-index", "save.before-commit", "persist.after-manifest"]
)
def test_killed_during_a_save_nothing_half_is_visible(tmp_path: Path, point: str) -> None:
    """A rank that dies before MANIFEST leaves the older checkpoint as the newest; after MANIFEST the new one is whole."""
    root = str(tmp_path / "root")
    state = {"model": {"w": torch.arange(300_000.0)}, "step": 1}
    dcp.save(state, storage_writer=FlashStorageWriter(root, step=1))
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faults.arm(point)
        dcp.save({"model": {"w": torch.zeros(300_000)}, "step": 2}, storage_writer=FlashStorageWriter(root, step=2))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    steps = [info.step for info in list_checkpoints(open_store(root), damaged=True)]
    assert steps == ([2, 1] if point == "persist.after-manifest" else [1])
    found = {"model": {"w": torch.ones(300_000)}, "step": 0}
    dcp.load(found, storage_reader=FlashStorageReader(root))
    assert found["step"] == steps[0]
    assert torch.equal(found["model"]["w"], state["model"]["w"] if steps[0] == 1 else torch.zeros(300_000))  # type: ignore[index]


@pytest.mark.matrix
def test_one_rank_killed_nothing_is_visible_and_the_next_life_saves(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    results = run_ranks(save_rank, 2, "fsdp", root, 5, "save.before-index:1:rank1", timeout_s=30)
    assert results[1].signal == signal.SIGKILL
    assert list_checkpoints(open_store(root), damaged=True) == []
    values(run_ranks(save_rank, 2, "fsdp", root, 5))
    assert [i.prefix for i in list_checkpoints(open_store(root))] == ["step-000000005.g2"]


def test_saving_a_step_again_begins_a_generation_and_overwrites_nothing(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    for number, step in enumerate((10, 20, 20, 15, 30)):
        dcp.save({"n": number, "w": torch.full((3,), number)}, storage_writer=FlashStorageWriter(root, step=step))
    prefixes = [info.prefix for info in list_checkpoints(open_store(root))]
    assert prefixes == [f"step-{s:09d}.g{g}" for s, g in ((30, 3), (15, 3), (20, 2), (20, 1), (10, 1))]
    state = {"n": -1, "w": torch.zeros(3, dtype=torch.int64)}
    dcp.load(state, storage_reader=FlashStorageReader(root, step=20, generation=1))
    assert (state["n"], state["w"].tolist()) == (1, [1, 1, 1])  # type: ignore[attr-defined]
    dcp.load(state, storage_reader=FlashStorageReader(root, step=20))
    assert state["n"] == 2


def test_two_savers_of_one_step_the_later_life_wins_and_the_other_is_told(tmp_path: Path) -> None:
    """Two processes that save the same step: different folders, and the one whose life is older may not commit."""
    root = str(tmp_path / "root")
    store = open_store(root)
    first = direct_writer.begin(store, 5, world_size=1)
    direct_writer._claims.clear()  # another process
    second = direct_writer.begin(store, 5, world_size=1)
    for place in (first, second):
        direct_writer.write(store, place, 0, [], {"who": place.claim.number}, job="test")
    direct_writer.finish(store, second)
    with pytest.raises(Exception, match="may no longer write to its root"):
        direct_writer.finish(store, first)
    assert [i.prefix for i in list_checkpoints(store)] == ["step-000000005.g2"]
    direct_writer._claims[store.url] = first.claim, 5
    with pytest.raises(Exception, match="may no longer write to its root"):
        direct_writer.begin(store, 6, world_size=1)


def test_steps_default_to_the_next_and_checkpoint_ids_are_steps(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    writer = FlashStorageWriter(root)
    dcp.save({"n": 1}, storage_writer=writer)
    dcp.save({"n": 2}, storage_writer=writer)
    dcp.save({"n": 3}, storage_writer=writer, checkpoint_id="120")
    assert [i.step for i in list_checkpoints(open_store(root))] == [120, 2, 1]
    state = {"n": 0}
    dcp.load(state, storage_reader=FlashStorageReader(root), checkpoint_id="2.g1")
    assert state == {"n": 2}
    assert FlashStorageWriter.validate_checkpoint_id("7")
    assert not FlashStorageReader.validate_checkpoint_id("/some/path/x")


def test_async_save_takes_the_state_of_the_call_and_keep_last_prunes(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    weights = torch.zeros(1000)
    for step in (1, 2, 3):
        weights.fill_(step)
        writer = FlashStorageWriter(root, step=step, keep_last=2)
        done: Any = dcp.async_save({"w": weights, "step": step}, storage_writer=writer)
        weights.fill_(-1)
        done.result()
    assert [i.step for i in list_checkpoints(open_store(root))] == [3, 2]
    state = {"w": torch.zeros(1000), "step": 0}
    dcp.load(state, storage_reader=FlashStorageReader(root))
    assert state["step"] == 3
    assert torch.equal(state["w"], torch.full((1000,), 3.0))  # type: ignore[arg-type]


def test_one_changed_import_saves_asynchronously_and_loads(tmp_path: Path) -> None:
    import flashckpt.dcp

    weights = torch.full((1000,), 1.0)
    done = flashckpt.dcp.async_save({"w": weights, "step": 7}, checkpoint_id=tmp_path / "root" / "step-7")
    weights.fill_(-1)
    done.result()
    flashckpt.dcp.save({"w": weights, "step": 8}, checkpoint_id=f"{tmp_path}/root/8/", keep_last=2)
    assert [i.step for i in list_checkpoints(open_store(tmp_path / "root"))] == [8, 7]
    state: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    flashckpt.dcp.load(state, checkpoint_id=tmp_path / "root" / "7")
    assert state["step"] == 7
    assert torch.equal(state["w"], torch.full((1000,), 1.0))
    for wrong in (None, "120", tmp_path / "last", tmp_path / "120.g3", "s3://120"):
        with pytest.raises(ConfigError, match="cannot derive root and step"):
            flashckpt.dcp.save(state, checkpoint_id=wrong)


class Foreign:
    pass


def test_what_would_need_pickle_is_refused_by_key_and_nothing_is_written(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    with pytest.raises(Failed, match=r"'trainer\.helper' cannot be held in a checkpoint") as refused:
        dcp.save({"w": torch.ones(3), "trainer": {"helper": Foreign()}}, storage_writer=FlashStorageWriter(root))
    assert "Foreign" in str(refused.value)
    assert "leave the key out" in str(refused.value)
    with pytest.raises(Failed, match="'s' cannot be held in a checkpoint"):
        dcp.save({"s": torch.ones(3).to_sparse()}, storage_writer=FlashStorageWriter(root))
    assert list_checkpoints(open_store(root), damaged=True) == []
    assert not list(tmp_path.rglob("*.fck"))


def test_values_and_dtypes_come_back_as_they_were(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16, torch.float64]
    state = {f"t{i}": torch.arange(-4, 9).to(kind) for i, kind in enumerate(kinds)}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 7), "view": torch.arange(20.0).reshape(4, 5).T}
    plain = {"a": None, "b": {"deep": [1, {"x": 2.5}, (True, b"\0")]}, "kind": torch.float16, "big": -(1 << 99)}
    dcp.save({**state, **plain}, storage_writer=FlashStorageWriter(root))
    found: dict[str, Any] = {key: torch.zeros_like(value) for key, value in state.items()}
    found |= {"a": 0, "b": {"deep": [0, {"x": 0}, None]}, "kind": None, "big": None}
    dcp.load(found, storage_reader=FlashStorageReader(root))
    for key, value in state.items():
        assert torch.equal(found[key].view(torch.uint8) if value.dtype.itemsize == 1 else found[key],
                           value.view(torch.uint8) if value.dtype.itemsize == 1 else value), key  # fmt: skip
    assert {key: found[key] for key in plain} == plain
    rebuilt: dict[str, Any] = {}
    empty = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch leaves it without types
    _load_state_dict(rebuilt, FlashStorageReader(root), planner=empty, no_dist=True)
    assert rebuilt["b"] == plain["b"]
    assert torch.equal(rebuilt["view"], state["view"])


def test_a_file_in_memory_comes_back_as_one_with_its_bytes_and_its_place(tmp_path: Path) -> None:
    """torch.save into one, and the result in a state dict: what trainers do with things that are no tensors."""
    root, losses = str(tmp_path / "root"), io.BytesIO()
    torch.save([1.5, 2.5], losses)
    nested = {"files": [io.BytesIO(b"deep"), {"x": 1}]}
    dcp.save({"w": torch.ones(3), "losses": losses, "train": nested}, storage_writer=FlashStorageWriter(root))
    losses.truncate(0)
    found: dict[str, Any] = {"w": torch.zeros(3), "losses": None, "train": {"files": [None, {"x": 0}]}}
    dcp.load(found, storage_reader=FlashStorageReader(root))
    assert found["losses"].tell() == len(found["losses"].getvalue()) > 0  # where the writer had left it
    found["losses"].seek(0)
    assert torch.load(found["losses"]) == [1.5, 2.5]
    assert found["train"]["files"][0].read() == b"deep"
    assert found["train"]["files"][1] == {"x": 1}


def test_metadata_names_the_save_and_the_load(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    writer = FlashStorageWriter(root, step=3)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert (writer.storage_meta().checkpoint_id, writer.storage_meta().save_id) == (root, writer.save_id)
    reader = FlashStorageReader(root)
    first, again = reader.read_metadata().storage_meta, FlashStorageReader(root).read_metadata().storage_meta
    assert first is not None
    assert again is not None
    assert (first.checkpoint_id, first.save_id, first.load_id) == (root, writer.save_id, reader.load_id)
    assert (again.checkpoint_id, again.save_id) == (first.checkpoint_id, first.save_id)
    assert len({first.load_id, again.load_id, None}) == 3
    saved = writer.save_id
    writer.reset(checkpoint_id="4")
    assert writer.save_id != saved
    assert writer.storage_meta().checkpoint_id == "4"
    reader.reset(checkpoint_id=f"3.g{reader.generation}")
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert meta.checkpoint_id == f"3.g{reader.generation}"


def test_metadata_names_the_folder_that_a_loop_gave(tmp_path: Path) -> None:
    place = tmp_path / "root" / "step-7"
    state = {"w": torch.ones(3)}
    saved = flashckpt.dcp.save(state, checkpoint_id=place)
    assert saved.storage_meta is None or saved.storage_meta.checkpoint_id == place
    seen: list[Any] = []

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            seen.append(storage_meta.checkpoint_id)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    flashckpt.dcp.save(state, checkpoint_id=place, planner=Planner())
    assert seen == [place]


def test_overwrite_false_refuses_a_save_where_a_checkpoint_is(tmp_path: Path) -> None:
    root, state = str(tmp_path / "root"), {"w": torch.ones(3)}
    dcp.save(state, storage_writer=FlashStorageWriter(root, step=3, overwrite=False))
    for writer in (FlashStorageWriter(root, overwrite=False), FlashStorageWriter(root, step=3, overwrite=False)):
        with pytest.raises(Failed, match="Checkpoint already exists"):
            dcp.save(state, storage_writer=writer)
    with pytest.raises(Failed, match="Checkpoint already exists"):
        dcp.save(state, storage_writer=FlashStorageWriter(root, overwrite=False), checkpoint_id="3")
    assert [path.name for path in (tmp_path / "root").glob("step-*")] == ["step-000000003.g1"]
    dcp.save(state, storage_writer=FlashStorageWriter(root, step=4, overwrite=False))
    dcp.save({"w": torch.zeros(3)}, storage_writer=FlashStorageWriter(root, step=3, overwrite=True))
    dcp.load(state, storage_reader=FlashStorageReader(root))
    assert state["w"].tolist() == [0.0] * 3


def test_overwrite_false_sees_what_another_committed_before_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = str(tmp_path / "root"), {"w": torch.ones(3)}
    begin = direct_writer.begin

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(direct_writer, "begin", begin)
        dcp.save(state, storage_writer=FlashStorageWriter(root, step=1))
        return begin(*args, **kwargs)

    monkeypatch.setattr(direct_writer, "begin", late)
    with pytest.raises(Failed, match="Checkpoint already exists"):
        dcp.save(state, storage_writer=FlashStorageWriter(root, step=1, overwrite=False))
    assert len(list((tmp_path / "root").glob("step-*/MANIFEST"))) == 1


def test_a_tensor_of_another_dtype_is_cast_as_torch_would(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    dcp.save({"w": torch.full((5, 3), 1.25)}, storage_writer=FlashStorageWriter(root))
    state = {"w": torch.zeros(5, 3, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=FlashStorageReader(root))
    assert state["w"].tolist() == [[1.25] * 3] * 5


def test_damage_is_found_and_named_on_load(tmp_path: Path) -> None:
    root = tmp_path / "root"
    dcp.save({"w": torch.arange(400_000.0)}, storage_writer=FlashStorageWriter(str(root)))
    (pack,) = root.rglob("*.fck")
    raw = bytearray(pack.read_bytes())
    raw[1_200_000] ^= 1
    pack.write_bytes(raw)
    with pytest.raises(Failed, match=r"'w' is damaged in step-000000001\.g1"):
        dcp.load({"w": torch.zeros(400_000)}, storage_reader=FlashStorageReader(str(root)))


def load_fails(reader: FlashStorageReader, reason: str) -> None:
    """Check that the reader names the reason, and that a load does; torch 2.11 drops what a reader says of metadata."""
    with pytest.raises(FlashckptError, match=reason):
        reader.read_metadata()
    drops_reasons = torch.__version__.startswith("2.11.")
    with pytest.raises(Failed, match="metadata is None" if drops_reasons else reason):
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader, no_dist=True)


def test_a_checkpoint_of_a_newer_format_is_called_that_on_load(tmp_path: Path) -> None:
    root = tmp_path / "root"
    dcp.save({"w": torch.zeros(3)}, storage_writer=FlashStorageWriter(root, step=1), no_dist=True)
    manifest = root / "step-000000001.g1/MANIFEST"
    raw = bytearray(manifest.read_bytes())
    raw[8] += 1
    manifest.write_bytes(raw)
    load_fails(FlashStorageReader(root, step=1), r"newer|version")


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    load_fails(FlashStorageReader(str(tmp_path / "none")), "does not exist")
    dcp.save({"w": torch.zeros(1)}, storage_writer=FlashStorageWriter(str(tmp_path / "root"), step=4))
    load_fails(FlashStorageReader(str(tmp_path / "root"), step=9), "has no checkpoint of step 9")


def test_planners_that_cannot_work_are_refused(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"w": torch.zeros(3)}, storage_writer=FlashStorageWriter(root, step=1), planner=planner)
    with pytest.raises(Failed, match="cached plans cannot be used"):
        dcp.save({"w": torch.zeros(3)}, storage_writer=FlashStorageWriter(root, step=2), planner=planner)


def test_saving_to_the_root_of_a_running_job_is_refused(tmp_path: Path) -> None:
    agent_dir()
    root = str(tmp_path / "root")
    model = net()
    ckpt = Checkpointer(root, job="t")
    ckpt.track(model=model)
    ckpt.restore()
    lock = JobDirectory.open("t").hold_daemon()  # as a daemon would
    assert lock is not None
    with pytest.raises(Failed, match="is the root of a job that is running"):
        dcp.save({"model": model.state_dict()}, storage_writer=FlashStorageWriter(root))
    lock.close()
    ckpt.close()


def test_names_go_there_and_back() -> None:
    keys = [
        "model.a.w",
        "optimizer.state.a.w.exp_avg",
        "optimizer.param_groups.0.lr",
        "step",
        "opt2.state.x",
        "a.b.c.d",
    ]
    labels = optimizer_labels(keys)
    assert labels == ["optimizer"]
    assert to_ours("optimizer.state.a.w.exp_avg", labels) == "optimizer.a.w.exp_avg"
    for key in keys:
        assert to_dcp(to_ours(key, labels), labels) == key
    assert default_path("optimizer.state.a.w.exp_avg", labels) == ("optimizer", "state", "a.w", "exp_avg")
    assert default_path("optimizer.param_groups.0.lr", labels) == ("optimizer", "param_groups", 0, "lr")
    assert default_path("opt2.state.x", labels) == ("opt2", "state.x")
