"""Which optimizer trains what, at which rate, and averages of the weights. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.weights import parameter_names

OPTIMIZERS = ("adamw", "muon", "adafactor", "sgd")
SCHEDULES = ("constant", "cosine", "linear", "1-sqrt", "wsd")
DECAY_SHAPES = ("linear", "cosine", "1-sqrt")
MUON_RATES = ("match_rms_adamw", "original")
UNSET = -1.0
"""A weight decay that a group leaves as it is elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """One `[[optim.groups]]`: what is otherwise for some parameters; the first group that matches a name counts.

    Attributes:
        match: Pattern over whole names of parameters: `*` any text, `?` one character, `[ab]` one of them.
        lr_mult: Factor of the rate.
        weight_decay: Instead of the usual one; -1 leaves that.
    """

    match: str = ""
    lr_mult: float = 1.0
    weight_decay: float = UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer and its schedule; the rate is a pure function of the step. 0 switches a clip off.

    Attributes:
        name: One of OPTIMIZERS. "muon": torch's Muon for the matrices of the layers, AdamW for everything else.
        lr, min_lr, warmup_steps, schedule, decay_steps: See `rate.learning_rate`.
        decay_shape: How `schedule = "wsd"` goes down.
        beta1, beta2, eps: Of AdamW.
        momentum: Of Muon and SGD.
        nesterov: Whether Muon and SGD look ahead along the momentum.
        muon_rate: How the rate of Muon follows from the shape of a matrix: "match_rms_adamw" makes updates as large as
            those of AdamW, so that one rate fits both; "original" is sqrt(max(1, rows / columns)).
        weight_decay: Of everything but norms, biases and embeddings. Times the rate; under SGD a part of the gradient.
        clip_norm, clip_value: Largest norm of all gradients, largest element.
        groups: `[[optim.groups]]`.
    """

    name: str = "adamw"
    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup_steps: int = 10
    schedule: str = "cosine"
    decay_steps: int = 0
    decay_shape: str = "linear"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    nesterov: bool = True
    muon_rate: str = "match_rms_adamw"
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    clip_value: float = 0.0
    groups: tuple[GroupConfig, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """An exponential moving average of the weights.

    Attributes:
        decay: What is kept of the average at each update; 0 switches it off.
        every: Steps between updates.
        evaluate: Whether evaluation during the run uses the average instead of the weights.
    """

    decay: float = 0.0
    every: int = 1
    evaluate: bool = False


def rule_of(groups: tuple[GroupConfig, ...], name: str) -> int:
    """Return the number of the first group that matches a name, or -1."""
    return next((number for number, group in enumerate(groups) if fnmatchcase(name, group.match)), -1)


_NEEDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("beta1", "beta2", "eps"), ("adamw", "muon")),
    (("momentum", "nesterov"), ("muon", "sgd")),
    (("muon_rate",), ("muon",)),
)


def check_optim(values: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse settings of `[optim]` and `[ema]` that are out of range or would have no effect.

    Args:
        values: Every setting of the run.
        defaults: The default of every setting.

    Raises:
        ConfigError: Names the setting.
    """
    optim, plain = values["optim"], defaults["optim"]
    for names, optimizers in _NEEDS:
        for name in names:
            if optim[name] != plain[name] and optim["name"] not in optimizers:
                raise _no_effect(
                    f"optim.{name}", optim[name], " | ".join(f'optim.name = "{one}"' for one in optimizers)
                )
    if optim["decay_shape"] != plain["decay_shape"] and optim["schedule"] != "wsd":
        raise _no_effect("optim.decay_shape", optim["decay_shape"], 'optim.schedule = "wsd"')
    if optim["name"] == "sgd" and optim["nesterov"] and not optim["momentum"]:
        raise _no_effect("optim.nesterov", optim["nesterov"], "optim.momentum above 0, or optim.nesterov = false")
    is_elsewhere = bool(values["init"]["from"]) and values["model"] == defaults["model"]  # the model is read from there
    _check_groups(optim["groups"], None if is_elsewhere else list(parameter_names(ModelConfig(**values["model"]))))
    _check_ema(values, defaults)


def _check_groups(groups: list[Mapping[str, Any]], names: list[str] | None) -> None:
    rules = tuple(GroupConfig(**group) for group in groups)
    for number, group in enumerate(rules):
        where = f"optim.groups[{number}]"
        if not group.match:
            raise ConfigError(
                f"{where} matches nothing", found="match = ''", expected='a pattern: match = "*.attention.*"'
            )
        if group.lr_mult == 1.0 and group.weight_decay == UNSET:
            raise _no_effect(where, group.match, "an lr_mult other than 1, or a weight_decay")
        if group.lr_mult < 0 or (group.weight_decay < 0 and group.weight_decay != UNSET):
            raise ConfigError(
                f"{where} has a number below zero",
                found=f"lr_mult = {group.lr_mult}, weight_decay = {group.weight_decay}",
                expected="0.0 or more (weight_decay = -1: as elsewhere)",
            )
        if names is not None and not any(rule_of(rules, name) == number for name in names):
            taken = any(fnmatchcase(name, group.match) for name in names)
            raise ConfigError(
                f"{where} applies to no parameter of this model",
                found=f"match = {group.match!r}" + (": groups before it take all that it matches" if taken else ""),
                expected="a pattern over names like layers.0.attention.wq.weight or tok_embeddings.weight",
                state="Nothing was started.",
                remedy="correct the pattern" if not taken else "put the narrower pattern first",
            )


def _check_ema(values: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Mapping[str, Any]]) -> None:
    ema = values["ema"]
    if ema["decay"] == 0:
        for name in ("every", "evaluate"):
            if ema[name] != defaults["ema"][name]:
                raise _no_effect(f"ema.{name}", ema[name], "ema.decay above 0")
    if ema["evaluate"] and not values["eval"]["every"]:
        raise _no_effect("ema.evaluate", ema["evaluate"], "eval.every of 1 or more")


def _no_effect(key: str, value: Any, needs: str) -> ConfigError:
    return ConfigError(
        f"{key} would have no effect in this run",
        found=f"{key} = {value!r}",
        expected=needs,
        state="Nothing was started.",
        remedy=f"omit {key}, or set what it needs",
    )
