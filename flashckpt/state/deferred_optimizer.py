"""Optimizer state that the first step will create, planned before it exists.

State appears only inside the first `optimizer.step()`, just before the first snapshot. For torch's optimizers it can
be predicted: its names and boxes are planned during `restore()`, and the first snapshot only looks up the real
tensors, in tens of nanoseconds each; the copy thread compares their form. If the prediction was wrong, the actual
state is planned.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flashckpt.state import optimizer_state
from flashckpt.state.optimizer_state import PredictedBlock
from flashckpt.state.placement import local_of
from flashckpt.state.structure import StructureGuard

_FORM = operator.attrgetter("dtype", "device", "shape")
_DTYPE, _DEVICE, _SHAPE, _IS_CPU = (operator.attrgetter(name) for name in ("dtype", "device", "shape", "is_cpu"))
_AT_A_TIME = 1024  # examined without releasing the GIL to training


class DeferredState:
    """The state that several optimizers are going to create; empty once it was found or another plan was made.

    Args:
        optimizers: Those that already have state, or are unknown, are skipped.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._parts = [part for o in optimizers if (part := PredictedState.of(o)) is not None]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def of(self, optimizer: torch.optim.Optimizer) -> PredictedState | None:
        """Return the part of one optimizer."""
        return next((part for part in self._parts if part.optimizer is optimizer), None)

    def blocks(self) -> Iterator[tuple[torch.optim.Optimizer, PredictedBlock]]:
        """Yield (optimizer, what it will make), in the order in which the tensors are awaited."""
        for part in self._parts:
            for block in part.blocks:
                yield part.optimizer, block

    def is_awaited(self) -> bool:
        """Whether none of it exists yet."""
        return not any(any(part.optimizer.state.values()) for part in self._parts)

    def found(self) -> list[torch.Tensor] | None:
        """Return the tensors that were made, in the order in which they are awaited; None if not all, or others."""
        parts = [part.found() for part in self._parts]
        if None in parts:
            return None
        made = list(chain.from_iterable(part for part in parts if part))
        return made if all(issubclass(one, torch.Tensor) for one in set(map(type, made))) else None

    def watch(self, tensors: Iterable[torch.Tensor]) -> StructureGuard:
        """Return a guard over the state that was found, which detects later changes."""
        states = [part.optimizer.state for part in self._parts]
        dicts = [members for state in states for members in (state, *state.values())]
        return StructureGuard(dicts, [], [tensor for tensor in tensors if type(tensor) is DTensor])

    def refused(self, tensors: Sequence[torch.Tensor]) -> tuple[str, str] | None:
        """Return (what was found, what was expected) of the first tensor that is not of the predicted form; in the copy thread."""
        start = 0
        for block in (block for part in self._parts for block in part.blocks):
            count = len(block.keys)
            own = tensors[start : start + count * len(block.params)]
            start += len(own)
            for number, (key, is_full) in enumerate(block.keys):
                if (found := _refused(block, key, own[number::count], is_full=is_full)) is not None:
                    return found
        return None


class PredictedState:
    """The state that one optimizer is going to create, parameter by parameter, in its own order.

    Attributes:
        optimizer: It has no state yet.
        blocks: What it will make, group by group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, blocks: Sequence[PredictedBlock]) -> None:
        self.optimizer, self.blocks = optimizer, blocks
        self._params = [param for block in blocks for param in block.params]
        self._keys = list(chain.from_iterable([key for key, _ in b.keys] * len(b.params) for b in blocks))

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> PredictedState | None:
        """Return what `optimizer` will make; None where it has state already, has none at all, or is not known."""
        if any(optimizer.state.values()) or not type(optimizer).__module__.startswith("torch.optim."):
            return None  # a subclass may keep its state in another form
        blocks = list(optimizer_state.predicted(optimizer))
        if not blocks or any(any(map(torch.Tensor.is_inference, block.params)) for block in blocks):
            return None
        return cls(optimizer, blocks)

    def found(self) -> list[torch.Tensor] | None:
        """Return the tensors that were made, in the order in which they are awaited; None if they have other keys."""
        state = self.optimizer.state
        if len(state) != len(self._params):
            return None
        is_in_order = all(map(operator.is_, state, self._params))
        if is_in_order and list(chain.from_iterable(state.values())) == self._keys:
            return list(chain.from_iterable(map(dict.values, state.values())))
        if not is_in_order and not all(map(state.__contains__, self._params)):
            return None
        return self._looked_up(list(state.values()) if is_in_order else list(map(state.__getitem__, self._params)))

    def _looked_up(self, states: Sequence[dict[Any, Any]]) -> list[torch.Tensor] | None:
        """Return the same of dicts that have their keys in another order: a restore makes them by name."""
        keys = [len(block.keys) for block in self.blocks for _ in block.params]
        if list(map(len, states)) != keys:
            return None
        owners = chain.from_iterable(map(repeat, states, keys))
        try:
            return list(map(operator.getitem, owners, self._keys))
        except KeyError:
            return None


def example(block: PredictedBlock, param: torch.Tensor, *, is_full: bool) -> torch.Tensor:
    """Return a tensor of the form that the state of `param` will have; its values are none."""
    return param.detach() if is_full else torch.zeros((), dtype=block.scalar, device=_scalar_device(block, param))


def _scalar_device(block: PredictedBlock, param: torch.Tensor) -> torch.device:
    on_device = block.group.get("capturable") or block.group.get("fused")
    return param.device if on_device else torch.device("cpu")


def _refused(
    block: PredictedBlock, key: str, tensors: Sequence[torch.Tensor], *, is_full: bool
) -> tuple[str, str] | None:
    for first in range(0, len(tensors), _AT_A_TIME):
        some, params = tensors[first : first + _AT_A_TIME], block.params[first : first + _AT_A_TIME]
        if _are_plainly_right(block, some, params, is_full=is_full):
            continue
        for tensor, param in zip(some, params, strict=True):
            wanted = example(block, param, is_full=is_full)
            if not _is_like(tensor, wanted):
                return f"{key!r} as {_said(tensor)}", _said(wanted)
    return None


def _are_plainly_right(
    block: PredictedBlock, tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *, is_full: bool
) -> bool:
    """Return whether all are plain tensors of the right form: nearly always, and quick to check."""
    if set(map(type, tensors)) != {torch.Tensor}:
        return False
    if is_full:
        return {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, params)) and (
            _devices(tensors) == _devices(params)
            and all(map(operator.is_, map(_DTYPE, tensors), map(_DTYPE, params)))
            and all(map(operator.eq, map(_SHAPE, tensors), map(_SHAPE, params)))
        )
    is_on_device = block.group.get("capturable") or block.group.get("fused")
    devices = set(map(_DEVICE, params)) if is_on_device else {torch.device("cpu")}
    is_right = len(devices) == 1 and {block.scalar}.issuperset(map(_DTYPE, tensors))
    return is_right and not any(map(torch.Tensor.dim, tensors)) and set(_devices(tensors)) == devices


def _devices(tensors: Sequence[torch.Tensor]) -> Sequence[torch.device]:
    """Return the devices of tensors; once where all are in host memory: torch makes an object each time it is asked."""
    return [torch.device("cpu")] if all(map(_IS_CPU, tensors)) else list(map(_DEVICE, tensors))


def _is_like(tensor: Any, example: torch.Tensor) -> bool:
    """Whether `tensor` has the type, dtype, device, shape, and as a DTensor the placements, of an example."""
    if type(tensor) is not type(example):
        return False
    if isinstance(tensor, DTensor) and isinstance(example, DTensor):
        placed = (tensor.placements, tensor.device_mesh) == (example.placements, example.device_mesh)
        return placed and _is_like(local_of(tensor), local_of(example))
    return bool(_FORM(tensor) == _FORM(example))


def _said(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of {tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}"
