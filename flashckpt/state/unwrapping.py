"""What frameworks wrap around optimizers and schedulers, taken off: the state is that of the object inside."""

from __future__ import annotations

from typing import Any

_INSIDE = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("accelerate.scheduler", "AcceleratedScheduler"): "scheduler",
}
"""Classes whose state_dict is that of one member; known by name, since nothing of these packages is imported here."""


def unwrapped(thing: Any) -> Any:
    """Return the torch object inside a known wrapper, or `thing` itself; of a list, the same of each member."""
    if type(thing) in {list, tuple}:
        return type(thing)(map(unwrapped, thing))
    for kind in type(thing).__mro__:
        inside = _INSIDE.get((kind.__module__, kind.__qualname__))
        if inside is not None:
            return unwrapped(getattr(thing, inside))
    return thing
