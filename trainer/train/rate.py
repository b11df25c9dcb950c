"""The learning rate as a pure function of the step. Torch-free."""

from __future__ import annotations

import math

from flashckpt.trainer.config.optim import OptimConfig


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
    shape = config.decay_shape if config.schedule == "wsd" else config.schedule
    return config.min_lr + (config.lr - config.min_lr) * _left(shape, done)


def _left(shape: str, done: float) -> float:
    """Return what is left of a decay of which the part `done` is over, both from 0 to 1."""
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - math.sqrt(done) if shape == "1-sqrt" else 1.0 - done
