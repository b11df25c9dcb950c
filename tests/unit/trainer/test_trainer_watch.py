"""The figures of a run and its pages: what is measured, what TensorBoard and wandb get, and what their failures cost."""

from __future__ import annotations

import json
import logging
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from support.ranks import wait_for
from support.training import run_config

from flashckpt.errors import ConfigError
from flashckpt.report import RestoreReport
from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.flops import count_parameters, flops_per_token, peak_tflops
from flashckpt.trainer.train.metrics import StepRecord, Trace
from flashckpt.trainer.train.step_phases import FenceClock
from flashckpt.trainer.watch import reporter
from flashckpt.trainer.watch.engine import EngineWatch, Events
from flashckpt.trainer.watch.figures import Figures, StepMeter, curves
from flashckpt.trainer.watch.reporter import Beside, Reporter
from flashckpt.trainer.watch.wandb_page import PATIENCE, RUN_ID, WandbPage, last_step

RECORD: dict[str, Any] = {"norm": 1.25, "rate": 0.1, "tokens": 64, "samples": "ab", "seconds": 0.5, "loss": 2.5}


def record(step: int, **other: Any) -> StepRecord:
    return StepRecord(step=step, **{**RECORD, **other})


# -- what is measured


def test_a_token_costs_what_it_is_multiplied_with() -> None:
    sizes: dict[str, Any] = {"dim": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "layers": 3, "vocab": 512}
    plain = ModelConfig(**sizes)
    body = count_parameters(plain) - 512 * 32
    assert flops_per_token(plain, 16) == 6 * body + 12 * 3 * 4 * 8 * 16
    assert flops_per_token(ModelConfig(**sizes, tied_embeddings=True), 16) == flops_per_token(plain, 16)
    assert flops_per_token(ModelConfig(**{**sizes, "kv_heads": 4}), 16) == flops_per_token(plain, 16) + 6 * 3 * 32 * 32
    wide = ModelConfig(**sizes, head_dim=16)  # attention by the size of heads, not of the model
    assert flops_per_token(wide, 16) == 6 * (count_parameters(wide) - 512 * 32) + 12 * 3 * 4 * 16 * 16
    windowed = ModelConfig(**sizes, window=4, window_from=1)
    assert flops_per_token(windowed, 16) == 6 * body + 12 * 4 * 8 * (16 + 4 + 4)
    assert flops_per_token(ModelConfig(**sizes, window=99), 16) == flops_per_token(plain, 16)
    sparse = ModelConfig(**sizes, experts=8, experts_per_token=2)
    assert flops_per_token(sparse, 16) == flops_per_token(plain, 16) + 6 * 3 * (3 * 32 * 48 + 32 * 8)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090 D", 0),
        ("NVIDIA L40", 0),
        ("NVIDIA A10G", 0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0),
        ("NVIDIA Tomorrow", 0),
        ("", 0),
    ],
)
def test_peaks_are_those_of_the_devices_that_are_known(device: str, peak: float) -> None:
    assert peak_tflops(device) == peak


@pytest.mark.parametrize(
    ("device", "set_tflops", "mfu"),
    [("NVIDIA H100 80GB HBM3", 0.0, 989.0), ("NVIDIA H100 PCIe", 2.0, 2.0), ("", 0.0, 0.0)],
)
def test_mfu_is_of_the_devices_peak_unless_another_one_is_set(
    tmp_path: Path, device: str, set_tflops: float, mfu: float
) -> None:
    reporter = Reporter(run_config(tmp_path, log={"peak_tflops": set_tflops}), world=2, after=0, device=device)
    found = reporter._meter.measure(record(1)).mfu
    reporter.close()
    config = run_config(tmp_path)
    tokens_per_s = config.train.global_batch * config.train.seq_len / 0.5
    flops = flops_per_token(config.model, config.train.seq_len)
    assert found == (pytest.approx(tokens_per_s * flops / (mfu * 1e12 * 2)) if mfu else None)


class Engine:
    """Stands for a Checkpointer: callbacks, and counters."""

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}


def report(step: int, session: int, tier: str) -> RestoreReport:
    return RestoreReport(step=step, generation=1, life=session, tier_bytes={tier: 10})


def test_the_lag_is_what_is_in_memory_and_not_on_storage() -> None:
    events, engine = Events(), Engine()
    watch = EngineWatch(events)
    watch.attach(engine)  # type: ignore[arg-type]
    watch.began(None)
    found: Any = engine
    assert watch.lag == 0
    found.on_snapshot(5)
    found.on_snapshot(10)
    assert (watch.snapshot, watch.lag) == (10, 10)
    found.on_commit(1, 5)
    assert (watch.committed, watch.lag) == (5, 5)
    found.on_failure(ConfigError("the copy failed"))
    assert [event.text for event in events.newest(9)] == [
        "checkpoint of generation 1 committed",
        "a later snapshot was discarded: the copy failed",
    ]


def test_after_a_restore_the_lag_is_known_as_soon_as_the_commit_is() -> None:
    events, engine = Events(), Engine()
    watch = EngineWatch(events)
    watch.attach(engine)  # type: ignore[arg-type]
    watch.began(report(20, 3, "memory"))
    assert (watch.snapshot, watch.lag, watch.restarts) == (20, None, 2)
    engine.on_commit(2, 15)  # type: ignore[attr-defined]  # of before
    assert watch.lag == 5
    assert events.newest(9) == []
    watch.began(report(20, 4, "storage"))
    assert (watch.lag, watch.restarts) == (0, 3)
    assert watch.restored == "restored from storage: generation 4 begins"


def test_fences_are_counted_per_step_and_from_zero_in_another_session() -> None:
    clock, engine = FenceClock(), Engine()
    checkpointer: Any = engine
    assert clock.ms(checkpointer) == 0.0
    for total, since in ((0.25, 250.0), (0.75, 500.0), (0.75, 0.0)):
        engine.stats["fence_s"] = total
        assert clock.ms(checkpointer) == since
    clock.begin()
    engine.stats["fence_s"] = 0.5
    assert clock.ms(checkpointer) == 500.0


def test_restarts_under_dlrun_count_before_anything_was_restored(monkeypatch: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_RESTART", "2")
    assert EngineWatch(Events()).restarts == 2
    assert StepMeter(batch_tokens=1).measure(record(1)).restarts == 2


def test_unknown_figures_have_no_curve() -> None:
    names = curves(record(1), Figures(tokens_per_s=2.0), 1)
    assert not {"throughput/MFU", "memory/device peak GiB", "checkpoint/persist lag steps"} & names.keys()
    found = StepMeter(batch_tokens=100, device_bytes=lambda: 3 << 30).measure(record(1))
    assert (found.tokens_per_s, found.device_gib) == (200.0, 3.0)
    assert found.host_gib is not None
    assert 0.0 < found.host_gib < 1000.0


# -- TensorBoard


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    tags = found.Tags()
    assert any("events" in name for name in tags["tensors"])
    return {name: [(point.step, point.value) for point in found.Scalars(name)] for name in tags["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_page_has_every_figure_once_per_step_over_a_restart(tmp_path: Path) -> None:
    config = run_config(tmp_path, log={"tensorboard": True, "peak_tflops": 1.0})
    watch, engine = EngineWatch(Events()), Engine()
    watch.attach(engine)  # type: ignore[arg-type]
    engine.on_snapshot(2)  # type: ignore[attr-defined]
    for after, last in ((0, 4), (2, 6)):
        reporter = Reporter(config, world=1, after=after, engine=watch, device_bytes=lambda: 1 << 30)
        watch.began(report(after, 2, "storage") if after else None)
        reporter.note(after, "restored")
        for step in range(after + 1, last + 1):
            reporter.step(record(step, loss=100.0 * after + step, stall_ms=0.5, channels={"code": 2.0}))
        reporter.close()
    found = points(tmp_path / "log")
    assert {*found} == {
        "train/loss", "train/loss code", "train/gradient norm", "train/learning rate",
        "throughput/tokens per second", "throughput/tokens per second and device", "throughput/seconds per step",
        "throughput/MFU", "throughput/MFU planned", "memory/device peak GiB", "memory/host resident GiB",
        "checkpoint/snapshot stall ms", "checkpoint/persist lag steps", "checkpoint/restarts so far",
    }  # fmt: skip
    assert all([step for step, _ in curve] == [1, 2, 3, 4, 5, 6] for curve in found.values())
    assert [value for _, value in found["train/loss"]] == [1, 2, 203, 204, 205, 206]
    assert [value for _, value in found["checkpoint/restarts so far"]] == [0, 0, 1, 1, 1, 1]
    assert found["checkpoint/snapshot stall ms"][0] == (1, 0.5)


# -- the thread


def test_a_page_that_hangs_holds_no_step_and_is_given_up_at_the_end(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(reporter, "LIMIT", 3)
    release, seen = threading.Event(), list[int]()
    thread = Beside("the page")
    thread.do(release.wait)
    wait_for(thread._calls.empty, what="the thread to hang")
    for number in range(5):
        thread.do(lambda number=number: seen.append(number))  # type: ignore[misc]  # bound now
    assert not thread.close(lambda: seen.append(-1), timeout_s=0.01)
    assert "2 steps were left out" in caplog.text
    assert "did not finish within 0.01 s" in caplog.text
    release.set()
    wait_for(lambda: len(seen) == 3, what="what could be kept")


def test_a_call_that_raises_does_not_end_the_thread(caplog: Any) -> None:
    seen: list[int] = []
    thread = Beside("the page")
    thread.do(lambda: 1 / 0)
    thread.do(lambda: seen.append(1))
    assert thread.close(lambda: seen.append(2), timeout_s=30.0)
    assert seen == [1, 2]
    assert "the page failed; training continues" in caplog.text


# -- wandb


class FakeRun:
    """Stands for wandb's run: keeps its history by id as the server does, and refuses steps that it has."""

    def __init__(self, module: Any, words: dict[str, Any]) -> None:
        self.module, self.words, self.id = module, words, words["id"]
        self.offline = words["mode"] == "offline"
        self.url, self.dir = "https://pages/run", words["dir"]
        self.history = module.pages.setdefault(self.id, [])
        self.step = 0 if self.offline or not self.history else self.history[-1][0] + 1
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        if self.module.is_down:
            raise RuntimeError("the service has gone\nand more")
        assert not self.history or step > self.history[-1][0], "wandb drops it, with a warning"
        self.history.append((step, values))

    def finish(self) -> None:
        self.finished = True
        if self.module.is_down:
            raise RuntimeError("the service has gone")


@pytest.fixture
def wandb(monkeypatch: Any) -> Any:
    module: Any = types.ModuleType("wandb")
    module.pages, module.runs, module.settings, module.is_down, module.refuses = {}, [], [], False, False

    def init(**words: Any) -> FakeRun:
        if module.refuses:
            raise ValueError("No API key configured")
        module.runs.append(FakeRun(module, words))
        return module.runs[-1]  # type: ignore[no-any-return]  # a module has no types

    module.Settings, module.setup, module.init = lambda **words: words, lambda settings: settings, init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("FLASHCKPT_RESTART", raising=False)
    return module


def train(config: Any, after: int, last: int) -> None:
    reporter = Reporter(config, world=1, after=after)
    for step in range(after + 1, last + 1):
        reporter.step(record(step))
    reporter.close()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_restarted_run_continues_its_page_without_a_step_twice(tmp_path: Path, wandb: Any, mode: str) -> None:
    config = run_config(tmp_path, log={"wandb": "project", "wandb_run": "name", "wandb_mode": mode})
    for after, last in ((0, 5), (2, 4), (3, 8)):  # what is rolled back is trained again
        train(config, after, last)
    (page,) = wandb.pages.values()
    assert [step for step, _ in page] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert page[0][1] == curves(
        record(1), Figures(tokens_per_s=512.0, host_gib=page[0][1]["memory/host resident GiB"]), 1
    )
    assert {run.id for run in wandb.runs} == {(tmp_path / "log" / RUN_ID).read_text().strip()}
    assert all(run.finished for run in wandb.runs)
    words = wandb.runs[0].words
    assert {name: words[name] for name in ("project", "name", "mode", "resume")} == {
        "project": "project", "name": "name", "mode": mode, "resume": "allow",
    }  # fmt: skip
    assert (words["settings"]["silent"], words["settings"]["console"]) == (True, "off")
    assert words["config"] == recorded_values(config)


def test_another_run_in_the_folder_gets_another_page_but_not_a_restart_of_this_one(
    tmp_path: Path, wandb: Any, monkeypatch: Any
) -> None:
    config = run_config(tmp_path, log={"wandb": "project"})
    train(config, 0, 2)
    train(config, 0, 2)
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")  # dead before its first snapshot
    train(config, 0, 4)
    assert [[step for step, _ in page] for page in wandb.pages.values()] == [[1, 2], [1, 2, 3, 4]]


def test_secrets_of_the_configuration_are_not_sent(tmp_path: Path, wandb: Any) -> None:
    options = {"secret": "hush", "endpoint_url": "http://127.0.0.1:9"}
    config = run_config(tmp_path, log={"wandb": "p"}, checkpoint={"root": str(tmp_path), "storage_options": options})
    train(config, 0, 1)
    assert "hush" not in json.dumps(wandb.runs[0].words["config"])


def test_a_page_that_cannot_be_opened_is_tried_again_later(tmp_path: Path, wandb: Any, caplog: Any) -> None:
    wandb.refuses = True
    page = WandbPage(run_config(tmp_path, log={"wandb": "p"}).log, {}, 0)
    for step in range(1, 11):
        page.add({"loss": 1.0}, step)
    wandb.refuses = False
    for step in range(11, 11 + PATIENCE):
        page.add({"loss": 1.0}, step)
    page.close()
    assert caplog.text.count("wandb cannot be written (ValueError: No API key configured)") == 1
    (run,) = wandb.runs
    assert len(run.history) == 10 + PATIENCE - (PATIENCE - 1)
    assert f"{PATIENCE - 1} lines were lost" in caplog.text


def test_a_page_that_fails_costs_points_and_not_the_run(tmp_path: Path, wandb: Any, caplog: Any) -> None:
    config = run_config(tmp_path, log={"wandb": "p"})
    reporter = Reporter(config, world=1, after=0)
    reporter.step(record(1))
    wait_for(lambda: wandb.pages and any(wandb.pages.values()), what="the first point")
    wandb.is_down = True
    reporter.step(record(2))
    reporter.close()
    assert "wandb cannot be written (RuntimeError: the service has gone)" in caplog.text
    assert (tmp_path / "log" / "trace.jsonl").read_text().count("\n") == 2


def test_without_wandb_one_warning_names_the_command(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        train(run_config(tmp_path, log={"wandb": "p"}), 0, 5)
    assert [entry.getMessage() for entry in caplog.records] == [
        "log.wandb is set, but wandb is not installed: pip install 'flashckpt[wandb]'"
    ]


def test_what_was_rolled_back_is_known_by_its_highest_step(tmp_path: Path) -> None:
    path = tmp_path / "abandoned.jsonl"
    assert last_step(path) == 0
    trace = Trace(tmp_path, 0)
    for step in range(1, 8):
        trace.write(record(step).to_line())
    trace.close()
    Trace(tmp_path, 3).close()
    assert last_step(path) == 7
    with path.open("a") as file:
        file.write('not JSON\n{"step": "x"}\n[]\n')
    assert last_step(path) == 7


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ({"display": "loud"}, "log.display has no such choice"),
        ({"wandb": "p", "wandb_mode": "sometimes"}, "log.wandb_mode has no such choice"),
        ({"wandb_run": "x"}, "log.wandb_run would have no effect"),
        ({"wandb_mode": "offline"}, "log.wandb_mode would have no effect"),
        ({"wandb_projekt": "x"}, "unknown setting 'log.wandb_projekt'"),
    ],
)
def test_wrong_settings_are_refused(log: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_values({"log": log})
