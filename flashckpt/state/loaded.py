"""Tracked objects are asked for their state and given it back by their own methods, and must say then what they were given.

A difference is an object that begins again in silence. None is: what another reading changes (a clock), what an object
added or dropped (another version of its class), what waits in it until it is used (a loader's next iterator), and bytes
that the load has changed: a pickle of the same object is seldom the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.errors import FlashckptError, ObjectStateError
from flashckpt.printable import printable
from flashckpt.report import guarded
from flashckpt.state.data_sources import is_lazy
from flashckpt.state.placement import dtensor

_AT_A_TIME = 1 << 20  # elements
_CLOCK_S = 3600.0
_MOST_DEPTH = 64
_ABSENT = object()
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)
_OF_NUMBERS = (*_ARRAYS, bool, int, float, complex, list, tuple)
_log = guarded(logging.getLogger("flashckpt"))


class OtherValue(NamedTuple):
    """A value that is not what was recorded.

    Attributes:
        where: How it is reached, e.g. "['epoch']".
        along: What was recorded, from the whole state to this value.
        now: The value.
    """

    where: str
    along: tuple[Any, ...]
    now: Any


def ask(name: str, thing: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a tracked object.

    Raises:
        ObjectStateError: It raised; names the object. Errors of ours pass as they are.
    """
    try:
        return getattr(thing, method)(*arguments)
    except FlashckptError:
        raise
    except Exception as error:
        text = printable(str(error).partition("\n")[0][:300])
        raise ObjectStateError(
            f"{method}() of the tracked object {name!r} raised {type(error).__name__}",
            found=f"{type(thing).__qualname__}.{method}(): {text or 'no text'}; its traceback is above",
            state="Nothing is trained on a state that is restored in part; snapshots and checkpoints are intact.",
            remedy=f"fix that method, or leave {name!r} out of track(): the rest is restored without it",
        ) from error


class Giving:
    """One object that is given its state back, and asked afterwards.

    Args:
        name: Its track name.
        thing: The object.
    """

    def __init__(self, name: str, thing: Any) -> None:
        self._name, self._thing = name, thing
        self._new: list[Any] = []
        self._said: Any = None
        self._before: Any = None

    def give(self, state: Any) -> None:
        """Let the object load; raises as `ask`."""
        if _has_bytes(state):
            with contextlib.suppress(Exception):  # one that has no state yet
                self._before = self._thing.state_dict()
        before = _attributes(self._thing)
        self._said = ask(self._name, self._thing, "load_state_dict", state)
        self._new = [v for key, v in _attributes(self._thing).items() if before.get(key, _ABSENT) is not v]

    def check(self, recorded: Callable[[], Any]) -> None:
        """Ask the object for its state.

        Args:
            recorded: Makes what it was given once more: it may have changed that.

        Raises:
            ObjectStateError: It is another one; names the first value that differs. Or as `ask`.
        """
        if isinstance(self._thing, LRScheduler) or is_lazy(self._thing) or is_ours(self._thing):
            return
        wanted = recorded()
        now = ask(self._name, self._thing, "state_dict")
        self._refuse_keys(now)
        found = [one for one in _differences((wanted,), now, "") if not self._waits(one) and not _is_of_now(one.now)]
        again = ask(self._name, self._thing, "state_dict")
        changing = {one.where for one in _differences((now,), again, "") if not _is_of_now(one.now)}
        found = [one for one in found if one.where not in changing]  # what each reading changes says nothing
        found = [one for one in found if not _are_bytes(one) or one.where not in self._moved(now)]
        if found:
            raise self._error(found)
        if changing:
            _log.warning(
                "%r: %s of its state changes each time it is read, and each snapshot reads it: if training depends on it, "
                "let %s.state_dict() return it without changing it",
                self._name, ", ".join(sorted(changing)[:3]) or "all", type(self._thing).__qualname__,
            )  # fmt: skip

    def _moved(self, now: Any) -> set[str]:
        """Return where the state is another one than before the load."""
        return {one.where for one in _differences((self._before,), now, "")}

    def _refuse_keys(self, now: Any) -> None:
        """Refuse what torch's `load_state_dict(strict=False)` says of keys, where the object's state consists of them."""
        unexpected = list(getattr(self._said, "unexpected_keys", None) or ())
        missing = [
            key for key in getattr(self._said, "missing_keys", None) or () if isinstance(now, Mapping) and key in now
        ]
        if unexpected or missing:
            words = [f"{len(keys)} {kind} (first: {printable(str(keys[0]))[:80]!r})" for keys, kind in
                     ((missing, "that it was not given"), (unexpected, "that it has no place for")) if keys]  # fmt: skip
            raise self._refusal(f"{type(self._thing).__qualname__}.load_state_dict() returned keys: {', '.join(words)}")

    def _waits(self, one: OtherValue) -> bool:
        """Whether what was recorded is in the object since, where its next use finds it."""
        last = one.along[-1]
        inside = list(last.values()) if isinstance(last, Mapping) else []
        return any(map(self._is_new, one.along)) or (bool(inside) and all(map(self._is_new, inside)))

    def _is_new(self, part: Any) -> bool:
        return any(_is_same(part, held) for held in self._new)

    def _error(self, found: list[OtherValue]) -> ObjectStateError:
        first, more = found[0], f", and {len(found) - 1} more values" if len(found) > 1 else ""
        now, then = (printable(str(value))[:80] for value in (first.now, first.along[-1]))
        return self._refusal(
            f"{type(self._thing).__qualname__}.state_dict(){first.where} is {now} after load_state_dict() with {then}{more}"
        )

    def _refusal(self, found: str) -> ObjectStateError:
        return ObjectStateError(
            f"the tracked object {self._name!r} does not come back as it was recorded",
            found=found,
            expected="the state that it was given, until training continues",
            state="Nothing is trained on it; snapshots and checkpoints are intact.",
            remedy="let load_state_dict() take all that state_dict() returns, and leave out of state_dict() what it keeps on purpose",
        )


def is_ours(thing: Any) -> bool:
    """Whether its class is of this project, and may say something else on other ranks or with other settings."""
    has_users = getattr(type(thing), "flashckpt_is_of_users", False)  # an object inside
    return type(thing).__module__.startswith("flashckpt.") and not has_users


def _attributes(thing: Any) -> dict[tuple[int, str], Any]:
    """Return what lies in an object and in the objects that it has, by owner and name."""
    found: dict[tuple[int, str], Any] = {}
    for owner in [thing, *getattr(thing, "__dict__", {}).values()]:
        if not isinstance(owner, (torch.nn.Module, torch.Tensor, type)):
            found.update({(id(owner), key): value for key, value in getattr(owner, "__dict__", {}).items()})
    return found


def _differences(along: tuple[Any, ...], now: Any, where: str) -> Iterator[OtherValue]:
    """Yield what of the last of `along` is another value now. Nothing was recorded in the place of a None."""
    then = along[-1]
    if then is None or len(along) > _MOST_DEPTH:
        return
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        both = [key for key in then if key in now]
        if then and (not both or _is_renamed(then, now)):
            yield OtherValue(where, along, now)
        for key in both:
            yield from _differences((*along, then[key]), now[key], f"{where}[{key!r}]")
    elif isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)) and len(then) == len(now):
        for i, (part, part_now) in enumerate(zip(then, now, strict=True)):
            yield from _differences((*along, part), part_now, f"{where}[{i}]")
    elif not _is_equal(then, now):
        yield OtherValue(where, along, now)


def _is_renamed(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> bool:
    """Whether a tensor is under no key any more, and tensors are under others that are none of those that were recorded."""
    dropped = [value for key, value in then.items() if key not in now and isinstance(value, _ARRAYS)]
    added = [value for key, value in now.items() if key not in then and isinstance(value, _ARRAYS)]
    return bool(added) and any(not any(_is_equal(one, other) for other in added) for one in dropped)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, with the same keys."""
    if isinstance(one, Mapping) and (not isinstance(other, Mapping) or one.keys() != other.keys()):
        return False
    return (one is None) == (other is None) and not any(_differences((one,), other, ""))


def _is_equal(then: Any, now: Any) -> bool:
    """Whether two values that are no trees are equal; also where nobody can tell."""
    if isinstance(then, (torch.dtype, torch.device)) or isinstance(now, dtensor()):
        return True
    try:
        if isinstance(then, _ARRAYS) or isinstance(now, _ARRAYS):
            if not isinstance(then, _OF_NUMBERS) or not isinstance(now, _OF_NUMBERS):
                return False
            return _are_equal(torch.as_tensor(then), torch.as_tensor(now))
        if isinstance(then, io.BytesIO):
            return not isinstance(now, io.BytesIO) or then.getvalue() == now.getvalue()
        return bool(then == now) or (then != then and now != now)  # noqa: PLR0124 -- not a number
    except (TypeError, ValueError, RuntimeError):
        return True


def _are_equal(then: torch.Tensor, now: torch.Tensor) -> bool:
    if then.shape != now.shape:
        return False
    if then.dtype == now.dtype and then.device == now.device and (then is now or torch.equal(then, now)):
        return True
    wide = _wide(then.dtype, now.dtype)
    parts = (torch.split(tensor.detach().reshape(-1), _AT_A_TIME) for tensor in (then, now))
    return all(
        torch.isclose(part.cpu().to(wide), part_now.cpu().to(wide), rtol=0.0, atol=0.0, equal_nan=True).all()
        for part, part_now in zip(*parts, strict=True)
    )


def _wide(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return a type that holds both exactly: what is held in fewer bits now is another value. torch has none for float8."""
    if one.is_complex or other.is_complex:
        return torch.complex128
    return torch.float64 if one.is_floating_point or other.is_floating_point else torch.promote_types(one, other)


def _are_bytes(one: OtherValue) -> bool:
    return isinstance(one.now, bytes) and isinstance(one.along[-1], bytes)


def _has_bytes(state: Any, depth: int = 0) -> bool:
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return isinstance(state, bytes) or (depth < _MOST_DEPTH and any(_has_bytes(part, depth + 1) for part in parts))


def _is_of_now(value: Any) -> bool:
    """Whether a number is this process' own, or a clock's: another one in each start."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value == os.getpid() or abs(value - time.time()) < _CLOCK_S
