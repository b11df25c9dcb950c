"""The engine on one rank: the fence, every kind of tensor, changes of structure, what a user meets."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from support.engine import agent_dir, digest, net, segments, train
from support.ranks import wait_for
from torch import nn

from flashckpt import Checkpointer
from flashckpt.errors import (
    ConfigError,
    FenceError,
    NoCheckpointError,
    SamplerStateError,
    ShardGapError,
    UnsupportedStateError,
)
from flashckpt.staging import staging


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()


def crash(ckpt: Checkpointer) -> None:
    """End this rank's life without a clean end: what is in memory stays."""
    life = ckpt._life
    assert life is not None
    life.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the copy thread back at its first tensor while it is cleared."""
    opened_gate = threading.Event()
    opened_gate.set()
    real: Any = getattr(staging, "copy_and_hash")  # noqa: B009 -- it is not exported, on purpose

    def held(*args: Any) -> None:
        assert opened_gate.wait(30)
        real(*args)

    monkeypatch.setattr(staging, "copy_and_hash", held)
    return opened_gate


class Holder:
    """Any object with state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def opened(root: Path, **things: Any) -> Checkpointer:
    ckpt = Checkpointer(str(root), snapshot_every=1, job="t")
    ckpt.track(**things)
    ckpt.restore()
    return ckpt


def test_a_tracked_run_has_the_trace_of_an_untracked_one_from_the_first_step(tmp_path: Path) -> None:
    assert train(0, "plain", str(tmp_path), 6)["digests"] == train(0, "plain", None, 6)["digests"]


def test_a_run_that_died_goes_on_bit_for_bit_from_memory(tmp_path: Path) -> None:
    whole = train(0, "plain", None, 8)
    train(0, "plain", str(tmp_path), 5)
    resumed = train(0, "plain", str(tmp_path), 8)
    assert resumed["first"] == 5
    assert resumed["restored"] == whole["digests"]["5"]
    assert resumed["losses"] == {s: whole["losses"][s] for s in ("6", "7", "8")}
    assert set(resumed["tiers"]) == {"memory"}


EVERY_DTYPE = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Module()
        for dtype in EVERY_DTYPE:
            raw = torch.randint(0, 2, (48,), generator=generator, dtype=torch.uint8)
            name = "of_" + str(dtype).removeprefix("torch.")
            model.register_buffer(name, raw.bool() if dtype is torch.bool else raw.view(dtype))
        base = torch.randn(40, 30, generator=generator)
        model.register_buffer("transposed", base.t())
        model.register_buffer("strided", base[::2, ::3])
        model.register_buffer("overlap_a", base[:30])
        model.register_buffer("overlap_b", base[10:])
        model.register_buffer("conj", torch.view_as_complex(torch.randn(5, 2, generator=generator)).conj())
        model.register_buffer("scalar", torch.randn((), generator=generator))
        model.register_buffer("nothing", torch.empty(0, 7))
        model.register_buffer("large", torch.randn(700, 500, generator=generator))
        model.register_buffer("nan", torch.tensor([float("nan"), -0.0, float("inf")]) * (seed + 1))
        return model

    model = make(1)
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    other = make(2)
    crash(opened(tmp_path, model=other))
    for (name, a), (_, b) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        x, y = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(x, y), name


def test_a_change_of_parameters_while_they_are_copied_discards_the_snapshot_and_names_the_tensor(
    tmp_path: Path, gate: threading.Event
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


def test_state_that_appears_and_parameters_that_are_added_or_frozen_are_in_the_next_snapshot(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    model[1].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def one(step: int, ckpt: Checkpointer) -> None:
        model(torch.randn(2, 50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)

    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    one(1, ckpt)
    model[1].requires_grad_(requires_grad=True)
    one(2, ckpt)
    model.append(nn.Linear(50, 3000))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    one(3, ckpt)
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50), nn.Linear(50, 3000))
    groups: Any = [{"params": [*other[0].parameters(), *other[1].parameters()]}, {"params": other[2].parameters()}]
    fresh = torch.optim.AdamW(groups)
    again = opened(tmp_path, model=other, optimizer=fresh)
    crash(again)
    assert digest(other, fresh) == kept
    assert fresh.param_groups[1]["lr"] == 0.5


def test_objects_with_state_come_back_with_tensors_and_values(tmp_path: Path) -> None:
    thing = Holder(
        count=3, window=[1.5, float("nan")], mean=torch.randn(5), nested={"a": (1, "x"), 7: torch.ones(2, 2)}
    )
    scheduled = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(scheduled, 10)
    for _ in range(3):
        scheduled.step()
        schedule.step()
    ckpt = opened(tmp_path, thing=thing, schedule=schedule)
    ckpt.step(1)
    mean = thing.state["mean"].clone()
    thing.state["mean"].zero_()
    crash(ckpt)
    other = Holder(count=0, window=[], mean=torch.zeros(5), nested={"a": (0, ""), 7: torch.zeros(2, 2)})
    fresh = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), 10)
    crash(opened(tmp_path, thing=other, schedule=fresh))
    assert torch.equal(other.state["mean"], mean), "copied before step() returned"
    assert other.state["nested"]["a"] == (1, "x")
    assert torch.equal(other.state["nested"][7], torch.ones(2, 2))
    assert fresh.state_dict() == schedule.state_dict()


def test_a_tied_model_restores_into_an_untied_one(tmp_path: Path) -> None:
    def make(*, tied: bool) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    model = make(tied=True)
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    other = make(tied=False)
    crash(opened(tmp_path, model=other))
    assert all(torch.equal(p, next(model.parameters())) for p in other.parameters())


def test_a_name_that_no_snapshot_has_is_an_error_unless_it_is_allowed(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, model=nn.Sequential(nn.Linear(3, 3)))
    ckpt.step(1)
    crash(ckpt)
    larger = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ShardGapError, match=r"model\.1\.bias"):
        opened(tmp_path, model=larger)
    lenient = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    lenient.track(model=larger)
    report = lenient.restore(strict=False)
    crash(lenient)
    assert report is not None
    assert report.missing == ("model.1.bias", "model.1.weight")


def test_an_abandoned_step_is_never_chosen_again(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def life(step: int | None, *steps: int) -> int:
        ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
        ckpt.track(model=model)
        report = ckpt.restore(step=step)
        for s in steps:
            ckpt.step(s)
        crash(ckpt)
        return report.step if report else 0

    assert life(None, 1, 2, 3) == 0
    assert life(2) == 2
    assert life(None) == 2, "step 3 of generation 1 was abandoned"
    with pytest.raises(NoCheckpointError):
        life(3)


def test_a_loop_without_restore_is_told_what_to_do(tmp_path: Path) -> None:
    ckpt = Checkpointer(str(tmp_path), job="t")
    with pytest.raises(ConfigError, match=r"restore\(\) was not called"):
        ckpt.step(1)
    with pytest.raises(ConfigError, match="memory://"):
        Checkpointer("memory://x")


def test_a_meta_tensor_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match=r"model\.weight"):
        opened(tmp_path, model=nn.Linear(2, 2, device="meta"))


def test_memory_for_three_slots_is_missing_and_two_are_taken_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flashckpt.staging import rank_memory as memory

    need = 2 * 4 * 250_000
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(need * 2.9))
    with caplog.at_level(logging.INFO, logger="flashckpt"):
        ckpt = opened(tmp_path, model=nn.Linear(500, 500, bias=False), other=nn.Linear(500, 500, bias=False))
    crash(ckpt)
    lines = [r.message for r in caplog.records if "slots" in r.message]
    assert len(lines) == 1
    assert "2 slots (3 did not fit)" in lines[0]


def test_a_clean_end_asks_for_removal_and_a_crash_does_not(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = opened(tmp_path, model=nn.Linear(2, 2))
    ckpt.step(1)
    crash(ckpt)
    assert segments(shm_dir)
    assert not list(shm_dir.rglob("ended"))
    again = opened(tmp_path, model=nn.Linear(2, 2))
    monkeypatch.delenv("FLASHCKPT_AGENT_DIR")
    again.close()
    assert list(shm_dir.rglob("ended"))


def test_twenty_thousand_tensors_are_staged_and_restored(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.full((3,), float(i)) for i in range(20_000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    other = nn.ParameterList([torch.zeros(3) for _ in range(20_000)])
    crash(opened(tmp_path, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1)))
    assert all(torch.equal(a, b) for a, b in zip(model, other, strict=True))


def test_the_layout_net_of_the_rank_tests_is_deterministic() -> None:
    first, second = (next(net().parameters()) for _ in range(2))
    assert torch.equal(first, second)


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


def test_a_parameter_with_another_storage_discards_one_snapshot_and_is_planned_anew(tmp_path: Path) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    ckpt.step(1)
    ckpt.fence()
    model.weight.data = torch.ones(4, 8)
    ckpt.step(2)
    ckpt.step(3)
    crash(ckpt)
    assert "model.weight" in str(failures[0])
    assert len(failures) == 1
    other = nn.Linear(8, 4, bias=False)
    crash(opened(tmp_path, model=other))
    assert torch.equal(next(other.parameters()), torch.ones(4, 8))


def test_a_reader_fills_a_model_from_storage_and_changes_nothing(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Checkpointer.readonly(str(tmp_path))
    nothing.track(model=nn.Linear(5, 5))
    with pytest.raises(NoCheckpointError):
        nothing.restore()
    monkeypatch.delenv("FLASHCKPT_AGENT_DIR")  # a daemon of its own
    model = nn.Linear(5, 5)
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, persist_every=2, job="t")
    ckpt.track(model=model, optimizer=torch.optim.AdamW(model.parameters()), rng=True)
    ckpt.restore()
    ckpt.step(1)
    ckpt.step(2)
    ckpt.wait(60)
    ckpt.close()
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    other = nn.Linear(5, 5)
    reader = Checkpointer.readonly(str(tmp_path))
    reader.track(model=other)
    report = reader.restore(step=2)
    assert (report.step, report.tier) == (2, "storage")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
    wait_for(lambda: not segments(shm_dir), what="the daemon to remove the memory of the ended job")


def test_a_part_of_another_run_is_a_warm_start_with_a_lineage_of_its_own(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHCKPT_AGENT_DIR")
    model = nn.Linear(5, 5)
    first = Checkpointer(str(tmp_path / "a"), snapshot_every=1, persist_every=1, job="a")
    first.track(model=model)
    first.restore()
    first.step(7)
    first.wait(60)
    first.close()
    agent_dir()
    other = nn.Linear(5, 5)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    second = Checkpointer(str(tmp_path / "b"), snapshot_every=1, job="b")
    second.track(model=other, optimizer=optimizer)
    report = second.restore(root=str(tmp_path / "a"), only="model.*")
    assert report is not None
    assert (report.step, report.life) == (7, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.5
    second.step(1)
    crash(second)
    third = opened_as(tmp_path / "b", "b", model=other, optimizer=optimizer)
    assert third == 1
    fourth = Checkpointer(str(tmp_path / "c"), snapshot_every=1, job="c")
    fourth.track(model=other)
    again = fourth.restore() or fourth.restore(root=str(tmp_path / "a"))
    assert again is not None
    assert again.step == 7
    crash(fourth)
    wait_for(lambda: not list(shm_dir.glob("*/a")), what="the daemon to remove the memory of the ended job")


def opened_as(root: Path, job: str, **things: Any) -> int:
    ckpt = Checkpointer(str(root), snapshot_every=1, job=job)
    ckpt.track(**things)
    report = ckpt.restore()
    crash(ckpt)
    return report.step if report else 0


def test_another_root_under_the_same_job_id_is_refused_and_its_snapshots_stay(tmp_path: Path, shm_dir: Path) -> None:
    model = nn.Linear(3, 3)
    ckpt = opened(tmp_path / "a", model=model)
    ckpt.step(1)
    crash(ckpt)
    with pytest.raises(ConfigError, match="another root"):
        opened(tmp_path / "b", model=model)
    assert opened_as(tmp_path / "a", "t", model=model) == 1


def test_a_damaged_segment_is_left_and_another_one_takes_its_place(tmp_path: Path, shm_dir: Path) -> None:
    model = nn.Linear(3, 3)
    crash(opened(tmp_path, model=model))
    (name,) = segments(shm_dir)
    next(shm_dir.rglob(name)).write_bytes(b"not a segment")
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    assert len(segments(shm_dir)) == 2
    assert opened_as(tmp_path, "t", model=model) == 1


OPTIMIZERS: list[Any] = [
    torch.optim.AdamW,
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
]


def steps(ckpt: Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        model(torch.full((2, 6), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_that_the_first_step_makes_was_planned_in_restore(make: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.BatchNorm1d(6))
    optimizer = make(model.parameters())
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    steps(ckpt, model, optimizer, 1, 3)
    assert "plans" not in ckpt.stats, "nothing was planned in step()"
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.BatchNorm1d(6))
    fresh = make(other.parameters())
    again = opened(tmp_path, model=other, optimizer=fresh)
    assert digest(other, fresh) == kept
    steps(again, other, fresh, 4, 5)
    assert "plans" not in again.stats, "nor after a restore"
    assert again.stats["snapshots"] >= 1
    crash(again)


class InHalves(torch.optim.SGD):
    """Keeps its state in another form than its base class."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16().float().reshape(-1)
        return result


def test_state_in_another_form_than_predicted_is_planned_when_it_is_there(tmp_path: Path) -> None:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    model.bias.requires_grad = False  # will have no state, against the prediction
    steps(ckpt, model, optimizer, 1, 2)
    assert ckpt.stats["plans"] == 1
    crash(ckpt)
    kept = digest(model, optimizer)
    other = nn.Linear(6, 6)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    crash(opened(tmp_path, model=other, optimizer=fresh))
    assert digest(other, fresh) == kept


def test_state_of_another_shape_than_predicted_discards_one_snapshot_and_is_planned_anew(tmp_path: Path) -> None:
    model = nn.Linear(6, 6, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(36)
    ckpt.step(1)
    ckpt.step(2)
    crash(ckpt)
    assert len(failures) == 1
    assert "another form" in str(failures[0])
    assert opened_as(tmp_path, "t", model=nn.Linear(6, 6, bias=False)) == 2


def test_a_subclass_of_a_known_optimizer_is_planned_as_it_is(tmp_path: Path) -> None:
    model = nn.Linear(6, 6)
    optimizer = InHalves(model.parameters(), lr=0.1, momentum=0.9)
    failures: list[Exception] = []
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    ckpt.on_failure = failures.append
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    ckpt.step(1)
    crash(ckpt)
    assert not failures
    assert opened_as(tmp_path, "t", model=nn.Linear(6, 6)) == 1


class Stuck(Holder):
    """A sampler whose position moves only while `moves` is set."""

    moves = True

    def commit(self, samples: int | None = None) -> None:
        self.state = {"offset": self.state["offset"] + (samples or 0) * self.moves}


def test_a_tracked_sampler_that_does_not_move_for_two_steps_is_an_error_and_for_one_is_not(tmp_path: Path) -> None:
    sampler = Stuck(offset=0)
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=sampler)
    ckpt.step(1, samples=8)
    sampler.moves = False
    ckpt.step(2, samples=8)
    sampler.moves = True
    ckpt.step(3, samples=8)
    sampler.moves = False
    ckpt.step(4, samples=8)
    with pytest.raises(SamplerStateError, match=r"'data' has not moved for 2 steps") as stuck:
        ckpt.step(5, samples=8)
    assert "step 5" in str(stuck.value)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=nn.Linear(2, 2), data=sampler) == 4, "step 5 was not taken"


class InPlace(Holder):
    """A sampler that gives out the very state it goes on changing, a tensor among it."""

    def commit(self, samples: int | None = None) -> None:
        self.state["offset"] += samples or 0


@pytest.mark.parametrize("first", [0, torch.zeros(2)], ids=["number", "tensor"])
def test_a_sampler_that_changes_its_state_in_place_is_seen_to_move(first: Any, tmp_path: Path) -> None:
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=InPlace(offset=first))
    for step in range(1, 5):
        ckpt.step(step, samples=8)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=nn.Linear(2, 2), data=InPlace(offset=first)) == 4


def test_an_elastic_sampler_that_is_committed_by_every_step_is_never_stuck(tmp_path: Path) -> None:
    from flashckpt.sampler import ElasticSampler

    sampler = ElasticSampler(20, dp_rank=0, dp_size=1, global_batch_size=8, tail="short")
    ckpt = opened(tmp_path, model=nn.Linear(2, 2), data=sampler)
    for step in range(1, 10):  # three epochs, each with a short batch at its end
        ckpt.step(step)
    crash(ckpt)
    assert sampler.epoch == 3


RIVAL = """
import sys, torch
from flashckpt import Checkpointer
from flashckpt.errors import JobInUseError
ckpt = Checkpointer(sys.argv[1], snapshot_every=1, job="t")
ckpt.track(model=torch.nn.Linear(int(sys.argv[2]), 3))
try:
    ckpt.restore()
except JobInUseError as error:
    print(error)
"""


@pytest.mark.parametrize("width", [3, 7])
def test_the_same_job_id_twice_is_refused_naming_the_holder_whatever_the_layout(
    width: int, tmp_path: Path, shm_dir: Path
) -> None:
    ckpt = opened(tmp_path, model=nn.Linear(3, 3))
    ckpt.step(1)
    before = segments(shm_dir)
    command = [sys.executable, "-c", RIVAL, str(tmp_path), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
    assert f"process {os.getpid()}" in done.stdout
    assert "already running" in done.stdout
    assert segments(shm_dir) == before, "nothing was made or changed"
    ckpt.step(2)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=nn.Linear(3, 3)) == 2


LARGE_BYTES = (4 << 30) + (1 << 20) + 12_345


def free_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not os.environ.get("FLASHCKPT_TEST_LARGE") or free_memory_bytes() < 3.5 * LARGE_BYTES,
    reason="a minute and 13 GB of memory: run once per release with FLASHCKPT_TEST_LARGE=1",
)
def test_a_single_tensor_larger_than_four_gigabytes_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("huge", torch.empty(LARGE_BYTES, dtype=torch.uint8))
    huge: Any = model.huge
    pattern = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8)
    for i, part in enumerate(huge.split(len(pattern))):
        part.copy_(pattern[: len(part)]).add_(i)  # no two parts are equal
    before = xxhash.xxh3_64_hexdigest(huge.numpy())
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t", slots=2)
    ckpt.track(model=model, fenced=["model"])
    ckpt.restore()
    assert ckpt._life is not None
    ckpt._life.memory.wait_ready()
    ckpt.step(1)
    began = time.perf_counter()
    crash(ckpt)
    print("copy and digests", time.perf_counter() - began, "s")
    huge.zero_()
    began = time.perf_counter()
    again = opened(tmp_path, model=model)
    print("restore", time.perf_counter() - began, "s")
    crash(again)
    assert xxhash.xxh3_64_hexdigest(huge.numpy()) == before


def resident_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10
    raise AssertionError(what)


def extra_bytes(root: Path, side: int) -> tuple[int, int]:
    """Return (peak of Python's and numpy's memory, peak of the process's) of the fourth snapshot, above what was there."""
    model = nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(4)], nn.BatchNorm1d(side))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(str(root), snapshot_every=1, job=f"side{side}")
    ckpt.track(model=model, optimizer=optimizer, rng=True)
    ckpt.restore()
    life = ckpt._life
    assert life is not None
    life.memory.wait_ready()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in (1, 2, 3, 4):
        optimizer.step()
        if step == 4:  # all three slots were written once; what the optimizer's own step takes is not counted
            tracemalloc.start()
            before = resident_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        ckpt.step(step)
        life._stager.finish()
    python, process = tracemalloc.get_traced_memory()[1], resident_bytes("VmHWM") - before
    tracemalloc.stop()
    crash(ckpt)
    return python, process


def test_from_the_second_snapshot_on_no_memory_is_taken_that_grows_with_the_state(tmp_path: Path) -> None:
    small, large = extra_bytes(tmp_path / "a", 256), extra_bytes(tmp_path / "b", 1024)
    assert large[0] - small[0] < 20_000, "Python and numpy: digests are 8 bytes per MiB, there and nowhere else"
    assert large[1] < 1 << 20, "the process: the state has 50 MB"


class Gate:
    """Lets `touch` through below a byte, and holds it back above while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, below: int) -> None:
        from flashckpt.memory import segment

        self.open, self._below, self._real = threading.Event(), below, segment.touch  # type: ignore[attr-defined]  # not exported
        monkeypatch.setattr(segment, "RESERVE_BYTES", 64 << 10)
        monkeypatch.setattr(segment, "touch", self._touch)

    def _touch(self, mapping: Any, address: int, start: int, size: int) -> None:
        assert start < self._below or self.open.wait(60)
        self._real(mapping, address, start, size)


def test_the_first_slot_is_used_while_the_others_are_still_being_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, below=900_000)
    model = nn.Linear(300, 300)
    ckpt = opened(tmp_path, model=model)
    life = ckpt._life
    assert life is not None
    assert life.memory.segment is not None
    spec = life.memory.segment.spec
    assert spec.header_at(1) < 900_000 < spec.header_at(2)
    life.memory.wait_first(30)
    ckpt.step(1)
    ckpt.step(2)
    assert (ckpt.stats.get("snapshots"), ckpt.stats.get("skipped")) == (1, 1), "no second slot yet, and nobody waited"
    gate.open.set()
    assert life.memory.wait_ready(30)
    ckpt.step(3)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=model) == 3


def test_snapshots_that_come_before_the_memory_wait_once_and_are_skipped_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashckpt import life

    monkeypatch.setattr(life, "RESERVE_WAIT_S", 0.05)
    gate = Gate(monkeypatch, below=0)
    ckpt = opened(tmp_path, model=nn.Linear(300, 300))
    assert ckpt._life is not None
    waits: list[float | None] = []
    real = ckpt._life.memory.wait_first

    def wait(timeout_s: float | None = None) -> bool:
        waits.append(timeout_s)
        return real(timeout_s)

    monkeypatch.setattr(ckpt._life.memory, "wait_first", wait)
    for step in (1, 2, 3):
        ckpt.step(step)
    assert waits == [0.05, 0.0, 0.0]
    assert ckpt.stats["skipped"] == 3
    gate.open.set()
    assert ckpt._life.memory.wait_ready(30)
    ckpt.step(4)
    crash(ckpt)
    assert opened_as(tmp_path, "t", model=nn.Linear(300, 300)) == 4


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


def test_two_jobs_on_one_machine_keep_their_snapshots_apart(tmp_path: Path, shm_dir: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    kept = [p.detach().clone() for p in (*first.parameters(), *second.parameters())]
    opened_jobs = []
    for job, model in (("one", first), ("two", second)):
        ckpt = Checkpointer(str(tmp_path / job), snapshot_every=1, job=job)
        ckpt.track(model=model)
        ckpt.restore()
        opened_jobs.append(ckpt)
    for step in (1, 2, 3):
        for ckpt in opened_jobs:
            ckpt.step(step)
    for ckpt in opened_jobs:
        crash(ckpt)
    with torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.zero_()
    assert opened_as(tmp_path / "one", "one", model=first) == 3
    assert opened_as(tmp_path / "two", "two", model=second) == 3
    now = [*first.parameters(), *second.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
