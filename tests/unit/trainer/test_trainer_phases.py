"""Phases of a step and of a start, and `--profile`: what is measured, written and refused."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.ranks import run_ranks, values
from support.training import run_config, write_corpus

from flashckpt.errors import ConfigError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.train import step_phases as module
from flashckpt.trainer.train.loop import Trainer, prepare
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.profile_range import NOTHING, Profiled, ProfileRange, phase_steps, profile_range
from flashckpt.trainer.train.step_phases import PHASES, PhaseTimer, StartClock, process_age_s
from flashckpt.trainer.watch import profiler
from flashckpt.trainer.watch.figures import Figures, curves
from flashckpt.trainer.watch.profiler import (
    PhaseProfile,
    RankPhases,
    StepProfiler,
    exposed_s,
    live_tensors,
    phase_lines,
)

TINY = str(ROOT / "configs" / "tiny.toml")


class Clock:
    """Stands for `time`: each reading is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    monotonic = perf_counter


def test_phases_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    timer = PhaseTimer()
    with timer.beside("log"):
        pass
    timer.start()
    began = clock.now
    for phase in ("data", "forward", "backward", "forward", "backward", "sync"):
        timer.reach(phase)
    found = timer.seconds()
    assert found == dict.fromkeys(PHASES, 0.0) | {"data": 1, "forward": 2, "backward": 2, "sync": 1, "log": 1}
    assert sum(found.values()) == clock.now - began + 1  # and what was written beside the step before
    timer.start()
    assert sum(timer.seconds().values()) == 0


def test_a_phase_costs_no_more_than_some_operations() -> None:
    """No lists grow, nothing is kept: a thousand marks leave a timer as it was."""
    timer = PhaseTimer()
    timer.start()
    for _ in range(1000):
        timer.reach("forward")
    assert set(timer.seconds()) == set(PHASES)


def phases_of(rank: int, config_values: Any) -> Any:
    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer.initialise()
        records = [trainer.one_step() for _ in range(2)]
        trainer.data.close()
        return [(record.seconds, record.phases) for record in records]


@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, {"pp": 2}])
def test_every_phase_of_a_trained_step_is_measured(parallel: Any, tmp_path: Path) -> None:
    config = run_config(tmp_path, parallel=parallel, data={"source": write_corpus(tmp_path / "text")})
    for records in values(run_ranks(phases_of, 2, to_values(config), timeout_s=120)):
        for seconds, found in records:
            assert set(found) == set(PHASES)
            assert sum(found.values()) == pytest.approx(seconds)
            assert all(found[name] > 0 for name in ("data", "forward", "backward", "sync", "optimizer", "clip"))


def profiled_steps(rank: int, config_values: Any, phases: int) -> Any:
    """Return each loss, whether marks met in that step, and what the profile says in the end."""
    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        profile = Profiled(phases=phases) if phases else NOTHING
        trainer = Trainer(config, layout, device, profiled=profile)
        trainer.initialise()
        profiler = PhaseProfile(phases, trainer.timer, device)
        losses, meetings, said = [], [], []
        for _ in range(config.train.steps):
            if phases:
                profiler.before()
            record = trainer.one_step()
            losses.append(record.loss.hex())
            meetings.append(trainer.timer.meeting is not None)
            said += profiler.finished(record) if phases else []
        trainer.data.close()
        return losses, meetings, said


@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, {"pp": 2}])
def test_a_profile_of_phases_measures_every_rank_and_changes_no_number(parallel: Any, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "text")
    config = run_config(tmp_path, parallel=parallel, data={"source": source}, train={"steps": 8})
    plain, found = (values(run_ranks(profiled_steps, 2, to_values(config), n, timeout_s=120)) for n in (0, 2))
    for (losses, *_), (same, meetings, said) in zip(plain, found, strict=True):
        assert same == losses
        assert meetings == [False] * 5 + [True] * 2 + [False]
        assert said[0].startswith("phases of 2 ranks, means of 2 steps")
        assert [line.split()[0] for line in said[2:-1]] == [*PHASES, "waiting"]
        assert "Not hidden behind forward, backward, clip, optimizer" in said[-1]


def met_phases(rank: int) -> Any:
    """Three phases by a clock that only this function moves: rank 1 computes for 10 s, rank 0 for 2."""
    clock = Clock()
    for one in (module, profiler):
        vars(one)["time"] = clock  # in this forked process
    timer = PhaseTimer()
    timer.meeting = profile = PhaseProfile(1, timer, torch.device("cpu"))
    timer.start()
    clock.now += 10 if rank else 2
    timer.reach("forward")
    clock.now += 3
    timer.reach("backward", alone=True)
    clock.now += 5
    timer.reach("sync")
    return timer.seconds(), profile._waited


def test_what_a_rank_waits_for_others_is_in_none_of_its_phases() -> None:
    for rank, (seconds, waited) in enumerate(values(run_ranks(met_phases, 2))):
        assert seconds == dict.fromkeys(PHASES, 0.0) | {"forward": 11 if rank else 3, "backward": 4, "sync": 6}
        assert waited == 3, "three meetings, each as long as one reading of the clock"


def test_what_compute_does_not_hide_is_what_a_step_takes_beyond_the_slowest_rank() -> None:
    none = dict.fromkeys(PHASES, 0.0)
    plain = none | {"data": 0.5, "forward": 2.0, "backward": 4.0, "sync": 1.0}
    ranks = [
        RankPhases(plain=plain, synchronised=none | {"forward": f, "backward": 4.0, "sync": 0.25}, waited=w)
        for f, w in ((1.0, 1.0), (2.0, 0.0), (1.5, 0.5))
    ]
    assert exposed_s(ranks) == 1.5
    *lines, last = phase_lines(ranks, 10)
    forward = next(line for line in lines if line.startswith("forward"))
    assert forward.split() == ["forward", "1000.00", "1500.00", "2000.00", "1", "2000.00"]
    assert last.startswith(
        "a step takes 7500.00 ms; its phases one after another, each of its slowest rank, 6250.00 ms"
    )
    assert last.endswith("1500.00 ms (20.0%)")
    assert exposed_s([RankPhases(plain=none, synchronised=none | {"forward": 1.0}, waited=0.0)]) == 0


@pytest.mark.parametrize("text", ["", "0", "-1", "4", "x", "101", "999999999999"])
def test_a_wrong_number_of_profiled_steps_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="not a number of steps"):
        phase_steps(text, 10)


def test_steps_of_phases_fit_into_the_run() -> None:
    assert phase_steps("3", 9) == 3
    assert phase_steps(None, 1) == 0


def test_phases_are_in_the_trace_and_on_the_pages() -> None:
    record = StepRecord(step=1, loss=1.0, norm=1.0, rate=1.0, tokens=1, samples="", seconds=0.5, phases={"data": 0.25})
    assert json.loads(record.to_line())["phases_ms"] == {"data": 250.0}
    assert curves(record, Figures(tokens_per_s=1.0), 1)["phase/data ms"] == 250.0


def test_a_start_is_measured_by_phase_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < process_age_s() < 86400
    clock = StartClock()
    clock.reach("data")
    line = clock.finish("cold")
    assert line is not None
    assert "(cold): imports " in line
    assert line.index("data") < line.index("first step", 10)
    assert clock.finish("cold") is None


@pytest.mark.parametrize(
    "text", ["", "5", "5:", ":5", "5:5", "6:5", "0:3", "1:12", "a:b", "-1:3", "1:2:3", "1:999999999999"]
)
def test_a_wrong_range_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="not a range of steps"):
        profile_range(text, 10)


def test_a_range_is_its_steps() -> None:
    assert profile_range("3:5", 10) == ProfileRange(3, 5)
    assert profile_range("1:11", 10) == ProfileRange(1, 11)
    assert profile_range(None, 10) is None
    with pytest.raises(ConfigError, match="not a range"):
        profile_range("1:102", 1000)


@pytest.mark.parametrize("flag", [["--check"], ["--evaluate"], ["--print-config"], ["--dry-run", "--world", "1"]])
def test_a_profile_of_no_training_is_refused(flag: list[str], capfd: Any) -> None:
    for asked in (["--profile", "1:2"], ["--profile-phases", "2"]):
        assert command.main(["--config", TINY, *asked, *flag]) == 10
        assert "--profile would have no effect" in capfd.readouterr().err


def test_a_trace_and_the_memory_of_some_steps_are_written(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileRange(2, 4), str(tmp_path), 3, torch.device("cpu"))
    kept = torch.zeros(123, 45)
    for step in range(1, 6):
        profiler.before(step)
        assert (profiler._profile is not None) == (step in (2, 3))
        torch.nn.functional.silu(kept)
        profiler.after(step)
    folder = tmp_path / "profile"
    assert {path.name for path in folder.iterdir()} == {
        "rank-3-steps-2-3.trace.json.gz",
        "rank-3-steps-2-3.memory.json.gz",
    }
    with gzip.open(folder / "rank-3-steps-2-3.trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::silu") == 2
    with gzip.open(folder / "rank-3-steps-2-3.memory.json.gz", "rt") as file:
        found = json.load(file)
    ours = [kind for kind in found["kinds"] if kind["shape"] == [123, 45]]
    assert ours == [{"device": "cpu", "dtype": "float32", "shape": [123, 45], "count": 1, "bytes": 4 * 123 * 45}]
    assert found["bytes"] == sum(kind["bytes"] for kind in found["kinds"])


def test_a_profile_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    profiler = StepProfiler(ProfileRange(1, 2), str(tmp_path), 0, torch.device("cpu"))
    profiler.before(1)
    profiler.after(1)
    assert (tmp_path / "profile").is_file()


def test_views_of_one_storage_count_once() -> None:
    whole = torch.zeros(1000, 31)
    views = [whole[start : start + 10] for start in range(0, 1000, 10)]
    kinds = live_tensors()["kinds"]
    assert sum(kind["bytes"] for kind in kinds if kind["shape"] in ([1000, 31], [10, 31])) == whole.nbytes
    assert len(views) == 100


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch warns at the first sparse tensor of a process
def test_tensors_without_a_storage_hinder_no_list() -> None:
    """Whatever else the process holds; the parts of a sparse tensor are no objects of Python until asked for."""
    values = torch.ones(7, 11)
    others = [torch.sparse_coo_tensor(torch.arange(7)[None], values, (9, 11), check_invariants=True)]
    others.append(torch.ones(3, 13).to_mkldnn())
    shapes = [kind["shape"] for kind in live_tensors()["kinds"]]
    assert [7, 11] in shapes
    assert not any(list(other.shape) in shapes for other in others)
