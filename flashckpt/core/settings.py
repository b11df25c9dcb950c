"""The rules for settings and step numbers, shared by Checkpointer, the daemon's config and the trainer.

Torch-free and without I/O.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack

from flashckpt.core.snapshot_id import MAX_SLOTS, MIN_SLOTS
from flashckpt.errors import ConfigError

MAX_STEP = 10**15
"""Largest step number, and largest interval: far from the end of a signed 64-bit word."""
MOST_REPLICAS = 2
"""Most partners of a node."""
MAX_COMPRESSION_LEVEL = 19
_COMPRESSIONS = f'"off", "auto", "zstd" or "zstd:LEVEL" with LEVEL 1 to {MAX_COMPRESSION_LEVEL}'
_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
CONTINUOUS = "continuous"
"""`persist_every` of who persists whenever no write is running."""
_OF_GENERATORS = ("get_state", "getstate", "bit_generator", "state_dict")
"""Methods of which generators of torch, Python and numpy, and wrappers of them, have one."""


def whole_number(value: object, *, least: int, most: int = MAX_STEP) -> int | None:
    """Return `value` as an int where it is a whole number (numpy's count, bool and tensors do not) in range, else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value) if least <= int(value) <= most else None


def duration_s(value: object) -> int | None:
    """Return the seconds of "30s", "10min", "2h" or "7d"; None for anything else."""
    unit = value.lstrip("0123456789") if isinstance(value, str) else ""
    number, scale = str(value)[: len(str(value)) - len(unit)], _UNITS_S.get(unit.removeprefix(" "))
    return int(number) * scale if scale and number and number[0] != "0" and len(number) <= 7 else None


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
        expected=_COMPRESSIONS,
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that a setting may have.

    Attributes:
        expected: The same in words, with the unit.
        take: Returns a value given in its plain type; raises ValueError. Gets the name of the setting for a separate error.
        words: Words that a file can hold, and what they mean; a word that means None stands for it there.
    """

    expected: str
    take: Callable[[str, object], Any]
    words: Mapping[Any, Any] = field(default_factory=dict)


def checked(name: str, value: object, *, called: str = "") -> Any:
    """Return the value of one setting in its plain type.

    Args:
        name: A setting of `Checkpointer`; one without a rule is returned as it is.
        value: The value that was given.
        called: The user's name for it, if that differs.

    Raises:
        ConfigError: It is invalid; names the setting, what was found and what is expected.
    """
    if (rule := _RULES.get(name)) is None:
        return value
    try:
        return rule.take(called or name, value)
    except ValueError:
        raise ConfigError(f"invalid {called or name}", found=_shown(value), expected=rule.expected) from None


def _whole(
    default: object,
    unit: str,
    *,
    least: int = 1,
    most: int = MAX_STEP,
    words: Mapping[Any, Any] | None = None,
    or_time: bool = False,
) -> Any:
    """Return the field of a setting that is a whole number, one of some words, or with `or_time` a duration."""
    known = words or {}

    def take(_: str, value: object) -> Any:
        for word, meaning in known.items():
            if value is meaning or (type(value) is type(word) and value == word):
                return meaning
        if or_time and duration_s(value) is not None:
            return value
        if (number := whole_number(value, least=least, most=most)) is None:
            raise ValueError
        return number

    bounds = f"at least {least}" if most == MAX_STEP else f"{least} to {most}"
    or_word = "".join(f", or {json.dumps(word)}" for word in known)
    or_word += ', or a time ("30s", "10min", "2h", "7d")' if or_time else ""
    return field(default=default, metadata={"rule": Rule(f"{unit}, {bounds}{or_word}", take, known)})


def _compression(_: str, value: object) -> object:
    try:
        compression_level(value)
    except ConfigError:
        raise ValueError from None
    return value


def _options(name: str, value: object) -> dict[str, Any]:
    """The daemon reads them from a record, so every value must be of a type that the record can hold."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise ValueError
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


def _shown(value: object) -> str:
    """Return a value for an error text, short and in ASCII; of options only the type, since they hold credentials."""
    if isinstance(value, Mapping):
        return f"{type(value).__qualname__} with names that are not text"
    return f"{ascii(value)[:100]} ({type(value).__qualname__})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `Checkpointer`, where each is explained, and the section [checkpoint] of the trainer: types, bounds, defaults.

    An empty `root` or `job` is one that is not known yet.

    Raises:
        ConfigError: One is invalid (see `checked`).
    """

    root: str = ""
    job: str = ""
    snapshot_every: int = _whole(5, "a number of steps")
    persist_every: int | str | None = _whole(
        250, "a number of steps", words={"never": None, CONTINUOUS: CONTINUOUS}, or_time=True
    )
    keep_last: int | str | None = _whole(3, "a number of checkpoints", words={"all": None}, or_time=True)
    keep_every: int | str | None = _whole(None, "a number of steps", words={"none": None}, or_time=True)
    slots: int | str = _whole("auto", "a number of slots", least=MIN_SLOTS, most=MAX_SLOTS, words={"auto": "auto"})
    storage_options: dict[str, Any] = field(
        default_factory=dict, metadata={"rule": Rule("a mapping of names to values, or None", _options)}
    )
    compression: str = field(default="off", metadata={"rule": Rule(_COMPRESSIONS, _compression)})
    replicate: int = _whole(0, "a number of partner nodes", least=0, most=MOST_REPLICAS)
    replicate_every: int = _whole(1, "a number of steps")
    replicate_rate: int | None = _whole(None, "bytes per second", words={0: None})

    def __post_init__(self) -> None:
        for name in _RULES:
            value, default = getattr(self, name), _DEFAULTS[name]
            if type(value) is not type(default) or value != default:
                object.__setattr__(self, name, checked(name, value))
        if self.replicate and self.slots == MIN_SLOTS:
            raise ConfigError(
                "two slots are too few to replicate from",
                found=f"replicate={self.replicate} with slots={self.slots}",
                expected="at least 3 slots (sending, last sent, writing)",
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
        return self.newest_persist(step) == step

    def newest_persist(self, step: int) -> int:
        """Return the newest step up to `step` that is to be persisted by its number; 0: none."""
        every = self.persist_every
        if every.__class__ is str:  # no call: each step asks
            every = self.snapshot_every
        return step // every * every if every else 0  # type: ignore[operator,return-value]

    def for_persister(self) -> dict[str, Any]:
        """Return the fields of `JobConfig` that say when to persist and what to keep: numbers, and seconds where it is a time."""
        seconds: dict[str, int] = {}
        for name in ("persist_every", "keep_last", "keep_every"):
            if (value := getattr(self, name)).__class__ is str:
                seconds[name] = duration_s(value) or 0  # "continuous": whenever no write is running
        return {
            "persist_every": self.snapshot_every if "persist_every" in seconds else self.persist_every,
            "persist_s": seconds.get("persist_every", 0),
            "keep_last": 1 if "keep_last" in seconds else self.keep_last,
            "keep_last_s": seconds.get("keep_last", 0),
            "keep_every": None if "keep_every" in seconds else self.keep_every,
            "keep_every_s": seconds.get("keep_every", 0),
        }

    def plain(self) -> dict[str, Any]:
        """Return the settings as a file holds them, where None is a word ("never", "all")."""
        values = asdict(self)
        for name, rule in _RULES.items():
            if values[name] is None:
                values[name] = next(word for word, meaning in rule.words.items() if meaning is None)
        return values


_RULES: dict[str, Rule] = {one.name: one.metadata["rule"] for one in fields(Settings) if one.metadata}
_DEFAULTS = {one.name: one.default for one in fields(Settings)}


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
        step: The number that was given to `Checkpointer.step`.
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
