"""Optimizer state, read directly and named by parameter.

The state_dict functions of torch.distributed.checkpoint are never called on a live optimizer: on a fresh
one they run a real step. Here the tensors in `optimizer.state` are held by reference, and nothing is run.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.state.modules import contained

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
Named = Mapping[int, str]
"""id(parameter) -> its global name without the track name, e.g. `layers.3.w1.weight`."""


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups, in order."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


def refuse_wrapper(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps its state in another one: what it holds itself is empty.

    Raises:
        UnsupportedStateError: Names the attribute to track instead.
    """
    inner = [
        key
        for key, value in vars(optimizer).items()
        if contained(value)
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
    ordered = [param for param in parameters(optimizer) if param in state]
    if all(map(operator.is_, ordered, state)):
        return
    others = [key for key in state if not isinstance(key, torch.Tensor)]
    for key in [*ordered, *others]:
        own = state.pop(key)  # to the end
        state[key] = own
