"""State by the place of a parameter, as lists of averaged weights and the `state_dict()` of an optimizer have it.

Nothing in such a list says whose an entry is. So a snapshot says in what row the parameters stood: where they stand in
another one, an object with such a list is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from flashckpt.state.data_sources import begins_when_read
from flashckpt.state.group_lists import held_groups
from flashckpt.state.loaded import is_ours

Named = Mapping[int, str]


def rows(modules: Mapping[str, Iterable[str]], objects: Mapping[str, Any], names: Named) -> dict[str, str]:
    """Return a digest of the names of parameters in their row, by track name of the modules and of what holds an optimizer.

    Args:
        modules: Names of the parameters by track name.
        objects: Other tracked objects.
        names: id(parameter) -> its name.
    """
    found = {label: _digest(own) for label, own in modules.items()}
    for name, thing in objects.items():
        groups = held_groups(thing) if may_have_rows(thing) else None
        if groups:
            found[name] = _digest(names.get(id(param), "") for group in groups for param in group["params"])
    return found


def may_have_rows(thing: Any) -> bool:
    """Whether an object's state may be by the place of a parameter."""
    is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
    return not (is_scheduler or is_ours(thing) or begins_when_read(thing))


def lists_in(state: Any, counts: Container[int], path: str) -> Iterator[str]:
    """Yield where in a state there is one entry for each parameter.

    Args:
        state: Of an object.
        counts: How many parameters there are.
        path: Of the state.
    """
    is_row = isinstance(state, (list, tuple)) and len(state) in counts
    entries = (
        list(state.values() if isinstance(state, dict) else state) if isinstance(state, (dict, list, tuple)) else []
    )
    is_row |= isinstance(state, dict) and {int}.issuperset(map(type, state))
    if is_row and len(entries) > 1 and all(isinstance(one, (torch.Tensor, dict)) for one in entries):
        yield path
        return
    keys = state if isinstance(state, dict) else range(len(entries))
    for key, value in zip(keys, entries, strict=True):
        yield from lists_in(value, counts, f"{path}.{key}")


def _digest(names: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()
