"""`plan`: what it says besides the step, sizes compared, and what a run says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from flashckpt.errors import ConfigError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config import from_values, read_config
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan import beyond
from flashckpt.trainer.plan.command import show_days
from flashckpt.trainer.plan.feedback import feedback
from flashckpt.trainer.plan.forecast import HOST_RATE, memory, step_time
from flashckpt.trainer.plan.gpus import GPUS
from flashckpt.trainer.plan.kernels import intensities, product_intensity, straggling
from flashckpt.trainer.plan.search import search, to_paste
from flashckpt.trainer.train.metrics import StepRecord

EIGHT = ROOT / "configs" / "llama3-8b.toml"
H100 = GPUS["h100"]


def planned(*words: str, capfd: Any) -> dict[str, Any]:
    assert command.main(["plan", "--config", str(EIGHT), "--gpu", "h100", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_a_run_has_its_flops_its_bytes_and_its_use(capfd: Any) -> None:
    found = planned("--gpus", "16", "--tokens", "1T", capfd=capfd)
    run, step = found["run"], found["step"]
    assert run["flops"] == found["model"]["flops_per_token"] * 1e12
    steps = 1e12 / step["tokens"]
    assert run["wire_bytes"] == pytest.approx(sum(one["sent"] for one in found["wire"]) * 16 * steps)
    assert step["gpu_hours"] == pytest.approx(run["gpu_days"] * 24)
    seconds = steps * step["estimate"]["seconds"]
    assert step["days"] * 86400 == pytest.approx(seconds * 1.05 / found["failures"]["goodput"])
    assert not run["needs_thousand"]
    assert planned("--gpus", "16", "--tokens", "300T", capfd=capfd)["run"]["needs_thousand"]
    use = run["inference"]
    assert use["flops_per_token"] == 2 * found["model"]["parameters"]
    assert use["weight_bytes"] == 2 * found["model"]["parameters"]
    assert use["kv_bytes_per_token"] == 2 * 2 * 32 * 1024  # keys and values of 32 layers in two bytes
    assert run["rule_bytes"] == 6 * found["model"]["parameters"]


def test_a_product_of_few_tokens_is_bound_by_memory() -> None:
    """2 b d f FLOPs over 2 b d + 2 d f + 2 b f bytes are about b of them per byte: 240 for a TPU or an A100."""
    assert product_intensity(8, 8192, 8192, 2) == pytest.approx(8, rel=0.01)
    config = read_config(EIGHT)
    layout = resolve_layout(config, 8)
    bound = {one["part"]: one["bound"] for one in intensities(config, layout, H100)}
    assert bound["feed-forward"] == bound["head"] == "compute"
    assert bound["one token generated"] == bound["norms, gates, residuals"] == "memory"


def test_tokens_are_epochs_of_what_is_prepared(monkeypatch: Any) -> None:
    sources = [
        {"kind": "text", "urls": ["x"], "channel": name, "weight": weight} for name, weight in (("en", 3), ("zh", 1))
    ]
    config = from_values({"data": {"sources": sources}})
    parts = [{"train": {"tokens": n, "documents": 1}, "held": {"tokens": 0}} for n in (100, 200, 50)]
    index = {"sources": [parts[:2], parts[2:]]}
    monkeypatch.setattr(beyond, "check_prepared", lambda _: index)
    assert beyond.epochs(config, 4000) == {"en": 10.0, "zh": 20.0}
    monkeypatch.undo()
    assert beyond.epochs(config, 4000) == {}


FULL = ("--parallel.activation_checkpoint", "full")  # fits all sizes


def test_sizes_are_compared(capfd: Any) -> None:
    found = planned("--gpus", "16,32,7,8", "--tokens", "1T", "--train.global_batch", "64", *FULL, capfd=capfd)
    assert found["gpus"] == 16
    first, twice, none, half = found["scaling"]
    assert (first["speedup"], first["efficiency"]) == (1, 1)
    assert 1 < twice["speedup"] < 2
    assert twice["gpu_hours"] > first["gpu_hours"]
    assert twice["efficiency"] == twice["speedup"] / 2
    assert half["gpus"] == 8
    assert "problem" in none or none["gpus"] == 7
    assert command.main(["plan", "--config", str(EIGHT), "--gpu", "h100", "--gpus", "16,8"]) == 0
    assert "speed-up" in capfd.readouterr().out


def test_many_days_are_years() -> None:
    assert (show_days(999), show_days(1.07e5)) == ("999 days", "293.0 years")


def test_a_step_waits_for_the_slowest_rank() -> None:
    assert straggling(1) == 1
    assert straggling(16384) == pytest.approx(1.088, abs=0.001)


def test_a_search_puts_into_host_memory_what_does_not_fit_and_says_what_it_costs() -> None:
    config = read_config(EIGHT)
    small = replace(H100, memory=30 * 10**9)
    found = search(config, 2, small, ranks_per_node=2).ranked[0]
    assert found.config.parallel.offload == "state"
    assert 'offload = "state"' in to_paste(found)
    parameters, gathers = found.memory.held.parameters, 2 * found.layout.micro_batches
    scatters = found.layout.micro_batches if found.config.parallel.zero >= 2 else 1
    gathers = gathers if found.config.parallel.zero == 3 else 1
    moved = found.time.host_s * HOST_RATE - gathers * parameters - scatters * found.memory.held.gradients
    assert moved == pytest.approx(2 * found.memory.moved * found.layout.micro_batches, abs=1e3)
    assert found.time.estimate_s >= found.time.host_s


# -- a run beside its plan


def lines(seconds: float, count: int = 20, **phases: float) -> list[dict[str, Any]]:
    record = StepRecord(step=1, loss=2.0, norm=1.0, rate=1e-3, tokens=9, samples="", seconds=seconds, stall_ms=4.0,
                        phases={name: share * seconds for name, share in phases.items()})  # fmt: skip
    slow = replace(record, seconds=50 * seconds)
    return [json.loads(one.to_line(device_gib=20.0)) for one in [slow] * 5 + [record] * count]


def test_a_run_says_the_efficiency_that_agrees_with_it_and_what_to_change(tmp_path: Path, capfd: Any) -> None:
    words = ["--gpus", "16", "--efficiency", "0.74"]
    slower = planned(*words[:2], "--efficiency", "0.51", capfd=capfd)["step"]["estimate"]["seconds"]
    text = [json.dumps(one) for one in lines(slower, data=0.08, forward=0.3, snapshot=0.001)]
    (tmp_path / "trace.jsonl").write_text("\n".join(text) + "\n")
    found = planned(*words, "--measured", str(tmp_path), capfd=capfd)["measured"]
    assert found["efficiency"] == pytest.approx(0.51, abs=0.001)
    assert found["planned_mfu"] > found["mfu"]
    assert (found["steps"], found["device_bytes"]) == (20, 20 * 2**30)
    assert found["phases"]["data"] == pytest.approx(0.08, abs=0.001)
    assert [one.split(":")[0] for one in found["change"]][:1] == ["data takes 8% of a step"]
    assert not any("snapshot" in one for one in found["change"])
    command.main(["plan", "--config", str(EIGHT), "--gpu", "h100", *words, "--measured", str(tmp_path)])
    summary = capfd.readouterr().out.split("\n\n")[0]
    assert "as measured: --efficiency 0.51 (planned: 0.74)" in summary


def inverse(value: float) -> float:
    return 1 / value


def test_a_run_that_no_efficiency_explains_says_so() -> None:
    config = read_config(EIGHT)
    layout = resolve_layout(config, 16)
    needed = memory(config, layout)

    def seconds(efficiency: float) -> float:
        return step_time(config, layout, H100, needed, ranks_per_node=8, efficiency=efficiency).estimate_s

    found = feedback(lines(1e-3), config, needed, gpu=H100, seconds=seconds, mfu=inverse, planned=0.6)
    assert found["efficiency"] is None
    with pytest.raises(ConfigError, match="too few steps"):
        feedback(lines(1.0, count=0), config, needed, gpu=H100, seconds=seconds, mfu=inverse, planned=0.6)
