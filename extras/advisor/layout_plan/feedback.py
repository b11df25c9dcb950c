"""What a finished or running job says of its plan: the efficiency that makes both agree, and the settings to change. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.plan.forecast import RESERVED, Memory
from flashckpt.trainer.plan.gpus import Gpu

_FIRST = 5
"""Steps that are left out: they compile, allocate and wait for caches."""

_SETTINGS = {
    "data": (0.03, "data.read_ahead, or more memory for the files: steps wait for their batch"),
    "sync": (0.10, "a longer micro-batch, or parallel.dp_replicate across nodes (HSDP): steps wait for each other"),
    "snapshot": (0.02, "checkpoint.snapshot_every: the step waits for its snapshot"),
    "log": (0.02, "log.every: writing and showing takes long"),
    "optimizer": (0.10, "parallel.zero = 1 or more: each rank updates all of the parameters"),
}
"""Phases, the share of a step from which they are worth a change, and which."""


def feedback(
    lines: Sequence[Mapping[str, Any]],
    config: RunConfig,
    needed: Memory,
    *,
    gpu: Gpu,
    seconds: Callable[[float], float],
    mfu: Callable[[float], float],
    planned: float,
) -> dict[str, Any]:
    """Return what a run's trace says, as JSON.

    Args:
        lines: Of `trace.jsonl`.
        config: The run.
        needed: Of the fullest rank.
        gpu: What each device can do.
        seconds: Returns the planned seconds of a step at an efficiency.
        mfu: Returns the share of the peak at seconds per step.
        planned: Efficiency of the plan.

    Raises:
        ConfigError: There are too few steps.
    """
    steady = [line for line in lines if not line.get("skipped")][_FIRST:]
    if not steady:
        raise ConfigError(
            "--measured has too few steps to compare with a plan",
            found=f"{len(lines)} steps",
            expected=f"more than {_FIRST}; the first ones compile and allocate",
            state="Nothing was computed.",
        )
    measured = statistics.median(float(line["seconds"]) for line in steady)
    phases = {
        name: statistics.median(float(line.get("phases_ms", {}).get(name, 0.0)) for line in steady) / 1e3 / measured
        for name in dict.fromkeys(name for line in steady for name in line.get("phases_ms", {}))
    }
    return {
        "steps": len(steady),
        "step_s": measured,
        "mfu": mfu(measured),
        "planned_mfu": mfu(seconds(planned)),
        "efficiency": _agreeing(seconds, measured),
        "stall_share": statistics.median(float(line.get("stall_ms", 0.0)) for line in steady) / 1e3 / measured,
        "phases": phases,
        "device_bytes": (used := _high_water(steady)),
        "change": _changes(phases, config, needed, gpu.memory * (1 - RESERVED) - (used or needed.peak)),
    }


def _agreeing(seconds: Callable[[float], float], measured: float) -> float | None:
    """Return the efficiency at which a plan takes as long as was measured; None if it is slower at any."""
    low, high = 0.001, 1.0
    if not seconds(high) <= measured <= seconds(low):
        return None
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return high


def _high_water(lines: Sequence[Mapping[str, Any]]) -> float | None:
    return max((line["device_gib"] * 2**30 for line in lines if "device_gib" in line), default=None)


def _changes(phases: Mapping[str, float], config: RunConfig, needed: Memory, room: float) -> list[str]:
    found = [
        f"{name} takes {phases[name]:.0%} of a step: {what}"
        for name, (least, what) in _SETTINGS.items()
        if phases.get(name, 0.0) >= least
    ]
    parallel = config.parallel
    if parallel.activation_checkpoint != "none" and room > 2 * needed.activations:
        found.append(f"{room / 1e9:.0f} GB of a device are free: parallel.activation_checkpoint = none or ffn")
    elif room > needed.activations and config.train.micro_batch == 1 and parallel.pp == 1:
        found.append(f"{room / 1e9:.0f} GB of a device are free: train.micro_batch = 2")
    return found
