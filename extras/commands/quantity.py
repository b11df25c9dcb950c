"""Quantities as people write them: durations, sizes, shares; and back, always with the unit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from flashckpt.errors import ConfigError

_DURATION_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365 * 86400.0}
_SIZE_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    f"{prefix}ib": 1 << shift for prefix, shift in (("k", 10), ("m", 20), ("g", 30), ("t", 40))
}
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_duration(text: str) -> float:
    """Return seconds; `50000h`, `30s`, `1.5d`. A number without a unit is refused."""
    return _parse(text, _DURATION_S, "a duration", "50000h, 10m, 30s or 250ms")


def parse_size(text: str) -> int:
    """Return bytes; `256MiB`, `1GB`. A number without a unit is refused."""
    return int(_parse(text, _SIZE_BYTES, "a size", "256MiB or 1GB"))


def parse_scale(text: str) -> float:
    """Return a factor in (0, 1]; `1/64` or `0.1`."""
    top, slash, bottom = text.partition("/")
    try:
        value = float(top) / (float(bottom) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 < value <= 1:
        raise ConfigError(f"{text!r} is not a scale", found=text, expected="above 0, at most 1: for example 1/64")
    return value


def parse_share(text: str) -> float:
    """Return a share in [0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ConfigError(f"{text!r} is not a share", found=text, expected="a number from 0 to 1")
    return value


def _parse(text: str, units: dict[str, Any], kind: str, example: str) -> float:
    match = _NUMBER.match(text)
    factor = units.get(match.group(2).lower()) if match else None
    value = float(match.group(1)) * factor if match and factor else math.nan
    if not 0 < value < 1e30:
        raise ConfigError(f"{text!r} is not {kind}", found=text, expected=f"a positive number with its unit: {example}")
    return value


if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # no generic class in click 8.1


class Parsed(ParamType):
    """A click option that goes through one of the functions above; bad values are errors of this project."""

    def __init__(self, parse: Callable[[str], Any], name: str) -> None:
        self.parse, self.name = parse, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002 -- click's signature
        """Return the parsed value; defaults that are numbers already pass through."""
        return self.parse(value) if isinstance(value, str) else value


DURATION = Parsed(parse_duration, "DURATION")
SIZE = Parsed(parse_size, "SIZE")
SCALE = Parsed(parse_scale, "SCALE")
SHARE = Parsed(parse_share, "SHARE")


def show_s(seconds: float) -> str:
    """Return a duration to three digits in the unit that suits it."""
    if not math.isfinite(seconds):
        return "never"
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:,.1f} h"


def show_bytes(nbytes: float) -> str:
    """Return decimal units, and binary ones in brackets from 1 GB on."""
    for limit, factor, unit in ((10**3, 1, "B"), (10**6, 10**3, "kB"), (10**9, 10**6, "MB")):
        if nbytes < limit:
            return f"{nbytes / factor:.4g} {unit}"
    if nbytes < 10**12:
        return f"{nbytes / 10**9:.4g} GB ({nbytes / 2**30:.4g} GiB)"
    return f"{nbytes / 10**12:.4g} TB ({nbytes / 2**40:.4g} TiB)"


def show_rate(bytes_per_s: float) -> str:
    """Return GB/s with GiB/s in brackets."""
    return f"{bytes_per_s / 10**9:.3g} GB/s ({bytes_per_s / 2**30:.3g} GiB/s)"


def as_setting(seconds: float) -> str:
    """Return a time as `persist_every` takes it: "45s", "10min"."""
    return f"{max(1, math.ceil(seconds))}s" if seconds < 120 else f"{math.ceil(seconds / 60)}min"
