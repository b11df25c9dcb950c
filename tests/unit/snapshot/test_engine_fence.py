"""The fence: state changed while it is copied is refused by name, whoever changes it; stale saves are said."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import digest
from support.one_rank import agent_of_the_test, crash, opened  # noqa: F401 -- fixtures
from torch import nn

from flashckpt import Checkpointer
from flashckpt.errors import FenceError
from flashckpt.native import UnusableMemoryError
from flashckpt.snapshot.runs import HostRuns


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the copy thread back in front of its copies while it is cleared."""
    opened_gate = threading.Event()
    opened_gate.set()
    real: Any = HostRuns.copy_and_digest

    def held(*args: Any, **options: Any) -> None:
        assert opened_gate.wait(30)
        real(*args, **options)

    monkeypatch.setattr(HostRuns, "copy_and_digest", held)
    return opened_gate


def test_a_change_of_parameters_while_they_are_copied_discards_the_snapshot_and_names_the_tensor(
    tmp_path: Path, gate: threading.Event, copied_by: str
) -> None:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    ckpt.step(1)
    ckpt.fence()
    kept = digest(model, optimizer)
    gate.clear()
    ckpt.step(2)
    with torch.no_grad():
        model.weight.mul_(2)  # what a foreign optimizer, or clipping of parameters, does
    gate.set()
    ckpt.step(3)
    ckpt.fence()
    crash(ckpt)
    assert isinstance(failures[0], FenceError)
    assert "model.weight" in str(failures[0])
    assert "step 2" in str(failures[0])
    kept_3 = digest(model, optimizer)
    assert kept_3 != kept
    fresh = nn.Linear(20, 20)
    other = torch.optim.SGD(fresh.parameters(), lr=0.1)
    crash(opened(tmp_path, model=fresh, optimizer=other))
    assert digest(fresh, other) == kept_3, "step 3 is intact, and step 2 never existed"


def test_memory_that_cannot_be_read_discards_that_snapshot_and_training_goes_on(tmp_path: Path, copied_by: str) -> None:
    mapped = tmp_path / "table"
    mapped.write_bytes(bytes(1 << 16))
    model = nn.Linear(20, 20)
    model.register_buffer("table", torch.from_file(str(mapped), shared=True, size=1 << 16, dtype=torch.uint8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures: list[Exception] = []
    ckpt = opened(tmp_path / "root", model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    os.truncate(mapped, 0)
    ckpt.step(1)
    assert [type(error) for error in failures] == [UnusableMemoryError]
    os.truncate(mapped, 1 << 16)
    ckpt.step(2)
    ckpt.fence()
    kept = digest(model, optimizer)
    crash(ckpt)
    with torch.no_grad():
        model.weight.zero_()
    crash(opened(tmp_path / "root", model=model, optimizer=optimizer))
    assert digest(model, optimizer) == kept
    assert len(failures) == 1


def test_an_average_of_weights_that_is_updated_right_after_the_step_is_in_the_snapshot_as_it_was(
    tmp_path: Path,
) -> None:
    model = nn.Linear(300, 300)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = opened(tmp_path, model=model, optimizer=optimizer, ema=average)
    ckpt.step(1)
    before = digest(average, optimizer)
    with torch.no_grad():
        average.weight.lerp_(torch.ones(300, 300), 0.5)
    crash(ckpt)
    again = copy.deepcopy(model)
    crash(opened(tmp_path, model=model, optimizer=optimizer, ema=again))
    assert digest(again, optimizer) == before


def test_a_fenced_average_that_is_updated_too_early_is_refused(tmp_path: Path, gate: threading.Event) -> None:
    average = nn.Linear(20, 20)
    failures: list[Exception] = []
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    ckpt.track(ema=average, fenced=["ema"])
    ckpt.restore()
    ckpt.on_failure = failures.append
    gate.clear()
    ckpt.step(1)
    with torch.no_grad():
        average.weight.add_(1)
    gate.set()
    crash(ckpt)
    assert "ema.weight" in str(failures[0])


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_optimizer_that_is_not_tracked_and_steps_too_early_is_caught(
    tmp_path: Path, options: dict[str, Any], gate: threading.Event
) -> None:
    model = nn.Linear(15, 15)
    tracked = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randn(2, 15)).sum().backward()
    tracked.step()
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=tracked)
    ckpt.on_failure = failures.append
    for hook in ckpt._hooks:
        hook.remove()
    ckpt._hooks.clear()
    gate.clear()
    ckpt.step(1)
    tracked.step()
    gate.set()
    crash(ckpt)
    assert isinstance(failures[0], FenceError)


def test_several_optimizers_are_fenced_by_the_first_that_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(900, 900), nn.Linear(900, 900))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=[first, second])
    ckpt.on_failure = failures.append
    for step in range(1, 6):
        model(torch.randn(1, 900)).sum().backward()
        second.step()
        first.step()
        ckpt.step(step)
    assert ckpt.stats["snapshots"] >= 4
    crash(ckpt)
    assert not failures


def test_optimizers_inside_the_backward_are_fenced_by_the_first_hook(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(700, 700, bias=False) for _ in range(4)])
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it without types
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=list(optimizers.values()))
    ckpt.on_failure = failures.append
    for step in range(1, 6):
        model(torch.randn(1, 700)).sum().backward()
        ckpt.step(step)
    crash(ckpt)
    assert not failures


def test_a_step_skipped_by_the_loss_scaler_leaves_a_snapshot_as_good_as_any(tmp_path: Path) -> None:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer, scaler=scaler)
    for step, factor in enumerate((1.0, float("inf"), 1.0), start=1):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 20)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        ckpt.step(step)
    crash(ckpt)
    kept, scale = digest(model, optimizer), scaler.get_scale()
    other = nn.Linear(20, 20)
    fresh, again = torch.optim.AdamW(other.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    crash(opened(tmp_path, model=other, optimizer=fresh, scaler=again))
    assert digest(other, fresh) == kept
    assert again.get_scale() == scale == 2.0


def test_three_equal_snapshots_although_the_optimizer_stepped_raise_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    for step in range(1, 4):
        ckpt.step(step)  # nothing stepped: a skipped step is no sign of a stale model
    for step in range(4, 10):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    crash(ckpt)
    assert len([r for r in caplog.records if "three snapshots" in r.message]) == 1


def test_a_step_that_a_guard_left_out_for_its_values_is_a_snapshot_like_any_other(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), float("nan") if step == 3 else 1.0)).sum()
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        ckpt.step(step)
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Linear(4, 4)
    fresh = torch.optim.AdamW(other.parameters())
    crash(opened(tmp_path, model=other, optimizer=fresh))
    assert digest(other, fresh) == kept
    assert all(torch.isfinite(p).all() for p in other.parameters())


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.clamp_(-0.01, 0.01),
        lambda p: p.lerp_(torch.ones_like(p), 0.1),
        lambda p: torch._foreach_mul_([p], 0.5),
        lambda p: p[3].zero_(),
        lambda p: p.copy_(torch.zeros_like(p)),
    ],
    ids=["clipping", "averaging", "a foreign optimizer", "a part of it", "loading weights"],
)
def test_every_way_to_write_a_parameter_too_early_is_caught(write: Any, tmp_path: Path, gate: threading.Event) -> None:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    gate.clear()
    ckpt.step(1)
    with torch.no_grad():
        write(model.weight)
    gate.set()
    crash(ckpt)
    assert isinstance(failures[0], FenceError)
    assert "model.weight" in str(failures[0])
