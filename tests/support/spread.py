"""Ranks of one machine that pretend to be on several nodes: each node has its own memory directory and host name."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashckpt import Checkpointer, faults
from support.engine import digest, net
from support.ranks import wait_for


def node_dir(node: int) -> Path:
    """The memory directory of a node, below the test's own; called in the test and in its ranks alike."""
    return Path(os.environ.get("FLASHCKPT_TEST_SHM", os.environ["FLASHCKPT_SHM_DIR"])) / f"node{node}"


def lose(node: int) -> None:
    """Switch a node's memory off."""
    shutil.rmtree(node_dir(node))


def on_node(rank: int, nodes: Sequence[int]) -> None:
    """Make this process a rank of node `nodes[rank]`."""
    os.environ.setdefault("FLASHCKPT_TEST_SHM", os.environ["FLASHCKPT_SHM_DIR"])
    node = nodes[rank]
    node_dir(node).mkdir(exist_ok=True)
    os.environ["FLASHCKPT_SHM_DIR"] = str(node_dir(node))
    socket.gethostname = lambda: f"host{node}"


def spread_model(kind: str, width: int) -> tuple[Any, Any]:
    """Return (model, mesh): hsdp replicates over pairs of ranks, fsdp shards over all, plain holds all on each."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net(width)
    world = torch.distributed.get_world_size()
    if kind == "plain":
        return model, None
    shape = (world // 2, 2) if kind == "hsdp" else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["dp_shard"])
    return model, mesh


def train_spread(
    rank: int,
    kind: str,
    root: str,
    nodes: Sequence[int],
    steps: int,
    options: dict[str, Any] | None = None,
    crash: str | None = None,
    hook: Callable[[], None] | None = None,
    crash_later: str | None = None,
) -> dict[str, Any]:
    """Train to `steps` on the given nodes; return the digest of the whole state after restore and per step, and the report.

    Args:
        rank: Given by `run_ranks`.
        kind: hsdp, fsdp or plain.
        root: Checkpoint root.
        nodes: Node of each rank.
        steps: Last step.
        options: Of the Checkpointer; `width` of the model, `persisted` to wait for storage, `replicated` for the partners,
            `restore` its arguments.
        crash: Crash point that is armed before `restore()`.
        hook: Called before `restore()`.
        crash_later: Crash point that is armed after it.
    """
    import torch

    on_node(rank, nodes)
    given = dict(options or {})
    width, persisted = given.pop("width", 24), given.pop("persisted", False)
    replicated, wish = given.pop("replicated", False), given.pop("restore", {})
    model, mesh = spread_model(kind, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    ckpt = Checkpointer(root, **{"snapshot_every": 1, "job": "t", **given})
    replicas = None if mesh is not None else "world"
    ckpt.track(model=model, optimizer=optimizer, rng=True, mesh=mesh, replicated_over=replicas)
    faults.arm(crash)
    if hook is not None:
        hook()
    report = ckpt.restore(**wish)
    faults.arm(crash_later)
    session = ckpt._session
    assert session is not None
    first = report.step if report else 0
    found = {"first": first, "restored": digest(model, optimizer), "whole": gathered(model, optimizer)}
    try:
        found["states"] = _train(ckpt, model, optimizer, range(first + 1, steps + 1), width, is_plain=mesh is None)
        if persisted:
            ckpt.wait(60)
        if replicated:
            session._stager.finish()
            _wait_for_replicas(session.directory, steps)
    finally:
        session.close()  # as after a crash: the snapshot under way is finished, everything stays
    return {**found, "report": told(report)}


def _train(ckpt: Any, model: Any, optimizer: Any, steps: range, width: int, *, is_plain: bool) -> dict[str, str]:
    """Train the steps and return the digest of the whole state after each."""
    import torch

    states = {}
    for step in steps:
        batch = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        for parameter in model.parameters() if is_plain else ():
            torch.distributed.all_reduce(parameter.grad)  # equal on all ranks: replicas
        optimizer.step()
        ckpt.step(step)
        states[str(step)] = gathered(model, optimizer)
    return states


def _wait_for_replicas(directory: Any, step: int) -> None:
    wait_for(lambda: _replicated(directory) == step, what="the replicas of the last step", deadline_s=60)


def _replicated(directory: Any) -> int | None:
    status = directory.read_status()
    return None if status is None or status.replicated is None else int(status.replicated.step)


def gathered(model: Any, optimizer: Any) -> str:
    """Return one digest of all parameters and moments, whole, whatever the layout."""
    import torch
    import xxhash
    from torch.distributed.tensor import DTensor

    hasher = xxhash.xxh3_64()
    tensors = [*model.parameters()]
    tensors += [
        optimizer.state[p][k] for p in model.parameters() if optimizer.state.get(p) for k in ("exp_avg", "step")
    ]
    for tensor in tensors:
        full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        raw: Any = full.contiguous().reshape(-1).view(torch.uint8).numpy()
        hasher.update(raw)
    return hasher.hexdigest()


def told(report: Any) -> dict[str, Any] | None:
    """What a test asks of a report."""
    if report is None:
        return None
    return {
        "step": report.step,
        "generation": report.generation,
        "tiers": dict(report.tier_bytes),
        "read": dict(report.read_bytes),
        "nodes": {host: dict(tiers) for host, tiers in report.nodes.items()},
        "reseeded": list(report.reseeded),
        "passed": list(report.passed_over),
        "damaged": list(report.damaged),
        "text": str(report),
        "same": report.is_same_layout,
    }
