"""The phases of a run, each with the whole configuration that holds in it: a pure function of the settings. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig, TrainConfig
from flashckpt.trainer.config.optim import OptimConfig
from flashckpt.trainer.config.phase import PhaseConfig, PhasesConfig
from flashckpt.trainer.parallel.layout import resolve_layout

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a run.

    Attributes:
        number: From 0; 0 is what the run begins with.
        config: The run as it is in this phase.
        stream: Which order of samples it draws from: another length of samples makes other samples, so another order.
        rate_from: Step after which its schedule of the rate counts.
        rate_steps: How many steps that schedule has.
    """

    number: int
    first_step: int
    config: RunConfig
    stream: int
    rate_from: int
    rate_steps: int

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of this phase."""
        return learning_rate(self.config.optim, step - self.rate_from, self.rate_steps)


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases of a run, the first of which begins with step 1.

    Raises:
        ConfigError: a phase begins before the one before it, or after the run.
    """
    found = [Phase(number=0, first_step=1, config=config, stream=0, rate_from=0, rate_steps=config.train.steps)]
    tokens = 0  # before the first step of the newest phase
    for number, given in enumerate(config.phase.each, 1):
        before = found[-1]
        per_step = before.config.train.global_batch * before.config.train.seq_len
        first = given.from_step or before.first_step + -(-(given.from_tokens - tokens) // per_step)
        if not before.first_step < first <= config.train.steps:
            raise ConfigError(
                f"phase[{number - 1}] does not begin within the run, after the one before",
                found=f"its first step would be {first}",
                expected=f"{before.first_step + 1} to {config.train.steps}",
                state="Nothing was started.",
            )
        tokens += (first - before.first_step) * per_step
        changed = _changed(before.config, given)
        _refuse_without_effect(f"phase[{number - 1}]", given, changed)
        is_new = changed.train.seq_len != before.config.train.seq_len
        found.append(
            Phase(
                number=number,
                first_step=first,
                config=changed,
                stream=before.stream + is_new,
                rate_from=first - 1 if given.rate() else before.rate_from,
                rate_steps=0,
            )
        )
    return tuple(replace(one, rate_steps=_rate_steps(found, one, config.train.steps)) for one in found)


def _rate_steps(phases: Sequence[Phase], one: Phase, steps: int) -> int:
    """Return how long a schedule is: to where the next one begins."""
    return min((other.rate_from for other in phases if other.rate_from > one.rate_from), default=steps) - one.rate_from


def _changed(config: RunConfig, given: PhaseConfig) -> RunConfig:
    train, model, optim = config.train, config.model, config.optim
    sources = tuple(
        replace(one, weight=given.weights.get(one.channel, one.weight)) if given.weights else one
        for one in config.data.sources
    )
    rate = given.rate()
    return replace(
        config,
        train=replace(
            train,
            seq_len=given.seq_len or train.seq_len,
            global_batch=given.global_batch or train.global_batch,
            micro_batch=given.micro_batch or train.micro_batch,
        ),
        model=replace(model, rope_base=given.rope_base or model.rope_base),
        data=replace(config.data, sources=sources),
        optim=replace(optim, **{"warmup_steps": 0, "decay_steps": 0, **rate}) if rate else optim,
    )


def _refuse_without_effect(where: str, given: PhaseConfig, changed: RunConfig) -> None:
    named, schedule = given.rate(), changed.optim.schedule
    useless: list[str] = [name for name in ("min_lr", "decay_steps") if name in named and schedule == "constant"]
    useless += ["decay_shape"] if "decay_shape" in named and schedule != "wsd" else []
    if useless:
        raise ConfigError(
            f"{where}.{useless[0]} would have no effect",
            found=f"{useless[0]} = {named[useless[0]]}, schedule = {schedule}",
            expected="wsd" if useless[0] == "decay_shape" else "a schedule that decays",
            state="Nothing was started.",
        )


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of a step."""
    return next(one for one in reversed(phases) if one.first_step <= step or one.number == 0)


def check_layouts(config: RunConfig, world: int) -> None:
    """Raise LayoutError if the layout does not divide in one of the phases, ConfigError if they are out of order."""
    for phase in phases_of(config):
        resolve_layout(phase.config, world)
