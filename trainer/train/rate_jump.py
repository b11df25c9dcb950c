"""A warning if a changed schedule makes the learning rate jump. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashckpt.trainer.config import RunConfig, TrainConfig
from flashckpt.trainer.config.optim import OptimConfig
from flashckpt.trainer.config.phase import PhaseConfig, PhasesConfig
from flashckpt.trainer.train.phases import phase_at, phases_of

_NOTICEABLE = 0.05
"""Part by which the next rate may differ: curves that part slowly from here on do not jump."""


def rate_jump(before: Mapping[str, Any], now: RunConfig, step: int) -> str:
    """Return a warning if the rate at `step`, or noticeably at the next, is not the recorded schedule's, else nothing."""
    then = _recorded(before, now)
    optim, steps = then.optim, then.train.steps
    earlier, present = phases_of(then), phases_of(now)

    def rates(at: int) -> tuple[float, float]:
        return phase_at(earlier, at).rate(at), phase_at(present, at).rate(at)

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
    if (
        not then.phase.each
        and not now.phase.each
        and _decays_with_run(optim, now.optim)
        and steps > optim.warmup_steps
        and steps != now.train.steps
    ):
        warning += f"; to continue on the recorded one, set optim.decay_steps = {steps - optim.warmup_steps}"
    return warning


def _recorded(before: Mapping[str, Any], now: RunConfig) -> RunConfig:
    """Return the recorded run, as far as the rate follows from it."""
    optim = _known(OptimConfig, before.get("optim", {}))
    optim.pop("groups", None)  # factors of the rate, not the rate
    train = {"steps": now.train.steps, **before.get("train", {})}
    kept = {name: train[name] for name in ("steps", "seq_len", "global_batch") if name in train}
    phases = tuple(PhaseConfig(**_known(PhaseConfig, one)) for one in before.get("phase", {}).get("each", []))
    return RunConfig(optim=OptimConfig(**optim), train=replace(TrainConfig(), **kept), phase=PhasesConfig(each=phases))


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _words(optim: OptimConfig, steps: int) -> str:
    decay = f", decay_steps {optim.decay_steps}" if optim.decay_steps else ""
    return f"{optim.schedule}, {steps} steps{decay}, lr {optim.lr:g}"


def _decays_with_run(before: OptimConfig, now: OptimConfig) -> bool:
    """Whether only the length of the run changed the schedule."""
    return (
        replace(before, groups=now.groups) == now
        and before.schedule in ("cosine", "linear", "1-sqrt")
        and not before.decay_steps
    )
