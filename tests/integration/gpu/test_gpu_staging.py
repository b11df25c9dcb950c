"""Snapshots of state on a GPU and restores into it: every byte, the order of streams, who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.one_rank import agent_of_the_test, crash, finished, opened
from support.ranks import wait_for
from torch import nn

from flashckpt import Checkpointer, accelerator
from flashckpt.restore import device_rows
from flashckpt.restore.executor import thread_count
from integration.gpu.device import bits, device, gpu, in_time

__all__ = ["agent_of_the_test", "device", "gpu", "in_time"]
pytestmark = pytest.mark.filterwarnings("default")  # a driver's warnings are no failures
CYCLES = 2_000_000_000
"""About a second of a GPU's clock: what is queued behind it has not run when the host looks."""


def net(device: torch.device, width: int = 160, seed: int = 0) -> nn.Sequential:
    """A model with large and small parameters, and buffers that train."""
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, width), nn.Dropout(0.1)]
    return nn.Sequential(*layers).to(device)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def update(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    optimizer.zero_grad()
    model(torch.rand(32, 160, device=device)).square().mean().backward()
    optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    for number, parameter in enumerate(model.parameters()):
        for key, value in optimizer.state[parameter].items():
            found[f"{number}.{key}"] = bits(torch.as_tensor(value))
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restore_brings_back_every_byte_of_the_step_while_training_went_on(
    kind: str, device: torch.device, tmp_path: Path
) -> None:
    model = net(device)
    optimizer = OPTIMIZERS[kind](model.parameters())
    ckpt = opened(tmp_path / "root", model=model, optimizer=optimizer)
    for step in range(1, 6):
        update(model, optimizer, device)
        ckpt.step(step)  # not waited for: each copy runs beside the step behind it
    wanted = state(model, optimizer)
    update(model, optimizer, device)  # in stream order behind the copy, which the fence holds it back for
    finished(ckpt)
    assert ckpt.stats["snapshots"] >= 1
    assert not ckpt.stats.get("discarded")
    crash(ckpt)
    other = net(device, seed=1)
    again = OPTIMIZERS[kind](other.parameters())
    resumed = Checkpointer(str(tmp_path / "root"), snapshot_every=1, job="t")
    resumed.track(model=other, optimizer=again)
    report = resumed.restore()
    crash(resumed)
    assert report is not None
    assert report.step == 5
    assert state(other, again) == wanted
    assert {p.device for p in other.parameters()} == {next(model.parameters()).device}
    kept = [v.device for s in again.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert kept == [v.device for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]


def test_tensors_of_every_kind_come_back_bit_for_bit(device: torch.device, tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        base = torch.randn(40, 30, generator=torch.Generator().manual_seed(seed)).to(device)
        kinds = {
            "brief": base.bfloat16(), "short": base.half(), "flag": base > 0, "count": torch.tensor(seed, device=device),
            "turned": base.t(), "part": base[::2, ::3], "tiny": base.to(torch.float8_e4m3fn), "wide": base.double(),
            "imaginary": torch.view_as_complex(base.reshape(-1, 2).contiguous()),
            "nothing": torch.empty(0, 3, device=device), "large": base.repeat(40, 40), "large_turned": base.repeat(40, 40).t(),
        }  # fmt: skip
        model = nn.Module()
        for name, tensor in kinds.items():
            model.register_buffer(name, tensor)
        for number in range(300):
            model.register_buffer(f"many{number}", torch.full((5,), float(number + seed), device=device))
        return model

    model = made(3)
    ckpt = opened(tmp_path / "root", model=model)
    ckpt.step(1)
    wanted = {name: bits(tensor) for name, tensor in model.named_buffers()}
    for tensor in model.buffers():
        tensor.zero_()  # what is not fenced may change as soon as step() has returned
    finished(ckpt)
    crash(ckpt)
    other = made(4)
    crash(opened(tmp_path / "root", model=other))
    assert {name: bits(tensor) for name, tensor in other.named_buffers()} == wanted


def test_a_restore_of_many_megabytes_goes_through_a_few_blocks(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads fill blocks while others are on the wire; the host never holds as much as the state."""
    monkeypatch.setattr(device_rows, "BLOCKS", 3)
    made: Any = []
    real = accelerator.host_buffer
    monkeypatch.setattr(
        device_rows, "host_buffer", lambda nbytes, on, api=None: (made.append(1), real(nbytes, on, api=api))[1]
    )
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(8))).to(device)
    ckpt = opened(tmp_path / "root", model=model)
    assert ckpt._session is not None
    memory = ckpt._session.memory
    wait_for(lambda: memory.is_ready, deadline_s=120, what="the segment")  # a snapshot would be skipped before
    ckpt.step(1)
    finished(ckpt)
    assert ckpt.stats["snapshots"] == 1
    crash(ckpt)
    wanted = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    other = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(8))).to(device)
    crash(opened(tmp_path / "root", model=other))
    assert {name: bits(tensor) for name, tensor in other.state_dict().items()} == wanted
    assert 0 < len(made) <= max(3, thread_count(waits=False)), "72 MB"


def test_the_device_generator_goes_on_where_it_was(device: torch.device, tmp_path: Path) -> None:
    model = net(device)
    ckpt = opened(tmp_path / "root", model=model, rng=True)
    torch.rand(17, device=device)
    ckpt.step(1)
    finished(ckpt)
    crash(ckpt)
    wanted = bits(torch.rand(1000, device=device)), bits(torch.rand(1000))
    torch.manual_seed(99)
    crash(opened(tmp_path / "root", model=model, rng=True))
    assert (bits(torch.rand(1000, device=device)), bits(torch.rand(1000))) == wanted


def test_neither_step_nor_the_fence_waits_for_the_device(gpu: torch.device, tmp_path: Path) -> None:
    model = net(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ckpt = opened(tmp_path / "root", model=model, optimizer=optimizer)
    for step in (1, 2):
        update(model, optimizer, gpu)
        ckpt.step(step)
    finished(ckpt)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    ckpt.step(3)
    assert not behind.query(), "step() waited for the device"
    optimizer.step()
    assert not behind.query(), "the fence waited for the device"
    finished(ckpt)
    crash(ckpt)


def page_locked(ckpt: Checkpointer) -> set[bool]:
    """Whether the driver knows the slots as page-locked, at their begins and ends; the page before them is read by hosts alone."""
    assert ckpt._session is not None
    memory = ckpt._session.memory
    wait_for(lambda: memory.is_ready, what="the segment")
    assert memory.segment is not None
    spec, view = memory.segment.spec, np.frombuffer(memory.segment.buffer, np.uint8)
    found = set()
    for slot in range(spec.slots):
        data: Any = view[spec.data_at(slot) :][: spec.data_capacity]
        found |= {torch.from_numpy(data[:4096]).is_pinned(), torch.from_numpy(data[-4096:]).is_pinned()}
    return found


def test_the_slots_are_page_locked_and_again_after_a_restart(gpu: torch.device, tmp_path: Path) -> None:
    ckpt = opened(tmp_path / "root", model=net(gpu))
    assert page_locked(ckpt) == {True}
    crash(ckpt)
    reused = Checkpointer(str(tmp_path / "root"), snapshot_every=1, job="t")  # registered twice would be refused
    reused.track(model=net(gpu))
    reused.restore()
    assert page_locked(reused) == {True}
    crash(reused)


def test_small_tensors_cross_the_bus_together(gpu: torch.device, tmp_path: Path) -> None:
    model = nn.ParameterList([torch.randn(50, device=gpu) for _ in range(500)])
    ckpt = opened(tmp_path / "root", model=model)
    ckpt.step(1)
    finished(ckpt)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ckpt.step(2)
        finished(ckpt)
    crash(ckpt)
    copies = [event for event in profile.events() if "DtoH" in event.name]
    if not profile.events():
        pytest.skip("the profiler sees nothing on this machine")
    assert 1 <= len(copies) <= 2


def test_a_write_past_the_fence_discards_that_snapshot_alone(gpu: torch.device, tmp_path: Path) -> None:
    model = net(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = opened(tmp_path / "root", model=model, optimizer=optimizer)
    update(model, optimizer, gpu)
    ckpt.step(1)
    finished(ckpt)
    torch.cuda._sleep(CYCLES)
    ckpt.step(2)
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[operator]  # a parameter
    finished(ckpt)
    assert ckpt.stats["discarded"] == 1
    ckpt.step(3)
    finished(ckpt)
    assert ckpt.stats["snapshots"] == 2
    crash(ckpt)


def test_state_that_grows_moves_to_other_page_locked_memory(device: torch.device, tmp_path: Path) -> None:
    model = net(device)
    ckpt = opened(tmp_path / "root", model=model)
    ckpt.step(1)
    finished(ckpt)
    model.append(nn.Linear(800, 800).to(device))
    ckpt.step(2)
    assert ckpt._session is not None
    memory = ckpt._session.memory
    wait_for(lambda: memory.is_ready, what="the segment")
    ckpt.step(3)
    finished(ckpt)
    assert ckpt.stats["snapshots"] == 2 + (ckpt.stats.get("late", 0) == 0)
    crash(ckpt)
    wanted = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    other = net(device, seed=1).append(nn.Linear(800, 800).to(device))
    crash(opened(tmp_path / "root", model=other))
    assert {name: bits(tensor) for name, tensor in other.state_dict().items()} == wanted


def test_a_compiled_model_in_bfloat16_is_the_same_model(gpu: torch.device, tmp_path: Path) -> None:
    """Autocast and torch.compile change neither names nor what is copied."""
    model = net(gpu)
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ckpt = opened(tmp_path / "root", model=compiled, optimizer=optimizer)
    for step in (1, 2):
        with torch.autocast(gpu.type, dtype=torch.bfloat16):
            update(compiled, optimizer, gpu)
        ckpt.step(step)
    wanted = state(model, optimizer)
    finished(ckpt)
    crash(ckpt)
    plain = net(gpu, seed=5)
    again = torch.optim.AdamW(plain.parameters(), fused=True)
    crash(opened(tmp_path / "root", model=plain, optimizer=again))
    assert state(plain, again) == wanted
