"""A job on top of the native copy, at every level: snapshots of live tensors, and a restore from memory, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.native_rows import every_level  # before flashckpt: it may bring another build of the C part
from support.one_rank import agent_of_the_test, crash, opened, step_kept
from torch import nn

from flashckpt.native import LEVEL_VARIABLE, implementation

__all__ = ["agent_of_the_test"]


def model_of(seed: int) -> nn.Module:
    """Rows of every kind: fenced runs, some over a chunk of 1 MiB, what step() copies, one that is not contiguous, empty ones."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    for number, size in enumerate((0, 1, 63, 4097, (1 << 18) + 5, 700_001)):
        model.register_parameter(f"w{number}", nn.Parameter(torch.randn(size, generator=generator)))
    model.register_parameter("turned", nn.Parameter(torch.randn(70, 300, generator=generator).t()))
    model.register_parameter("frozen", nn.Parameter(torch.randn(333, generator=generator), requires_grad=False))
    model.register_buffer("flags", torch.rand(1001, generator=generator) > 0.5)
    model.register_buffer("halves", torch.randn(77, generator=generator).half())
    return model


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@every_level
def test_state_that_was_kept_in_memory_comes_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    assert implementation().endswith(level)
    model = model_of(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    for step in (1, 2, 3):
        trained(model, optimizer)
        step_kept(ckpt, step)
    crash(ckpt)
    other = model_of(2)
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.1)
    crash(opened(tmp_path, model=other, optimizer=fresh))
    expected, found = model.state_dict(), other.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    states, again = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert all(torch.equal(again[n][key], states[n][key]) for n in states for key in states[n])
    assert len(states) == 7
