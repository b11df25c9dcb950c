"""What a snapshot says of the program that took it: classes of optimizers and schedulers, and settings as it was built.

Classes are compared by name, without their module: that of a class in the script is another one under another launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashckpt.state.group_lists import schedulers_in
from flashckpt.state.named_groups import NOT_SETTINGS, plain, settings

KEY = ".program"
"""What stands before "@" in the key of the value; no tracked name has a dot."""
_MOST_GROUPS = 256
_PLAIN = (bool, int, float, str)
Optimizers = Mapping[str, Sequence[torch.optim.Optimizer]]


def class_of(thing: Any) -> str:
    """Return the class of an optimizer, or of a scheduler with those that it calls."""
    inner = [class_of(one) for one in vars(thing).get("_schedulers", ())] if len(schedulers_in(thing)) > 1 else []
    return type(thing).__name__ + (f"({', '.join(inner)})" if inner else "")


def built(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[dict[str, Any]]]:
    """Return the settings of each group that are plain values; nothing of very many groups."""
    if sum(len(optimizer.param_groups) for optimizer in optimizers) > _MOST_GROUPS:
        return []
    return [
        [{k: v for k, v in settings(group).items() if _is_plain(v)} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in _PLAIN or (type(value) is list and all(type(v) in _PLAIN for v in value))


def record(
    optimizers: Optimizers, objects: Mapping[str, Any], as_built: Mapping[str, Any], rows: Mapping[str, str]
) -> dict[str, Any]:
    """Return the value that a snapshot holds.

    Args:
        optimizers: The tracked ones.
        objects: Other tracked objects; those that are no schedulers are left out.
        as_built: `built` of the optimizers before anything was restored.
        rows: Of `parameter_rows`.
    """
    schedulers = {name: one for name, one in objects.items() if is_scheduler(one)}
    return {
        "optimizers": {label: list(map(class_of, own)) for label, own in optimizers.items()},
        "schedulers": {name: class_of(one) for name, one in schedulers.items()},
        "built": dict(as_built),
        "rows": dict(rows),
    }


def is_scheduler(thing: Any) -> bool:
    """Whether a tracked object is one of which the class is recorded."""
    return isinstance(thing, torch.optim.lr_scheduler.LRScheduler)


def changes(
    live: Mapping[str, Any], recorded: Mapping[str, Any], as_built: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """Return setting -> (that of the program, that of the snapshot) where the program was changed since.

    Args:
        live: Settings of a group as the program built it.
        recorded: Those of the snapshot.
        as_built: Those of the program that took it, before its first step; None where the snapshot does not say it: then
            what a scheduler may have changed is left out.
    """
    moving: set[str] = set()
    if as_built is None:
        moving = {"lr"} if "initial_lr" in recorded else set()
        moving |= {"momentum", "betas"} if "base_momentum" in recorded else set()
    before, found = recorded if as_built is None else as_built, dict[str, tuple[Any, Any]]()
    for key, value in live.items():
        if key in NOT_SETTINGS or key in moving or key not in recorded or key not in before:
            continue
        ours, theirs = plain(value), plain(recorded[key])
        if ours != theirs and ours != plain(before[key]) and _is_plain(ours):
            found[key] = ours, theirs
    return found
