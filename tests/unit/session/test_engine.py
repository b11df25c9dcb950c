"""The engine on one rank: every kind of tensor, lineage, warm starts, what a user meets."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dlrun import processes_of
from support.engine import agent_dir, net, segments, train
from support.one_rank import Holder, agent_of_the_test, crash, opened, opened_as  # noqa: F401 -- fixtures
from support.ranks import wait_for
from torch import nn

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError, NoCheckpointError, ShardGapError, UnsupportedStateError
from flashckpt.native import IMPLEMENTATIONS, implementation
from flashckpt.planning.read_plan import SourceNames
from flashckpt.restore.program import Program
from flashckpt.restore.values import Values, missing_values
from flashckpt.shm.control import RESTORED_FROM, ControlView
from flashckpt.shm.job_directory import jobs_in_memory


def test_a_tracked_run_has_the_trace_of_an_untracked_one_from_the_first_step(tmp_path: Path) -> None:
    assert train(0, "plain", str(tmp_path), 6)["digests"] == train(0, "plain", None, 6)["digests"]


def test_a_run_that_died_goes_on_bit_for_bit_from_memory(tmp_path: Path, copied_by: str) -> None:
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


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, copied_by: str) -> None:
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
    (directory,) = jobs_in_memory()[0]
    (row,) = ControlView(directory.control_path).rows()
    assert (IMPLEMENTATIONS[row.copied_by], RESTORED_FROM[row.restored_from]) == (implementation(), "nothing")
    ckpt.step(1)
    crash(ckpt)
    other = make(2)
    ckpt = opened(tmp_path, model=other)
    assert [RESTORED_FROM[row.restored_from] for row in ControlView(directory.control_path).rows()] == ["memory"]
    crash(ckpt)
    for (name, a), (_, b) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        x, y = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(x, y), name


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


class Optional(Holder):
    flashckpt_optional = True


def test_an_optional_object_stays_as_it_is_only_where_the_snapshot_never_had_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    with pytest.raises(ShardGapError, match="place"):
        opened(tmp_path, model=model, place=Holder(at=7))
    place = Optional(at=7)
    ckpt = opened(tmp_path, model=model, place=place)
    assert place.state == {"at": 7}
    tracked = ckpt._tracked
    nothing = Values([], SourceNames([]), 0)
    assert missing_values(tracked, nothing, None, program=Program(), is_whole=True) == []
    assert missing_values(tracked, nothing, None, program=Program(), is_whole=False) == [
        "place"
    ]  # a rank that is lost may have had it
    ckpt.step(2)
    crash(ckpt)
    place = Optional(at=0)
    crash(opened(tmp_path, model=model, place=place))
    assert place.state == {"at": 7}


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


@pytest.mark.matrix
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


def test_the_cycle_collector_rests_while_a_restore_plans_and_runs_again_afterwards(tmp_path: Path) -> None:
    class Witness(Holder):
        def __init__(self) -> None:
            super().__init__(asked=0)
            self.saw: set[bool] = set()

        def state_dict(self) -> dict[str, Any]:
            self.saw.add(gc.isenabled())
            return super().state_dict()

    witness = Witness()
    ckpt = Checkpointer(tmp_path, snapshot_every=1, persist_every=100)
    ckpt.track(model=nn.Linear(2, 2), witness=witness)
    witness.saw.clear()
    ckpt.restore()
    assert witness.saw == {False}
    assert gc.isenabled()
    with pytest.raises(ConfigError, match="called twice"):
        ckpt.restore()
    assert gc.isenabled(), "also where it fails"
    crash(ckpt)


def test_the_layout_net_of_the_rank_tests_is_deterministic() -> None:
    first, second = (next(net().parameters()) for _ in range(2))
    assert torch.equal(first, second)


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
    wait_for(lambda: not processes_of(shm_dir), what="the end of the daemon, which tidies up the root after its commit")
    assert not segments(shm_dir), "the daemon removes the memory of an ended job"
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    other = nn.Linear(5, 5)
    reader = Checkpointer.readonly(str(tmp_path))
    reader.track(model=other)
    report = reader.restore(step=2)
    assert (report.step, report.tier) == (2, "storage")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before


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
