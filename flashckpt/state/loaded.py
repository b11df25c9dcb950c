"""Tracked objects are asked for their state and given it back by their own methods, and must say then what they were given.

A difference is an object that begins again in silence. None is: what another reading changes (a clock), what an object
added or dropped (another version of its class), and what waits in it until it is used (a loader's next iterator).
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.errors import FlashckptError, ObjectStateError
from flashckpt.printable import printable
from flashckpt.state.data_sources import is_lazy

_SAMPLED = 1 << 16
"""Elements of a tensor up to which all are compared; of a larger one about as many."""
_CLOCK_S = 3600.0
_MOST_DEPTH = 64
_ABSENT = object()


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

    def give(self, state: Any) -> None:
        """Let the object load; raises as `ask`."""
        before = _attributes(self._thing)
        ask(self._name, self._thing, "load_state_dict", state)
        self._new = [v for key, v in _attributes(self._thing).items() if before.get(key, _ABSENT) is not v]

    def check(self, recorded: Callable[[], Any]) -> None:
        """Ask the object for its state.

        Args:
            recorded: Makes what it was given once more: it may have changed that.

        Raises:
            ObjectStateError: It is another one; names the first value that differs. Or as `ask`.
        """
        if isinstance(self._thing, LRScheduler) or is_lazy(self._thing) or _is_ours(self._thing):
            return
        wanted = recorded()
        found = [one for one in self._differences(wanted) if not self._waits(one) and not _is_of_now(one.now)]
        if found:  # what differs each time it is read says nothing
            again = {one.where: one.now for one in self._differences(wanted)}
            found = [one for one in found if one.where in again and _is_same(one.now, again[one.where])]
        if found:
            raise self._error(found)

    def _differences(self, wanted: Any) -> list[OtherValue]:
        return list(_differences((wanted,), ask(self._name, self._thing, "state_dict"), ""))

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
        return ObjectStateError(
            f"the tracked object {self._name!r} does not come back as it was recorded",
            found=f"{type(self._thing).__qualname__}.state_dict(){first.where} is {now} after load_state_dict() with {then}{more}",
            expected="the state that it was given, until training continues",
            state="Nothing is trained on it; snapshots and checkpoints are intact.",
            remedy="let load_state_dict() take all that state_dict() returns, and leave out of state_dict() what it keeps on purpose",
        )


def _is_ours(thing: Any) -> bool:
    """Whether its class is of this project, and may say something else on other ranks or with other settings."""
    module = type(thing).__module__
    return (
        module.startswith("flashckpt.") and module != "flashckpt.integrations.shared"
    )  # that one has a user's object inside


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
        if then and not both:
            yield OtherValue(where, along, now)
        for key in both:
            yield from _differences((*along, then[key]), now[key], f"{where}[{key!r}]")
    elif isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)) and len(then) == len(now):
        for i, (part, part_now) in enumerate(zip(then, now, strict=True)):
            yield from _differences((*along, part), part_now, f"{where}[{i}]")
    elif not _is_equal(then, now):
        yield OtherValue(where, along, now)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, with the same keys."""
    if isinstance(one, Mapping) and (not isinstance(other, Mapping) or one.keys() != other.keys()):
        return False
    return (one is None) == (other is None) and not any(_differences((one,), other, ""))


def _is_equal(then: Any, now: Any) -> bool:
    """Whether two values that are no trees are equal; also where nobody can tell."""
    if isinstance(then, (torch.dtype, torch.device)) or isinstance(now, DTensor):
        return True
    try:
        if isinstance(then, (torch.Tensor, np.ndarray, np.generic)) or isinstance(now, (torch.Tensor, np.ndarray)):
            return _are_equal(torch.as_tensor(then), torch.as_tensor(now))
        if isinstance(then, io.BytesIO):
            return not isinstance(now, io.BytesIO) or then.getvalue() == now.getvalue()
        return bool(then == now) or (then != then and now != now)  # noqa: PLR0124 -- not a number
    except (TypeError, ValueError, RuntimeError):
        return True


def _are_equal(then: torch.Tensor, now: torch.Tensor) -> bool:
    if then.shape != now.shape:
        return False
    step = max(1, then.numel() // _SAMPLED)
    some, some_now = (tensor.detach().reshape(-1)[::step] for tensor in (then, now))
    return bool(torch.isclose(some.to(some_now), some_now, rtol=0.0, atol=0.0, equal_nan=True).all())


def _is_of_now(value: Any) -> bool:
    """Whether a number is this process' own, or a clock's: another one in each start."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value == os.getpid() or abs(value - time.time()) < _CLOCK_S


__all__ = ["Giving", "ask"]
