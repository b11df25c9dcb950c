"""Optimizer state in a structure: names, boxes, replicas, forms; what is a value; what is still to come."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flashckpt.errors import UnsupportedStateError
from flashckpt.planning.read_plan import USUAL, Form
from flashckpt.planning.write_partition import WriteShare
from flashckpt.state import optimizer_state
from flashckpt.state.box_sets import BoxSets, first_alike
from flashckpt.state.module_tensors import first_shared
from flashckpt.state.optimizer_state import DeferredState, PredictedBlock, example, name_of, usable_key
from flashckpt.state.placement import (
    PLAIN_TENSORS,
    Replication,
    World,
    dtensor,
    local_of,
    replicated,
    spread_of_dtensor,
)


@dataclass(frozen=True, slots=True)
class StateValue:
    """One value of a parameter's state that is not a tensor, read for each snapshot.

    Attributes:
        name: Its key in a snapshot.
        state: The dict that holds it.
        key: Its key there.
        mesh: Of its parameter, where that is a DTensor.
    """

    name: str
    state: dict[Any, Any]
    key: Any
    mesh: DeviceMesh | None


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameters:
    """What optimizer state is named and placed after.

    Attributes:
        names: id(parameter) -> name without the track name.
        sets: id(parameter) -> number of its boxes, those of the tensor it stands for where it is an alias.
    """

    names: Mapping[int, str]
    sets: Mapping[int, int]


@dataclass(slots=True, eq=False)
class StateColumns:
    """Tensors of a structure under way: a name, a tensor (None where it does not exist yet) and its boxes' number."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    sets: list[int] = field(default_factory=list)
    fenced: list[bool] = field(default_factory=list)

    def extend(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor | None], sets: Sequence[int], fenced: Sequence[bool]
    ) -> None:
        """Append one tensor for each name."""
        self.names += names
        self.tensors += tensors
        self.sets += sets
        self.fenced += fenced


@dataclass(slots=True, eq=False)
class _Found:
    """State tensors that exist, in columns; one entry per tensor."""

    params: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    on_device: list[bool] = field(default_factory=list)


class OptimizerEntries:
    """The state of all optimizers in one structure.

    Args:
        world: The ranks.
        parameters: Names and boxes of the parameters.
        box_sets: The kinds of tensors in the structure; grows.
        ahead: State that does not exist yet.

    Attributes:
        columns: The state tensors.
        forecast: State that the first step will make and that is not planned ahead.
        values: State that is no tensor.
        forms: By track name: name of a state tensor -> its form, where that is not the usual one.
    """

    def __init__(self, world: World, parameters: NamedParameters, box_sets: BoxSets, ahead: DeferredState) -> None:
        self._world, self._parameters, self._box_sets, self._ahead = world, parameters, box_sets, ahead
        self.columns, self.forecast = StateColumns(), StateColumns()
        self.values: list[StateValue] = []
        self.forms: dict[str, dict[str, Form]] = {}

    def add(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        """Enter the state of one optimizer.

        Raises:
            ConfigError: A parameter that no tracked module has.
            UnsupportedStateError: Some of it could not be restored as it is; names it.
        """
        part = self._ahead.of(optimizer)
        if part is not None:
            for block in part.blocks:
                self._add_predicted(self.columns, label, block)
            return
        self._add_existing(label, optimizer)
        for block in optimizer_state.predicted(optimizer):
            self._add_predicted(self.forecast, label, block)

    # -- what is still to come -----------------------------------------------------------------------

    def _add_predicted(self, columns: StateColumns, label: str, block: PredictedBlock) -> None:
        """Enter what a first step will make, in its order: for each parameter every key."""
        ids = list(map(id, block.params))
        sets = list(map(self._parameters.sets.__getitem__, ids))
        paths = list(map(self._parameters.names.__getitem__, ids))
        of_key = [self._predicted_sets(label, block, key, sets, is_full=is_full) for key, is_full in block.keys]
        names: list[str] = [""] * (len(sets) * len(of_key))
        numbers = [0] * len(names)
        stems = [f"{label}.{path}." for path in paths]
        for at, ((key, _), found) in enumerate(zip(block.keys, of_key, strict=True)):
            names[at :: len(of_key)] = map(operator.add, stems, itertools.repeat(key))
            numbers[at :: len(of_key)] = map(found.__getitem__, sets)
        columns.extend(self._suffixed(names, numbers), [None] * len(names), numbers, [True] * len(names))

    def _predicted_sets(
        self, label: str, block: PredictedBlock, key: str, sets: Sequence[int], *, is_full: bool
    ) -> dict[int, int]:
        """Return for each kind of parameter the kind of its state."""
        found = {}
        for number, param in dict(zip(reversed(sets), reversed(block.params), strict=True)).items():
            full = f"{label}.{self._parameters.names[id(param)]}.{key}"
            tensor = example(block, param, is_full=is_full)
            found[number] = self._set_of(full, number, param, tensor)
            form = form_of(full, param, key, tensor, block.group)
            if form != USUAL:
                alike = (p for p, other in zip(block.params, sets, strict=True) if other == number)
                names = (f"{self._parameters.names[id(p)]}.{key}" for p in alike)
                self.forms.setdefault(label, {}).update(dict.fromkeys(names, form))
        return found

    def _suffixed(self, names: list[str], numbers: Sequence[int]) -> list[str]:
        """Return names with the suffix of this rank where a tensor belongs to it alone."""
        if not any(self._box_sets.known[number].spread.per_rank for number in set(numbers)):
            return names
        known, suffix = self._box_sets.known, self._world.suffix
        return [known[number].name(name, suffix) for name, number in zip(names, numbers, strict=True)]

    # -- what exists -------------------------------------------------------------------------------------

    def _add_existing(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        found = self._read(label, optimizer)
        numbers = [self._parameters.sets[id(p)] for p in found.params]
        is_step = [key == "step" for key in found.keys]
        firsts = first_alike(found.tensors, numbers, is_step, found.on_device)
        of_first: dict[int, tuple[int, Form]] = {}
        for first in dict.fromkeys(firsts):
            param, tensor, key = found.params[first], found.tensors[first], found.keys[first]
            full = f"{label}.{found.names[first]}.{key}"
            form = form_of(full, param, key, tensor, {"capturable": found.on_device[first]})
            of_first[first] = self._set_of(full, numbers[first], param, tensor), form
        sets = [of_first[first][0] for first in firsts]
        names = [f"{label}.{name}.{key}" for name, key in zip(found.names, found.keys, strict=True)]
        fenced = [not self._box_sets.known[number].is_inference for number in sets]
        self.columns.extend(self._suffixed(names, sets), found.tensors, sets, fenced)
        if any(form != USUAL for _, form in of_first.values()):
            for name, key, first in zip(found.names, found.keys, firsts, strict=True):
                if (form := of_first[first][1]) != USUAL:
                    self.forms.setdefault(label, {})[f"{name}.{key}"] = form

    def _read(self, label: str, optimizer: torch.optim.Optimizer) -> _Found:
        """Read the state of every parameter: tensors into columns, the rest into `values`."""
        found, states = _Found(), optimizer.state
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                name = name_of(param, self._parameters.names, label)
                state = states.get(param) if states else None
                for key, value in state.items() if state else ():
                    usable = usable_key(key, f"{label}.{name}")
                    if isinstance(value, torch.Tensor):
                        found.params.append(param)
                        found.names.append(name)
                        found.keys.append(usable)
                        found.tensors.append(value)
                        found.on_device.append(on_device)
                    else:
                        self._add_value(f"{label}.{name}.{usable}", param, state, key)
        return found

    def _add_value(self, name: str, param: torch.Tensor, state: Any, key: Any) -> None:
        spread = self._box_sets.known[self._parameters.sets[id(param)]].spread
        own = f"@{self._world.suffix}" if spread.per_rank else ""
        self.values.append(
            StateValue(name + own, state, key, param.device_mesh if isinstance(param, dtensor()) else None)
        )

    def refuse_shared(self) -> None:
        """Refuse state that is one tensor under two names; when all of it was added.

        Raises:
            UnsupportedStateError: Names both.
        """
        if all(map(operator.is_, self.columns.tensors, itertools.repeat(None))):
            return  # nothing exists yet: as a rule in a fresh start
        columns = zip(self.columns.names, self.columns.tensors, strict=True)
        held = [(name, tensor) for name, tensor in columns if tensor is not None]
        shared = first_shared([name for name, _ in held], [tensor for _, tensor in held])
        if shared is not None:
            raise UnsupportedStateError(
                f"the optimizer state {shared[1]!r} is the same tensor as {shared[0]!r}",
                found="one tensor under two names: after a restart they would be two tensors, and diverge",
                expected="a separate tensor for every parameter and key",
                remedy="clone it inside the optimizer",
            )

    # -- boxes -------------------------------------------------------------------------------------------

    def _set_of(self, full: str, number: int, param: torch.Tensor, tensor: torch.Tensor) -> int:
        """Return the kind of a state tensor, from the kind of its parameter; asked once per kind."""
        spread, shares = self._spread(number, param, tensor)
        return self._box_sets.add(full, _as_sharded(param, tensor), spread, shares)

    def _spread(
        self, number: int, param: torch.Tensor, tensor: torch.Tensor
    ) -> tuple[Replication, tuple[WriteShare, ...]]:
        known = self._box_sets.known[number]
        spread, shares = known.spread, known.shares
        if type(param) in PLAIN_TENSORS and type(tensor) in PLAIN_TENSORS:
            return spread, shares
        sharded = dtensor()
        if isinstance(tensor, sharded):
            own = spread_of_dtensor(tensor, self._world)
            return own, shares if own == spread else ()
        if not isinstance(param, sharded):
            return spread, shares
        if is_of_one_rank(param, tensor):
            return Replication(per_rank=True), ()
        if tensor.shape != local_of(param).shape:
            mesh = param.device_mesh  # scalars of a sharded parameter are equal on its whole mesh
            count = mesh.size() * spread.replicas
            first = spread.index == 0 and not any(mesh.get_coordinate() or ())
            return Replication(replicas=count, index=0 if first else 1), ()
        return spread, shares


def _as_sharded(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return plain state of the local shard's shape as a DTensor placed as its parameter is."""
    if type(param) in PLAIN_TENSORS or not isinstance(param, sharded := dtensor()) or isinstance(tensor, sharded):
        return tensor
    if not tensor.dim() or tensor.shape != local_of(param).shape:
        return tensor
    return sharded.from_local(
        tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


# -- How a tensor of optimizer state lies beside its parameter: what a fresh optimizer needs to have it exactly as
#    it was
#
# Most state has the shape, placement and device of its parameter, and is made by `allocate` without a word about
# it. What is otherwise is recorded in the snapshot, by name: a form of two words, (kind, device).

REPLICATED = "replicated"
"""A DTensor on the parameter's mesh, equal on all of its ranks."""
LOCAL = "local"
"""A plain tensor beside a sharded parameter, of the shape of this rank's shard."""
PLAIN = "plain"
"""A plain tensor beside a sharded parameter, of another shape: it belongs to this rank alone, unless it is a scalar."""


def form_of(fqn: str, param: torch.Tensor, key: str, tensor: torch.Tensor, group: Mapping[str, Any]) -> Form:
    """Return the form of one state tensor; USUAL where `allocate` needs none.

    Raises:
        UnsupportedStateError: A DTensor that could not be recreated: on another mesh, or with another placement.
    """
    device = tensor.device.type
    usual_device = _device(param, key, tuple(tensor.shape), group).type
    return _kind(fqn, param, tensor), "" if device == usual_device else device


def _kind(fqn: str, param: torch.Tensor, tensor: torch.Tensor) -> str:
    if type(param) in PLAIN_TENSORS and type(tensor) in PLAIN_TENSORS:
        return ""
    sharded = dtensor()
    if isinstance(tensor, sharded):
        same_mesh = isinstance(param, sharded) and tensor.device_mesh == param.device_mesh
        if same_mesh and tensor.shape == param.shape and tensor.placements == param.placements:  # type: ignore[attr-defined]  # same_mesh says so
            return ""
        if same_mesh and all(p.is_replicate() for p in tensor.placements):
            return REPLICATED
        raise UnsupportedStateError(
            f"{fqn!r} has a placement that cannot be recreated in a new optimizer",
            found=f"a DTensor of shape {tuple(tensor.shape)} and {tensor.placements} on {tensor.device_mesh}",
            expected="the shape and placements of its parameter, or Replicate on its mesh",
            remedy="redistribute it to Replicate inside the optimizer",
        )
    if not isinstance(param, sharded) or not tensor.dim():
        return ""
    return LOCAL if tensor.shape == local_of(param).shape else PLAIN


def is_of_one_rank(param: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether state of a sharded parameter is this rank's alone: nothing says that it is equal anywhere else."""
    return isinstance(param, dtensor()) and not isinstance(tensor, dtensor()) and _kind("", param, tensor) == PLAIN


def allocate(
    param: torch.Tensor,
    key: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any],
    fqn: str,
    form: Form = USUAL,
) -> torch.Tensor:
    """Return an unfilled state tensor as the optimizer itself would make it; the restore overwrites it whole.

    Args:
        param: The parameter it belongs to.
        key: Its key in the parameter's state, e.g. "exp_avg".
        shape: Global shape recorded in the snapshot.
        dtype: Dtype recorded in the snapshot.
        group: The parameter's group: capturable and fused optimizers keep `step` on the device.
        fqn: Its name, for the error.
        form: Its form recorded in the snapshot.

    Raises:
        UnsupportedStateError: Sharded state that has not the parameter's shape and no form: where it lies is not known.
    """
    kind, device = form
    if kind == REPLICATED and isinstance(param, dtensor()):
        local = torch.empty(shape, dtype=dtype, device=param.device)
        mesh = param.device_mesh
        return replicated(local, mesh)
    if shape == tuple(param.shape) and shape and kind != PLAIN:
        like = local_of(param).detach() if kind == LOCAL else param
        made = _beside(like, dtype)
        return made.to(device) if device and not isinstance(made, dtensor()) else made
    if shape and kind != PLAIN and isinstance(param, dtensor()):
        raise UnsupportedStateError(
            f"{fqn!r} has not the shape of its parameter, so its sharding is not known before the first step",
            found=str(shape),
            expected=str(tuple(param.shape)),
            remedy="take one optimizer step before restore(), so that the optimizer makes its state itself",
        )
    return torch.empty(shape, dtype=dtype, device=device or _device(param, key, shape, group))


def _beside(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an unfilled tensor of the shape, placement and device of another."""
    if (
        type(like) not in PLAIN_TENSORS
        and type(like) is dtensor()
        and local_of(like).device.type == like.device_mesh.device_type
    ):
        # Of the local part: as an operation on a DTensor it would first have to be planned, per shape and placement.
        local = _beside(local_of(like).detach(), dtype)
        return dtensor().from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return torch.empty_like(like, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)


def _device(param: torch.Tensor, key: str, shape: tuple[int, ...], group: Mapping[str, Any]) -> torch.device:
    """Return where torch's optimizers keep state of this key."""
    on_device = shape or key != "step" or group.get("capturable") or group.get("fused")
    return param.device if on_device else torch.device("cpu")
