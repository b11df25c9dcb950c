"""Two runs of one program, one of them restarted: every bit of live state and every later loss must be equal."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flashckpt import Checkpointer
from flashckpt.report import RestoreReport
from support.one_rank import crash, step_kept

Build = Callable[[], tuple[nn.Module, Any]]
"""Returns (model, optimizer or list of them), built alike each time."""


def bits(value: Any) -> Any:
    """Return a value with every tensor as (dtype, shape, bytes), dicts in the order of their keys: comparable by ==."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return str(plain.dtype), tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, (list, tuple)):
        return type(value), [bits(one) for one in value]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    return type(value), value


def state_of(model: nn.Module, optimizers: Any) -> Any:
    """Return all of parameters, buffers, optimizer state and hyperparameters, comparable by ==."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Any] = {"tensors": bits(dict(model.state_dict()))}
    for i, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
        for key, value in optimizer.state.items():
            if not isinstance(key, torch.Tensor) or value:
                found[f"{i}.{names.get(id(key), key)}"] = bits(value)
        found[f"{i}.groups"] = bits([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    return found


def step_once(model: nn.Module, optimizers: Any, step: int) -> bytes:
    """Make one step on the batch of `step`; return the bits of its loss."""
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    every = optimizers if isinstance(optimizers, list) else [optimizers]

    def closure() -> torch.Tensor:
        for optimizer in every:
            optimizer.zero_grad()
        loss: torch.Tensor = model(batch).pow(2).mean()
        loss.backward()
        return loss

    loss = closure()
    for optimizer in every:
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return struct.pack("<d", float(loss.detach()))


def started(root: Path, *, strict: bool = True, **things: Any) -> tuple[Checkpointer, RestoreReport | None]:
    """Return a Checkpointer that was restored, and its report."""
    ckpt = Checkpointer(str(root), snapshot_every=1, job="t")
    ckpt.track(**things)
    return ckpt, ckpt.restore(strict=strict)


def check_restart(root: Path, build: Build, *, before: int = 3, after: int = 2) -> Checkpointer:
    """Train unbroken, and with a crash and a restart from memory behind step `before`; compare them bit for bit.

    Returns:
        The closed Checkpointer of the restarted run, for its counters.
    """
    model, optimizers = build()
    losses, states = [], []
    for step in range(1, before + after + 1):
        losses.append(step_once(model, optimizers, step))
        states.append(state_of(model, optimizers))
    failures: list[Exception] = []
    model, optimizers = build()
    ckpt, _ = started(root, model=model, optimizer=optimizers)
    ckpt.on_failure = failures.append
    for step in range(1, before + 1):
        step_once(model, optimizers, step)
        step_kept(ckpt, step)
    crash(ckpt)
    assert not failures
    model, optimizers = build()
    ckpt, report = started(root, model=model, optimizer=optimizers)
    ckpt.on_failure = failures.append
    assert report is not None
    assert report.step == before
    assert state_of(model, optimizers) == states[before - 1]
    for step in range(before + 1, before + after + 1):
        assert step_once(model, optimizers, step) == losses[step - 1]
        step_kept(ckpt, step)
        assert state_of(model, optimizers) == states[step - 1]
    ckpt.fence()
    crash(ckpt)
    assert not failures
    assert ckpt._session is not None
    assert ckpt._session.stats["snapshots"] == after
    return ckpt
