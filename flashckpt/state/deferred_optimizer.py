"""Optimizer state that the first step will make, planned before it exists.

Planning costs tens of microseconds per tensor, and state appears only inside the first `optimizer.step()`, right
in front of the first snapshot. For the optimizers of torch it is known before: stand-ins of the same form
take its place in the plan during `restore()`, and the first snapshot only finds the real tensors, in tens of
nanoseconds each; the copy thread compares their form. Where the prediction was wrong, the state is planned as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flashckpt.state import optimizer_state
from flashckpt.state.placement import local_of
from flashckpt.state.structure import StructureGuard


class PredictedTensor:
    """The state that several optimizers are going to make; empty once it was found or another plan was made.

    Args:
        optimizers: Those that have state already, or of which nothing is known, are left out.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._parts = [part for o in optimizers if (part := PredictedState.of(o)) is not None]

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def stand_ins(self) -> list[torch.Tensor]:
        """The tensors that stand for state that does not exist yet."""
        return [tensor for part in self._parts for tensor in part.stand_ins]

    def of(self, optimizer: torch.optim.Optimizer) -> PredictedState | None:
        """Return the part of one optimizer."""
        return next((part for part in self._parts if part.optimizer is optimizer), None)

    def found(self) -> list[torch.Tensor] | None:
        """Return the tensors that have taken the place of the stand-ins, in their order; None if not all, or others."""
        parts = [part.found() for part in self._parts]
        return None if None in parts else list(chain.from_iterable(part for part in parts if part))

    def watch(self, tensors: Iterable[torch.Tensor]) -> StructureGuard:
        """Return a watch over the state that was found, and so over every later change of it."""
        states = [part.optimizer.state for part in self._parts]
        dicts = [members for state in states for members in (state, *state.values())]
        return StructureGuard(dicts, [], [tensor for tensor in tensors if type(tensor) is DTensor])


class PredictedState:
    """The state that one optimizer is going to make, parameter by parameter, in the order in which it makes it.

    Attributes:
        optimizer: It has no state yet.
        stand_ins: One tensor for each that it will make, of the same form; they share the bytes of the parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, predicted: Sequence[tuple[torch.Tensor, str, bool, Any]]
    ) -> None:
        self.optimizer = optimizer
        self._owners = [param for param, _, _, _ in predicted]
        self._params = list({id(p): p for p in self._owners}.values())
        self._keys = [key for _, key, _, _ in predicted]
        groups = optimizer_state.groups_by_parameter(optimizer)
        self.stand_ins = [
            param.detach() if full else torch.zeros((), dtype=dtype, device=_scalar_device(param, groups[id(param)]))
            for param, _, full, dtype in predicted
        ]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> PredictedState | None:
        """Return what `optimizer` will make; None where it has state already, has none at all, or is not known."""
        if any(optimizer.state.values()) or not type(optimizer).__module__.startswith("torch.optim."):
            return None  # somebody's subclass may well keep its state in another form
        predicted = list(optimizer_state.predicted(optimizer))
        if not predicted or any(param.is_inference() for param, _, _, _ in predicted):
            return None
        return cls(optimizer, predicted)

    def state_tensors(self, names: optimizer_state.Named) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
        """Yield what `optimizer_state.state_tensors` will, with stand-ins."""
        for param, key, tensor in zip(self._owners, self._keys, self.stand_ins, strict=True):
            yield names[id(param)], key, param, tensor

    def found(self) -> list[torch.Tensor] | None:
        """Return the tensors that have taken the place of the stand-ins, in their order; None if they have other keys."""
        state = self.optimizer.state
        if len(state) != len(self._params) or not all(map(operator.is_, state, self._params)):
            return None
        if list(chain.from_iterable(state.values())) != self._keys:
            return None
        return list(chain.from_iterable(map(dict.values, state.values())))


def is_like(tensor: Any, stand_in: torch.Tensor) -> bool:
    """Whether `tensor` has the type, dtype, device, shape, and as a DTensor the placements, of its stand-in."""
    if type(tensor) is not type(stand_in):
        return False
    if isinstance(tensor, DTensor) and isinstance(stand_in, DTensor):
        placed = (tensor.placements, tensor.device_mesh) == (stand_in.placements, stand_in.device_mesh)
        return placed and is_like(local_of(tensor), local_of(stand_in))
    wanted = stand_in.dtype, stand_in.device, stand_in.shape
    return (tensor.dtype, tensor.device, tensor.shape) == wanted


def _scalar_device(param: torch.Tensor, group: dict[str, Any]) -> torch.device:
    return param.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
