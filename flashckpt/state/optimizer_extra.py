"""Entries of an optimizer's own `state_dict()` besides `state` and `param_groups`: mostly counters of its class."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flashckpt.errors import UnsupportedStateError
from flashckpt.logs import guarded

_log = guarded(logging.getLogger("flashckpt"))
_LOOKS = 8  # readings of the state in which a counter has had the time to change
_READ_DIRECTLY = frozenset({"state", "param_groups"})


def says_nothing_more(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its `state_dict()` is torch's own, without hooks."""
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not _hooks(optimizer)


def read(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the other entries of the optimizer's `state_dict()`; {} at once where it is torch's own."""
    if says_nothing_more(optimizer):
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in _READ_DIRECTLY}


class Extras:
    """Reads them for each snapshot, but not from optimizers that have none: some copy their whole state to say so."""

    def __init__(self) -> None:
        self._have_none: set[int] = set()
        self._numbers: dict[int, dict[str, float]] = {}
        self._looks: dict[int, int] = {}

    def read(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
        """Return what `read` does for each optimizer."""
        return [self._read(optimizer) for optimizer in optimizers]

    def _read(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        extra = {} if id(optimizer) in self._have_none else read(optimizer)
        if not extra and optimizer.state:  # its first step is done: what it counts is there by now
            self._have_none.add(id(optimizer))
        self._look_for_counters(optimizer, extra)
        return extra

    def _look_for_counters(self, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
        """Warn of numbers that change in attributes of the optimizer, and that a snapshot therefore lacks."""
        key = id(optimizer)
        looks = self._looks[key] = self._looks.get(key, 0) + 1
        if looks > _LOOKS:
            return
        now = {k: v for k, v in vars(optimizer).items() if type(v) in {int, float} and not k.startswith("_")}
        before = self._numbers.setdefault(key, now)
        changed = [name for name, value in now.items() if before.get(name) != value and name not in extra]
        if changed and optimizer.state:
            self._looks[key] = _LOOKS
            _log.warning(
                "%s changes %s in attributes that its state_dict() does not have: they are in no snapshot, and start  "
                "over after a restart; if the updates depend on them, keep them in param_groups or track them",
                type(optimizer).__qualname__, ", ".join(map(repr, changed)),
            )  # fmt: skip


def _hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Any]:
    found: Mapping[int, Any] = vars(optimizer).get("_optimizer_state_dict_post_hooks", {})
    return found


def give_back(optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
    """Give an optimizer what `read` returned, by its own `load_state_dict()`; state and groups stay the same objects.

    The state it is handed is empty: torch's `load_state_dict` would cast moments to the dtype of their parameters.
    """
    state, groups = optimizer.state, optimizer.param_groups
    settings = [dict(group) for group in groups]
    try:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}, **extra})
    finally:
        optimizer.state, optimizer.param_groups = state, groups
        for group, before in zip(groups, settings, strict=True):
            group.update(before)


def refuse_one_way(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer that does not restore the contents of its `state_dict()`.

    Raises:
        UnsupportedStateError: Names the entries.
    """
    extra = read(optimizer)
    if not extra:
        return
    try:
        give_back(optimizer, extra)
        lost = [key for key in extra if key not in read(optimizer)]
        problem = f"{', '.join(map(repr, lost))} is gone after load_state_dict()" if lost else ""
    except Exception as error:  # noqa: BLE001 -- a third party's method
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise UnsupportedStateError(
            f"the optimizer {name!r} does not restore what its state_dict() returns",
            found=problem,
            expected=f"load_state_dict() that takes {', '.join(map(repr, extra))} and an empty 'state'",
            state="Nothing was tracked.",
            remedy="keep such values in param_groups, or leave them out of state_dict() and track them as an object",
        )
