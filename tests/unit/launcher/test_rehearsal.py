"""A rehearsal: workers inherit it where it fits and succeeded, are started without it in every other case, and plans of one rank serve all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values
from support.training import run_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flashckpt import rehearsal
from flashckpt.daemon.zygote.rehearse import check_target
from flashckpt.errors import ConfigError
from flashckpt.rehearsal.trainer_step import ranks_of_node, rehearse
from flashckpt.trainer.config import to_toml
from flashckpt.trainer.parallel.layout import resolve_layout

WARM = """
import os, threading, time

def good(words): assert words == ["a", "b"] and os.environ["WORLD_SIZE"] == "1"
def refuses(words): return "there is no point"
def raises(words): raise ValueError("no")
def waits(words): threading.Event().wait()
def dies(words): os._exit(3)
def starts_a_thread(words): threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
CLIENT = """
import json, logging, os, sys, time
from flashckpt.daemon.zygote.worker import run_worker
from flashckpt.daemon.machine.process import become_subreaper
from flashckpt.daemon.zygote.client import ZygoteClient

logging.basicConfig(level=logging.DEBUG)
become_subreaper()
zygote = ZygoteClient.forked()
if isinstance(zygote, dict):
    os._exit(run_worker(zygote))

def worker(name, world="1"):
    env = {**os.environ, "WORLD_SIZE": world, "RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {"argv": ["worker.py", "a", "b"], "module": False, "env": {**env, "NAME": name}, "stdout": f"{name}{world}", "stderr": ""}

def inherited(request):
    (pid,) = zygote.fork([request])
    assert os.waitpid(pid, 0)[1] == 0
    return json.load(open(request["stdout"]))

found = {"cold": inherited(worker("cold"))}
for name in sys.argv[1:]:
    zygote._given_up = ""
    zygote.rehearse("warming:" + name, worker(name), is_asked=True)
    copy, end = zygote._warm, time.monotonic() + 60
    while name != "waits" and zygote._warm is copy and not copy.ready and time.monotonic() < end:
        zygote.rehearse("warming:" + name, worker(name), is_asked=True)
    found[name] = inherited(worker(name))
    if name == "good":
        found["again"] = inherited(worker(name))
        found["of another world"] = inherited(worker(name, "2"))
    zygote._end_copy()
zygote.close()
print(json.dumps(found))
"""


def test_workers_inherit_a_rehearsal_that_succeeded_and_are_cold_in_every_other_case(tmp_path: Path) -> None:
    (tmp_path / "warming.py").write_text(WARM)
    (tmp_path / "worker.py").write_text("import json, sys; print(json.dumps('warming' in sys.modules))")
    (tmp_path / "client.py").write_text(CLIENT)
    names = ["good", "refuses", "raises", "waits", "dies", "starts_a_thread"]
    command = [sys.executable, "client.py", *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [name for name, is_warm in found.items() if is_warm] == ["good", "again"]
    assert set(found) == {"cold", "again", "of another world", *names}
    for reason in (
        "there is no point", "warming:raises failed: ValueError: no", "its process died", "2 threads after the imports",
    ):  # fmt: skip
        assert f"a step was not rehearsed, restarts start cold: {reason}" in done.stderr


@pytest.mark.parametrize("target", ["module", "module:", ":name", "a b:c", "a:b.c", "a/b:c"])
def test_what_names_no_function_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="--warm names no function"):
        check_target(target)


def test_names_that_are_functions_or_none_are_taken() -> None:
    assert [check_target(target) for target in ("", "none", "a:b", "a.b:c")] == ["", "none", "a:b", "a.b:c"]


# -- plans


def step(mesh: Any) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.arange(32.0).view(4, 8).sin() * (1 + mesh.get_coordinate()[0])
    sharded: Any = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    (model(inputs).square().sum() + sharded.sum().full_tensor()).backward()
    return model


def trained(rank: int) -> Any:
    """Train a step on a mesh of 2 x 2; return what was planned for it and a digest of its gradients."""
    planned: list[str] = []
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    plan = propagator.propagate_op_sharding_non_cached

    def counted(schema: Any) -> Any:
        planned.append(str(schema.op))
        return plan(schema)

    propagator.propagate_op_sharding_non_cached = counted
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rehearsal.adopt(mesh)
    model = step(mesh)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.device_mesh.get_coordinate() == (mesh.get_coordinate() or [0, 0])[1:]
        digest.update(parameter.grad.to_local().numpy().tobytes())
    return len(planned), digest.hexdigest()


def rehearsed_in_a_child() -> Any:
    """Rehearse as rank 0 in a fork of this process, and train in forks of that: what it knows stays there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with rehearsal.pretend_rank(0, 4):
            step(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        os.write(writer, json.dumps(values(run_ranks(trained, 4, timeout_s=60))).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        raw = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(raw)


@pytest.mark.skipif(bool(rehearsal.unsupported()), reason=rehearsal.unsupported())
def test_plans_of_one_rank_serve_every_rank_with_the_same_gradients() -> None:
    cold = values(run_ranks(trained, 4, timeout_s=60))
    warm = rehearsed_in_a_child()
    assert all(planned > 5 for planned, _ in cold)
    assert [planned for planned, _ in warm] == [0, 0, 0, 0]
    assert [digest for _, digest in warm] == [digest for _, digest in cold]
    assert len({digest for _, digest in cold}) == 4


@pytest.mark.skipif(bool(rehearsal.unsupported()), reason=rehearsal.unsupported())
def test_who_pretends_leaves_no_process_group_and_no_random_state_behind() -> None:
    before = torch.get_rng_state()
    made = init_device_mesh.__module__, dist.recv
    with rehearsal.pretend_rank(3, 4):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 4)
        torch.rand(3)
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before)
    assert (init_device_mesh.__module__, dist.recv) == made


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "3.0.0"])
def test_another_torch_is_not_rehearsed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert f"torch {version} is not known to it" in rehearsal.unsupported()


# -- the trainer's


@pytest.mark.parametrize(
    ("words", "sections", "reason"),
    [
        (["--check"], {}, "these words start no training run"),
        (["--parallel.tp", "3"], {}, "the layout does not fill the world"),
        ([], {"parallel": {"tp": 1}}, "without tensor parallelism there is little to plan"),
        ([], {"parallel": {"tp": 2, "pp": 2, "loss_parallel": True}}, "ask each other for their shapes"),
        ([], {"parallel": {"tp": 2}, "train": {"device": "cuda"}}, "train.device = cuda"),
        ([], {"parallel": {"tp": 2}, "model": {"dim": 4096, "ffn": 8192, "layers": 1}}, "takes longer than its plans"),
    ],
)
def test_runs_that_have_nothing_to_gain_are_left_alone(
    words: list[str], sections: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.toml").write_text(to_toml(run_config(tmp_path, **sections)))
    assert reason in rehearse(["--config", str(tmp_path / "run.toml"), *words])


def test_one_rank_of_each_stage_of_a_node_is_rehearsed(tmp_path: Path) -> None:
    layout = resolve_layout(run_config(tmp_path, parallel={"pp": 4, "tp": 2}), 8)
    assert [ranks_of_node(layout, first, 4) for first in (0, 4)] == [[0, 2], [4, 6]]
    assert ranks_of_node(layout, 3, 2) == [3, 4]
