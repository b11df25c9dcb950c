"""Parameter groups, found again by the names of their members, whatever order and number a program makes them in.

Several recorded groups may be one now, and one several, where that says nothing else: the settings that meet are equal.
Everywhere else what the snapshot says of groups is of no use to the program, and a restore says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flashckpt.printable import counted
from flashckpt.state.optimizer_state import Named
from flashckpt.state.pytree import flatten

NOT_SETTINGS = frozenset({"params", "param_names", "name"})
_MOST_SAID = 4


def group_names(optimizers: Sequence[torch.optim.Optimizer], names: Named) -> list[list[list[str]]]:
    """Return the parameters' names per optimizer and group: static, so that it is made once per structure."""
    return [
        [list(map(names.__getitem__, map(id, group["params"]))) for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def groups(
    optimizers: Sequence[torch.optim.Optimizer], named: Sequence[Any], path: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (value, tensors) of the hyperparameters: per optimizer, per group, all keys, `params` as names.

    Args:
        optimizers: The live ones.
        named: `group_names` of them.
        path: Prefix of the names of tensors among the hyperparameters.
    """
    hyper = [
        [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    skeleton, tensors = flatten(hyper, path)
    for one, own in zip(skeleton, named, strict=True):
        for group, params in zip(one, own, strict=True):
            group["params"] = params
    return skeleton, tensors


class Ref(NamedTuple):
    """One recorded group: in which value, of which optimizer, which of its groups."""

    value: int
    optimizer: int
    group: int


class GroupOrder(NamedTuple):
    """Which recorded groups each live group of an optimizer is made of.

    Attributes:
        total: Groups that the recorded optimizer had.
        of: For each live group the places of recorded ones; none where the program's own count.
    """

    total: int
    of: tuple[tuple[int, ...], ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing has moved."""
        return self.of == tuple((place,) for place in range(self.total))


@dataclass(frozen=True, slots=True, eq=False)
class GroupMatch:
    """The groups of one live optimizer, and the recorded ones of the same parameters.

    Attributes:
        optimizer: The live one.
        names: Of the parameters of each live group.
        refs: For each live group the recorded groups that its parameters were in.
        conflicts: Live group -> why none of the recorded settings is its own.
    """

    optimizer: torch.optim.Optimizer
    names: Sequence[Sequence[str]]
    refs: Sequence[Sequence[Ref]]
    conflicts: Mapping[int, str] = field(default_factory=dict)

    def found(self) -> Iterator[tuple[int, dict[str, Any], Ref]]:
        """Yield (place, live group, recorded group) of those whose settings the snapshot has."""
        for place, (group, refs) in enumerate(zip(self.optimizer.param_groups, self.refs, strict=True)):
            if refs and place not in self.conflicts:
                yield place, group, refs[0]


class Groups:
    """The recorded groups of the optimizers of one track name.

    Args:
        recorded: Values made by `groups`, one per rank that recorded them. What was recorded last counts; groups are
            found by the names of their parameters, and one without parameters by its place.
    """

    def __init__(self, recorded: Sequence[Any]) -> None:
        self.recorded = recorded

    def __getitem__(self, ref: Ref) -> dict[str, Any]:
        found: dict[str, Any] = self.recorded[ref.value][ref.optimizer][ref.group]
        return found

    @cached_property
    def _homes(self) -> list[dict[str, Ref]]:
        """By value: the name of each parameter -> where it was."""
        return [
            {
                name: Ref(v, i, j)
                for i, one in enumerate(value)
                for j, group in enumerate(one)
                for name in group["params"]
            }
            for v, value in enumerate(self.recorded)
        ]

    @cached_property
    def _home(self) -> dict[str, Ref]:
        return {name: ref for homes in self._homes for name, ref in homes.items()}

    def match(self, optimizers: Sequence[torch.optim.Optimizer], names: Named) -> list[GroupMatch]:
        """Return what was recorded of each optimizer."""
        return [
            self._match(place, optimizer, own)
            for place, (optimizer, own) in enumerate(zip(optimizers, group_names(optimizers, names), strict=True))
        ]

    def _match(self, at: int, optimizer: torch.optim.Optimizer, names: list[list[str]]) -> GroupMatch:
        value = len(self.recorded) - 1
        held = self.recorded[value][at] if self.recorded and at < len(self.recorded[value]) else ()
        if all(names) and [group["params"] for group in held] == names:  # nearly always
            return GroupMatch(optimizer, names, [[Ref(value, at, j)] for j in range(len(names))])
        every = {name for group in names for name in group}
        home = next((homes for homes in reversed(self._homes) if every <= homes.keys()), self._home)
        refs = [list(dict.fromkeys(home[name] for name in group if name in home)) for group in names]
        if not any(refs) and len(held) == len(names):  # a replica that is new: nothing is known of it by name
            refs = [[Ref(value, at, j)] for j in range(len(names))]
        found = GroupMatch(optimizer, names, self._with_empty(at, names, refs))
        return GroupMatch(optimizer, names, found.refs, dict(self._conflicts(found)))

    def _with_empty(self, at: int, names: Sequence[Sequence[str]], refs: list[list[Ref]]) -> list[list[Ref]]:
        """Find groups that have no parameters: by their place where no other one has it, else among those without any."""
        if all(names):
            return refs
        taken = {ref for found in refs for ref in found}
        value, optimizer = next(((r.value, r.optimizer) for r in taken), (len(self.recorded) - 1, at))
        held = self.recorded[value][optimizer] if self.recorded and optimizer < len(self.recorded[value]) else ()
        free = [ref for j in range(len(held)) if (ref := Ref(value, optimizer, j)) not in taken]
        for place, group in enumerate(names):
            own = Ref(value, optimizer, place)
            found = own if own in free else next((ref for ref in free if not self[ref]["params"]), None)
            if not group and found is not None:
                refs[place] = [found]
                free.remove(found)
        return refs

    def _conflicts(self, match: GroupMatch) -> Iterator[tuple[int, str]]:
        """Yield (live group, why) of those that nothing recorded says the settings of."""
        users: dict[Ref, list[int]] = {}
        for place, refs in enumerate(match.refs):
            for ref in refs:
                users.setdefault(ref, []).append(place)
        other = {ref: found for ref, own in users.items() if (found := self._other_user(match, ref, own)) is not None}
        for place, refs in enumerate(match.refs):
            split = next((ref for ref in refs if ref in other), None)
            if not refs:
                if match.names[place] or self.recorded:
                    yield place, "the snapshot has no group of its parameters"
            elif len(refs) > 1 and any(settings(self[ref]) != settings(self[refs[0]]) for ref in refs):
                yield place, f"its parameters were in {len(refs)} groups that differ"
            elif split is not None:
                beside = other[split] if place == users[split][0] else users[split][0]
                yield (
                    place,
                    f"its parameters and those of group {beside} were in one group, which is in parts that differ now",
                )

    def _other_user(self, match: GroupMatch, ref: Ref, users: Sequence[int]) -> int | None:
        """Return the first live group of a recorded one's parameters that has other settings than the first of all."""
        if len(users) == 1 or not settings(self[ref]):
            return None
        live = match.optimizer.param_groups
        first = settings(live[users[0]])
        return next((place for place in users[1:] if settings(live[place]) != first), None)

    def order(self, match: GroupMatch) -> GroupOrder:
        """Return where the entries of lists stand that have one for each group."""
        main = next((refs[0] for refs in match.refs if refs), None)
        if main is None:
            return GroupOrder(0, ((),) * len(match.refs))
        places = [
            () if place in match.conflicts else tuple(sorted({ref.group for ref in refs}))
            for place, refs in enumerate(match.refs)
        ]
        return GroupOrder(len(self.recorded[main.value][main.optimizer]), tuple(places))

    def described(self, match: GroupMatch) -> tuple[str, str]:
        """Return what the program's groups are and what the snapshot's are, for an error."""
        live = match.optimizer.param_groups
        here = [(names, group) for names, group in zip(match.names, live, strict=True)]
        refs = dict.fromkeys(ref for found in match.refs for ref in found)
        of = {(ref.value, ref.optimizer) for ref in refs}
        there = [(group["params"], group) for v, i in sorted(of) for group in self.recorded[v][i]]
        return _said(here), _said(there)


def _said(found: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> str:
    one_by_one = [_group_said(names, group) for names, group in found[:_MOST_SAID]]
    more = [f"{len(found) - _MOST_SAID} more"] if len(found) > _MOST_SAID else []
    return f"{counted(len(found), 'group')}: {'; '.join([*one_by_one, *more])}"


def _group_said(names: Sequence[str], group: Mapping[str, Any]) -> str:
    members = f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "no parameter"
    own = ", ".join(f"{key} {plain(group[key])!r}" for key in ("lr", "weight_decay") if key in group)
    return f"{members} ({own})" if own else members


SCALARS = frozenset({bool, int, float, str, type(None)})


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters that can be compared by ==."""
    return {
        key: value if type(value) in SCALARS else plain(value)
        for key, value in group.items()
        if key not in NOT_SETTINGS
    }


def plain(value: Any) -> Any:
    """Return a tensor's elements as numbers, a tuple as a list as deep, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def set_group(group: dict[str, Any], recorded: Mapping[str, Any]) -> None:
    """Give a live group recorded settings; a tensor among them stays the same object."""
    for key, value in recorded.items():
        if key == "params":
            continue
        live = group.get(key)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                live.copy_(value)
        else:
            group[key] = value
