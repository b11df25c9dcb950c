"""`[[phase]]`: what changes in the course of a run, and from which step. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config.optim import DECAY_SHAPES, SCHEDULES

UNSET = -1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseConfig:
    """One `[[phase]]`; what it does not name stays as it was in the one before.

    Attributes:
        from_step: Its first step.
        from_tokens: Or: it begins with the first step before which so many tokens were trained.
        seq_len, rope_base, global_batch, micro_batch: Instead of those of `[train]` and `[model]`; 0: as before.
        weights: Weight of each channel of `[[data.sources]]`; channels that are not named keep theirs.
        lr, min_lr, warmup_steps, schedule, decay_steps, decay_shape: A schedule that begins with the phase.
    """

    from_step: int = 0
    from_tokens: int = 0
    seq_len: int = 0
    rope_base: float = 0.0
    global_batch: int = 0
    micro_batch: int = 0
    weights: dict[str, Any] = field(default_factory=dict)
    lr: float = UNSET
    min_lr: float = UNSET
    warmup_steps: int = -1
    schedule: str = ""
    decay_steps: int = -1
    decay_shape: str = ""

    def rate(self) -> dict[str, Any]:
        """Return the settings of the rate that the phase names."""
        names = ("lr", "min_lr", "warmup_steps", "schedule", "decay_steps", "decay_shape")
        return {name: value for name in names if (value := getattr(self, name)) not in (-1, "")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasesConfig:
    """All of `[[phase]]`, in their order."""

    each: tuple[PhaseConfig, ...] = ()


def as_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run with the tables of `[[phase]]` as one section."""
    found = dict(values)
    if isinstance(found.get("phase"), list):
        found["phase"] = {"each": found["phase"]}
    return found


def check_phases(values: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse phases that are out of order, change nothing, or change what the run does not have.

    Raises:
        ConfigError: Names the phase.
    """
    channels = {source["channel"] for source in values["data"]["sources"]}
    last_step = 1
    for number, phase in enumerate(values["phase"]["each"]):
        where = f"phase[{number}]"
        if (phase["from_step"] > 0) == (phase["from_tokens"] > 0):
            raise _wrong(
                f"{where} needs one beginning",
                f"from_step = {phase['from_step']}, from_tokens = {phase['from_tokens']}",
                "from_step of 2 or more, or from_tokens of 1 or more",
            )
        if phase["from_step"] and not last_step < phase["from_step"] <= values["train"]["steps"]:
            raise _wrong(
                f"{where} does not begin within the run, after the one before",
                f"from_step = {phase['from_step']}",
                f"{last_step + 1} to {values['train']['steps']}",
            )
        last_step = phase["from_step"] or last_step
        _check_changes(where, phase, channels)


def _check_changes(where: str, phase: Mapping[str, Any], channels: set[str]) -> None:
    given = PhaseConfig(**phase)
    sizes = (given.seq_len, given.rope_base, given.global_batch, given.micro_batch)
    if not any(sizes) and not given.weights and not given.rate():
        raise _wrong(
            f"{where} changes nothing", "only its beginning", "seq_len, rope_base, global_batch, weights, lr ..."
        )
    for name in ("seq_len", "rope_base", "global_batch", "micro_batch", "warmup_steps", "decay_steps", "lr", "min_lr"):
        value, least = phase[name], 2 if name == "seq_len" else 1.0 if name == "rope_base" else 0
        if value not in (0, -1) and value < least:
            raise _wrong(f"{where}.{name} is too small", str(value), f"{least} or more")
    for name, choices in (("schedule", SCHEDULES), ("decay_shape", DECAY_SHAPES)):
        if phase[name] and phase[name] not in choices:
            raise _wrong(f"{where}.{name} has no such choice", repr(phase[name]), " | ".join(choices))
    for channel, weight in given.weights.items():
        if channel not in channels:
            known = ", ".join(sorted(channels)) or "none: the run has no [[data.sources]]"
            raise _wrong(f"{where}.weights names no channel of the data", channel, known)
        if type(weight) is not int or weight < 0:
            raise _wrong(f"{where}.weights.{channel} is no weight", repr(weight), "an integer of 0 or more")


def _wrong(problem: str, found: str, expected: str) -> ConfigError:
    return ConfigError(problem, found=found, expected=expected, state="Nothing was started.")
