"""The program that a snapshot is of, compared with this one: classes, groups, and lists that have an entry per group.

What stands in another place now is found there. What belongs nowhere is refused, with both sides, before a live tensor is
written; where the caller allows differences it stays as the program made it, and the report names it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashckpt.core.shard import split_owner
from flashckpt.errors import TensorMismatchError
from flashckpt.planning.read_plan import SourceNames
from flashckpt.printable import counted
from flashckpt.report import guarded
from flashckpt.restore.requirements import Wanted, is_wanted
from flashckpt.state import group_lists, named_groups, optimizer_state, pytree
from flashckpt.state.group_lists import GroupsOf
from flashckpt.state.named_groups import GroupMatch, GroupOrder, Groups, Ref
from flashckpt.state.registry import StateRegistry

Find = Callable[[str], tuple[bool, Any]]
_MOST_LOOKED_AT = 1000
_log = guarded(logging.getLogger("flashckpt"))


@dataclass(eq=False)
class Program:
    """What was found.

    Attributes:
        matches: By track name of the optimizers: their groups, and the recorded ones.
        orders: By track name of the optimizers: where lists that have an entry per group have it.
        aside: Track names of what is of another class, with that class: nothing of it is restored.
        refusals: Why a restore that allows no difference is refused.
    """

    matches: dict[str, list[GroupMatch]] = field(default_factory=dict)
    orders: dict[str, list[GroupsOf]] = field(default_factory=dict)
    aside: dict[str, str] = field(default_factory=dict)
    refusals: list[TensorMismatchError] = field(default_factory=list)

    @property
    def all_orders(self) -> list[GroupsOf]:
        """Of all optimizers."""
        return list(itertools.chain.from_iterable(self.orders.values()))

    def wanted(self, only: Wanted) -> Wanted:
        """Return what is asked for without what is set aside."""
        if not self.aside:
            return only
        return lambda name: name.partition(".")[0].partition("@")[0] not in self.aside and is_wanted(name, only)

    def left_behind(self) -> list[str]:
        """Return in words what is set aside, for the report."""
        return [f"{name} ({there})" for name, there in sorted(self.aside.items())]


def compare(
    tracked: StateRegistry, recorded: Callable[[str], list[Any]], find: Find, names: SourceNames, only: Wanted
) -> Program:
    """Compare the program with that of a snapshot. Nothing is written.

    `recorded` gives the values under a key of all ranks, `find` the one that this rank sees.
    """
    program, records = Program(), [one for one in recorded(group_lists.KEY) if isinstance(one, dict)]
    remedy = _remedy(tracked)
    for label, optimizers in tracked.optimizers.items():
        raw = recorded(f"{label}.groups")
        groups = Groups([pytree.unflatten(value, lambda _: torch.empty(0)) for value in raw])
        matches = program.matches[label] = groups.match(optimizers, tracked.names_for(optimizers))
        classes = [one.get("optimizers", {}).get(label, []) for one in records]
        built = [one.get("built", {}).get(label, []) for one in records]
        looks = [_Look(label, match, groups, names, classes, built, remedy) for match in matches]
        if is_wanted(f"{label}.groups", only):
            program.refusals += [refusal for look in looks for refusal in look.refusals()]
            program.aside.update((label, there) for look in looks if (there := look.another()))
        program.orders[label] = [look.order(is_aside=label in program.aside) for look in looks]
        if label not in program.aside:
            _compare_beside(program, tracked, label, find)
    orders = program.all_orders
    has_moved = any(not one.order.is_same for one in orders)
    moved = _rows_moved(tracked, records)
    schedulers = {name: there for one in records for name, there in one.get("schedulers", {}).items()}
    for name, thing in tracked.objects.items():
        if is_wanted(name, only) and (has_moved or moved or group_lists.is_scheduler(thing)):
            found, state = find(tracked.key_of(name, thing))
            if found:
                plain = pytree.unflatten(state, functools.partial(_of_form, names))
                _compare_object(program, tracked, name, plain, schedulers.get(name))
                if (moved - tracked.objects.keys() or name in moved) and group_lists.may_have_rows(thing):
                    _compare_rows(program, tracked, name, plain)
    return program


def _of_form(names: SourceNames, name: str) -> torch.Tensor:
    """Return a tensor that stands for one of a snapshot, of its shape where that may be an entry per group."""
    found = names.find(name)
    shape = next((kind.global_shape for kind in names.kinds([found] if found else [])), (0,))
    return torch.empty(shape if len(shape) < 2 and math.prod(shape) <= _MOST_LOOKED_AT else 0)


def _remedy(tracked: StateRegistry) -> str:
    modules = list(tracked.modules)
    part = f"; restore(only='{modules[0]}.*') takes {modules[0]!r} alone" if modules else ""
    return f"restore(strict=False) takes the rest and leaves what differs as the program made it{part}"


def _refusal(problem: str, *, found: str, expected: str, remedy: str) -> TensorMismatchError:
    return TensorMismatchError(problem, found=found, expected=expected, state="Nothing was restored.", remedy=remedy)


def _compare_object(program: Program, tracked: StateRegistry, name: str, state: Any, there: str | None) -> None:
    thing, remedy = tracked.objects[name], _remedy(tracked)
    if there is not None and group_lists.is_scheduler(thing) and (here := group_lists.class_of(thing)) != there:
        program.aside[name] = there
        problem = f"{name!r} is another scheduler than the one in the snapshot"
        program.refusals.append(_refusal(problem, found=here, expected=there, remedy=remedy))
        return
    _, misfits = group_lists.in_live_order(name, thing, state, program.all_orders)
    _refuse_lists(program, name, misfits, remedy)


def _rows_moved(tracked: StateRegistry, records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the track names of modules, and of what holds an optimizer, whose parameters stand in another row."""
    live = tracked.rows()
    return {
        name
        for name, row in live.items()
        if (known := {one["rows"][name] for one in records if name in one.get("rows", {})}) and row not in known
    }


def _compare_rows(program: Program, tracked: StateRegistry, name: str, state: Any) -> None:
    parameters = [
        list(itertools.chain.from_iterable(p.parameters() for p in parts)) for parts in tracked.modules.values()
    ]
    groups = group_lists.held_groups(tracked.objects[name])
    parameters += [[param for group in groups or () for param in group["params"]]]
    counts = {n for own in parameters for n in (len(own), sum(param.requires_grad for param in own))}
    for path in itertools.islice(group_lists.lists_in(state, counts, name), 1):
        program.refusals.append(
            _refusal(
                f"{name!r} has state by the place of a parameter, and the parameters are in another order",
                found=f"{path!r}, of which it cannot be said which entry belongs to which parameter",
                expected="parameters in the order in which the run that took the snapshot made them",
                remedy=_remedy(tracked),
            )
        )


def _compare_beside(program: Program, tracked: StateRegistry, label: str, find: Find) -> None:
    """Compare state that an optimizer keeps once for all parameters."""
    for key in ("state", "extra"):
        found, others = find(f"{label}.{key}@{tracked.world.suffix}")
        for one, state in zip(program.orders[label], others if found else (), strict=False):
            plain = pytree.unflatten(state, lambda _: torch.empty(0))
            _, misfits = group_lists.beside(one, plain, f"{label}.{key}")
            _refuse_lists(program, label, misfits, _remedy(tracked))


def _refuse_lists(program: Program, name: str, misfits: Sequence[str], remedy: str) -> None:
    if misfits:
        program.refusals.append(
            _refusal(
                f"{name!r} has state by the place of a parameter group, and the groups have changed",
                found=f"{', '.join(map(repr, misfits[:3]))}, of which it cannot be said what belongs to which group",
                expected="groups in the order and number in which the run that took the snapshot made them",
                remedy=remedy,
            )
        )


@dataclass(frozen=True, eq=False)
class _Look:
    """One optimizer beside what a snapshot says of it."""

    label: str
    match: GroupMatch
    groups: Groups
    names: SourceNames
    classes: Sequence[Sequence[str]]
    as_built: Sequence[Any]
    remedy: str

    def order(self, *, is_aside: bool) -> GroupsOf:
        """Return where entries per group belong; of what is set aside all are the program's own."""
        order = self.groups.order(self.match)
        if is_aside:
            order = GroupOrder(order.total, ((),) * len(order.of))
        return GroupsOf(self.match.optimizer, order, self._settings())

    def _settings(self) -> list[dict[tuple[str, str], Any]]:
        """Return the settings of the recorded groups: as they were, and as they were built."""
        main = self._main
        held = self.groups.recorded[main.value][main.optimizer] if main else ()
        found = [{("now", key): value for key, value in group.items()} for group in held]
        for place, group in enumerate(found):
            built = _built_of(self.as_built, Ref(main.value, main.optimizer, place)) or {}
            group.update({("built", key): value for key, value in built.items()})
        return found

    @property
    def _main(self) -> Any:
        return next((refs[0] for refs in self.match.refs if refs), None)

    def another(self) -> str:
        """Return what the snapshot has in place of this optimizer's state; "" where it has that."""
        return self._other_class() or self._as_one_vector()

    def _other_class(self) -> str:
        here, main = group_lists.class_of(self.match.optimizer), self._main
        if not any(self.classes):
            return self._other_evidence()
        if main and len(self.classes) == len(self.groups.recorded) and main.optimizer < len(self.classes[main.value]):
            there = self.classes[main.value][main.optimizer]
            return "" if here == there else there
        known = sorted({one for classes in self.classes for one in classes})
        return "" if here in known else ", ".join(known)

    def _other_evidence(self) -> str:
        """Say what a snapshot without a record of classes has of another class of torch's."""
        own, setting = optimizer_state.state_keys(self.match.optimizer)
        if not setting or self._main is None:
            return ""
        names = list(itertools.islice(itertools.chain.from_iterable(self.match.names), _MOST_LOOKED_AT))
        known = sorted(optimizer_state.ALL_STATE_KEYS)
        state = [k for k in known if any(self.names.find(f"{self.label}.{name}.{k}") for name in names)]
        if set(state) - own and not own <= set(state):
            return f"an optimizer with {', '.join(state)}"
        held = self.groups[self._main].keys()
        others = sorted(optimizer_state.ALL_SETTINGS & held)
        return f"an optimizer with {', '.join(others)}" if setting not in held and others else ""

    def _as_one_vector(self) -> str:
        """Tell state of all parameters of a group in a row (LBFGS), where they are in another row now."""
        live = self.match.optimizer.param_groups
        for names, group, refs in zip(self.match.names, live, self.match.refs, strict=True):
            held = self.groups[refs[0]]["params"] if refs else names
            if held == names or len(held) < 2:
                continue
            total, prefix = sum(param.numel() for param in group["params"]), f"{self.label}.{held[0]}."
            found = [fqn for fqn in self.names.index if fqn.startswith(prefix)]
            if any(kind.global_shape == (total,) for kind in self.names.kinds(found)):
                return f"state of {held[0]!r}, {held[1]!r}, ... in one row"
        return ""

    def refusals(self) -> Iterator[TensorMismatchError]:
        """Yield why nothing of the snapshot can be taken for this optimizer, or for some of its groups."""
        kind = group_lists.class_of(self.match.optimizer)
        if there := self._other_class():
            problem = f"{self.label!r} is another optimizer than the one in the snapshot"
            yield _refusal(problem, found=kind, expected=there, remedy=self.remedy)
        elif there := self._as_one_vector():
            problem = f"the parameters of {self.label!r} are in another order, and its state is of all of them together"
            first = self.match.names[0][:2]
            found = f"{', '.join(map(repr, first))}, ... in a group of a {kind}"
            yield _refusal(problem, found=found, expected=there, remedy=self.remedy)
        conflicts = {place: why for place, why in self.match.conflicts.items() if self.match.refs[place]}
        if conflicts:
            place, why = next(iter(conflicts.items()))
            here, held = self.groups.described(self.match)
            problem = f"the groups of {self.label!r} are others than those in the snapshot: group {place}: {why}"
            yield _refusal(problem, found=here, expected=held, remedy=self.remedy)


def set_groups(
    tracked: StateRegistry, label: str, recorded: Sequence[Any], as_built: Sequence[Any]
) -> tuple[list[str], list[str]]:
    """Set the hyperparameters of the optimizers of one track name, by the names of their parameters.

    Args:
        tracked: The live objects.
        label: The track name.
        recorded: The values, with their tensors.
        as_built: What `group_lists.built` said of each of them; [] where the snapshot does not say it.

    Returns:
        What did not fit; and in words what the program has changed, and the snapshot has overruled.
    """
    groups, optimizers = Groups(recorded), tracked.optimizers[label]
    missing: list[str] = []
    changed: dict[str, list[int]] = {}
    for number, match in enumerate(groups.match(optimizers, tracked.names_for(optimizers))):
        missing += conflicts_of(match, number)
        for place, group, ref in match.found():
            held = groups[ref]
            for key, (ours, theirs) in group_lists.changes(group, held, _built_of(as_built, ref)).items():
                changed.setdefault(f"{key} {ours!r} in the program, {theirs!r} restored", []).append(place)
            named_groups.set_group(group, held)
    return missing, [f"{label}: {text} ({_places(places)})" for text, places in changed.items()]


def warn_of_frozen(tracked: StateRegistry, label: str, names: SourceNames) -> None:
    """Warn of parameters that were trained, and that the program has frozen: one that thaws them in the middle has to again."""
    named = tracked.names_for(tracked.optimizers[label])
    params = itertools.chain.from_iterable(map(optimizer_state.parameters, tracked.optimizers[label]))
    frozen = [f"{label}.{named[id(param)]}" for param in params if not param.requires_grad]
    if not frozen:
        return
    have_state = {split_owner(fqn)[0].rpartition(".")[0] for fqn in names.index}
    if thawed := [name for name in frozen if name in have_state]:
        _log.warning(
            "%s of %r with state in the snapshot, so trained before, and frozen in this program (requires_grad is False; the "
            "first is %r): what is unfrozen in the middle of training has to be unfrozen again after a restart",
            counted(len(thawed), "parameter"), label, thawed[0],
        )  # fmt: skip


def conflicts_of(match: GroupMatch, number: int) -> list[str]:
    """Return in words which groups of an optimizer, the `number`-th of its track name, keep their own settings."""
    return [
        f"one setting for group {place} of optimizer {number}: {why}"
        if match.refs[place]
        else f"group {place} of optimizer {number}"
        for place, why in match.conflicts.items()
    ]


def _built_of(as_built: Sequence[Any], ref: Ref) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = as_built[ref.value][ref.optimizer][ref.group]
    except IndexError:
        return None
    return found


def _places(places: Sequence[int]) -> str:
    return (
        f"group{'s' if len(places) > 1 else ''} {', '.join(map(str, places[:8]))}{', ...' if len(places) > 8 else ''}"
    )
