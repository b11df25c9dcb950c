"""A tiny training loop for tests of the engine: real optimizers and layouts, one digest of everything per step."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from flashckpt import Checkpointer, faults
from flashckpt.state.placement import local_of
from support.agents import pretend_agent


def agent_dir() -> None:
    """Pretend that an agent runs, so that no daemon is started; its folder lies in the test's own memory tier."""
    os.environ["FLASHCKPT_AGENT_DIR"] = pretend_agent(Path(tempfile.mkdtemp(dir=os.environ["FLASHCKPT_SHM_DIR"])))


def net(width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 22), nn.ReLU(), nn.Linear(22, width), nn.Dropout(0.1))


def parallel_net(kind: str) -> tuple[nn.Module, Any]:
    """Return (model, mesh) for one of: plain, ddp, fsdp, hsdp, tp, fsdp_tp (2 or 4 ranks of the default group)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: nn.Module = net()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), None
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh)
        return model, mesh
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        return model, mesh
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, plan), mesh
    if kind == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        return model, mesh
    return model, None


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return one digest over every local byte of parameters, buffers and optimizer state."""
    hasher = xxhash.xxh3_64()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [
        t for p in model.parameters() for _, t in sorted(optimizer.state.get(p, {}).items()) if torch.is_tensor(t)
    ]
    for tensor in tensors:
        raw: Any = local_of(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        hasher.update(raw)
    return hasher.hexdigest()


def train(
    rank: int,
    kind: str,
    root: str | None,
    steps: int,
    options: dict[str, Any] | None = None,
    crash: str | None = None,
) -> dict[str, Any]:
    """Train to `steps`; return losses and digests per step, what was restored, and how.

    Args:
        rank: Global rank (given by `run_ranks`).
        kind: As `parallel_net`; `plain` only keeps step with its peers while they live.
        root: Checkpoint root, or None for an untracked run.
        steps: Last step.
        options: Of the Checkpointer.
        crash: Crash point to arm after `restore()`.
    """
    model, mesh = parallel_net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7 if kind == "tp" else rank)
    ckpt, first, found = None, 0, None
    if root is not None:
        ckpt = Checkpointer(root, **{"snapshot_every": 1, "job": "t", **(options or {})})
        ckpt.track(model=model, optimizer=optimizer, rng=True, mesh=mesh)
        report = ckpt.restore()
        if report is not None:
            first, found = report.step, dict(report.tier_bytes)
    restored = digest(model, optimizer)
    faults.arm(crash)
    losses, digests = {}, {}
    for step in range(first + 1, steps + 1):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[str(step)], digests[str(step)] = loss.item().hex(), digest(model, optimizer)
        if kind == "plain" and torch.distributed.is_initialized():
            with contextlib.suppress(RuntimeError):  # once a peer is dead this rank goes on alone
                torch.distributed.all_reduce(torch.ones(1))
        if ckpt is not None:
            ckpt.step(step)
    if ckpt is not None:
        ckpt.close()
    return {"first": first, "restored": restored, "losses": losses, "digests": digests, "tiers": found}


def segments(shm: Path) -> list[str]:
    """Return the segments of all jobs below a memory directory."""
    return sorted(p.name for p in shm.rglob("*.seg"))
