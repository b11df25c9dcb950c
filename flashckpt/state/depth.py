"""Values that are nested too deeply, found at `track()` where they are there already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from flashckpt.state import modules, pytree


def refuse_deep(name: str, *things: Any) -> None:
    """Refuse things whose state no snapshot could hold; what comes later is refused when it is taken apart.

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
        for path, module in modules.extra_states(thing.named_modules()):
            yield f"{name}.{path}", _asked(module.get_extra_state)
    elif not hasattr(thing, "__iter__"):  # a stateful loader that is asked for its state begins an iterator, and draws
        yield name, _asked(thing.state_dict)


def _asked(get: Any) -> Any:
    with contextlib.suppress(Exception):  # not ready yet: it is asked again in restore()
        return get()
    return None


def _is_deep(tree: Any) -> bool:
    level = [tree] if _is_tree(tree) else []
    for _ in range(pytree.DEEPEST + 1):
        parts = (part for one in level for part in (one.values() if isinstance(one, Mapping) else one))
        level = list({id(part): part for part in parts if _is_tree(part)}.values())
    return bool(level)


def _is_tree(value: Any) -> bool:
    return isinstance(value, Mapping) or type(value) in (list, tuple)
