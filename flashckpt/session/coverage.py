"""What is tracked and what is not: one line at the start, as far as objects show it without a false alarm; later, optimizers.

An optimizer that nobody tracked and that changes tracked parameters shows when it steps: what it holds is in no snapshot.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from flashckpt.report import guarded
from flashckpt.state import samplers
from flashckpt.state.data_sources import begins_when_read, continuation_of
from flashckpt.state.registry import StateRegistry

_DRAWING = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "random",
        "choice",
        "choices",
        "uniform",
        "normal",
        "gauss",
        "shuffle",
        "bernoulli",
        "randperm",
        "rand_like",
        "randn_like",
        "sample",
    ]
)
_SEEDED = frozenset(["generator", "Generator", "manual_seed", "default_rng", "RandomState", "seed"])
_RANDOM_TRANSFORM = re.compile(r"\b(Random|AutoAugment|TrivialAugment|AugMix|ColorJitter|GaussianBlur)|\(p=0?\.")
_PLAIN = frozenset({type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float, bool, type(None)})
_DEPTH = 3
_OTHERS = frozenset({"flashckpt", "torch", "lightning", "transformers", "accelerate", "_pytest", "pluggy", "runpy"})


def coverage(tracked: StateRegistry) -> str:
    """Return the line: names that are tracked, and what a restart will not have."""
    names = [*tracked.modules, *tracked.optimizers, *tracked.objects, *(["random state"] if tracked.rng else [])]
    lacking = list(_lacking(tracked))
    rest = f"; not tracked: {', '.join(lacking)}" if lacking else ""
    return f"tracked: {', '.join(names) or 'nothing'}{rest}"


def _lacking(tracked: StateRegistry) -> Iterator[str]:
    loaders = _loaders()
    if not any(map(_has_position, tracked.objects.values())) and (loaders or not tracked.rng):
        seen = " (a DataLoader is there)" if loaders else ""
        yield f"data position{seen}"
    if not tracked.rng:
        yield "random state (rng=True)"
    yield from (f"the scheduler of {label}" for label in _unscheduled(tracked))
    if any(_draws_in_workers(loader) for loader in loaders):
        yield "what samples draw in loader workers (SeededSamples)"


def _has_position(thing: Any) -> bool:
    found = (thing, *getattr(thing, "__dict__", {}).values())
    is_known = any(samplers.is_sampler(part) or continuation_of(part) is not None for part in found)
    return is_known or begins_when_read(thing)


def _loaders() -> list[DataLoader[Any]]:
    """Return the loaders in the variables of the program: of the functions that are running, and one level below."""
    values: list[Any] = []
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        values += [*frame.f_locals.values(), *(() if name in _OTHERS else frame.f_globals.values())]
        frame = frame.f_back
    values = list({id(value): value for value in values if type(value) not in _PLAIN}.values())
    parts: list[Any] = []
    for value in values:
        if type(value) in (list, tuple):
            parts += value
        elif not isinstance(value, (type, ModuleType)) and type(getattr(value, "__dict__", None)) is dict:
            parts += vars(value).values()
    every = {id(one): one for one in (*values, *parts) if type(one) not in _PLAIN}
    try:
        return [one for one in every.values() if isinstance(one, DataLoader)]
    except Exception:  # noqa: BLE001 -- any variable of the program: proxies, mocks
        return list(filter(_is_loader, every.values()))


def _is_loader(value: Any) -> bool:
    """Whether it says that it is one, as Accelerate's do; what answers no such question is none."""
    try:
        return isinstance(value, DataLoader)
    except Exception:  # noqa: BLE001 -- any variable of the program: proxies, mocks
        return False


def _unscheduled(tracked: StateRegistry) -> Iterator[str]:
    """Yield the optimizers that some scheduler has begun to set, and no tracked object is one of theirs."""
    known = [one for thing in tracked.objects.values() for one in _schedulers_in(thing, _DEPTH)]
    owners = {id(part) for one in known for part in _optimizers_of(one)}
    own = {id(one) for one in tracked.all_optimizers()}
    if known and not owners <= own:
        return  # a scheduler of something that is wrapped: nobody can tell whose it is
    for label, group in tracked.optimizers.items():
        if any("initial_lr" in g for one in group if id(one) not in owners for g in one.param_groups):
            yield label


def _optimizers_of(scheduler: Any) -> list[Any]:
    optimizer = scheduler.optimizer
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return [optimizer]


def _schedulers_in(thing: Any, depth: int) -> Iterator[Any]:
    if (isinstance(thing, LRScheduler) or hasattr(thing, "base_lrs")) and hasattr(thing, "optimizer"):
        yield thing
    elif depth and not isinstance(thing, (torch.nn.Module, torch.Tensor, type)):
        inside = thing if isinstance(thing, (list, tuple)) else getattr(thing, "__dict__", {}).values()
        for part in list(inside):
            yield from _schedulers_in(part, depth - 1)


def _draws_in_workers(loader: DataLoader[Any]) -> bool:
    """Whether it has workers, and a data set that draws from generators that nobody seeds for each sample."""
    data: Any = loader.dataset
    for _ in range(_DEPTH if loader.num_workers else 0):
        if type(data).__name__ == "SeededSamples":
            return False
        if _draws(type(data)) or any(_RANDOM_TRANSFORM.search(repr(t)) for t in _transforms(data)):
            return True
        data = getattr(data, "dataset", None)
    return False


def _transforms(data: Any) -> list[Any]:
    return [getattr(data, name) for name in ("transform", "transforms") if getattr(data, name, None) is not None]


def _draws(kind: type) -> bool:
    code = getattr(getattr(kind, "__getitem__", None), "__code__", None)
    if code is None:
        return False
    words = {*code.co_names, *(w for c in code.co_consts if isinstance(c, tuple) for w in c if isinstance(w, str))}
    return bool(words & _DRAWING) and not words & _SEEDED


_logger = logging.getLogger("flashckpt")
_REACH = 20_000
"""Objects that are looked through for an optimizer inside of a tracked object."""


class UntrackedOptimizers:
    """Sees each optimizer of the process take its steps, and warns once of one that is not tracked and should be.

    One that steps beside a tracked optimizer of the same parameters, or is inside of a tracked object, is their affair.

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
