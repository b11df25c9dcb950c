"""What frameworks wrap around optimizers and schedulers, taken off: the state is that of the object inside."""

from __future__ import annotations

from typing import Any

import torch

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
            if members := contained(value):
                return unwrapped(members)
    for kind in type(thing).__mro__:
        inside = _INSIDE.get((kind.__module__, kind.__qualname__))
        if inside is not None:
            return unwrapped(getattr(thing, inside))
    return thing


def contained(value: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a list, tuple or dict of nothing else; [] where it is another thing."""
    members = list(value.values()) if isinstance(value, dict) else value
    is_whole = isinstance(members, (list, tuple)) and all(isinstance(one, torch.optim.Optimizer) for one in members)
    return list(members) if is_whole else []
