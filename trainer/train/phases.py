"""The phases of a run, each with the whole configuration that holds in it: a pure function of the settings. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.phase import PhaseConfig
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train.rate import learning_rate


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
