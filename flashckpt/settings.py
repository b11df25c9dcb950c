"""The rules for settings and step numbers, shared by Checkpointer, the daemon's config and the trainer.

Torch-free and without I/O.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from flashckpt.core.superblock import MAX_SLOTS, MIN_SLOTS
from flashckpt.errors import ConfigError
from flashckpt.planning.partners import MOST_REPLICAS

MAX_STEP = 10**15
"""Largest step number, and largest interval: far from the end of a signed 64-bit word."""
MAX_COMPRESSION_LEVEL = 19
_OF_GENERATORS = ("get_state", "getstate", "bit_generator", "state_dict")
"""What generators of torch, Python and numpy, and wrappers of them, have; one of them is found in each."""


def whole_number(value: object, *, least: int, most: int = MAX_STEP) -> int | None:
    """Return `value` as an int where it is a whole number (numpy's count, bool and tensors do not) in range, else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value) if least <= int(value) <= most else None


def compression_level(value: object) -> int | None:
    """Return the zstd level of a compression setting, 0 for its default; None for "off" and "auto".

    Raises:
        ConfigError: It is not "off", "auto", "zstd" or "zstd:LEVEL".
    """
    kind, colon, level = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind in ("off", "auto", "none") and not colon:
        return None
    if kind == "zstd" and not colon:
        return 0
    if kind == "zstd" and level.isascii() and level.isdigit() and 1 <= int(level[:9]) <= MAX_COMPRESSION_LEVEL:
        return int(level)
    raise ConfigError(
        "invalid compression",
        found=_shown(value),
        expected=f'"off", "auto", "zstd" or "zstd:LEVEL" with LEVEL 1 to {MAX_COMPRESSION_LEVEL}',
    )


def checked(name: str, value: object, *, called: str = "") -> Any:
    """Return the value of one setting in its plain type.

    Args:
        name: Of a setting of `Checkpointer`; one without a rule here is returned as it is.
        value: As given.
        called: The user's name for it, if that differs.

    Raises:
        ConfigError: It is invalid; names the setting, what was found and what is expected.
    """
    try:
        return _RULES[name](name, value) if name in _RULES else value
    except ConfigError as error:
        if not called:
            raise
        problem = error.problem.replace(name, called, 1)
        raise ConfigError(problem, found=error.found, expected=error.expected) from None


def _interval(name: str, value: object) -> int:
    number = whole_number(value, least=1)
    if number is None:
        raise ConfigError(f"invalid {name}", found=_shown(value), expected="a number of steps, at least 1")
    return number


def _keep(name: str, value: object) -> int | None:
    number = whole_number(value, least=1)
    if number is None and value is not None:
        unit = "checkpoints" if name == "keep_last" else "steps"
        meaning = "to keep all" if name == "keep_last" else "for no such rule"
        raise ConfigError(
            f"invalid {name}", found=_shown(value), expected=f"a number of {unit}, at least 1, or None {meaning}"
        )
    return number


def _slots(name: str, value: object) -> int | str:
    if isinstance(value, str) and value == "auto":
        return value
    number = whole_number(value, least=MIN_SLOTS, most=MAX_SLOTS)
    if number is None:
        raise ConfigError(
            f"invalid {name}", found=_shown(value), expected=f'"auto" or a number from {MIN_SLOTS} to {MAX_SLOTS}'
        )
    return number


def _replicate(name: str, value: object) -> int:
    number = whole_number(value, least=0, most=MOST_REPLICAS)
    if number is None:
        expected = f"a number of partner nodes, 0 to {MOST_REPLICAS}"
        raise ConfigError(f"invalid {name}", found=_shown(value), expected=expected)
    return number


def _rate(name: str, value: object) -> int | None:
    number = whole_number(value, least=1)
    if number is None and value is not None:
        expected = "bytes per second, at least 1, or None for no limit"
        raise ConfigError(f"invalid {name}", found=_shown(value), expected=expected)
    return number


def _compression(name: str, value: object) -> object:
    del name
    compression_level(value)
    return value


def _options(name: str, value: object) -> dict[str, Any]:
    """The daemon reads them from a record, so every value must be of a type that the record can hold."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise ConfigError(f"invalid {name}", found=_shown(value), expected="a mapping of names to values, or None")
    for key, one in value.items():
        try:
            msgpack.packb(_plain(one))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{name} has a value that cannot be passed to another process: {key!r}",
                found=type(one).__qualname__,
                expected="None, bool, int, float, text, bytes, or lists and mappings of them",
            ) from error
    return {key: _plain(one) for key, one in value.items()}


def _plain(value: object) -> Any:
    """Return mappings as dicts; nothing else is changed."""
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


_RULES: dict[str, Callable[[str, object], Any]] = {
    "snapshot_every": _interval,
    "persist_every": _interval,
    "keep_last": _keep,
    "keep_every": _keep,
    "slots": _slots,
    "compression": _compression,
    "storage_options": _options,
    "replicate": _replicate,
    "replicate_every": _interval,
    "replicate_rate": _rate,
}


def _shown(value: object) -> str:
    """Return a value for an error text, short and in ASCII; of options only the type, since they hold credentials."""
    if isinstance(value, Mapping):
        return f"{type(value).__qualname__} with names that are not text"
    return f"{ascii(value)[:100]} ({type(value).__qualname__})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """As the arguments of `Checkpointer`, with root and job resolved.

    Raises:
        ConfigError: One is invalid (see `checked`).
    """

    root: str
    job: str
    snapshot_every: int = 5
    persist_every: int = 250
    keep_last: int | None = 3
    keep_every: int | None = None
    slots: int | str = "auto"
    storage_options: dict[str, Any] = field(default_factory=dict)
    compression: str = "off"
    replicate: int = 0
    replicate_every: int = 1
    replicate_rate: int | None = None

    def __post_init__(self) -> None:
        for name in _RULES:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if self.replicate and self.slots == MIN_SLOTS:
            raise ConfigError(
                "two slots are too few to replicate from",
                found=f"replicate={self.replicate} with slots={self.slots}",
                expected="at least 3 slots: one is being sent, one is the newest that was sent, one is written",
                remedy='slots="auto", 3 or more',
            )

    @property
    def slot_count(self) -> int | None:
        """The number of slots the user asked for, or None."""
        return None if self.slots == "auto" else int(self.slots)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is taken at `step`."""
        return step % self.snapshot_every == 0 or self.is_persist(step)

    def is_persist(self, step: int) -> bool:
        """Whether the snapshot of `step` is to be persisted."""
        return step % self.persist_every == 0


def tracking_settings(rng: object, fenced: str | Iterable[str], names: Iterable[str]) -> tuple[bool, tuple[str, ...]]:
    """Return `rng` and `fenced` of `track()`, which tracks `names`; ConfigError where one of them is something else."""
    if any(hasattr(rng, name) for name in _OF_GENERATORS):
        raise ConfigError(
            "track(rng=) takes True or False",
            found=f"an object of class {type(rng).__qualname__}",
            expected="True: the default generators of torch, Python and numpy",
            remedy="track a generator of your own inside an object with state_dict() and load_state_dict()",
        )
    known = tuple(names)
    fenced = (fenced,) if isinstance(fenced, str) else tuple(fenced)
    if unknown := [name for name in fenced if name not in known]:
        raise ConfigError(
            "track(fenced=) names what this call does not track",
            found=repr(unknown[0]),
            expected=", ".join(known),
            remedy="correct the name, or track it in this call",
        )
    return bool(rng), fenced


def next_step(step: object, *, last: int) -> int:
    """Return the number of the step just done as an int.

    Args:
        step: As it was given to `Checkpointer.step`.
        last: Number of the step before, or of the one that was restored; 0 before the first.

    Raises:
        ConfigError: It is not a whole number, out of range, or not above `last`.
    """
    number = whole_number(step, least=1)
    if number is None:
        raise ConfigError(
            "invalid step number",
            found=_shown_step(step),
            expected=f"a whole number (int) from 1 to {MAX_STEP}",
            state="Nothing was counted and no snapshot was taken.",
            remedy="count the optimizer steps in an int of the loop and give ckpt.step() that one",
        )
    if number <= last:
        raise ConfigError(
            f"step {number} comes after step {last}",
            found=f"ckpt.step({number})",
            expected=f"a number above {last}: a snapshot of step {number} would sort before older state",
            state="Nothing was counted and no snapshot was taken; earlier ones are intact.",
            remedy=(
                "count steps over the whole run, not from 1 in each epoch: keep one counter outside the loop over "
                "epochs; after a restore continue from report.step + 1"
            ),
        )
    return number


def _shown_step(step: object) -> str:
    if isinstance(step, numbers.Integral):
        return _shown(step)
    if isinstance(step, float) and math.isfinite(step):
        return f"{step!r} (float)"
    kind = type(step)
    return f"a value of type {kind.__module__}.{kind.__qualname__}"  # not printed: a tensor may be on a device
