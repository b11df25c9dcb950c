"""The learning rate as a pure function of the step, and a warning if a changed schedule makes it jump. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flashckpt.trainer.config import OptimConfig, RunConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 1): warm-up, then the chosen shape down to `min_lr`.

    A pure function of the step, without state. `decay_steps` 0 means: all after the warm-up
    (for "wsd": the last fifth of the run).
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = config.decay_steps or (
        max(1, steps // 5) if config.schedule == "wsd" else max(1, steps - config.warmup_steps)
    )
    start = steps - span if config.schedule == "wsd" else config.warmup_steps
    done = min(1.0, max(0.0, (step - start) / span))
    shape = 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.min_lr + (config.lr - config.min_lr) * shape


_NOTICEABLE = 0.05
"""Part by which the next rate may differ: curves that part slowly from here on do not jump."""


def rate_jump(before: Mapping[str, Any], now: RunConfig, step: int) -> str:
    """Return a warning if the rate at `step`, or noticeably at the next, is not the recorded schedule's; "" if it is.

    Args:
        before: The values recorded with the checkpoint.
        now: This run.
        step: The restored step.
    """
    known = {field.name for field in dataclasses.fields(OptimConfig)}
    optim = OptimConfig(**{name: value for name, value in before.get("optim", {}).items() if name in known})
    steps = int(before.get("train", {}).get("steps", now.train.steps))

    def rates(at: int) -> tuple[float, float]:
        return learning_rate(optim, at, steps), learning_rate(now.optim, at, now.train.steps)

    where, (old, new) = f"the restored step {step}", rates(step)
    if math.isclose(old, new, rel_tol=1e-9):
        where, (old, new) = f"step {step + 1}, the first after the restored one", rates(step + 1)
        if math.isclose(old, new, rel_tol=_NOTICEABLE) or step >= now.train.steps:
            return ""
    factor = f" ({new / old:.3g} times)" if old > 0 else ""
    warning = (
        f"the learning rate jumps at {where}: {old:.3e} under the recorded schedule "
        f"({_words(optim, steps)}), {new:.3e} under this one ({_words(now.optim, now.train.steps)}){factor}"
    )
    if _decays_with_run(optim, now.optim) and steps > optim.warmup_steps and steps != now.train.steps:
        warning += f"; to continue on the recorded one, set optim.decay_steps = {steps - optim.warmup_steps}"
    return warning


def _words(optim: OptimConfig, steps: int) -> str:
    decay = f", decay_steps {optim.decay_steps}" if optim.decay_steps else ""
    return f"{optim.schedule}, {steps} steps{decay}, lr {optim.lr:g}"


def _decays_with_run(before: OptimConfig, now: OptimConfig) -> bool:
    """Whether only the length of the run changed the schedule."""
    return before == now and before.schedule in ("cosine", "linear") and not before.decay_steps
