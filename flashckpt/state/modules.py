"""Facts about modules: paths without wrappers, extra state, state that would be lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flashckpt.errors import UnsupportedStateError
from flashckpt.report import guarded
from flashckpt.state import pytree
from flashckpt.state.placement import dtensor, fsdp_module, local_of

_log = guarded(logging.getLogger("flashckpt"))
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Shapes:
    """Detects tensors whose shape changes during training: a restarted program creates them with the original shape."""

    def __init__(self) -> None:
        self._known: dict[str, torch.Size] = {}
        self._first: tuple[Sequence[str], Sequence[torch.Size]] = (), ()
        self._named: set[str] = set()

    def look(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> None:
        """Warn once about each tensor whose shape differs from the first one that was seen."""
        if not self._first[0]:
            self._first = names, shapes
        if self._first == (names, shapes):
            return
        now, before = dict(zip(names, shapes, strict=True)), self._known or dict(zip(*self._first, strict=True))
        self._known = {**now, **before}
        for name in (name for name, shape in now.items() if before.get(name, shape) != shape):
            if name in self._named:
                continue
            self._named.add(name)
            _log.warning(
                "%r had the shape %s and has %s now: its snapshots can only be restored into a program that makes it with "
                "the shape it has then; leave it out with persistent=False, or make it with its largest shape",
                name, tuple(before[name]), tuple(now[name]),
            )  # fmt: skip


def refuse_lazy(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a parameter or buffer that a lazy module has not made yet.

    Raises:
        UnsupportedStateError: Names it.
    """
    one_of_each = {type(tensor): tensor for tensor in tensors}
    if not any(map(is_lazy, one_of_each.values())):
        return
    name, tensor = next((n, t) for n, t in zip(names, tensors, strict=True) if is_lazy(t))
    raise UnsupportedStateError(
        f"{name!r} is uninitialized: a lazy module makes it in its first forward",
        found=type(tensor).__qualname__,
        expected="tensors that have a shape and values",
        state="Nothing was tracked.",
        remedy="run the model once on a batch of the right shape before restore()",
    )


def refuse_hidden(name: str, part: nn.Module, is_left_out: Callable[[str], bool] = lambda _: False) -> None:
    """Refuse a part in which a module saves state that is no parameter, buffer or extra state.

    Args:
        name: Track name of the part.
        part: The part.
        is_left_out: Tells of a name whether nobody wants that state.

    Raises:
        UnsupportedStateError: Names the module, its class and the keys that would be lost.
    """
    for prefix, module in part.named_modules(prefix=name):
        if saves_in_its_own_way(type(module)):
            refuse_hidden_in(prefix, module, lambda key, path=prefix: is_left_out(f"{path}.{key}"))  # type: ignore[misc]


def saves_in_its_own_way(kind: type[nn.Module]) -> bool:
    """Whether a class of modules overrides what a state dict is made of."""
    is_usual = kind.state_dict is nn.Module.state_dict and kind._save_to_state_dict is nn.Module._save_to_state_dict  # noqa: SLF001 -- what quantized modules override
    return not is_usual


def refuse_hidden_in(path: str, module: nn.Module, is_left_out: Callable[[str], bool] = lambda _: False) -> None:
    """As `refuse_hidden`, of one module; `is_left_out` is asked of keys."""
    hidden = [key for key in _hidden_keys(module) if not is_left_out(key)]
    if not hidden:
        return
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    raise UnsupportedStateError(
        f"the module {path!r} saves state that is neither a parameter nor a buffer",
        found=f"{', '.join(map(repr, hidden[:3]))}{', ...' if len(hidden) > 3 else ''} in the state dict of a {kind}",
        expected="parameters, persistent buffers, or get_extra_state() and set_extra_state() that hold the rest",
        remedy='leave it out where it does not train: track(model=..., exclude="base.*"); or give '
        "its class get_extra_state() and set_extra_state()",
    )


def _hidden_keys(module: nn.Module) -> list[str]:
    """Return the keys of state that only the module's own save methods know; most classes do not override them."""
    kind, saved = type(module), dict[str, Any]()
    if kind.get_extra_state is not nn.Module.get_extra_state:
        return []
    if not module._modules and kind.state_dict is not nn.Module.state_dict:  # noqa: SLF001 -- wrappers rename and gather in theirs
        saved = dict(module.state_dict())
    elif kind._save_to_state_dict is not nn.Module._save_to_state_dict:  # noqa: SLF001 -- what quantized modules override
        module._save_to_state_dict(saved, "", keep_vars=True)  # noqa: SLF001 -- as above
    if not saved:
        return []
    transient = module._non_persistent_buffers_set  # noqa: SLF001 -- the only place that says so
    buffers = ((key, buffer) for key, buffer in module.named_buffers() if key not in transient)
    held = dict([*module.named_parameters(), *buffers])
    if any(map(is_lazy, held.values())):
        return []  # refused by that name if it is still so when a snapshot is planned
    storages = {storage_key(tensor) for tensor in held.values()}
    return [
        key
        for key, value in saved.items()
        if key not in held and not (isinstance(value, torch.Tensor) and storage_key(value) in storages)
    ]


def has_wrapper(paths: str) -> bool:
    """Whether a segment of a wrapper may be in module paths."""
    return any(wrapper in paths for wrapper in _WRAPPERS)


def strip(prefix: str, ddp_prefixes: Sequence[str] | dict[str, tuple[int, ...]] = ()) -> str:
    """Return a module path without wrapper segments; `module` only where its parent is a DDP wrapper."""
    if not ddp_prefixes and not has_wrapper(prefix):
        return prefix
    kept: list[str] = []
    parts = prefix.split(".") if prefix else []
    for i, part in enumerate(parts):
        if part in _WRAPPERS or (part == "module" and ".".join(parts[:i]) in ddp_prefixes):
            continue
        kept.append(part)
    return ".".join(kept)


def extra_states(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of modules that override `get_extra_state`, of (path, module) in one part."""
    for prefix, module in named:
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            clean = strip(prefix)
            yield f"{clean}._extra_state" if clean else "_extra_state", module


def reshard(walked: Iterable[nn.Module]) -> None:
    """Bring FSDP2 modules back to sharded parameters (they stay gathered after a forward without a backward)."""
    for module in walked:
        if isinstance(module, fsdp_module()):
            module.reshard()


def watched(walked: Iterable[nn.Module]) -> Iterator[dict[str, object]]:
    """Yield the dicts whose values change when a parameter, buffer or submodule is added or replaced."""
    for module in walked:
        yield module._parameters  # type: ignore[misc]  # noqa: SLF001 -- held, to see changes without walking the modules
        yield module._buffers  # type: ignore[misc]  # noqa: SLF001 -- as above
        yield module._modules  # type: ignore[misc]  # noqa: SLF001 -- as above; a layer may get its first one while it trains


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two names of one tensor share; unique per object if it has no bytes."""
    local = local_of(tensor)
    if isinstance(tensor, dtensor()) or local.is_meta or local.layout is not torch.strided or not local.numel():
        return ("object", id(tensor))
    return (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)


# -- Values that are nested too deeply, found at `track()` if they exist already -----------------------------------


def refuse_deep(name: str, *things: Any) -> None:
    """Reject objects whose state no snapshot could hold; later state is checked when it is flattened.

    Raises:
        UnsupportedStateError: A value of it has more than `trees.DEEPEST` levels; names it.
    """
    for thing in things:
        for path, value in _values(name, thing):
            if _is_deep(value):
                pytree.refuse_depth(path)


def _values(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, torch.optim.Optimizer):
        yield f"{name}.groups", [[{k: v for k, v in group.items() if k != "params"} for group in thing.param_groups]]
        for key, state in thing.state.items():
            own = state.items() if isinstance(key, torch.Tensor) else [(key, state)]
            yield from ((f"{name}.state.{inner}", value) for inner, value in own)
    elif isinstance(thing, nn.Module):
        for path, module in extra_states(thing.named_modules()):
            yield f"{name}.{path}", _asked(module.get_extra_state)
    elif not hasattr(thing, "__iter__"):  # a stateful loader begins an iterator, and draws, when its state is read
        yield name, _asked(thing.state_dict)


def _asked(get: Any) -> Any:
    with contextlib.suppress(Exception):  # not ready yet: checked again in restore()
        return get()
    return None


def _is_deep(tree: Any) -> bool:
    level = [tree]
    for _ in range(pytree.DEEPEST + 2):
        inside: dict[int, Iterable[Any]] = {}  # by id: a value may be there more than once
        for one in level:
            if isinstance(one, Mapping):
                inside[id(one)] = one.values()
            elif type(one) in (list, tuple):
                inside[id(one)] = one
        if not inside:
            return False
        level = list(chain.from_iterable(inside.values()))
    return True


# -- What frameworks wrap around optimizers and schedulers, taken off: the state is that of the object inside ------

_INSIDE = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("accelerate.scheduler", "AcceleratedScheduler"): "scheduler",
}
"""Classes whose state_dict is that of one member; known by name, since nothing of these packages is imported here."""


def unwrapped(thing: Any) -> Any:
    """Return the torch object inside a known wrapper, or `thing` itself; of a list, the same of each member.

    An optimizer that only passes its calls on to a list of others, as torchtitan's container does, is that list: its own
    state is empty, and a snapshot of it would have none.
    """
    if type(thing) in {list, tuple}:
        return type(thing)(map(unwrapped, thing))
    if isinstance(thing, torch.optim.Optimizer) and not vars(thing).get("state"):
        for value in vars(thing).values():
            if isinstance(value, (dict, list, tuple)) and value and (members := contained(value)):
                return unwrapped(members)
    for kind in type(thing).__mro__:
        inside = _INSIDE.get((kind.__module__, kind.__qualname__))
        if inside is not None:
            return unwrapped(getattr(thing, inside))
    return thing


def contained(value: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a list, tuple or dict of nothing else; [] where it is another thing."""
    if not isinstance(value, (dict, list, tuple)) or not value:
        return []
    members = list(value.values() if isinstance(value, dict) else value)
    is_one = isinstance(members[0], torch.optim.Optimizer)
    return members if is_one and all(isinstance(one, torch.optim.Optimizer) for one in members) else []
