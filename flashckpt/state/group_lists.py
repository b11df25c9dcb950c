"""Lists that have one entry for each parameter group, in the state of schedulers and of other objects beside an optimizer.

They are by position. Where a program makes its groups in another order, the entries follow the groups that they belong to;
a list of which that cannot be said is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flashckpt.state.data_sources import begins_when_read
from flashckpt.state.loaded import ask, is_ours
from flashckpt.state.named_groups import NOT_SETTINGS, SCALARS, GroupOrder, plain, settings

BY_GROUP = frozenset(
    {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums", "swa_lrs"}
)
"""What torch's schedulers keep for each group."""
NOT_BY_GROUP = frozenset({"_milestones", "milestones", "_schedulers", "_schedule_phases"})
"""What they keep in lists otherwise."""
_DEEPEST, _MOST_SEEN = 4, 2000
_NUMBERS = "\0"  # keys that are numbers, where others have text before them
_OPAQUE = (torch.Tensor, torch.nn.Module, type, str, bytes, int, float)


@dataclass(frozen=True, eq=False)
class GroupsOf:
    """The groups of one live optimizer.

    Attributes:
        optimizer: It.
        order: Which recorded ones they are.
        recorded: The settings of all groups of the recorded optimizer, in its order.
    """

    optimizer: torch.optim.Optimizer
    order: GroupOrder
    recorded: Sequence[Mapping[Any, Any]] = ()


@dataclass(eq=False)
class InLiveOrder:
    """One state on its way from the recorded order of groups to the live one.

    Attributes:
        groups: Of the optimizer that the lists are of; None: of one that is not tracked.
        knows_lists: All lists by group are in BY_GROUP.
        is_alone: No other optimizer has groups that they may be of.
        misfits: Places in the state whose entries cannot be said to belong to any group; the live ones stay there.
    """

    groups: GroupsOf | None
    knows_lists: bool
    is_alone: bool = True
    misfits: list[str] = field(default_factory=list)

    def node(self, state: Any, live: Any, path: str) -> Any:
        """Return a part of the state, with its lists in the live order."""
        if isinstance(state, dict):
            known = live if isinstance(live, Mapping) else {}
            if not self.knows_lists and (prefix := _counted(state)) is not None:
                own: Sequence[Any] | None = list(known.values()) if known.keys() == state.keys() else None
                entries = self._entries(list(state.values()), own, path, is_known=False)
                return {place if prefix is _NUMBERS else f"{prefix}{place}": v for place, v in enumerate(entries)}
            return {key: self._member(key, value, known.get(key), f"{path}.{key}") for key, value in state.items()}
        if type(state) in (list, tuple):
            own = live if isinstance(live, (list, tuple)) else None
            each = self._each if self.knows_lists else functools.partial(self._entries, is_known=False)
            return type(state)(each(list(state), own, path))
        if isinstance(state, (torch.Tensor, np.ndarray)) and not self.knows_lists and self._is_of_groups(state):
            self.misfits.append(path)
            return state if live is None else live
        return state

    def _each(self, entries: list[Any], live: Sequence[Any] | None, path: str) -> list[Any]:
        there = live if live is not None and len(live) == len(entries) else [None] * len(entries)
        return [self.node(v, w, f"{path}.{i}") for i, (v, w) in enumerate(zip(entries, there, strict=True))]

    def _member(self, key: Any, value: Any, live: Any, path: str) -> Any:
        own = live if isinstance(live, (list, tuple)) else None
        if key in NOT_BY_GROUP:
            return value if key != "_schedulers" else type(value)(self._each(list(value), own, path))
        if key in BY_GROUP and type(value) in (list, tuple):
            return type(value)(self._entries(list(value), own, path, is_known=True))
        if isinstance(value, torch.Tensor) and "." in str(key):  # of a parameter
            return value
        return self.node(value, live, path)

    def _entries(self, entries: list[Any], live: Sequence[Any] | None, path: str, *, is_known: bool) -> Sequence[Any]:
        groups = self.groups
        total = 0 if groups is None else groups.order.total
        if is_known and (not total or len(entries) != total):
            if live is None or len(live) == len(entries):
                return entries
        elif is_known or (groups and self.is_alone and self._is_known_by_its_entries(entries, live)):
            return self._moved(entries, live, path)
        elif not self._may_be_by_group(entries, live):
            return self._each(entries, live, path)
        self.misfits.append(path)
        return entries if live is None else live

    def _is_known_by_its_entries(self, entries: list[Any], live: Sequence[Any] | None) -> bool:
        """Whether a list is a setting of all groups, or what the program makes now, put into the recorded order."""
        assert self.groups is not None
        if len(entries) != self.groups.order.total or _is_column(entries, self.groups.recorded):
            return len(entries) == self.groups.order.total
        order = self.groups.order
        moved = [entries[of[0]] for of in order.of if of]
        return live is not None and len(moved) == len(order.of) == len(live) and _are_alike(live, moved)

    def _may_be_by_group(self, entries: list[Any], live: Sequence[Any] | None) -> bool:
        """Whether a list that nobody knows may have an entry per group, in another order than the live one."""
        if self.groups is None or self.groups.order.is_same or _are_equal(entries):
            return False
        if any(isinstance(one, torch.Tensor) and one.numel() > 1 for one in entries):
            return False  # of parameters
        is_as_built = live is not None and len(live) == len(entries) and _are_alike(live, entries)
        return len(entries) == self.groups.order.total and not is_as_built

    def _moved(self, entries: list[Any], live: Sequence[Any] | None, path: str) -> Sequence[Any]:
        assert self.groups is not None
        moved = []
        for place, sources in enumerate(self.groups.order.of):
            found = [entries[source] for source in sources]
            if found and _are_equal(found):
                moved.append(found[0])
            elif live is not None and place < len(live):
                if found:
                    self.misfits.append(path)
                moved.append(live[place])
            else:
                self.misfits.append(path)
                return entries if live is None else live
        return moved

    def _is_of_groups(self, value: torch.Tensor | np.ndarray) -> bool:
        order = None if self.groups is None else self.groups.order
        return order is not None and not order.is_same and tuple(value.shape) == (order.total,) and order.total > 1


def in_live_order(name: str, thing: Any, state: Any, groups: Sequence[GroupsOf]) -> tuple[Any, list[str]]:
    """Return the recorded state of an object in the order of the live groups, and the places where that cannot be said.

    Args:
        name: Of the object.
        thing: The object.
        state: What was recorded of it.
        groups: Of all optimizers.
    """
    is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
    moved = [one for one in groups if not one.order.is_same]
    if not is_scheduler and (not moved or is_ours(thing) or begins_when_read(thing)):  # nearly always
        return state, []
    own = group_of(thing, groups)
    if own is not None and own.order.is_same:
        return state, []
    of = [own] if own is not None or is_scheduler else moved
    knows = (own is not None or is_scheduler) and all(map(_is_of_torch, schedulers_in(thing)))
    misfits: list[str] = []
    live = ask(name, thing, "state_dict")
    for one in of:
        walk = InLiveOrder(one, knows_lists=knows, is_alone=len(of) == 1)
        state = walk.node(state, live, name)
        misfits += walk.misfits
    return state, misfits


def beside(groups: GroupsOf, state: Any, path: str) -> tuple[Any, list[str]]:
    """Do the same for what an optimizer itself keeps beside the state of its parameters."""
    if groups.order.is_same:
        return state, []
    walk = InLiveOrder(groups, knows_lists=False)
    return walk.node(state, None, path), walk.misfits


def group_of(thing: Any, groups: Sequence[GroupsOf]) -> GroupsOf | None:
    """Return the groups of the optimizer that an object holds, itself or in what it consists of; None where it holds none."""
    by_id = {id(one.optimizer.param_groups): one for one in groups}
    return next((by_id[id(found)] for found in _param_groups(thing) if id(found) in by_id), None)


def held_groups(thing: Any) -> Any:
    """Return the parameter groups of the nearest optimizer that an object holds, a tracked one or not; None without one."""
    return next((found for found in _param_groups(thing) if _are_groups(found)), None)


def _are_groups(found: Any) -> bool:
    return type(found) is list and bool(found) and all(isinstance(one, dict) and "params" in one for one in found)


def schedulers_in(thing: Any) -> list[Any]:
    """Return an object, and the schedulers that it calls where it is a scheduler of others."""
    inner = vars(thing).get("_schedulers", ()) if hasattr(thing, "__dict__") else ()
    return [thing, *itertools.chain.from_iterable(map(schedulers_in, inner if type(inner) in (list, tuple) else ()))]


def _is_of_torch(thing: Any) -> bool:
    return type(thing).__module__.startswith("torch.")


def _param_groups(thing: Any) -> Iterator[Any]:
    """Yield every `param_groups` of an object and of its members, the nearest first."""
    level, seen = [thing], {id(thing)}
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for one in level:
            with contextlib.suppress(Exception):  # an attribute of anybody's class
                yield one.param_groups
            for member in itertools.islice(_members(one), _MOST_SEEN - len(seen)):
                if not isinstance(member, _OPAQUE) and id(member) not in seen:
                    seen.add(id(member))
                    below.append(member)
        level = below


def _members(thing: Any) -> Iterable[Any]:
    if type(thing) in (list, tuple):
        return thing  # type: ignore[no-any-return]  # one of the two
    return list((thing if type(thing) is dict else getattr(thing, "__dict__", {})).values())


def _counted(state: Mapping[Any, Any]) -> str | None:
    """Return what stands before the numbers where a dict is a list in other words: its keys are 0, 1, 2, ... or "group_0", ..."""
    if len(state) < 2:
        return None
    if all(type(key) is int and key == place for place, key in enumerate(state)):
        return _NUMBERS
    prefix = re.sub(r"0$", "", first) if isinstance(first := next(iter(state)), str) else None
    return prefix if all(key == f"{prefix}{place}" for place, key in enumerate(state)) else None


def _are_equal(entries: Sequence[Any]) -> bool:
    if any(isinstance(one, torch.Tensor) for one in entries):
        return all(one is entries[0] for one in entries)
    return all(type(one) is type(entries[0]) and _is_same(one, entries[0]) for one in entries)


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays inside
        return False


def _are_alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(_are_equal(pair) for pair in zip(some, others, strict=True))


def _is_column(entries: Sequence[Any], recorded: Sequence[Mapping[Any, Any]]) -> bool:
    """Whether a list is one setting of all groups, which so differ in it."""
    keys = set(recorded[0]).intersection(*recorded) if recorded else set()
    return any(_is_same([plain(group[key]) for group in recorded], list(entries)) for key in keys)


# -- State by the place of a parameter, as lists of averaged weights and the `state_dict()` of an optimizer have it
#
# Nothing in such a list says whose an entry is. So a snapshot says in what row the parameters stood: where they
# stand in another one, an object with such a list is refused.

Named = Mapping[int, str]


def rows(modules: Mapping[str, Iterable[str]], objects: Mapping[str, Any], names: Named) -> dict[str, str]:
    """Return a digest of the names of parameters in their row, by track name of the modules and of what holds an optimizer.

    Args:
        modules: Names of the parameters by track name.
        objects: Other tracked objects.
        names: id(parameter) -> its name.
    """
    found = {label: _digest(own) for label, own in modules.items()}
    for name, thing in objects.items():
        groups = held_groups(thing) if may_have_rows(thing) else None
        if groups:
            found[name] = _digest(names.get(id(param), "") for group in groups for param in group["params"])
    return found


def may_have_rows(thing: Any) -> bool:
    """Whether an object's state may be by the place of a parameter."""
    is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
    return not (is_scheduler or is_ours(thing) or begins_when_read(thing))


def lists_in(state: Any, counts: Container[int], path: str) -> Iterator[str]:
    """Yield where in a state there is one entry for each parameter.

    Args:
        state: Of an object.
        counts: How many parameters there are.
        path: Of the state.
    """
    if not isinstance(state, (dict, list, tuple)):
        return
    is_row = {int}.issuperset(map(type, state)) if isinstance(state, dict) else len(state) in counts
    items = list(state.items() if isinstance(state, dict) else enumerate(state))
    if is_row and len(items) > 1 and all(isinstance(one, (torch.Tensor, dict)) for _, one in items):
        yield path
        return
    for key, value in items:
        yield from lists_in(value, counts, f"{path}.{key}")


def _digest(names: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()


# -- What a snapshot says of the program that took it: classes of optimizers and schedulers, and settings as it was
#    built
#
# Classes are compared by name, without their module: that of a class in the script is another one under another
# launcher.

KEY = ".program"
"""What stands before "@" in the key of the value; no tracked name has a dot."""
_MOST_GROUPS = 256
_PLAIN = (bool, int, float, str)
Optimizers = Mapping[str, Sequence[torch.optim.Optimizer]]


def class_of(thing: Any) -> str:
    """Return the class of an optimizer, or of a scheduler with those that it calls."""
    inner = [class_of(one) for one in vars(thing).get("_schedulers", ())] if len(schedulers_in(thing)) > 1 else []
    return type(thing).__name__ + (f"({', '.join(inner)})" if inner else "")


def built(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[dict[str, Any]]]:
    """Return the settings of each group that are plain values; nothing of very many groups."""
    if sum(len(optimizer.param_groups) for optimizer in optimizers) > _MOST_GROUPS:
        return []
    return [
        [{k: v for k, v in settings(group).items() if _is_plain(v)} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in _PLAIN or (type(value) is list and all(type(v) in _PLAIN for v in value))


def record(
    optimizers: Optimizers, objects: Mapping[str, Any], as_built: Mapping[str, Any], rows: Mapping[str, str]
) -> dict[str, Any]:
    """Return the value that a snapshot holds.

    Args:
        optimizers: The tracked ones.
        objects: Other tracked objects; those that are no schedulers are left out.
        as_built: `built` of the optimizers before anything was restored.
        rows: Of `parameter_rows`.
    """
    schedulers = {name: one for name, one in objects.items() if is_scheduler(one)}
    return {
        "optimizers": {label: list(map(class_of, own)) for label, own in optimizers.items()},
        "schedulers": {name: class_of(one) for name, one in schedulers.items()},
        "built": dict(as_built),
        "rows": dict(rows),
    }


def is_scheduler(thing: Any) -> bool:
    """Whether a tracked object is one of which the class is recorded."""
    return isinstance(thing, torch.optim.lr_scheduler.LRScheduler)


def changes(
    live: Mapping[str, Any], recorded: Mapping[str, Any], as_built: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """Return setting -> (that of the program, that of the snapshot) where the program was changed since.

    Args:
        live: Settings of a group as the program built it.
        recorded: Those of the snapshot.
        as_built: Those of the program that took it, before its first step; None where the snapshot does not say it: then
            what a scheduler may have changed is left out.
    """
    moving: set[str] = set()
    if as_built is None:
        moving = {"lr"} if "initial_lr" in recorded else set()
        moving |= {"momentum", "betas"} if "base_momentum" in recorded else set()
    before, found = recorded if as_built is None else as_built, dict[str, tuple[Any, Any]]()
    for key, value in live.items():
        if key in NOT_SETTINGS or key in moving or key not in recorded or key not in before:
            continue
        if type(value) in SCALARS and value == recorded[key]:
            continue
        ours, theirs = plain(value), plain(recorded[key])
        if ours != theirs and ours != plain(before[key]) and _is_plain(ours):
            found[key] = ours, theirs
    return found
