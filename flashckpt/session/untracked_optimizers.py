"""Optimizers that nobody tracked and that change tracked parameters: what they hold is in no snapshot."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from flashckpt.logs import guarded
from flashckpt.state.registry import StateRegistry

_logger = logging.getLogger("flashckpt")
_REACH = 20_000
"""Objects that are looked through for an optimizer inside of a tracked object."""


class UntrackedOptimizers:
    """Sees each optimizer of the process take its steps, and warns once of one that is not tracked and should be.

    One that steps beside a tracked optimizer of the same parameters, or is inside of a tracked object, is their affair.

    Args:
        tracked: What is tracked, all of it.

    Attributes:
        others: Those that took a step since the last `check()` and are not tracked.
    """

    def __init__(self, tracked: StateRegistry) -> None:
        self._tracked = tracked
        self._mine = set(map(id, tracked.all_optimizers()))
        self._harmless: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._active: dict[int, Optimizer] = {}
        self.others: dict[int, Optimizer] = {}
        me = weakref.ref(self)

        def note(optimizer: Optimizer, *_: object) -> None:
            if (this := me()) is not None:
                this.note(optimizer)

        self._hook = register_optimizer_step_post_hook(note)

    def remove(self) -> None:
        """Look no longer."""
        self._hook.remove()
        self._active, self.others = {}, {}

    def note(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has taken a step."""
        if optimizer not in self._harmless:
            noted = self._active if id(optimizer) in self._mine else self.others
            noted[id(optimizer)] = optimizer

    def check(self) -> None:
        """Compare the optimizers that took a step since the last call with those that are tracked."""
        active, others, self._active, self.others = self._active, self.others, {}, {}
        for other in others.values():
            if (name := self._changed_by(other, active.values())) is not None:
                guarded(_logger).warning(
                    "%s took a step with %r and is not tracked: its state and rate are in no snapshot, and a restart begins "
                    "without them. Track every optimizer that steps, and change a tracked one in place of making another",
                    type(other).__name__,
                    name,
                )
                return self.remove()
        return None

    def _changed_by(self, other: Optimizer, active: Iterable[Optimizer]) -> str | None:
        """Return the name of a tracked parameter that only `other` changes; None: it is harmless."""
        named = {
            id(p): f"{label}.{name}"
            for label, modules in self._tracked.modules.items()
            for module in modules
            for name, p in module.named_parameters()
        }
        its = [id(p) for p in _parameters(other) if id(p) in named]
        theirs = {id(p) for one in active for p in _parameters(one)}
        if not its or _is_inside(other, self._tracked.objects.values()):
            self._harmless.add(other)
            return None
        return named[its[0]] if theirs.isdisjoint(its) else None


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _is_inside(optimizer: Optimizer, things: Iterable[Any]) -> bool:
    """Return whether attributes, lists and dicts of the objects lead to the optimizer."""
    todo, seen = deque(things), set[int]()
    while todo and len(seen) < _REACH:
        thing = todo.popleft()
        if thing is optimizer:
            return True
        if id(thing) in seen or isinstance(thing, Tensor):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            todo += thing
        else:
            todo += getattr(thing, "__dict__", {}).values()
    return False


__all__ = ["UntrackedOptimizers"]
