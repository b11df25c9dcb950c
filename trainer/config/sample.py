"""Samples during training, and how tokens are chosen. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashckpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """What the model says every n steps; `every` 0 switches it off.

    Attributes:
        every: Steps from one set of samples to the next.
        prompts: One sample each.
        max_tokens: Tokens that are added to a prompt; fewer where train.seq_len is reached.
        temperature, top_p, seed: See Choice. Each time begins with the same seed, so samples differ by the weights alone.
    """

    every: int = 0
    prompts: tuple[str, ...] = ()
    max_tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How the next token is chosen.

    Attributes:
        temperature: Logits are divided by it; 0: always the likeliest token.
        top_p: Only the likeliest tokens that together have this probability; 1.0: all.
        seed: Of the numbers that are drawn; the same seed gives the same text.
    """

    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 1


def check_samples(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a `[samples]` table with values out of range, or without effect.

    Raises:
        ConfigError: See above.
    """
    if values["every"] < 0:
        raise ConfigError("samples.every is too small", found=str(values["every"]), expected="0 (off) or more")
    if values["max_tokens"] < 1:
        raise ConfigError("samples.max_tokens is too small", found=str(values["max_tokens"]), expected="1 or more")
    check_choice(values["temperature"], values["top_p"], values["seed"], of="samples.")
    if values["every"] and not values["prompts"]:
        raise ConfigError(
            "samples.every has no prompts",
            found="samples.prompts = []",
            expected='samples.prompts = ["Once upon a time", ...]',
            state="Nothing was started.",
        )
    for key, default in defaults.items():
        if not values["every"] and values[key] != default:
            raise ConfigError(
                f"samples.{key} would have no effect in this run",
                found=f"samples.{key} = {values[key]!r}",
                expected="samples.every of 1 or more",
                state="Nothing was started.",
                remedy=f"omit samples.{key}, or set what it needs",
            )


def check_choice(temperature: float, top_p: float, seed: int, *, of: str) -> None:
    """Refuse values out of range.

    Args:
        temperature: See Choice.
        top_p: See Choice.
        seed: See Choice.
        of: What stands before their names: "--" or "samples.".

    Raises:
        ConfigError: One is out of range.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"{of}temperature is out of range", found=str(temperature), expected="0 (greedy) or more")
    if not 0 < top_p <= 1:
        name = "top-p" if of == "--" else "top_p"
        raise ConfigError(f"{of}{name} is out of range", found=str(top_p), expected="above 0, up to 1")
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"{of}seed is out of range", found=str(seed), expected="0 to 2^63 - 1")
