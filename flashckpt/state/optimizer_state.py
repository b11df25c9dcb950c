"""Optimizer state, read directly and named by parameter.

The state_dict functions of torch.distributed.checkpoint are never called on a live optimizer: on a fresh
one they run a real step. Here the tensors in `optimizer.state` are held by reference, and nothing is run.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch

from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.state.modules import contained
from flashckpt.state.placement import dtensor, local_of
from flashckpt.state.structure import StructureGuard

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
Named = Mapping[int, str]
"""id(parameter) -> its global name without the track name, e.g. `layers.3.w1.weight`."""


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups, in order."""
    return itertools.chain.from_iterable([group["params"] for group in optimizer.param_groups])


def refuse_wrapper(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps its state in another one: what it holds itself is empty.

    Raises:
        UnsupportedStateError: Names the attribute to track instead.
    """
    inner = [
        key
        for key, value in vars(optimizer).items()
        if (isinstance(value, (dict, list, tuple)) and value and contained(value))
        or (isinstance(value, torch.optim.Optimizer) and value.state is not vars(optimizer).get("state"))
    ]
    if not inner and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return
    raise UnsupportedStateError(
        f"the optimizer {name!r} wraps another optimizer, which has the state",
        found=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        + (f" with a {type(vars(optimizer)[inner[0]]).__qualname__} as its {inner[0]!r}" if inner else ""),
        expected="the optimizer that updates the parameters",
        state="Nothing was tracked.",
        remedy=_remedy_for_wrapper(name, optimizer, inner[0] if inner else "optimizer"),
    )


def _remedy_for_wrapper(name: str, optimizer: torch.optim.Optimizer, inner: str) -> str:
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return (
            "shard with FSDP2 instead (torch.distributed.fsdp.fully_shard and a plain optimizer), or use a plain optimizer "
            "on every rank; each rank of ZeroRedundancyOptimizer has state that the others lack"
        )
    return (
        f"track the one inside: track({name}=wrapper.{inner}), if that is all of its state and equal on the ranks that "
        "hold a parameter"
    )


def name_of(param: torch.Tensor, names: Named, where: str) -> str:
    """Return the global name of a parameter.

    Raises:
        ConfigError: No tracked module has it, so its value would not be part of a snapshot.
    """
    try:
        return names[id(param)]
    except KeyError:
        raise ConfigError(
            f"{where!r} updates a parameter that no tracked module has",
            found=f"a {str(param.dtype).removeprefix('torch.')} tensor of shape {tuple(param.shape)}",
            expected="every parameter of a tracked optimizer is a parameter of a tracked module",
            state="Nothing was tracked.",
            remedy="track its module too: ckpt.track(model=[...], optimizer=...)",
        ) from None


def usable_key(key: Any, path: str) -> str:
    """Return a key of a parameter's state that can be a part of a name.

    Raises:
        UnsupportedStateError: Another state would come back under this name, or this one under another.
    """
    if type(key) is str and key and not {".", "@"} & set(key):
        return key
    raise UnsupportedStateError(
        f"the optimizer state {key!r} of {path!r} cannot be named in a snapshot",
        found=f"a key of type {type(key).__qualname__}"
        if type(key) is not str
        else "an empty key, or '.' or '@' in it",
        expected="keys that are strings without '.' and '@'",
        remedy="put it into a separate dict: state['name'] = {key: value}",
    )


def other_keys(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the keys of `optimizer.state` that are no parameters: state that an optimizer keeps once for all of them."""
    if {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, optimizer.state)):
        return []
    return [key for key in optimizer.state if not isinstance(key, torch.Tensor)]


def has_only_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all state is of parameters, and plain tensors: one quick look at very many. False says nothing."""
    state = optimizer.state
    if not {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, state)) or not {dict}.issuperset(
        map(type, state.values())
    ):
        return False
    return {torch.Tensor}.issuperset(map(type, itertools.chain.from_iterable(map(dict.values, state.values()))))


@dataclass(frozen=True, slots=True, eq=False)
class PredictedBlock:
    """State that the first step will make of one group: for each parameter every key, in this order.

    Attributes:
        group: The group.
        params: Its parameters that have no state yet.
        keys: (key, whether its tensors have the parameter's form); the others are scalars.
        scalar: Dtype of the scalars.
    """

    group: dict[str, Any]
    params: list[torch.Tensor]
    keys: list[tuple[str, bool]]
    scalar: torch.dtype


def predicted(optimizer: torch.optim.Optimizer) -> Iterator[PredictedBlock]:
    """Yield the state that the first step will make, group by group.

    Only a forecast, to reserve memory before the first step; unknown optimizers give nothing.
    """
    wide, state = torch.get_default_dtype() == torch.float64, optimizer.state
    for group in optimizer.param_groups:
        keys = _predicted_keys(optimizer, group)
        params = list(itertools.compress(group["params"], map(_REQUIRES_GRAD, group["params"])))
        if state:
            params = [p for p in params if not state.get(p)]
        if keys and params:
            scalar = torch.float64 if wide and not group.get("fused") else torch.float32
            yield PredictedBlock(group, params, keys, scalar)


_KEYS: tuple[tuple[type[torch.optim.Optimizer], str, tuple[tuple[str, str], ...]], ...] = (
    (torch.optim.Adam, "betas", (("exp_avg", ""), ("exp_avg_sq", ""), ("max_exp_avg_sq", "amsgrad"))),
    (torch.optim.SGD, "momentum", (("momentum_buffer", "momentum"),)),
    (torch.optim.RMSprop, "alpha", (("square_avg", ""), ("momentum_buffer", "momentum"), ("grad_avg", "centered"))),
    (torch.optim.Adagrad, "lr_decay", (("sum", ""),)),
    (torch.optim.Adadelta, "rho", (("square_avg", ""), ("acc_delta", ""))),
    (torch.optim.Adamax, "betas", (("exp_avg", ""), ("exp_inf", ""))),
    (torch.optim.NAdam, "betas", (("exp_avg", ""), ("exp_avg_sq", ""))),
    (torch.optim.RAdam, "betas", (("exp_avg", ""), ("exp_avg_sq", ""))),
)
"""A setting that tells the class, and the keys of state of a parameter's shape, in the order in which torch makes them, with
the option that asks for them."""
_SCALARS = {torch.optim.SGD: (), torch.optim.NAdam: ("step", "mu_product")}


def key_order(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return keys of a parameter's state in the order in which a step makes them, as far as that is known."""
    known = [key for key, _ in _predicted_keys(optimizer, group)]
    return sorted(keys, key=lambda key: (known.index(key) if key in known else len(known), key))


def _predicted_keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[tuple[str, bool]]:
    for kind, _, keys in _KEYS:
        if isinstance(optimizer, kind):
            scalars = [(key, False) for key in _SCALARS.get(kind, ("step",))]
            return scalars + [(key, True) for key, option in keys if not option or group.get(option)]
    return []


def state_keys(optimizer: torch.optim.Optimizer) -> tuple[frozenset[str], str]:
    """Return the state that every parameter of an optimizer of torch has after steps, and a setting of its class.

    Both are empty where the class is not known.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        for kind, setting, keys in _KEYS:
            if isinstance(optimizer, kind):
                return frozenset(key for key, option in keys if not option or kind is torch.optim.SGD), setting
    return frozenset(), ""


ALL_STATE_KEYS = frozenset(key for _, _, keys in _KEYS for key, _ in keys)
ALL_SETTINGS = frozenset(setting for _, setting, _ in _KEYS)


def bytes_per_byte(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """Return id(parameter) -> bytes of state per byte of the parameter, whether it exists yet or not.

    What decides who persists it: nothing that differs between replicas may go in. Of an unknown optimizer
    two moments are assumed.
    """
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            keys = _predicted_keys(optimizer, group)
            count = sum(full for _, full in keys) if keys or isinstance(optimizer, torch.optim.SGD) else 2
            for param in group["params"]:
                found[id(param)] = found.get(id(param), 0) + (count if param.requires_grad else 0)
    return found


def in_program_order(optimizer: torch.optim.Optimizer) -> None:
    """Bring state that a restore has made into the order in which steps make it: that of the groups."""
    state = optimizer.state
    every = list(parameters(optimizer))
    if len(every) == len(state) and all(map(operator.is_, every, state)):
        return
    ordered = [param for param in every if param in state]
    if all(map(operator.is_, ordered, state)):
        return
    others = [key for key in state if not isinstance(key, torch.Tensor)]
    for key in [*ordered, *others]:
        own = state.pop(key)  # to the end
        state[key] = own


# -- Optimizer state that the first step will create, planned before it exists -------------------------------------
#
# State appears only inside the first `optimizer.step()`, just before the first snapshot. For torch's optimizers
# it can be predicted: its names and boxes are planned during `restore()`, and the first snapshot only looks up
# the real tensors, in tens of nanoseconds each; the copy thread compares their form. If the prediction was wrong,
# the actual state is planned.

_FORM = operator.attrgetter("dtype", "device", "shape")
_DTYPE, _DEVICE, _SHAPE, _IS_CPU = (operator.attrgetter(name) for name in ("dtype", "device", "shape", "is_cpu"))
_AT_A_TIME = 1024  # examined without releasing the GIL to training


class DeferredState:
    """The state that several optimizers are going to create; empty once it was found or another plan was made.

    Args:
        optimizers: Those that already have state, or are unknown, are skipped.

    Attributes:
        parts: What each optimizer will make.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self.parts = [part for o in optimizers if (part := PredictedState.of(o)) is not None]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def of(self, optimizer: torch.optim.Optimizer) -> PredictedState | None:
        """Return the part of one optimizer."""
        return next((part for part in self.parts if part.optimizer is optimizer), None)

    def blocks(self) -> Iterator[tuple[torch.optim.Optimizer, PredictedBlock]]:
        """Yield (optimizer, what it will make), in the order in which the tensors are awaited."""
        for part in self.parts:
            for block in part.blocks:
                yield part.optimizer, block

    def is_awaited(self) -> bool:
        """Whether none of it exists yet."""
        return not any(any(part.optimizer.state.values()) for part in self.parts)

    def found(self) -> list[torch.Tensor] | None:
        """Return the tensors that were made, in the order in which they are awaited; None if not all, or others."""
        parts = [part.found() for part in self.parts]
        if None in parts:
            return None
        made = list(chain.from_iterable(part for part in parts if part))
        return made if all(issubclass(one, torch.Tensor) for one in set(map(type, made))) else None

    def watch(self, tensors: Iterable[torch.Tensor]) -> StructureGuard:
        """Return a guard over the state that was found, which detects later changes."""
        dicts = [one for part in self.parts for one in (part.optimizer.state, *part.optimizer.state.values())]
        sharded = dtensor()
        return StructureGuard(dicts, [], [tensor for tensor in tensors if type(tensor) is sharded])

    def refused(self, tensors: Sequence[torch.Tensor]) -> tuple[str, str] | None:
        """Return (what was found, what was expected) of the first tensor that is not of the predicted form; in the copy thread."""
        start = 0
        for block in (block for part in self.parts for block in part.blocks):
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
        blocks = list(predicted(optimizer))
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
    if is_full:
        return param.detach()
    is_on_device = block.group.get("capturable") or block.group.get("fused")
    return torch.zeros((), dtype=block.scalar, device=param.device if is_on_device else "cpu")


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
    if isinstance(tensor, dtensor()) and isinstance(example, dtensor()):
        placed = (tensor.placements, tensor.device_mesh) == (example.placements, example.device_mesh)
        return placed and _is_like(local_of(tensor), local_of(example))
    return bool(_FORM(tensor) == _FORM(example))


def _said(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of {tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}"
