"""The state that a sampler records: plain integers and strings, the same on every rank, under 200 bytes."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, overload

from flashckpt.errors import ConfigError, SamplerStateError
from flashckpt.sampler.order.spans import SkippedSpans

STATE_VERSION, PACKED_VERSION = 1, 2
"""A state with the spans as one text has the second version: a program that knows the first alone would not skip them."""
Segment = tuple[Any, ...]
_INTEGERS = ("version", "seed", "epoch", "offset", "length", "fingerprint")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """The position of training: in which order of which data.

    Args:
        seed: Key of the order.
        epoch: The epoch the next sample belongs to.
        offset: Samples of that epoch that are trained, over all ranks.
        length: Samples of one epoch.
        fingerprint: Identifies the data; 0 if the data set gives none.
        order: Kind and version of the order, e.g. "global:feistel8.1".
        segments: Changes along the stream: ("skip", first, last), or ("skips", text) for many of them
            (`SkippedSpans.packed`); ("batch", position, samples),
            ("weights", position, weight, weight, ...), ("ended", epoch) after the last step of an epoch.
    """

    seed: int
    epoch: int
    offset: int
    length: int
    fingerprint: int
    order: str
    segments: tuple[Segment, ...] = ()
    version: int = STATE_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain values, for JSON and msgpack."""
        return {
            "version": self.version,
            "seed": self.seed,
            "epoch": self.epoch,
            "offset": self.offset,
            "length": self.length,
            "fingerprint": self.fingerprint,
            "order": self.order,
            "segments": [list(segment) for segment in self.segments],
        }

    def skips(self) -> SkippedSpans:
        """Return the spans that it skips."""
        for kind, *parts in self.segments:
            if kind == "skips":
                return SkippedSpans.unpacked(parts[0])
        return SkippedSpans(spans=((parts[0], parts[1]) for kind, *parts in self.segments if kind == "skip"))

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SamplerState:
        """Return the state that `to_dict` gave.

        Raises:
            SamplerStateError: it is not a sampler state, or a newer version wrote it.
        """
        wanted = (*_INTEGERS, "order", "segments")
        if not isinstance(state, Mapping) or set(state) != set(wanted):
            keys = str(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
            raise _unreadable("this is not the state of an elastic sampler", keys, ", ".join(wanted))
        if state["version"] not in (STATE_VERSION, PACKED_VERSION):
            expected = f"{STATE_VERSION} or {PACKED_VERSION}"
            raise _unreadable("the sampler state has another version", str(state["version"]), expected)
        for name in _INTEGERS:
            if isinstance(state[name], bool) or not isinstance(state[name], int):
                raise _unreadable(f"{name} of the sampler state is not an integer", repr(state[name]), "an integer")
        if not (state["epoch"] >= 0 and 0 <= state["offset"] < max(1, state["length"])):
            found = f"epoch {state['epoch']}, offset {state['offset']}, length {state['length']}"
            raise _unreadable("the sampler state has no such position", found, "0 <= offset < length")
        if not isinstance(state["order"], str) or not isinstance(state["segments"], (list, tuple)):
            found = f"order {state['order']!r:.40}, segments {state['segments']!r:.40}"
            raise _unreadable("the sampler state has no order or no segments", found, "text and a list")
        segments = tuple(_segment(segment) for segment in state["segments"])
        if (state["version"] == PACKED_VERSION) != any(kind == "skips" for kind, *_ in segments):
            found = f"version {state['version']}"
            raise _unreadable("the sampler state has another version than its segments", found, "skips in version 2")
        return cls(**{name: state[name] for name in _INTEGERS}, order=state["order"], segments=segments)


@overload
def whole(name: str, value: int) -> int: ...
@overload
def whole(name: str, value: int | None) -> int | None: ...  # type: ignore[overload-overlap]
@overload
def whole(name: str, value: object) -> int: ...
def whole(name: str, value: object) -> int | None:
    """Return a whole number of any type (numpy, torch, 4.0) as an int: what is recorded must be one. None stays None.

    Raises:
        ConfigError: It is none.
    """
    if value is None:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # what is asked
    except TypeError:
        if getattr(value, "is_integer", bool)():
            return int(value)  # type: ignore[call-overload,no-any-return]  # a float
    raise ConfigError(f"{name} is not a whole number", found=f"{value!r:.60}", expected="a whole number")


def _segment(segment: Any) -> Segment:
    parts = list(segment) if isinstance(segment, (list, tuple)) else []
    lengths = {"skip": 3, "batch": 3, "weights": len(parts), "ended": 2}
    kind, *numbers = parts or [None]
    if kind == "skips" and len(numbers) == 1 and _is_packed(numbers[0]):
        return ("skips", numbers[0])
    is_known = type(kind) is str and len(parts) == lengths.get(kind)
    if not is_known or not numbers or any(type(number) is not int for number in numbers):
        raise _unreadable("a segment of the sampler state is not known", f"{segment!r:.80}", ", ".join(lengths))
    return (str(kind), *numbers)


def _is_packed(text: Any) -> bool:
    try:
        return type(text) is str and len(SkippedSpans.unpacked(text)) > 0
    except ValueError:
        return False


def _unreadable(problem: str, found: str, expected: str) -> SamplerStateError:
    return SamplerStateError(
        problem,
        found=found,
        expected=expected,
        state="The sampler keeps its position.",
        remedy="pass the result of ElasticSampler.state_dict()",
    )


def check_same(state: SamplerState, own: SamplerState) -> None:
    """Reject a state that belongs to other data, another seed or another order; names both sides."""
    for name, label in (
        ("length", "samples per epoch"),
        ("fingerprint", "data set fingerprint"),
        ("seed", "seed"),
        ("order", "order"),
    ):
        recorded, here = getattr(state, name), getattr(own, name)
        if recorded != here:
            raise SamplerStateError(
                f"the sampler was resumed with another {'number of ' * (name == 'length')}{label}",
                found=f"{label} {here} in this run",
                expected=f"{label} {recorded} as recorded (epoch {state.epoch}, offset {state.offset})",
                state="The sampler keeps its position; nothing was loaded.",
                remedy="resume with the same data, seed and order, or start a new run on purpose without the sampler state",
            )


def fingerprint_of(value: object) -> int:
    """Return 63 bits that identify a data set: from an explicit value, or from its `fingerprint`; 0 if it has none."""
    if isinstance(value, bool) or not isinstance(value, (int, Integral, str, bytes)):
        value = getattr(value, "fingerprint", None) or getattr(value, "_fingerprint", None)
        value = value() if callable(value) else value
        if value is None:
            return 0
    data = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
