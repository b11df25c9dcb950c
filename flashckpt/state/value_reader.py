"""Reads for every snapshot what is not a held tensor: hyperparameters, objects' state, generators."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from flashckpt.state import (
    builds,
    left_out,
    modules,
    named_groups,
    optimizer_extra,
    optimizer_state,
    parameter_rows,
    pytree,
    rng,
)
from flashckpt.state.captured import Captured, ValuesRead
from flashckpt.state.exclusion import Exclusion
from flashckpt.state.loaded import ask
from flashckpt.state.module_tensors import ModuleTensors
from flashckpt.state.optimizer_entries import OptimizerEntries, StateValue
from flashckpt.state.placement import World
from flashckpt.state.state_forms import Form

_REPLICATED_TYPES = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


class Readable(Protocol):
    """What is read: the tracked objects."""

    world: World
    optimizers: dict[str, list[torch.optim.Optimizer]]
    objects: dict[str, Any]
    unread: set[str]
    rng: bool
    aliases: dict[str, str]

    def names_for(self, group: Iterable[torch.optim.Optimizer]) -> Mapping[int, str]:
        """Return the names of the parameters: id(parameter) -> name without the track name `model`."""


class ValueReader:
    """What has to be known to read the values, found out once per structure.

    Args:
        tracked: The tracked objects.

    Attributes:
        values: State of parameters that is no tensor.
        extra: (name, module) of modules with extra state.
    """

    def __init__(self, tracked: Readable) -> None:
        self._tracked = tracked
        self.values: list[StateValue] = []
        self.extra: list[tuple[str, nn.Module]] = []
        self._forms: dict[str, dict[str, Form]] = {}
        self._others: list[tuple[str, list[dict[Any, Any]]]] = []
        self._groups: dict[str, list[list[list[str]]]] = {}
        self._extras = optimizer_extra.Extras()
        self._built: dict[str, Any] = {}
        self._program: dict[str, Any] = {}
        self._left_out: dict[str, torch.Tensor] = {}
        self._sample: bytes | None = None
        self._parameters: dict[str, list[str]] = {}
        self._devices: set[torch.device] = set()

    def look(self, found: ModuleTensors, exclusion: Exclusion) -> None:
        """Record which modules have extra state that is not left out, and which parameters are."""
        self._groups = {}
        kept = set(found.ids)
        self._devices = {
            tensor.device for module in found.walked_modules() for tensor in module.parameters(recurse=False)
        }
        self._left_out = {name: tensor for name, tensor in found.left_out.items() if id(tensor) not in kept}
        self._sample = None
        self._parameters = {label: [] for label, _ in found.walked}
        for name in itertools.compress(found.names, found.is_parameter):
            self._parameters[name.partition(".")[0]].append(name)
        self.extra = [
            (f"{label}.{name}", module)
            for label, walked in found.walked
            for name, module in modules.extra_states(walked)
            if not exclusion(f"{label}.{name}")
        ]

    def take(self, entries: OptimizerEntries) -> None:
        """Take note of the optimizers' state: what of it is no tensor."""
        self.values, self._forms, self._program = entries.values, entries.forms, {}
        self._others = [
            (label, [dict.fromkeys(optimizer_state.other_keys(optimizer), optimizer.state) for optimizer in group])
            for label, group in self._tracked.optimizers.items()
        ]

    def key_of(self, name: str, thing: Any = None) -> str:
        """Return the key of an object's state: with a suffix where the state belongs to this rank alone."""
        if getattr(thing, "flashckpt_replicated", False) or isinstance(thing, _REPLICATED_TYPES):
            return name
        return f"{name}@{self._tracked.world.suffix}"

    def sample_of_left_out(self) -> bytes:
        """Return elements of the parameters that are left out, as they were when this was first asked; b"" without any."""
        if self._sample is None:
            self._sample = left_out.sample(self._left_out) if self._left_out else b""
        return self._sample

    def read(self) -> Captured:
        """Read everything as it is now.

        Raises:
            UnsupportedStateError: A value that cannot be held; names it.
            ObjectStateError: An object's own method raised.
        """
        values: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, thing in self._tracked.objects.items():
            if name in self._tracked.unread:
                continue
            key = self.key_of(name, thing)
            values[key], own = pytree.flatten(ask(name, thing, "state_dict"), key)
            tensors |= own
        self._read_optimizers(values, tensors)
        for name, module in self.extra:
            values[name], own = pytree.flatten(ask(name, module, "get_extra_state"), name)
            tensors |= own
        if self._tracked.aliases:
            values["aliases"] = self._tracked.aliases
        if sample := self.sample_of_left_out():
            values[f"{left_out.KEY}@{self._tracked.world.suffix}"] = sample
        generators = None
        if self._tracked.rng:
            generators = f"rng@{self._tracked.world.suffix}", rng.Generators.now(self._devices)
        return Captured(read=ValuesRead(values, generators), tensors=tensors)

    def _read_program(self) -> dict[str, Any]:
        """Return the record of the program; settings as they are when they are first read, before a restore."""
        tracked = self._tracked
        if not tracked.optimizers and not tracked.objects:
            return {}
        for label, optimizers in tracked.optimizers.items():
            if label not in self._built:
                self._built[label] = builds.built(optimizers)
        self._program = builds.record(tracked.optimizers, tracked.objects, self._built, self.rows())
        return self._program

    def rows(self) -> dict[str, str]:
        """Return in what row parameters stand, as `parameter_rows.rows` does."""
        return parameter_rows.rows(self._parameters, self._tracked.objects, self._tracked.names_for(()))

    def _read_optimizers(self, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        world = self._tracked.world
        suffix, stage = world.suffix, f"@{world.stage}" if world.stage else ""
        if program := self._program or self._read_program():
            values[f"{builds.KEY}{stage}"] = program
        for label, group in self._tracked.optimizers.items():
            key = f"{label}.groups{stage}"
            values[key], own = named_groups.groups(group, self.group_names(label), f"{label}.groups@{suffix}")
            tensors |= own
            if any(extra := self._extras.read(group)):
                key = f"{label}.extra@{suffix}"
                values[key], own = pytree.flatten(extra, key)
                tensors |= own
        for value in self.values:
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

    def group_names(self, label: str) -> list[list[list[str]]]:
        """Return the names of the parameters per optimizer and group."""
        group = self._tracked.optimizers[label]
        known = self._groups.get(label)
        counts = [[len(g["params"]) for g in o.param_groups] for o in group]
        if known is None or [[len(names) for names in one] for one in known] != counts:
            known = self._groups[label] = named_groups.group_names(group, self._tracked.names_for(group))
        return known
