"""Reads for every snapshot what is not a held tensor: hyperparameters, objects' state, generators."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgpack
import torch
from torch import nn

from flashckpt.errors import UnsupportedStateError
from flashckpt.planning.read_plan import Form
from flashckpt.report import guarded
from flashckpt.state import (
    group_lists,
    modules,
    named_groups,
    optimizer_state,
    pytree,
    rng,
)
from flashckpt.state.loaded import ask
from flashckpt.state.module_tensors import Exclusion, ModuleTensors
from flashckpt.state.optimizer_entries import OptimizerEntries, StateValue
from flashckpt.state.placement import World, boxes_of, dtensor
from flashckpt.state.structure import Captured, ValuesRead

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
        self._extras = Extras()
        self._built: dict[str, Any] = {}
        self._program: dict[str, Any] = {}
        self._left_out: dict[str, torch.Tensor] = {}
        self._sample: bytes | None = None
        self._parameters: dict[str, list[str]] = {}
        self._devices: set[torch.device] = set()

    def look(self, found: ModuleTensors, exclusion: Exclusion) -> None:
        """Record which modules have extra state that is not left out, and which parameters are."""
        self._groups, self._program = {}, {}
        kept = set(found.ids)
        owners = [module._parameters.values() for module in found.walked_modules()]  # noqa: SLF001 -- parameters() hashes each
        self._devices = {tensor.device for own in owners for tensor in own if tensor is not None}
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
        self.values, self._forms = entries.values, entries.forms
        self._others = [
            (label, [dict.fromkeys(optimizer_state.other_keys(optimizer), optimizer.state) for optimizer in group])
            for label, group in self._tracked.optimizers.items()
        ]

    def has_all(self, captured: Captured) -> bool:
        """Whether what was read before `take` would be read just so again: nothing but plain settings of optimizers."""
        others = any(any(per_optimizer) for _, per_optimizer in self._others)
        return not (captured.tensors or self._tracked.objects or self.extra or self.values or self._forms or others)

    def key_of(self, name: str, thing: Any = None) -> str:
        """Return the key of an object's state: with a suffix where the state belongs to this rank alone."""
        if getattr(thing, "flashckpt_replicated", False) or isinstance(thing, _REPLICATED_TYPES):
            return name
        return f"{name}@{self._tracked.world.suffix}"

    def sample_of_left_out(self) -> bytes:
        """Return elements of the parameters that are left out, as they were when this was first asked; b"" without any."""
        if self._sample is None:
            self._sample = sample_of(self._left_out) if self._left_out else b""
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
            values[f"{LEFT_OUT_KEY}@{self._tracked.world.suffix}"] = sample
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
                self._built[label] = group_lists.built(optimizers)
        self._program = group_lists.record(tracked.optimizers, tracked.objects, self._built, self.rows())
        return self._program

    def rows(self) -> dict[str, str]:
        """Return in what row parameters stand, as `group_lists.rows` does."""
        return group_lists.rows(self._parameters, self._tracked.objects, self._tracked.names_for(()))

    def _read_optimizers(self, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        world = self._tracked.world
        suffix, stage = world.suffix, f"@{world.stage}" if world.stage else ""
        if program := self._program or self._read_program():
            values[f"{group_lists.KEY}{stage}"] = program
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


# -- Entries of an optimizer's own `state_dict()` besides `state` and `param_groups`: mostly counters of its class -

_log = guarded(logging.getLogger("flashckpt"))
_LOOKS = 8  # readings of the state in which a counter has had the time to change
_READ_DIRECTLY = frozenset({"state", "param_groups"})


def says_nothing_more(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its `state_dict()` is torch's own, without hooks."""
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not _hooks(optimizer)


def read(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the other entries of the optimizer's `state_dict()`; {} at once where it is torch's own."""
    if says_nothing_more(optimizer):
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in _READ_DIRECTLY}


class Extras:
    """Reads them for each snapshot, but not from optimizers that have none: some copy their whole state to say so."""

    def __init__(self) -> None:
        self._have_none: set[int] = set()
        self._numbers: dict[int, dict[str, float]] = {}
        self._looks: dict[int, int] = {}

    def read(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
        """Return what `read` does for each optimizer."""
        return [self._read(optimizer) for optimizer in optimizers]

    def _read(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        extra = {} if id(optimizer) in self._have_none else read(optimizer)
        if not extra and optimizer.state:  # its first step is done: what it counts is there by now
            self._have_none.add(id(optimizer))
        self._look_for_counters(optimizer, extra)
        return extra

    def _look_for_counters(self, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
        """Warn of numbers that change in attributes of the optimizer, and that a snapshot therefore lacks."""
        key = id(optimizer)
        looks = self._looks[key] = self._looks.get(key, 0) + 1
        if looks > _LOOKS:
            return
        now = {k: v for k, v in vars(optimizer).items() if type(v) in {int, float} and not k.startswith("_")}
        before = self._numbers.setdefault(key, now)
        changed = [name for name, value in now.items() if before.get(name) != value and name not in extra]
        if changed and optimizer.state:
            self._looks[key] = _LOOKS
            _log.warning(
                "%s changes %s in attributes that its state_dict() does not have: they are in no snapshot, and start  "
                "over after a restart; if the updates depend on them, keep them in param_groups or track them",
                type(optimizer).__qualname__, ", ".join(map(repr, changed)),
            )  # fmt: skip


def _hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Any]:
    found: Mapping[int, Any] = vars(optimizer).get("_optimizer_state_dict_post_hooks", {})
    return found


def give_back(optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
    """Give an optimizer what `read` returned, by its own `load_state_dict()`; state and groups stay the same objects.

    The state it is handed is empty: torch's `load_state_dict` would cast moments to the dtype of their parameters.
    """
    state, groups = optimizer.state, optimizer.param_groups
    settings = [dict(group) for group in groups]
    try:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}, **extra})
    finally:
        optimizer.state, optimizer.param_groups = state, groups
        for group, before in zip(groups, settings, strict=True):
            group.update(before)


def refuse_one_way(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer that does not restore the contents of its `state_dict()`.

    Raises:
        UnsupportedStateError: Names the entries.
    """
    extra = read(optimizer)
    if not extra:
        return
    try:
        give_back(optimizer, extra)
        lost = [key for key in extra if key not in read(optimizer)]
        problem = f"{', '.join(map(repr, lost))} is gone after load_state_dict()" if lost else ""
    except Exception as error:  # noqa: BLE001 -- a third party's method
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise UnsupportedStateError(
            f"the optimizer {name!r} does not restore what its state_dict() returns",
            found=problem,
            expected=f"load_state_dict() that takes {', '.join(map(repr, extra))} and an empty 'state'",
            state="Nothing was tracked.",
            remedy="keep such values in param_groups, or leave them out of state_dict() and track them as an object",
        )


# -- A few elements of each parameter that `track(exclude=)` leaves out: enough to notice that a restart has others
#
# An adapter that continues on another base model trains without an error, and is worth nothing. A snapshot does
# not hold the base model, so it holds up to 8 elements of each of its parameters, at fixed places of the whole
# tensor: ranks that have other shards of it compare those that both have.

LEFT_OUT_KEY = ".excluded"
"""What stands before "@" in the key of the value; no tracked name has a dot."""
_ELEMENTS = 8


def sample_of(left_out: Mapping[str, torch.Tensor]) -> bytes:
    """Return elements of the frozen parameters among `left_out`, for `differing`.

    Buffers may change in training, tensors of other classes may be packed in another way each time, and what is on the
    meta device has no elements yet: these are left out.
    """
    plain = torch.Tensor, nn.Parameter, dtensor()
    found: dict[str, list[Any]] = {}
    for name, tensor in left_out.items():
        if isinstance(tensor, nn.Parameter) and type(tensor) in plain and not tensor.is_meta:
            found[name] = [str(tensor.dtype), list(tensor.shape), _elements(name, tensor)]
    packed: bytes = msgpack.packb(found)
    return packed


def differing(ours: bytes, theirs: Any) -> list[str]:
    """Return the parameters of which two samples say something else.

    Args:
        ours: `sample_of` of the live parameters.
        theirs: What a snapshot holds; anything that is no sample says nothing.
    """
    if type(theirs) is not bytes:
        return []
    here, there = msgpack.unpackb(ours, strict_map_key=False), msgpack.unpackb(theirs, strict_map_key=False)
    return sorted(name for name in here.keys() & there.keys() if _differ(here[name], there[name]))


def _differ(here: list[Any], there: list[Any]) -> bool:
    (_, shape, elements), (_, other_shape, others) = here, there
    if here[0] != there[0] or shape != other_shape:
        return True
    return any(elements[place] != others[place] for place in elements.keys() & others.keys())


def _elements(name: str, tensor: torch.Tensor) -> dict[int, bytes]:
    """Return place in the whole, flattened tensor -> bytes of the element, of those that this rank has."""
    local = tensor._local_tensor if isinstance(tensor, dtensor()) else tensor  # noqa: SLF001 -- to_local() makes a view
    places, own = [], []
    for place in sorted({(2 * k + 1) * tensor.numel() // (2 * _ELEMENTS) for k in range(_ELEMENTS)}):
        if place < tensor.numel() and (at := _local_place(name, tensor, place)) is not None:
            places.append(place)
            own.append(at)
    if not places:
        return {}
    dims = tuple(torch.tensor(dim, device=local.device) for dim in zip(*own, strict=True))
    picked = local.detach()[dims] if dims else local.detach().reshape(1)
    raw = picked.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    size = len(raw) // len(places)
    return {place: raw[k * size : (k + 1) * size] for k, place in enumerate(places)}


def _local_place(name: str, tensor: torch.Tensor, place: int) -> tuple[int, ...] | None:
    """Return where an element of the whole tensor is in the local one; None where it is on other ranks."""
    index = []
    for length in reversed(tensor.shape):
        place, at = divmod(place, length)
        index.append(at)
    index.reverse()
    for box in boxes_of(name, tensor):
        inside = [at - first for at, first in zip(index, box.offsets, strict=True)]
        if all(0 <= at < length for at, length in zip(inside, box.lengths, strict=True)):
            return tuple(start + at for start, at in zip(box.starts, inside, strict=True))
    return None
