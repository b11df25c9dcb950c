"""From live objects to a structure: module tensors, who persists which part of them, optimizer state, objects' tensors."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count, repeat
from typing import Any

import numpy as np
import torch

from flashckpt.planning.write_partition import WritePart, WriteShare, cut_dimension, partition_writes
from flashckpt.state import optimizer_state
from flashckpt.state.box_sets import BoxSets, first_alike
from flashckpt.state.module_tensors import ModuleTensors, two_of_one_name
from flashckpt.state.optimizer_entries import NamedParameters, OptimizerEntries, StateColumns
from flashckpt.state.optimizer_state import DeferredState
from flashckpt.state.parts import Parts, PartSets
from flashckpt.state.placement import Replication, World, dtensor, spread_of_dtensor, spread_of_plain
from flashckpt.state.structure import Captured, StateForecast, Structure, arranged

Optimizers = Mapping[str, Sequence[torch.optim.Optimizer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """What a structure is built of.

    Attributes:
        world: The ranks.
        found: The tensors of all modules.
        names: id(parameter) -> name without the track name.
        optimizers: torch optimizers by track name.
        fenced: Track names whose tensors change only inside `optimizer.step()`, as the user says.
        captured: What was read last; objects' tensors are taken from it.
        ahead: Optimizer state that does not exist yet and is planned all the same.
        parts: Tensors that lie in parts, of each object that has some.
        plans_only: Tensors may be on the meta device.
    """

    world: World
    found: ModuleTensors
    names: Mapping[int, str]
    optimizers: Optimizers
    fenced: Collection[str]
    captured: Captured
    ahead: DeferredState
    parts: Parts
    plans_only: bool = False


def build(tracked: Tracked) -> tuple[Structure, OptimizerEntries]:
    """Return the structure of the state as it is now, and what was found out about optimizer state.

    Raises:
        UnsupportedStateError: A tensor that cannot be held; names it.
        ConfigError: Two tensors of one name, or an optimizer over parameters of no tracked module.
    """
    world, found, box_sets = tracked.world, tracked.found, BoxSets(takes_meta=tracked.plans_only)
    numbers = _module_sets(found, world, tracked.optimizers, box_sets)
    columns = StateColumns()
    _enter_modules(columns, tracked, numbers, box_sets)
    parameters = NamedParameters(tracked.names, found.by_id(numbers))
    entries = OptimizerEntries(world, parameters, box_sets, tracked.ahead)
    for label, group in tracked.optimizers.items():
        for optimizer in group:
            entries.add(label, optimizer)
    entries.refuse_shared()
    first = len(columns.names)
    state = entries.columns
    columns.extend(state.names, state.tensors, state.sets, state.fenced)
    _enter_captured(columns, tracked, box_sets)
    names = [*columns.names, *_enter_parts(columns, tracked, box_sets)]  # the parts of a tensor share one
    structure = arranged(
        columns.names,
        columns.tensors,
        columns.sets,
        columns.fenced,
        box_sets.known,
        awaited=list(compress(count(first), map(operator.is_, state.tensors, repeat(None)))),
        forecast=StateForecast(entries.forecast.names, entries.forecast.sets),
        aliases=found.aliases,
        fresh=frozenset(tracked.captured.tensors),
        forms=tracked.captured.forms,
    )
    if structure.first_double is not None and (double := _first_double(names)) is not None:
        raise two_of_one_name(double)
    return structure, entries


def _first_double(names: Sequence[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _module_sets(found: ModuleTensors, world: World, optimizers: Optimizers, box_sets: BoxSets) -> list[int]:
    """Return the number of each module tensor's boxes."""
    firsts = first_alike(found.tensors, found.ddp_ranks, forms=found.forms)
    of_first: dict[int, int] = {}
    for first in dict.fromkeys(firsts):
        tensor, ranks = found.tensors[first], found.ddp_ranks[first]
        spread = spread_of_dtensor(tensor, world) if isinstance(tensor, dtensor()) else spread_of_plain(world, ranks)
        of_first[first] = box_sets.add(found.names[first], tensor, spread)
    numbers = [of_first[first] for first in firsts]
    if not any(one.spread.replicas > 1 for one in box_sets.known):
        return numbers
    chosen = _shares(found, numbers, box_sets, [o for group in optimizers.values() for o in group])
    return [
        box_sets.shared(number, chosen[name]) if name in chosen else number
        for name, number in zip(found.names, numbers, strict=True)
    ]


def _shares(
    found: ModuleTensors, numbers: Sequence[int], box_sets: BoxSets, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, tuple[WriteShare, ...]]:
    """Return which replica persists which rows of each parameter and its state, balanced within each replica set.

    Sizes of optimizer state are those it will have: the cuts must not move with the first step.
    """
    state_bytes = optimizer_state.bytes_per_byte(optimizers)
    parts: dict[tuple[int, tuple[Any, ...]], list[WritePart]] = {}
    sizes = [(_rows(one.whole), one.nbytes) for one in box_sets.known]
    columns = zip(found.names, found.tensors, found.is_parameter, numbers, strict=True)
    for name, tensor, is_parameter, number in columns:
        spread = box_sets.known[number].spread
        if spread.replicas > 1 and is_parameter:  # buffers stay with replica 0, whose DDP broadcasts
            rows, nbytes = sizes[number]
            part = WritePart(name=name, rows=rows, nbytes=nbytes, weight=nbytes * (1 + state_bytes.get(id(tensor), 0)))
            parts.setdefault((spread.replicas, spread.over), []).append(part)
    return {name: shares for (count, _), own in parts.items() for name, shares in partition_writes(own, count).items()}


def _rows(boxes: Sequence[Any]) -> int:
    (box, *others) = boxes
    return 1 if others or not box.lengths else int(box.lengths[cut_dimension(box.lengths)])


def _enter_modules(columns: StateColumns, tracked: Tracked, numbers: Sequence[int], box_sets: BoxSets) -> None:
    found, known = tracked.found, box_sets.known
    groups = [group["params"] for all_ in tracked.optimizers.values() for o in all_ for group in o.param_groups]
    owned = set(map(id, chain.from_iterable(groups)))
    names = found.names
    if any(one.spread.per_rank for one in known):
        suffix = tracked.world.suffix
        names = [known[number].name(name, suffix) for name, number in zip(names, numbers, strict=True)]
    fenced = np.fromiter(map(owned.__contains__, found.ids), np.bool_) & np.array(found.is_parameter, np.bool_)
    if labels := tuple(f"{label}." for label in tracked.fenced):
        fenced |= np.array([name.startswith(labels) for name in found.names], np.bool_)
    versioned = np.array([not one.is_inference for one in known], np.bool_)[np.array(numbers, np.int64)]
    columns.extend(names, found.tensors, numbers, (fenced & versioned).tolist())


def _enter_captured(columns: StateColumns, tracked: Tracked, box_sets: BoxSets) -> None:
    """Enter the tensors that objects gave out."""
    if not tracked.captured.tensors:
        return
    known = dict(zip(columns.names, columns.tensors, strict=True))
    for name, tensor in tracked.captured.tensors.items():
        if name in known and known[name] is tensor:
            continue  # it was a number when the values were looked for, and is a held tensor from now on
        spread = Replication(per_rank="@" in name and tracked.world.size > 1)
        if isinstance(tensor, dtensor()):
            spread = spread_of_dtensor(tensor, tracked.world)
        columns.extend([name], [tensor], [box_sets.add(name, tensor, spread)], [False])


def _enter_parts(columns: StateColumns, tracked: Tracked, box_sets: BoxSets) -> list[str]:
    """Enter what this rank holds of tensors that lie in parts, under one name each; return the names."""
    if not tracked.parts:
        return []
    part_sets, names = PartSets(tracked.parts, tracked.world, box_sets), list[str]()
    for by_name in tracked.parts:
        for name, parts in by_name.items():
            numbers = [part_sets.number(name, part) for part in parts]
            fenced = [part.is_fenced and not part.tensor.is_inference() for part in parts]
            columns.extend([name] * len(parts), [part.tensor for part in parts], numbers, fenced)
            names.append(name)
    return names
