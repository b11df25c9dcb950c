"""Non-tensor state of a snapshot, and the tensors inside it: found for this rank, and given back to live objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import split_owner
from flashckpt.errors import ShardGapError
from flashckpt.planning.peer_index import PeerQuery
from flashckpt.planning.read_plan import SourceNames
from flashckpt.restore import program as programs
from flashckpt.restore.absent_state import is_of_this_rank
from flashckpt.restore.program import Program
from flashckpt.restore.requirements import Wanted, is_wanted
from flashckpt.state import group_lists, optimizer_state, pytree, rng, samplers, value_reader
from flashckpt.state.data_sources import refuse_other_ranks, refuse_other_workers
from flashckpt.state.group_lists import GroupsOf, beside, in_live_order
from flashckpt.state.loaded import Giving, ask
from flashckpt.state.placement import dtensor, replicated
from flashckpt.state.registry import StateRegistry

_OF_THE_WHOLE = frozenset({"groups", "forms", "state", "extra"})
"""What stands behind an optimizer's name in keys that are no parameter's."""
Tensors = Callable[[str], torch.Tensor]


class Values:
    """The non-tensor state of a snapshot as this rank sees it: its own manifest first."""

    def __init__(self, manifests: Sequence[Manifest], names: SourceNames, rank: int) -> None:
        self._manifests = sorted(manifests, key=lambda m: (m.rank != rank, m.rank))
        self.names = names
        self.all: dict[str, Any] = {}
        for manifest in self._manifests:
            for key, value in manifest.values.items():
                self.all.setdefault(key, value)
        self._bases = {key: split_owner(key)[0] for key in self.all if "@" in key}  # of what belongs to one rank

    def find(self, key: str) -> tuple[bool, Any]:
        """Return (found, value) of a key: its own, that of all ranks, or that of the others if they agree."""
        if key in self.all:
            return True, self.all[key]
        base = split_owner(key)[0] if "@" in key else key
        if base in self.all:
            return True, self.all[base]
        others = [self.all[name] for name, one in self._bases.items() if one == base] if self._bases else []
        if others and all(value == others[0] for value in others):
            return True, others[0]
        return False, None

    def refuse_other_places(self, tracked: StateRegistry, name: str, thing: Any) -> None:
        """Raise SamplerStateError for a source of data that was dealt to another number of ranks."""
        if self._manifests and tracked.key_of(name, thing) != name:
            owners = [split_owner(key)[1] for key, base in self._bases.items() if base == name]
            refuse_other_ranks(name, thing, owners, self._manifests[0].world_size, tracked.world)

    def recorded(self, base: str) -> list[Any]:
        """Return the values under `base` and `base@...` of all manifests, this rank's first."""
        return [
            value
            for manifest in self._manifests
            for key, value in manifest.values.items()
            if key.startswith(base) and self._bases.get(key, key) == base
        ]

    def as_built(self, label: str) -> list[Any]:
        """Return the settings that optimizers were built with, beside `recorded(f"{label}.groups")`; [] where that is not known."""
        found = [one.get("built", {}).get(label, []) for one in self.recorded(group_lists.KEY)]
        return found if len(found) == len(self.recorded(f"{label}.groups")) else []

    def of_parameters(self, label: str, suffix: str) -> dict[str, dict[str, Any]]:
        """Return parameter name -> key -> value of one optimizer's state, this rank's own where ranks differ."""
        keys: dict[tuple[str, str], str] = {}
        for key in self.all:
            if not key.startswith(f"{label}."):
                continue
            base, owner = split_owner(key) if key in self._bases else (key, "")
            if not base.startswith(f"{label}.") or base.removeprefix(f"{label}.") in _OF_THE_WHOLE:
                continue
            name, _, state_key = base.removeprefix(f"{label}.").rpartition(".")
            if owner not in ("", suffix) and is_of_this_rank(name, suffix, self.names.index):
                continue
            known = keys.get((name, state_key))
            if known is None or _rank_of(owner, suffix) < _rank_of(split_owner(known)[1], suffix):
                keys[name, state_key] = key
        found: dict[str, dict[str, Any]] = {}
        for (name, state_key), key in keys.items():
            found.setdefault(name, {})[state_key] = self.all[key]
        return found


def _rank_of(owner: str, suffix: str) -> tuple[bool, str]:
    """Sort owners of one value: this rank's own, then that of all ranks (no owner), then the others."""
    return owner != suffix, owner


def unnamed_values(tracked: StateRegistry, values: Values, only: Wanted) -> list[PeerQuery]:
    """Return queries for the values of this rank and its objects that the sources lack under their own name."""
    keys = [tracked.key_of(name, thing) for name, thing in tracked.objects.items() if is_wanted(name, only)]
    if tracked.rng and is_wanted("rng", only):
        keys.append(f"rng@{tracked.world.suffix}")
    return [PeerQuery(f"={key}", "", None) for key in keys if key not in values.all]


class Applied(NamedTuple):
    """What became of the values.

    Attributes:
        reseeded: Generators that were seeded from (step, rank).
        overruled: In words, settings that the program has changed and the snapshot has set again.
    """

    missing: list[str]
    reseeded: list[str]
    overruled: list[str]


def apply_values(
    tracked: StateRegistry,
    values: Values,
    tensors: Mapping[str, torch.Tensor],
    *,
    program: Program,
    step: int,
    only: Wanted,
) -> Applied:
    """Give every object its state back.

    Args:
        tracked: The live objects.
        values: Of the snapshot.
        tensors: Those that objects' state consists of, filled, by name.
        program: How the live groups of optimizers compare with the recorded ones.
        step: The restored step; seeds generators whose own state was never taken.
        only: A pattern over names, or None.

    Raises:
        ShardGapError: A value consists of a tensor that no source has.
        ObjectStateError: An object raised, or is not what it was given.
    """
    tensor, orders = functools.partial(_filled, tensors), program.all_orders
    overruled: list[str] = []
    missing = _give_objects(tracked, values, tensor, only, orders)
    for label in tracked.optimizers:
        if is_wanted(f"{label}.groups", only):
            recorded = [pytree.unflatten(v, tensor, place=_to_device) for v in values.recorded(f"{label}.groups")]
            lost, changed = programs.set_groups(tracked, label, recorded, values.as_built(label))
            missing += lost + _restore_state(tracked, label, values, tensor, program)
            overruled += changed
            programs.warn_of_frozen(tracked, label, values.names)
    for name, module in tracked.extra_states():
        if not is_wanted(name, only):
            continue
        found, value = values.find(name)
        if found:
            ask(name, module, "set_extra_state", pytree.unflatten(value, tensor, place=_to_device))
        else:
            missing.append(name)
    reseeded = _restore_rng(tracked, values, step) if tracked.rng and is_wanted("rng", only) else []
    return Applied(missing, reseeded, overruled)


def _give_objects(
    tracked: StateRegistry, values: Values, tensor: Tensors, only: Wanted, orders: Sequence[GroupsOf]
) -> list[str]:
    """Give objects their state, then see whether they took it; return the names of those that no source has."""
    missing: list[str] = []
    given = list[tuple[Giving, Callable[[], Any]]]()

    def state_of(name: str, thing: Any, skeleton: Any) -> Any:
        state, misfits = in_live_order(name, thing, pytree.unflatten(skeleton, tensor, place=_to_device), orders)
        missing.extend(one for one in misfits if one not in missing)
        return state

    # samplers last: one that a loader also knows is to have its own
    for name, thing in sorted(tracked.objects.items(), key=lambda item: samplers.is_sampler(item[1])):
        found, skeleton = values.find(tracked.key_of(name, thing)) if is_wanted(name, only) else (False, None)
        if found:
            values.refuse_other_places(tracked, name, thing)
            given.append((Giving(name, thing), functools.partial(state_of, name, thing, skeleton)))
            refuse_other_workers(name, thing, state := given[-1][1]())
            given[-1][0].give(state)
        elif is_wanted(name, only) and not _is_optional(thing):
            missing.append(name)
        tracked.was_given(name)
    for one, recorded in given:
        one.check(recorded)
    return missing


def _filled(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise half_restored([name])
    return tensors[name]


def _is_optional(thing: Any) -> bool:
    """Whether an object stays as it is where a whole snapshot has no state under its name."""
    return bool(getattr(thing, "flashckpt_optional", False))


def missing_values(
    tracked: StateRegistry, values: Values, only: Wanted, *, program: Program, is_whole: bool
) -> list[str]:
    """Return what `apply_values` would find missing, before any live tensor is written.

    Args:
        tracked: The live objects.
        values: Of the snapshot.
        only: A pattern over names, or None.
        program: As for `apply_values`.
        is_whole: No rank's part of the snapshot is lost: what it lacks was never in it.
    """
    wanted = [(name, one) for name, one in tracked.objects.items() if not (is_whole and _is_optional(one))]
    things = [(name, tracked.key_of(name, thing)) for name, thing in wanted]
    things += [(name, name) for name, _ in tracked.extra_states()]
    missing = [name for name, key in things if is_wanted(name, only) and not values.find(key)[0]]
    for label in tracked.optimizers:
        if is_wanted(f"{label}.groups", only):
            for number, match in enumerate(program.matches[label]):
                missing += programs.conflicts_of(match, number)
            missing += _missing_state(tracked, label, values)
    return missing


def _missing_state(tracked: StateRegistry, label: str, values: Values) -> list[str]:
    optimizers = tracked.optimizers[label]
    several = [optimizer for optimizer in optimizers if not optimizer_state.has_only_tensors(optimizer)]
    missing = _missing_beside_tensors(tracked, label, several, values) if several else []
    found, others = values.find(f"{label}.state@{tracked.world.suffix}")
    fits = found and len(others) == len(optimizers)
    if not fits and (found or any(optimizer_state.other_keys(optimizer) for optimizer in optimizers)):
        missing.append(f"{label}.state")
    if any(map(value_reader.read, optimizers)) and _recorded_extra(tracked, label, values) is None:
        missing.append(f"{label}.extra")
    return missing


def _missing_beside_tensors(
    tracked: StateRegistry, label: str, optimizers: Sequence[torch.optim.Optimizer], values: Values
) -> list[str]:
    """Return the state of parameters that is no tensor and was not recorded."""
    recorded, live = values.of_parameters(label, tracked.world.suffix), tracked.names_for(optimizers)
    return [
        f"{label}.{live[id(param)]}.{key}"
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor) and id(param) in live
        for key, value in state.items()
        if not isinstance(value, torch.Tensor) and str(key) not in recorded.get(live[id(param)], ())
    ]


def _recorded_extra(tracked: StateRegistry, label: str, values: Values) -> list[dict[str, Any]] | None:
    """Return what the optimizers' own `state_dict()`s said beside state and groups; None where that does not fit."""
    found, extra = values.find(f"{label}.extra@{tracked.world.suffix}")
    return extra if found and len(extra) == len(tracked.optimizers[label]) else None


def _restore_rng(tracked: StateRegistry, values: Values, step: int) -> list[str]:
    """Set the generators; without a state of this rank seed them from (step, rank), and return its name."""
    key = f"rng@{tracked.world.suffix}"
    if key in values.all:
        rng.restore(values.all[key])
        samplers.hold(tracked.objects, values.all[key])
        return []
    rng.reseed(step=step, rank=tracked.world.rank)
    return [key]


def _restore_state(tracked: StateRegistry, label: str, values: Values, tensor: Tensors, program: Program) -> list[str]:
    """Set optimizer state that is no tensor, e.g. a Python `step` or a list of tensors; return what is missing."""
    missing = _missing_state(tracked, label, values)
    for optimizer, param, _, recorded in _per_parameter(tracked, label, values):
        for key, value in recorded.items():
            optimizer.state[param][key] = pytree.unflatten(value, tensor, place=_beside(param))
    found, others = values.find(f"{label}.state@{tracked.world.suffix}")
    optimizers = tracked.optimizers[label]
    if found and len(others) == len(optimizers):
        for one, other in zip(program.orders[label], others, strict=True):
            state, lost = beside(one, pytree.unflatten(other, tensor, place=_to_device), f"{label}.state")
            one.optimizer.state.update(state)
            missing += lost
    for one, extra in zip(program.orders[label], _recorded_extra(tracked, label, values) or (), strict=False):
        if extra:
            state, lost = beside(one, pytree.unflatten(extra, tensor, place=_to_device), f"{label}.extra")
            value_reader.give_back(one.optimizer, state)
            missing += lost
    return missing


def _per_parameter(
    tracked: StateRegistry, label: str, values: Values
) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, str, dict[str, Any]]]:
    """Yield (optimizer, parameter, its name, recorded state) of every parameter with state that is no tensor."""
    by_name = values.of_parameters(label, tracked.world.suffix)
    for optimizer in tracked.optimizers[label] if by_name else ():
        names = tracked.names_for([optimizer])
        for param in optimizer_state.parameters(optimizer):
            name = names[id(param)]
            if name in by_name:
                yield optimizer, param, name, by_name[name]


def _to_device(tensor: torch.Tensor, mark: Any) -> torch.Tensor:
    """Return a tensor on the kind of device that it lay on, where this machine has one: this process' own."""
    kind, here = str(mark.get("device", "cpu")).partition(":")[0], torch.accelerator.current_accelerator()
    return tensor.to(here) if here is not None and kind == here.type else tensor


def _beside(param: torch.Tensor) -> pytree.Place:
    """Return what brings tensors of a parameter's state to where they lay."""

    def place(tensor: torch.Tensor, mark: Any) -> torch.Tensor:
        placed = _to_device(tensor, mark)
        if not (mark.get("replicated") and isinstance(param, dtensor())):
            return placed
        mesh = param.device_mesh
        return replicated(placed, mesh)

    return place


def value_tensors(tracked: StateRegistry, values: Values) -> set[str]:
    """Return the names of the tensors that the wanted values refer to."""
    wanted: list[Any] = []
    for name, thing in tracked.objects.items():
        wanted += [skeleton for found, skeleton in [values.find(tracked.key_of(name, thing))] if found]
    for label in tracked.optimizers:
        wanted += values.recorded(f"{label}.groups")
        wanted += [value for *_, found in _per_parameter(tracked, label, values) for value in found.values()]
        wanted += [value for found, value in [values.find(f"{label}.state@{tracked.world.suffix}")] if found]
        wanted += _recorded_extra(tracked, label, values) or []
    for name, _ in tracked.extra_states():
        wanted += [value for found, value in [values.find(name)] if found]
    trees_of = (value for value in wanted if isinstance(value, (dict, list, tuple)))
    return {name for value in trees_of for name in pytree.tensor_names(value)}


# -- The errors for what is wanted and nowhere ---------------------------------------------------------------------


def half_restored(names: Sequence[str]) -> ShardGapError:
    """Return the error for what turned out missing when live tensors were written already."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ShardGapError(
        f"{names[0]!r}{more} is wanted and in no snapshot or checkpoint",
        expected=", ".join(names[:5]),
        state="Live state is a mixture and must not be trained on.",
        remedy="build the program as the run that took the snapshot did, and start it again",
    )


def missing_error(names: Sequence[str], unexpected: Sequence[str], *, is_whole: bool) -> ShardGapError:
    """Return the error for names that no source has."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if not is_whole:
        return ShardGapError(
            f"{names[0]!r}{more} is in no memory that can be reached",
            found="a snapshot of which some ranks are lost, and which is not committed on storage",
            expected=", ".join(names[:5]),
            state="Nothing was restored from it.",
            remedy="an older snapshot or checkpoint is tried next",
        )
    return ShardGapError(
        f"{names[0]!r}{more} is wanted and in no snapshot or checkpoint",
        found=f"instead: {', '.join(unexpected[:5])}" if unexpected else "",
        expected=", ".join(names[:5]),
        state="Nothing was restored.",
        remedy="restore(strict=False) leaves such state as it is; restore(only='model.*') takes a part; where the snapshots were taken "
        "without frozen weights, give track() the same exclude=",
    )
