"""What a plan says besides the step: the whole run, more or fewer GPUs, epochs of the data, and the trained model's use. Pure but for the data's index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from flashckpt.errors import ConfigError, DataError, LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.prepared import check_prepared
from flashckpt.trainer.flops import count_parameters, training_days
from flashckpt.trainer.parallel.layout import Layout
from flashckpt.trainer.plan.forecast import OUTSIDE, StepTime
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.kernels import intensities
from flashckpt.trainer.prepare.channels import channels_of_index

THOUSAND, WORTH_DAYS = 1000, 8192
"""A run that takes fewer GPU days needs no thousand GPUs: a rule of thumb, eight days of a thousand."""

RULE_BYTES = 6
"""Bytes per parameter that a 16-bit model needs to be used, with its caches and the room around it: a rule of thumb."""


def run_days(config: RunConfig, time: StepTime, tokens: float, goodput: float) -> float:
    """Return the days of a run: its steps, what failures and checkpoints take of the time, and what is outside of steps."""
    rate = config.train.global_batch * config.train.seq_len / time.estimate_s
    return training_days(tokens, rate) * (1 + OUTSIDE) / goodput


def run_document(
    config: RunConfig, layout: Layout, time: StepTime, gpu: Gpu, *, tokens: float, goodput: float
) -> dict[str, Any]:
    """Return totals of a run, whether many GPUs pay, FLOPs per byte, and what the model's use takes, as JSON.

    Args:
        config: The run.
        layout: Its layout.
        time: Of its step.
        gpu: What each device can do.
        tokens: To train.
        goodput: Share of the time that failures and checkpoints leave.
    """
    days = run_days(config, time, tokens, goodput)
    steps = tokens / (config.train.global_batch * config.train.seq_len)
    return {
        "flops": time.flops * tokens,
        "wire_bytes": sum(one.sent for one in time.traffic) * layout.world * steps,
        "gpu_days": days * layout.world,
        "needs_thousand": days * layout.world >= WORTH_DAYS,
        "epochs": epochs(config, tokens),
        "rule_bytes": RULE_BYTES * count_parameters(config.model),
        "intensity": intensities(config, layout, gpu),
        "ridge": gpu.flops / gpu.memory_rate,
        "inference": inference(config, gpu),
    }


def epochs(config: RunConfig, tokens: float) -> dict[str, float]:
    """Return how often a run reads each source of prepared text, by channel; {} where none is prepared."""
    try:
        index = check_prepared(config)
    except (DataError, ConfigError):
        return {}
    return {name: one.epochs for name, one in channels_of_index(config, index, tokens).items()}


def inference(config: RunConfig, gpu: Gpu) -> dict[str, float]:
    """Return what one token costs to generate in 16 bits: 2 N FLOPs, the weights read once, and its keys and values kept."""
    model = config.model
    active = count_parameters(model, active=True)
    weights, of_token = 2 * count_parameters(model), 4 * model.layers * model.kv_heads * model.head_size
    return {
        "flops_per_token": 2.0 * active,
        "weight_bytes": weights,
        "kv_bytes_per_token": of_token,
        "kv_bytes_per_row": of_token * config.train.seq_len,
        "gpus": -(-weights // gpu.memory),
        "tokens_per_s_alone": gpu.memory_rate / (2 * active),
    }


Sized: TypeAlias = "tuple[int, tuple[RunConfig, StepTime] | LayoutError]"
"""A number of GPUs, and the run on it with its step, or why there is none."""


def scaling(rows: Sequence[Sized], run: tuple[float, float]) -> list[dict[str, Any]]:
    """Return step, speed-up over the first that works and GPU hours for each number of GPUs, or why there is none.

    Args:
        rows: In the order to show them.
        run: Tokens and goodput.
    """
    found: list[dict[str, Any]] = []
    first: tuple[int, float] | None = None
    for gpus, one in rows:
        if isinstance(one, LayoutError):
            found.append({"gpus": gpus, "problem": one.problem})
            continue
        config, time = one
        days = run_days(config, time, *run)
        first = first or (gpus, days)
        speedup = first[1] / days
        found.append({
            "gpus": gpus, "step_s": time.estimate_s, "days": days, "gpu_hours": days * 24 * gpus, "speedup": speedup,
            "efficiency": speedup * first[0] / gpus,
        })  # fmt: skip
    return found
