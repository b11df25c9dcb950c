"""How often GPUs fail, and what `flashckpt plan`'s model makes of it: snapshot interval and goodput. Pure."""

from __future__ import annotations

import difflib
from dataclasses import asdict, replace
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.plan.coordination import coordination
from flashckpt.plan.model import PUBLISHED_GPU_HOURS, Failures, best
from flashckpt.plan.report import Rates, costs_from
from flashckpt.trainer.plan.forecast import Memory

MONTH_HOURS = 30 * 24
PRESETS = {"llama3": PUBLISHED_GPU_HOURS, "8-percent-month": MONTH_HOURS / 0.08}
"""Hours between failures of one GPU: the published Llama 3 405B run; and 8 % of the GPUs in each month of 30 days."""

RELAUNCH_S, REPLACE_S = 60.0, 600.0


def gpu_hours(name: str) -> float:
    """Return the hours between failures of one GPU that a preset has, or those of a number with "h".

    Raises:
        ConfigError: It is neither.
    """
    if name in PRESETS:
        return PRESETS[name]
    text = name.removesuffix("h")
    if name.endswith("h") and text.replace(".", "", 1).isdigit() and float(text) > 0:
        return float(text)
    nearest = difflib.get_close_matches(name, PRESETS, n=1)
    raise ConfigError(
        "--failures is neither a preset nor hours",
        found=repr(name),
        expected=f"{nearest[0]} (the nearest name)" if nearest else " | ".join([*PRESETS, "HOURSh, such as 50000h"]),
        state="Nothing was computed.",
    )


def chance(each: float, count: int) -> float:
    """Return the chance that at least one of `count` fails, if each fails with chance `each`: 1 - (1 - p)^n."""
    return 1.0 - (1.0 - each) ** count


def failure_forecast(
    needed: Memory, checkpoint_bytes: int, *, gpus: int, ranks_per_node: int, hours: float, step_s: float
) -> dict[str, Any]:
    """Return failures per day, the intervals to choose and the goodput, as JSON.

    Args:
        needed: Of the fullest rank.
        checkpoint_bytes: Of all tensors, replicas once.
        gpus: Of the job.
        ranks_per_node: Ranks that share a node's storage link.
        hours: Between failures of one GPU.
        step_s: Seconds per step.
    """
    failures = Failures(gpus=gpus, gpu_mtbf_s=hours * 3600)
    rates = Rates()
    costs = costs_from(
        needed.held.state, checkpoint_bytes, gpus=gpus, gpus_per_node=ranks_per_node, rates=rates,
        relaunch_s=RELAUNCH_S, replace_s=REPLACE_S,
    )  # fmt: skip
    between = coordination(
        ranks=gpus,
        nodes=-(-gpus // ranks_per_node),
        checkpoint_bytes=checkpoint_bytes,
        rows=0,
        request_s=rates.request_s,
    )
    costs = replace(costs, persist_s=costs.persist_s + between.seconds)
    chosen = best(failures, costs, step_s=step_s, persist_floor_s=between.least_s)
    return {
        "gpu_hours": hours,
        "mtbf_s": failures.mtbf_s,
        "per_day": 86400 / failures.mtbf_s,
        "chance_of_one_in_a_day": chance(min(1.0, 24 / hours), gpus),
        "snapshot_every_steps": round(chosen.snapshot_s / step_s),
        "snapshot_s": chosen.snapshot_s,
        "persist_every_steps": round(chosen.snapshot_s / step_s) * chosen.persist_every,
        "persist_s": chosen.persist_s,
        **asdict(chosen.forecast),
    }
