"""Optimizer state as entries of the structure: names, boxes, replicas, forms; what is a value; what is still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flashckpt.core.shard import Shard
from flashckpt.errors import UnsupportedStateError
from flashckpt.planning.write_partition import WriteShare
from flashckpt.state import modules, optimizer_state, state_forms
from flashckpt.state.deferred_optimizer import PredictedTensor
from flashckpt.state.placement import (
    Replication,
    World,
    boxes_of,
    local_of,
    shard_of,
    split_among_replicas,
    spread_of_dtensor,
)
from flashckpt.state.state_forms import Form

Enter = Callable[..., None]
"""`Tracked._enter` for the entries under way: name, tensor, boxes, spread and shares."""


@dataclass(frozen=True, slots=True)
class StateValue:
    """One value of a parameter's state that is no tensor, read anew for each snapshot.

    Attributes:
        name: Its key in a snapshot.
        state: The dict it lies in.
        key: Its key there.
        mesh: Of its parameter, where that is a DTensor.
    """

    name: str
    state: dict[Any, Any]
    key: Any
    mesh: DeviceMesh | None


class OptimizerEntries:
    """The state of all optimizers in one structure.

    Args:
        world: The ranks.
        names: id(parameter) -> name without the track name.
        spreads: id(parameter) -> how it is spread, and its full name.
        chosen: Full name of a parameter -> who persists which rows.
        ahead: State that does not exist yet.
        enter: Takes one tensor into the structure.

    Attributes:
        values: State that is no tensor.
        forecast: Shards of state that the first step will make.
        forms: By track name: name of a state tensor -> its form, where that is not the usual one.
    """

    def __init__(  # noqa: PLR0917 -- the parts of the structure under way
        self,
        world: World,
        names: Mapping[int, str],
        spreads: Mapping[int, tuple[Replication, str]],
        chosen: Mapping[str, tuple[WriteShare, ...]],
        ahead: PredictedTensor,
        enter: Enter,
    ) -> None:
        self._world, self._names, self._spreads, self._chosen = world, names, spreads, chosen
        self._ahead, self._enter = ahead, enter
        self._seen: dict[tuple[object, ...], str] = {}
        self.values: list[StateValue] = []
        self.forecast: list[Shard] = []
        self.forms: dict[str, dict[str, Form]] = {}

    def add(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        """Enter the state of one optimizer.

        Raises:
            UnsupportedStateError: Some of it could not be given back as it is; names it.
        """
        groups = optimizer_state.groups_by_parameter(optimizer)
        part = self._ahead.of(optimizer)
        if part is not None:
            tensors = part.state_tensors(self._names)
        else:
            tensors = optimizer_state.state_tensors(optimizer, self._names, label)
        for name, key, param, tensor in tensors:
            full = f"{label}.{name}.{key}"
            form = state_forms.form_of(full, param, key, tensor, groups[id(param)])
            if form != state_forms.USUAL:
                self.forms.setdefault(label, {})[f"{name}.{key}"] = form
            if part is None:
                self._refuse_shared(full, tensor)
            spread, shares = self._spread(param, tensor)
            placed = _as_sharded(param, tensor)
            self._enter(full, placed, boxes_of(full, placed), spread=spread, shares=shares, fenced=True)
        suffix = f"@{self._world.suffix}"
        for name, param, state, key in optimizer_state.state_values(optimizer, self._names, label):
            own = suffix if self._spreads[id(param)][0].per_rank else ""
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            self.values.append(StateValue(name + own, state, key, mesh))
        if part is None:
            self.forecast += self._forthcoming(label, optimizer)

    def _refuse_shared(self, full: str, tensor: torch.Tensor) -> None:
        known = self._seen.setdefault(modules.storage_key(tensor), full)
        if known != full:
            raise UnsupportedStateError(
                f"the optimizer state {full!r} is the same tensor as {known!r}",
                found="one tensor under two names: after a restart they would be two, and go their own ways",
                expected="a tensor of its own for every parameter and key",
                remedy="clone it inside the optimizer",
            )

    def _spread(self, param: torch.Tensor, tensor: torch.Tensor) -> tuple[Replication, tuple[WriteShare, ...]]:
        spread, full = self._spreads[id(param)]
        if isinstance(tensor, DTensor):
            own = spread_of_dtensor(tensor, self._world)
            return own, self._chosen.get(full, ()) if own == spread else ()
        if state_forms.is_of_one_rank(param, tensor):
            return Replication(per_rank=True), ()
        if isinstance(param, DTensor) and tensor.shape != local_of(param).shape:
            mesh = param.device_mesh  # scalars of a sharded parameter are equal on its whole mesh
            count = mesh.size() * spread.replicas
            first = spread.index == 0 and not any(mesh.get_coordinate() or ())
            return Replication(replicas=count, index=0 if first else 1), ()
        return spread, self._chosen.get(full, ())

    def _forthcoming(self, label: str, optimizer: torch.optim.Optimizer) -> Iterator[Shard]:
        for param, key, full_shape, dtype in optimizer_state.predicted(optimizer):
            spread, full = self._spreads[id(param)]
            name = f"{label}.{self._names[id(param)]}.{key}" + (f"@{self._world.suffix}" if spread.per_rank else "")
            kind = str(dtype).removeprefix("torch.")
            scalar = torch.zeros((), dtype=dtype)
            like = param if full_shape else scalar
            shares: Sequence[WriteShare] = self._chosen.get(full, ())
            if not full_shape:
                spread, shares = self._spread(param, scalar)
            for box in split_among_replicas(boxes_of(name, like), kind, spread, shares):
                yield shard_of(name, kind, box)


def _as_sharded(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return plain state of the local shard's shape as a DTensor placed as its parameter is."""
    if not isinstance(param, DTensor) or isinstance(tensor, DTensor):
        return tensor
    if not tensor.dim() or tensor.shape != local_of(param).shape:
        return tensor
    return DTensor.from_local(
        tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
