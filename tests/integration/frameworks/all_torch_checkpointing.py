"""Folders that torch_checkpointing writes, imported; exports that it loads, resharded; and what it keeps on a root of ours.

Part of `make test-frameworks`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import warm
from support.paths import ROOT
from support.s3 import free_port
from support.s3_stub import s3_stub
from unit.interop.test_interop import Captured, run, same

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError, DamagedError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_checkpointing") is None, reason="needs torch_checkpointing (make test-frameworks)"
)
RANK = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from flashckpt.integrations.torch_checkpointing import FlashStorageConfig

what, rank, port, folder, root = sys.argv[1:]
os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
dist.init_process_group("gloo")

def gathered(self, data, process_group=None):  # theirs goes through CUDA
    found = [None, None]
    dist.all_gather_object(found, data)
    return dict(enumerate(found))

DefaultMetadataManager._all_gather_pickled_data = gathered
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for i in range(3 if what == "save" else 1):
    model(torch.full((2, 4), float(i))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
manager = CheckpointManager(CheckpointManager.Config(
    default=ItemSpec(resharder=DefaultResharder()),
    storage_config=FlashStorageConfig(root) if root else LocalFileSystemStorageConfig(use_direct_io=False),
    save=SyncCheckpointSaverConfig()))
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
if what == "save":
    manager.save(f"{root or folder}/step_3", {**state, "step": 3, "train": {"epoch": 1, "rates": [0.1]}})
else:
    loaded = manager.load(f"{root}/step_3" if root else f"{folder}/out", into=state)
    assert all(torch.isfinite(x.to_local()).all() for x in loaded["model"].values() if hasattr(x, "to_local"))
    state = loaded
whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state["model"].items()}
moments = {k: v["exp_avg"].full_tensor() for k, v in state["optimizer"]["state"].items()}
if rank == "0":
    torch.save([whole, moments], f"{folder}/{what}.pt")
manager.close()
# All that is judged is on disk. Elsewhere a rank was seen to abort at its end ("terminate called without an active exception"),
# presumably by a thread of gloo's that still wants the interpreter's lock: not shown, and nothing of ours is in this process.
dist.barrier()
sys.stderr.flush()
os._exit(0)
"""


def both_ranks(what: str, folder: Path, root: str = "") -> list[dict[str, torch.Tensor]]:
    """Run two ranks, on a root of ours if one is given; return the whole weights and moments that rank 0 gathered."""
    script, port = folder / "rank.py", free_port()
    script.write_text(RANK)
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    ranks = [
        warm.start(
            [str(script), what, str(rank), str(port), str(folder), root],
            folder / f"{what}{rank}.log",
            cwd=folder,
            env=env,
        )
        for rank in range(2)
    ]
    codes = [rank.wait(240) for rank in ranks]
    assert codes == [0, 0], "\n".join((folder / f"{what}{rank}.log").read_text() for rank in range(2))
    found: list[dict[str, torch.Tensor]] = torch.load(folder / f"{what}.pt", weights_only=True)
    return found


def test_sharded_folder_comes_in_and_goes_out_again(tmp_path: Path, capsys: Captured) -> None:
    """Their loader says "O_DIRECT read failed" of files on ext4, of its own as of ours: it reads slices where they lie."""
    weights, moments = both_ranks("save", tmp_path)
    code, document = run("import", tmp_path / "step_3", tmp_path / "root", capsys=capsys)
    assert (code, document["format"], document["step"], document["omitted"]) == (0, "torch_checkpointing", 3, [])

    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    reader = Checkpointer.readonly(tmp_path / "root")
    reader.track(model=model, optimizer=optimizer)
    reader.restore()
    assert same(dict(model.state_dict()), weights)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert same({name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}, moments)

    to = tmp_path / "out"
    code, document = run("export", tmp_path / "root", "--to", to, "--format", "torch_checkpointing", capsys=capsys)
    assert (code, document["left_out"]) == (0, [])
    loaded = both_ranks("load", tmp_path)
    assert same(loaded[0], weights)
    assert same(loaded[1], moments)


def test_shards_of_two_ranks_are_kept_on_a_root_and_resharded_from_it(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    saved = both_ranks("save", tmp_path, root)
    loaded = both_ranks("load", tmp_path, root)
    assert same(loaded[0], saved[0])
    assert same(loaded[1], saved[1])
    assert sorted(path.name for path in (tmp_path / "root/step_3").iterdir()) == ["MANIFEST"]


PROGRAM = """
import json, sys, torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from flashckpt.integrations.torch_checkpointing import FlashStorageConfig

def main():
    kind, root, options, *actions = sys.argv[1:]
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    save = AsyncCheckpointSaverConfig(staging_config=staging) if kind == "async" else SyncCheckpointSaverConfig()
    storage = FlashStorageConfig(root, json.loads(options))
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage, save=save))
    for action in actions:
        what, step = action.split(":")
        state = {"model": {f"w{i}": torch.full((1000,), float(step)) for i in range(3)}, "step": int(step)}
        if what == "save" and (future := manager.save(f"step_{step}", state)) is not None:
            future.result(timeout=120)
        if what == "load":
            into = {"model": {key: torch.zeros(1000) for key in state["model"]}, "step": 0}
            found = manager.load(f"{root}/step_{step}" if "://" not in root else f"step_{step}", into=into)
            assert found["step"] == int(step) and all(torch.equal(into["model"][k], v) for k, v in state["model"].items())
        if what == "none":
            assert f"step_{step}" not in storage.create_storage().ls(root), step
    manager.close()
    print("done", *actions)

if __name__ == "__main__":
    main()
"""
POINTS = {"folder.after-part": "none", "folder.before-commit": "none", "folder.after-commit": "load"}


@contextlib.contextmanager
def root_of(kind: str, folder: Path) -> Iterator[list[str]]:
    """Give root and options: a directory for the synchronous saver, S3 for the other."""
    if kind == "sync":
        yield [str(folder / "root"), "{}"]
        return
    with s3_stub() as stub:
        yield ["s3://bucket/run", json.dumps(stub.options())]


def program(
    folder: Path, kind: str, place: list[str], *actions: str, crash_at: str = ""
) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "FLASHCKPT_CRASH_AT": crash_at}
    words = [sys.executable, str(folder / "program.py"), kind, *place, *actions]
    return subprocess.run(words, capture_output=True, text=True, timeout=280, env=env, cwd=ROOT, check=False)


@pytest.mark.parametrize(("kind", "point"), [*(("sync", point) for point in POINTS), ("async", "folder.before-commit")])
def test_a_save_whose_writer_is_killed_is_there_whole_or_not_at_all(tmp_path: Path, kind: str, point: str) -> None:
    """The writer is the rank itself, or the process that the library starts for it."""
    with root_of(kind, tmp_path) as place:
        done = program(tmp_path, kind, place, "save:1", "load:1")
        assert done.returncode == 0, done.stderr
        died = program(tmp_path, kind, place, "save:2", crash_at=point)
        assert died.returncode == (-signal.SIGKILL if kind == "sync" else 1), died.stderr
        again = ["save:2"] if POINTS[point] == "none" else []
        done = program(tmp_path, kind, place, "load:1", f"{POINTS[point]}:2", *again, "load:2")
        assert done.returncode == 0, done.stderr


def test_a_flipped_bit_and_a_path_elsewhere_are_named(tmp_path: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    from flashckpt.integrations.torch_checkpointing import FlashStorageConfig

    config = FlashStorageConfig(str(tmp_path / "root"))
    manager = CheckpointManager(CheckpointManager.Config(storage_config=config, save=SyncCheckpointSaverConfig()))
    manager.save(str(tmp_path / "root/step_1"), {"model": {"w": torch.ones(1000)}})
    (part,) = (tmp_path / "root/data/tmp_step_1").glob("model_0.pt.*")
    raw = bytearray(part.read_bytes())
    raw[len(raw) // 2] ^= 1
    part.write_bytes(raw)
    with pytest.raises(DamagedError, match=r"step_1/model_0\.pt of .* is damaged"):
        manager.load("step_1", into={"model": {"w": torch.zeros(1000)}})
    with pytest.raises(ConfigError, match="is not below the root"):
        manager.load("/elsewhere/step_1", into={"model": {"w": torch.zeros(1000)}})
    with pytest.raises(FileExistsError):
        manager.save("step_1", {"model": {"w": torch.ones(1000)}})
    manager.close()
