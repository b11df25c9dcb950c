"""The pure parts: learning rate, guard, trace, weights by name, FLOPs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from flashckpt.errors import DivergedError
from flashckpt.trainer.config import GuardConfig, from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.optim import OptimConfig
from flashckpt.trainer.flops import count_parameters, flops_per_token
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.apply import MicroBatch, build_stage
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train.anomaly import Guard
from flashckpt.trainer.train.metrics import StepRecord, Trace, read_trace
from flashckpt.trainer.train.phases import learning_rate
from flashckpt.trainer.watch.figures import ProgressLine, StepMeter

RECORD: dict[str, Any] = {"norm": 1.0, "rate": 0.1, "tokens": 64, "samples": "ab", "seconds": 0.5}


@pytest.mark.parametrize("shape", ["constant", "cosine", "linear", "wsd"])
def test_the_rate_warms_up_and_ends_where_it_should(shape: Any) -> None:
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=10, schedule=shape)
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(1.0 if shape == "constant" else 0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[79] == 1.0 if shape in ("constant", "wsd") else rates[79] < 1.0


def test_non_finite_steps_are_refused_and_more_than_the_budget_end_the_run() -> None:
    guard = Guard(GuardConfig(max_interventions=3))
    assert guard.admit(1.0, 2.0, step=1)
    assert not guard.admit(math.nan, 2.0, step=2)
    assert not guard.admit(1.0, math.inf, step=3)
    assert guard.admit(1.0, 1.0, step=4)
    assert not guard.admit(math.nan, 1.0, step=5)
    with pytest.raises(DivergedError, match="3 steps skipped or rolled back"):
        guard.admit(math.nan, 1.0, step=6)
    assert guard.skipped == 4


@pytest.mark.parametrize("loss", [8.0, 0.1])
def test_a_loss_far_off_the_window_is_a_spike_both_ways(loss: Any) -> None:
    guard = Guard(GuardConfig(window=8))
    for i in range(8):
        assert not guard.is_spike(loss)  # a window that is not full judges nobody
        guard.record(3.0 + 0.01 * (-1) ** i, 1.0)
    assert guard.is_spike(loss)
    assert not guard.is_spike(3.05)
    resumed = Guard(GuardConfig(window=8))
    resumed.load_state_dict(guard.state_dict())
    assert resumed.state_dict() == guard.state_dict()


def test_a_gradient_norm_far_above_the_window_is_a_spike_where_that_is_asked() -> None:
    guard = Guard(GuardConfig(window=8, norm_mads=10.0))
    for i in range(8):
        assert not guard.is_norm_spike(50.0)
        guard.record(3.0, 1.0 + 0.1 * (-1) ** i)
    assert guard.is_norm_spike(2.2)
    assert not guard.is_norm_spike(1.9)
    assert not guard.is_norm_spike(0.0), "a small one is no harm"
    resumed = Guard(GuardConfig(window=8, norm_mads=10.0))
    resumed.load_state_dict(guard.state_dict())
    assert resumed.is_norm_spike(2.2)
    silent = Guard(GuardConfig(window=8))
    silent.load_state_dict(guard.state_dict())
    assert not silent.is_norm_spike(1e9)


def test_rollbacks_and_skips_are_paid_from_one_budget() -> None:
    guard = Guard(GuardConfig(max_interventions=2))
    guard.record(3.0, 1.0)
    guard.count_rollback(9.0, 1.0, step=3)
    guard.skip_spike(9.0, 1.0)
    with pytest.raises(DivergedError, match="the budget of interventions is used up"):
        guard.count_rollback(9.0, 1.0, step=3)


def test_a_resumed_trace_has_no_step_twice_and_keeps_what_was_lost(tmp_path: Any) -> None:
    trace = Trace(tmp_path, 0)
    for step in range(1, 6):
        trace.write(StepRecord(step=step, loss=1.0 / step, **RECORD).to_line())
    trace.close()
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write('{"step": 6, "loss"')  # killed in the middle of a line
    trace = Trace(tmp_path, 3)
    trace.write(StepRecord(step=4, loss=0.25, **RECORD).to_line())
    trace.close()
    lines = read_trace(tmp_path / "trace.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[2]["loss"] == (1 / 3).hex()
    assert [json.loads(line)["step"] for line in (tmp_path / "abandoned.jsonl").read_text().splitlines()] == [4, 5]


def test_the_progress_line_says_what_a_user_wants_to_know() -> None:
    line = ProgressLine(steps=100, every=1)
    record = StepRecord(step=10, loss=2.5, stall_ms=0.4, **RECORD)
    figures = StepMeter(batch_tokens=1000, peak_tflops=1.0, flops=1e9, world=2).measure(record)
    line.show(record, figures)
    text = line.text(record, figures)
    assert text.startswith(
        "step 10/100  loss 2.5000  gnorm 1.00  lr 1.0e-01  tok/s 2,000  mfu 100.0%  snap 0.4 ms  eta 0m45s"
    )


def test_stages_hold_each_parameter_of_the_model_once() -> None:
    config = from_values({"model": {"dim": 16, "ffn": 32}, "parallel": {"pp": 2, "schedule": "Interleaved1F1B"}})
    layout = resolve_layout(config, 2)
    whole = dict(Transformer(config.model, config.train.seq_len).named_parameters())
    parts: dict[str, torch.Tensor] = {}
    for stage in range(layout.stages):
        part = dict(build_stage(config, layout, stage).named_parameters())
        assert all(parameter.is_meta for parameter in part.values())
        assert not parts.keys() & part.keys()  # names are global: stages never collide
        parts |= part
    assert {name: part.shape for name, part in parts.items()} == {name: part.shape for name, part in whole.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_stages_know_the_shapes_that_go_through_them(precision: str) -> None:
    """A stage that knows nothing, or too little, has torch send a trial micro-batch through all of them."""
    values = {
        "model": {"dim": 16, "ffn": 32, "vocab": 300},
        "parallel": {"pp": 2},
        "train": {"seq_len": 24, "global_batch": 12, "micro_batch": 3, "precision": precision},
    }
    config = from_values(values)
    layout = resolve_layout(config, 2)
    for stage in range(2):
        ends = MicroBatch.of(config, layout).ends(is_first=stage == 0, is_last=stage == 1)
        part = build_stage(config, layout, stage)
        made = part.to(getattr(torch, precision))(ends["input_args"])
        assert (made.shape, made.dtype) == (ends["output_args"].shape, ends["output_args"].dtype)
        assert ends["output_args"].requires_grad


def test_logits_that_stay_sharded_are_left_to_torch() -> None:
    values = {"parallel": {"pp": 2, "tp": 2, "loss_parallel": True}, "model": {"heads": 4, "kv_heads": 2}}
    config = from_values(values)
    assert MicroBatch.of(config, resolve_layout(config, 4)).ends(is_first=True, is_last=False) == {}


def test_parameter_count_and_flops_follow_the_model() -> None:
    config = ModelConfig(dim=32, heads=4, kv_heads=2, ffn=48, layers=3)
    model = Transformer(config, 16)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    table = 256 * 32  # a row of it is read, and multiplied with nothing
    assert flops_per_token(config, 16) == 6 * (count_parameters(config) - table) + 12 * 3 * 32 * 16
    sparse = ModelConfig(dim=32, heads=4, kv_heads=2, ffn=48, layers=3, experts=4, experts_per_token=1)
    assert count_parameters(sparse) == sum(p.numel() for p in Transformer(sparse, 16).parameters())
    assert count_parameters(sparse, active=True) == count_parameters(config) + 3 * 32 * 4


@pytest.mark.parametrize(
    "kind",
    [
        {"head_dim": 12, "qkv_bias": True, "qk_norm": True},
        {"experts": 4, "shared_ffn": 20, "experts_per_token": 4},
        {"tied_embeddings": True},
    ],
)
def test_parameters_of_every_kind_are_counted(kind: dict[str, Any]) -> None:
    config = ModelConfig(dim=32, heads=4, kv_heads=2, ffn=48, layers=3, **kind)
    held = {name: p.numel() for name, p in Transformer(config, 16).named_parameters()}
    if config.tied_embeddings:
        del held["output.weight"]
    assert count_parameters(config) == sum(held.values())
    assert count_parameters(config, active=True) == sum(held.values())
