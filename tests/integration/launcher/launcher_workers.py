"""What dlrun's workers find when they start, forked and spawned, and how often they come back after a kill."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from support import incidents
from support.dlrun import TRAIN, alive, dlrun, first_steps, processes_of, run_dlrun, script
from support.ranks import wait_for

pytestmark = pytest.mark.timeout(300)  # two cores that others use too


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return script(tmp_path, TRAIN)


KILLS = int(os.environ.get("DLRUN_TEST_KILLS", "5"))  # make test-restarts: 50


@pytest.mark.timeout(120 + 10 * KILLS)
def test_rank_killed_five_times_in_a_row_all_ranks_train_again_each_time(tmp_path: Path, train: Path) -> None:
    """SIGKILL of another rank per life, gloo: the generation after each kill trains, with all four ranks."""
    flags = ("--standalone", "--nproc-per-node=4", "--max_restarts", KILLS)
    with dlrun(tmp_path, *flags, train, tmp_path, 100000, 0.002, fresh=True) as launch:
        seen: set[int] = set()
        for life in range(KILLS + 1):
            pids = launch.until(partial(first_steps, tmp_path, life, 4), f"all ranks of life {life}")
            assert not seen & set(pids.values())
            seen |= set(pids.values())
            if life < KILLS:
                os.kill(pids[life % 4], signal.SIGKILL)
                launch.until(partial(launch.says, f"rank {life % 4} "), "the failing rank's name")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == 128 + signal.SIGTERM
    assert launch.output.count("failed first: signal 9 (SIGKILL, exit code 137)") == KILLS
    assert len(incidents.said(launch.output)) == KILLS
    assert "Traceback" not in launch.output  # the peers' "connection closed" stays out of the way
    assert not processes_of(tmp_path)
    assert not list(tmp_path.glob("flashckpt-agents*"))


ENVIRONMENT = """
import json, os, random, sys, time, torch, numpy as np
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
         "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE", "CUDA_VISIBLE_DEVICES", "MINE"]
out = {name: os.environ.get(name) for name in names}
out |= {"argv": sys.argv[1:], "path": sys.path[0], "threads": torch.get_num_threads(), "name": __name__,
        "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(),
        "stdout": [sys.stdout.write_through, sys.stdout.encoding, sys.stdout.name],
        "spec": __spec__ is None}
open(f"{sys.argv[1]}/env{os.environ['RANK']}", "w").write(json.dumps(out))
random_values = (random.random(), np.random.rand(), torch.rand(1).item())
open(f"{sys.argv[1]}/random{os.environ['RANK']}", "w").write(json.dumps(random_values))
kept_open = open(f"{sys.argv[1]}/unflushed{os.environ['RANK']}", "w")
kept_open.write("flushed at exit")
"""


def test_forked_worker_sees_what_torchruns_worker_sees(tmp_path: Path) -> None:
    """Environment, arguments, path, threads, streams and torch's seed equal those of a fresh interpreter."""
    seen = {}
    for launcher in ("dlrun", "torchrun"):
        folder = tmp_path / launcher
        folder.mkdir()
        path = script(folder, ENVIRONMENT)
        flags = ("--nproc-per-node", 2, "--max-restarts=3", "--role=trainer")
        env = {"OMP_NUM_THREADS": "2", "MINE": "a b"}
        code, output = run_dlrun(
            folder, *flags, path, folder, "--x", "y", env=env, torchrun=launcher == "torchrun", fresh=True
        )
        assert code == 0, output
        records = [json.loads((folder / f"env{rank}").read_text()) for rank in range(2)]
        seen[launcher] = json.loads(json.dumps(records).replace(str(folder), "FOLDER"))
        assert (folder / "unflushed1").read_text() == "flushed at exit"
    for forked, fresh in zip(seen["dlrun"], seen["torchrun"], strict=True):
        assert (forked.pop("MASTER_ADDR"), fresh.pop("MASTER_ADDR")) == ("127.0.0.1", "localhost")
        assert {key: (forked[key], fresh[key]) for key in forked if forked[key] != fresh[key]} == {}
    values = [json.loads((tmp_path / "dlrun" / f"random{rank}").read_text()) for rank in range(2)]
    assert not set(values[0]) & set(values[1])


IMPORTS = """
import sys
before = set(sys.modules)
import json, os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from flashckpt import Checkpointer
dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(sys.argv[1] + "/root", snapshot_every=1)
ckpt.track(model=model, optimizer=optimizer, mesh=mesh)
ckpt.restore()
out = model(torch.ones(2, 8))
(out.to_local() if hasattr(out, "to_local") else out).sum().backward()
optimizer.step()
ckpt.step(1)
new = sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("torch", "flashckpt", "numpy"))
open(f"{sys.argv[1]}/new{dist.get_rank()}", "w").write(json.dumps(new))
dist.barrier()
ckpt.close()
dist.destroy_process_group()
"""


def test_forked_worker_imports_nothing_of_torch_or_flashckpt_any_more(tmp_path: Path) -> None:
    """Also not by the first optimizer, FSDP, tensor-parallel or Checkpointer call."""
    code, output = run_dlrun(tmp_path, "--nproc-per-node=2", script(tmp_path, IMPORTS), tmp_path, fresh=True)
    assert code == 0, output
    found = json.loads((tmp_path / "new0").read_text())
    assert not found, " ".join(found)


def test_spawned_python_workers_restart_too(tmp_path: Path, train: Path) -> None:
    """--no-zygote: fresh interpreters, the same agent: a killed rank comes back, the agent's death ends all."""
    flags = ("--no-zygote", "--nproc-per-node=2", "--max-restarts=1")
    with dlrun(tmp_path, *flags, train, tmp_path, 100000, 0.002) as launch:
        pids = launch.until(lambda: first_steps(tmp_path, 0, 2), "the first life")
        os.kill(pids[0], signal.SIGKILL)
        again = launch.until(lambda: first_steps(tmp_path, 1, 2), "the second life")
        os.kill(launch.process.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in again.values()), what="the workers' end")
