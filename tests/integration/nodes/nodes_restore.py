"""Restores between nodes (make test-nodes; root): dlrun on network namespaces, a node is lost with its memory.

What the survivors' memory covers comes over the network and nothing from storage; what it does not cover, and only
that, from the checkpoint of the same step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.nodes import Nodes, nodes

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

FLAGS = ("--nproc-per-node=2", "--max-restarts=3")
SLOTS = 3
HOLD = 12
"""The step at which all ranks wait, with its snapshot in memory and, where the test says so, on storage."""
TENSORS = [(48, 16), (48,), (8, 48), (8,)]
PROGRAM = f"""
import json, os, sys, time
import torch, torch.distributed as dist, xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from flashckpt import Checkpointer

folder, kind = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.Tanh(), torch.nn.Linear(48, 8))
shape = (world // 2, 2) if kind == "hsdp" else (1, world)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["dp_shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ckpt = Checkpointer(f"{{folder}}/root", snapshot_every=1, persist_every={HOLD} if kind == "fsdp" else 100000)
ckpt.track(model=model, optimizer=optimizer, rng=True, mesh=mesh)

def state():
    hasher = xxhash.xxh3_64()
    for p in model.parameters():
        for t in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            hasher.update(t.detach().full_tensor().numpy().tobytes())
    return hasher.hexdigest()

def tell(name, **what):
    with open(f"{{folder}}/{{name}}.part", "w") as file:
        json.dump(what, file)
    os.replace(f"{{folder}}/{{name}}.part", f"{{folder}}/{{name}}")

report = ckpt.restore()
first, life = (report.step, report.life) if report else (0, 1)
states = {{}}
if report:
    tell(f"restored{{world}}-{{life}}-{{rank}}", step=first, state=state(), tiers=dict(report.tier_bytes), host=os.uname().nodename,
         nodes={{k: dict(v) for k, v in report.nodes.items()}}, reseeded=list(report.reseeded))
for step in range(first + 1, {HOLD} + 1):
    optimizer.zero_grad()
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    optimizer.step()
    ckpt.step(step)
    states[step] = state()
ckpt.wait()
tell(f"held{{world}}-{{life}}-{{rank}}", state=state(), states=states)
while True:  # until this job is killed; whoever is left alone notices here
    dist.all_reduce(torch.ones(1))
    ckpt.heartbeat()
    time.sleep(0.05)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def told(folder: Path, name: str, world: int, after: int = 0) -> list[dict[str, Any]] | None:
    """What every rank of the newest life after `after` told, in rank order; None until all have."""
    lives = {int(path.name.split("-")[1]) for path in folder.glob(f"{name}{world}-*") if path.suffix != ".part"}
    for life in sorted((life for life in lives if life > after), reverse=True):
        paths = [folder / f"{name}{world}-{life}-{rank}" for rank in range(world)]
        if all(path.exists() for path in paths):
            return [{"life": life, **json.loads(path.read_text())} for path in paths]
    return None


def held(them: Nodes, program: Path, kind: str, world_nodes: int) -> list[dict[str, Any]]:
    """Train on the first nodes until every rank waits at HOLD."""
    for node in range(world_nodes):
        them.start(node, *FLAGS, program, them.folder, kind, nnodes=f"1:{world_nodes}")
    found: list[dict[str, Any]] = them.until(
        partial(told, them.folder, "held", 2 * world_nodes), "all ranks at the step"
    )
    return found


def restored(them: Nodes, world: int, after: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = them.until(partial(told, them.folder, "restored", world, after), "the restore")
    return found


def check_newest(after: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Of the last steps, one per slot: where nodes hear late of one another, ranks leave a snapshot out rather than wait."""
    (step,) = {one["step"] for one in after}
    assert step > HOLD - SLOTS
    assert {one["state"] for one in after} == {before[0]["states"][str(step)]}


def tier(results: list[dict[str, Any]], name: str, where: Callable[[str], bool] = lambda _: True) -> int:
    return sum(one["tiers"].get(name, 0) for one in results if where(one["host"]))


def test_node_lost_and_another_takes_its_place_from_the_survivors_memory(tmp_path: Path, program: Path) -> None:
    """HSDP over two nodes: the node that comes reads all its state from the one that is left, and nothing is on storage."""
    with nodes(tmp_path, 3) as them:
        before = held(them, program, "hsdp", 2)
        them.kill(1)
        them.start(2, *FLAGS, program, tmp_path, "hsdp", nnodes="1:2")
        after = restored(them, 4, before[0]["life"])
        check_newest(after, before)
        survivor, new = f"{them.prefix}0", f"{them.prefix}2"
        assert tier(after, "storage") == 0
        assert not list((tmp_path / "root").glob("step-*/MANIFEST"))
        state = 12 * sum(a * (b[0] if b else 1) for a, *b in TENSORS) + 2 * 4 * len(TENSORS)
        assert tier(after, "peer", lambda host: host == new) == state
        assert tier(after, "memory", lambda host: host == survivor) == state
        assert after[0]["nodes"] == {survivor: {"memory": state}, new: {"peer": state}}
        # ranks may have been renumbered: a rank that has the survivors' ranks has their generators, the others are seeded
        assert sum(len(one["reseeded"]) for one in after) == 2


def test_node_lost_the_rest_goes_on_alone_from_its_memory(tmp_path: Path, program: Path) -> None:
    """HSDP, three nodes shrink to two: no byte from storage, every byte from memory of one of the two."""
    with nodes(tmp_path, 3) as them:
        before = held(them, program, "hsdp", 3)
        them.kill(2)
        after = restored(them, 4, before[0]["life"])
        check_newest(after, before)
        assert tier(after, "storage") == 0


def test_not_covered_exactly_the_lost_nodes_ranges_come_from_storage(tmp_path: Path, program: Path) -> None:
    """FSDP over two nodes: half of the state is lost with the node, and is read from the checkpoint of that step."""
    with nodes(tmp_path, 3) as them:
        before = held(them, program, "fsdp", 2)
        them.kill(1)
        them.start(2, *FLAGS, program, tmp_path, "fsdp", nnodes="1:2")
        after = restored(them, 4, before[0]["life"])
        assert {(one["step"], one["state"]) for one in after} == {(HOLD, before[0]["state"])}
        half = 12 * sum(a * (b[0] if b else 1) for a, *b in TENSORS) // 2  # all rows divide by four
        assert tier(after, "storage") == half
        assert tier(after, "memory") + tier(after, "peer") == half + 4 * 4 * len(TENSORS)
        assert all(not one["reseeded"] for one in after)
