"""What is tracked: the objects a user names, and what a snapshot of them consists of on this rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.planning.write_partition import WritePart, WriteShare, cut_dimension, partition_writes
from flashckpt.state import modules, optimizer_extra, optimizer_state, pytree, rng, samplers
from flashckpt.state.deferred_optimizer import PredictedTensor
from flashckpt.state.depth import refuse_deep
from flashckpt.state.optimizer_entries import Enter, OptimizerEntries, StateValue
from flashckpt.state.placement import (
    Box,
    Replication,
    World,
    box_bytes,
    boxes_of,
    dtype_name,
    split_among_replicas,
    spread_of_dtensor,
    spread_of_plain,
)
from flashckpt.state.state_forms import Form
from flashckpt.state.structure import Entry, Structure, StructureGuard, structure_of

_MOST_READINGS = 3
_REPLICATED_TYPES = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The part of the state that is read anew for every snapshot.

    Attributes:
        values: Non-tensor state by key, msgpack types.
        tensors: Tensors that objects gave out, by name.
    """

    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def forms(self) -> tuple[Any, ...]:
        """What a plan is made for: it holds for every reading with equal forms."""
        return tuple((name, t.dtype, t.shape, t.layout) for name, t in self.tensors.items())


class StateRegistry:
    """The tracked objects of one process.

    Attributes:
        modules: Model parts by track name.
        optimizers: torch optimizers by track name.
        objects: Everything else with state_dict and load_state_dict, by track name.
        rng: Whether the random number generators are part of the state.
        planned: The structure built last, which `holds` speaks of.
        ahead: Optimizer state in it that does not exist yet.
        fenced: Track names whose tensors the user declared to change only inside `optimizer.step()`.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.modules: dict[str, list[nn.Module]] = {}
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        self.objects: dict[str, Any] = {}
        self.rng = False
        self.fenced: set[str] = set()
        self.watch = StructureGuard([], [])
        self.planned: Structure | None = None
        self.ahead = PredictedTensor()
        self._appeared = StructureGuard([], [])
        self.aliases: dict[str, str] = {}
        self._values: list[StateValue] = []
        self._forms: dict[str, dict[str, Form]] = {}
        self._others: list[tuple[str, list[dict[Any, Any]]]] = []
        self._extra: list[tuple[str, nn.Module]] = []
        self._names: dict[int, str] = {}
        self._groups: dict[str, list[list[list[str]]]] = {}
        self._extras = optimizer_extra.Extras()
        self._shapes = modules.Shapes()

    def add(self, name: str, thing: Any, *, fenced: bool = False) -> None:
        """Track one object, or a list of modules or of optimizers, under a name.

        Raises:
            ConfigError: The name is taken or not usable, or the object has no state_dict/load_state_dict.
            UnsupportedStateError: A module or an optimizer keeps state where a snapshot would not find it.
        """
        if name in {*self.modules, *self.optimizers, *self.objects} or not name or "@" in name or "." in name:
            raise ConfigError(
                f"cannot track anything under the name {name!r}",
                found="it is taken" if name and "@" not in name and "." not in name else "an empty name, '@' or '.'",
                expected="a name of its own for every tracked object",
            )
        parts = list(thing) if isinstance(thing, (list, tuple, nn.ModuleList)) else [thing]
        if parts and all(isinstance(p, nn.Module) for p in parts):
            refuse_deep(name, *parts)
            for part in parts:
                modules.refuse_hidden(name, part)
            self.modules[name] = parts
        elif parts and all(isinstance(p, torch.optim.Optimizer) for p in parts):
            for part in parts:
                optimizer_state.refuse_wrapper(name, part)
                optimizer_extra.refuse_one_way(name, part)
            refuse_deep(name, *parts)
            self.optimizers[name] = parts
        elif isinstance(thing, (list, tuple)):
            for i, part in enumerate(parts):
                self.add(f"{name}-{i}", part, fenced=fenced)
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            samplers.refuse_second(name, thing, self.objects)
            refuse_deep(name, *parts)
            self.objects[name] = thing
        else:
            raise ConfigError(
                f"cannot track {name!r}",
                found=f"an object of class {type(thing).__qualname__}",
                expected="a module, an optimizer, a list of them, or anything with state_dict() and load_state_dict()",
            )
        if fenced:
            self.fenced.add(name)

    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return every tracked torch optimizer."""
        return [o for group in self.optimizers.values() for o in group]

    def parts(self) -> list[nn.Module]:
        """Return every tracked module."""
        return [part for group in self.modules.values() for part in group]

    def key_of(self, name: str, thing: Any = None) -> str:
        """Return the key of an object's state: with a suffix where the state belongs to this rank alone."""
        if getattr(thing, "flashckpt_replicated", False) or isinstance(thing, _REPLICATED_TYPES):
            return name
        return f"{name}@{self.world.suffix}"

    # -- structure ---------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Tell whether the structure built last is still that of the live objects (cheap)."""
        return not self.ahead and self._appeared.holds() and self._rest_holds()

    def _rest_holds(self) -> bool:
        if self.watch.holds():
            return True
        for part in self.parts():
            modules.reshard(part)
        return self.watch.holds()

    def appeared(self) -> list[torch.Tensor] | None:
        """Return the tensors that have taken the place of those planned ahead; None: not all of them, or others."""
        tensors = self.ahead.found() if self.ahead else None
        if tensors is not None and self._rest_holds():
            self._appeared, self.ahead = self.ahead.watch(tensors), PredictedTensor()
            return tensors
        return None

    def settled(self, *, ahead: bool = False) -> tuple[Structure, Captured]:
        """Return the structure and what was read with it: state that has just appeared may consist of tensors too.

        Raises:
            UnsupportedStateError: As `structure`; or an object gives out other tensors each time it is asked.
        """
        captured = self.capture()
        for _ in range(_MOST_READINGS):
            structure = self.structure(captured, ahead=ahead)
            captured = self.capture()
            if captured.forms == structure.forms:
                return structure, captured
        before, now = ({one[0]: one for one in forms} for forms in (structure.forms, captured.forms))
        name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
        raise UnsupportedStateError(
            f"{name!r} is another tensor each time the state is read",
            found=f"{now.get(name, 'no such tensor')} after {before.get(name, 'no such tensor')}",
            expected="the same keys, dtypes and shapes as long as no step was made",
            remedy="let state_dict() or get_extra_state() only read, or leave the object out of track()",
        )

    def structure(self, captured: Captured, *, ahead: bool = False) -> Structure:
        """Return the structure of the state as it is now; objects' tensors are taken from `captured`.

        Args:
            captured: What was read last.
            ahead: Optimizer state that the first step will make is part of it too.

        Raises:
            UnsupportedStateError: A tensor that cannot be held; names it.
            ConfigError: Two tensors of one name, or an optimizer over parameters of no tracked module.
        """
        found, aliases = self._module_tensors()
        self._shapes.look(found)
        owned = {id(p) for o in self.all_optimizers() for p in optimizer_state.parameters(o)}
        boxes = {full: boxes_of(full, owner.tensor) for full, owner in found.items()}
        chosen = self._shares(found, boxes)
        entries: dict[str, Entry] = {}
        spreads: dict[int, tuple[Replication, str]] = {}
        for full, owner in found.items():
            spread = self._spread(owner)
            label = full.partition(".")[0]
            spreads[id(owner.tensor)] = spread, full
            fenced = (owner.is_parameter and id(owner.tensor) in owned) or label in self.fenced
            shares = chosen.get(full, ())
            self._enter(entries, full, owner.tensor, boxes[full], spread=spread, shares=shares, fenced=fenced)
        self._names, self._groups = self._parameter_names(found, aliases), {}
        for alias, full in aliases.items():
            spreads.setdefault(id(self._aliased[alias]), (self._spread(found[full]), full))
        self.ahead = PredictedTensor(self.all_optimizers() if ahead else ())
        enter = functools.partial(self._enter, entries)
        state = self._optimizer_entries(enter, spreads, chosen)
        for name, tensor in captured.tensors.items():
            if name in entries and entries[name].tensor is tensor:
                continue  # it was a number when the values were looked for, and is a held tensor from now on
            spread = Replication(per_rank="@" in name and self.world.size > 1)
            if isinstance(tensor, DTensor):
                spread = spread_of_dtensor(tensor, self.world)
            self._enter(entries, name, tensor, boxes_of(name, tensor), spread=spread, fenced=False)
        awaited = set(map(id, self.ahead.stand_ins))
        live = (e.tensor for e in entries.values() if e.fenced and id(e.tensor) not in awaited)
        self._rewatch([tensor for tensor in live if isinstance(tensor, DTensor)])
        self.aliases = aliases
        self.planned = structure_of(
            entries.values(), forecast=state.forecast, aliases=aliases, fresh=captured.tensors, forms=captured.forms
        )
        return self.planned

    def _module_tensors(self) -> tuple[dict[str, modules.ModuleTensor], dict[str, str]]:
        found: dict[str, modules.ModuleTensor] = {}
        by_storage: dict[tuple[object, ...], str] = {}
        aliases: dict[str, str] = {}
        self._aliased: dict[str, torch.Tensor] = {}
        for label, parts in self.modules.items():
            for part in parts:
                for one in modules.tensors_of(part):
                    full, key = f"{label}.{one.name}", modules.storage_key(one.tensor)
                    known = by_storage.setdefault(key, full)
                    if known == full and full not in found:
                        found[full] = one
                    elif full in found or full in aliases:
                        self._duplicate(full, one.tensor, found.get(full))
                    else:
                        aliases[full], self._aliased[full] = known, one.tensor
        return found, aliases

    def _duplicate(self, full: str, tensor: torch.Tensor, known: modules.ModuleTensor | None) -> None:
        if known is not None and known.tensor is tensor:
            return  # one module reached on two ways
        raise ConfigError(
            f"two tracked tensors have the name {full!r}",
            found="model parts whose names are not global",
            expected="one name per tensor over all parts and pipeline stages, e.g. the global layer number in it",
            state="Nothing was tracked.",
        )

    def _parameter_names(self, found: dict[str, modules.ModuleTensor], aliases: dict[str, str]) -> dict[int, str]:
        names = {id(one.tensor): _short(full) for full, one in found.items()}
        for alias in aliases:
            names.setdefault(id(self._aliased[alias]), _short(alias))
        return names

    def _spread(self, one: modules.ModuleTensor) -> Replication:
        if isinstance(one.tensor, DTensor):
            return spread_of_dtensor(one.tensor, self.world)
        return spread_of_plain(self.world, one.ddp_ranks)

    def _shares(
        self, found: dict[str, modules.ModuleTensor], boxes: dict[str, tuple[Box, ...]]
    ) -> dict[str, tuple[WriteShare, ...]]:
        """Return which replica persists which rows of each parameter and its state, balanced within each replica set.

        Sizes of optimizer state are those it will have: the cuts must not move with the first step.
        """
        state_bytes = optimizer_state.bytes_per_byte(self.all_optimizers())
        sets: dict[tuple[int, tuple[Any, ...]], list[WritePart]] = {}
        for full, one in found.items():
            spread = self._spread(one)
            if spread.replicas > 1 and one.is_parameter:  # buffers stay with replica 0, whose DDP broadcasts
                (box, *others) = boxes[full]
                nbytes = box_bytes(dtype_name(full, one.tensor), boxes[full])
                rows = 1 if others or not box.lengths else box.lengths[cut_dimension(box.lengths)]
                weight = nbytes * (1 + state_bytes.get(id(one.tensor), 0))
                part = WritePart(name=full, rows=rows, nbytes=nbytes, weight=weight)
                sets.setdefault((spread.replicas, spread.over), []).append(part)
        return {
            name: shares
            for (count, _), parts in sets.items()
            for name, shares in partition_writes(parts, count).items()
        }

    def _enter(
        self,
        entries: dict[str, Entry],
        full: str,
        tensor: torch.Tensor,
        boxes: Sequence[Box],
        *,
        spread: Replication,
        shares: Sequence[WriteShare] = (),
        fenced: bool,
    ) -> None:
        dtype = dtype_name(full, tensor)
        fqn = f"{full}@{self.world.suffix}" if spread.per_rank and "@" not in full else full
        if fqn in entries:
            self._duplicate(fqn, tensor, None)
        entries[fqn] = Entry(
            fqn=fqn,
            tensor=tensor,
            dtype=dtype,
            boxes=split_among_replicas(boxes, dtype, spread, shares),
            replicas=spread.replicas,
            fenced=fenced and not tensor.is_inference(),
        )

    def _optimizer_entries(self, enter: Enter, spreads: Any, chosen: Any) -> OptimizerEntries:
        found = OptimizerEntries(self.world, self._names, spreads, chosen, self.ahead, enter)
        for label, group in self.optimizers.items():
            for optimizer in group:
                found.add(label, optimizer)
        self._values, self._forms = found.values, found.forms
        self._others = [
            (label, [dict.fromkeys(optimizer_state.other_keys(optimizer), optimizer.state) for optimizer in group])
            for label, group in self.optimizers.items()
        ]
        return found

    def _rewatch(self, sharded: Sequence[torch.Tensor]) -> None:
        dicts: list[Any] = [d for part in self.parts() for d in modules.watched(part)]
        lists: list[Sequence[Any]] = []
        mixed: list[Any] = []
        changing = {id(value.state) for value in self._values}
        for optimizer in self.all_optimizers():
            if self.ahead.of(optimizer) is None:
                (mixed if optimizer_state.other_keys(optimizer) else dicts).append(optimizer.state)
                for state in (v for k, v in optimizer.state.items() if isinstance(k, torch.Tensor)):
                    (mixed if id(state) in changing else dicts).append(state)
            lists += [group["params"] for group in optimizer.param_groups]
            lists.append(optimizer.param_groups)
        self.watch = StructureGuard(dicts, lists, sharded, mixed=mixed, is_member=_is_watched)
        self._appeared = StructureGuard([], [])
        self._extra = [
            (f"{label}.{name}", module)
            for label, parts in self.modules.items()
            for part in parts
            for name, module in modules.extra_states(part)
        ]

    def extra_states(self) -> list[tuple[str, nn.Module]]:
        """Return (name, module) of modules with state of their own beside tensors."""
        return list(self._extra)

    # -- values ------------------------------------------------------------------------------------------

    def capture(self) -> Captured:
        """Read what is not a held tensor: hyperparameters, objects' state, random number generators."""
        values: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        suffix = self.world.suffix
        for name, thing in self.objects.items():
            key = self.key_of(name, thing)
            values[key], own = pytree.flatten(thing.state_dict(), key)
            tensors |= own
        self._capture_optimizers(values, tensors)
        for name, module in self._extra:
            values[name], own = pytree.flatten(module.get_extra_state(), name)
            tensors |= own
        if self.aliases:
            values["aliases"] = self.aliases
        if self.rng:
            values[f"rng@{suffix}"] = rng.capture()
        return Captured(values=values, tensors=tensors)

    def _capture_optimizers(self, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        suffix, stage = self.world.suffix, f"@{self.world.stage}" if self.world.stage else ""
        for label, group in self.optimizers.items():
            key = f"{label}.groups{stage}"
            values[key], own = optimizer_state.groups(group, self._group_names(label), f"{label}.groups@{suffix}")
            tensors |= own
            if any(extra := self._extras.read(group)):
                key = f"{label}.extra@{suffix}"
                values[key], own = pytree.flatten(extra, key)
                tensors |= own
        for value in self._values:
            values[value.name], own = pytree.flatten(value.state.get(value.key), value.name, mesh=value.mesh)
            tensors |= own
        for label, per_optimizer in self._others:
            if any(per_optimizer):
                key = f"{label}.state@{suffix}"
                others = [{k: state.get(k) for k, state in one.items()} for one in per_optimizer]
                values[key], own = pytree.flatten(others, key)
                tensors |= own
        for label, forms in self._forms.items():
            values[f"{label}.forms{stage}"] = forms

    def _group_names(self, label: str) -> list[list[list[str]]]:
        group = self.optimizers[label]
        known = self._groups.get(label)
        counts = [[len(g["params"]) for g in o.param_groups] for o in group]
        if known is None or [[len(names) for names in one] for one in known] != counts:
            known = self._groups[label] = optimizer_state.group_names(group, self.names_for(group))
        return known

    def names_for(self, group: Iterable[torch.optim.Optimizer]) -> dict[int, str]:
        """Return the names of the parameters: id(parameter) -> name without the track name `model`.

        Raises:
            ConfigError: An optimizer of `group` has a parameter that no tracked module has.
        """
        if any(id(p) not in self._names for o in group for p in optimizer_state.parameters(o)):
            found, aliases = self._module_tensors()
            self._names = self._parameter_names(found, aliases)
            for label, optimizers in self.optimizers.items():
                for p in (p for o in optimizers for p in optimizer_state.parameters(o)):
                    optimizer_state.name_of(p, self._names, label)
        return self._names


def _is_watched(key: Any, value: Any) -> bool:
    """Whether a value in `optimizer.state`, or in the state of one parameter, is held and not read anew."""
    return isinstance(key, torch.Tensor) or isinstance(value, torch.Tensor)


def _short(full: str) -> str:
    """Return a parameter's name inside the name of its optimizer state: without the track name `model`."""
    return full.removeprefix("model.")
