"""Loaders begun after a restore: their seed is drawn once in a run, not once more in every resumed one.

A torch DataLoader draws a seed for its workers from the default generator whenever an iterator of it is made,
workers or not, and a sampler or a transform may draw too. In the unbroken run that happened when the epoch began,
so a snapshot in the middle of the epoch holds generators after that draw; a resumed run creates its iterator again,
and must leave the generators as the snapshot had them, or everything random after it differs. An iterator that the
unbroken run, too, creates after the snapshot, because the restored step was the last of its epoch, draws in both,
unless its workers persist: those draw once per process.

No public hook of torch comes before the draw. So from a restore until each tracked sampler has been begun once,
`DataLoader.__iter__` is replaced by one that remembers the generators as they were before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Sampler

from flashckpt.state import rng, samplers

_DEPTH = 8
"""Maximum depth of nested samplers that are searched."""
_held: Held | None = None


class Held:
    """The generators of a restore, and the tracked samplers and loaders whose first iterator has yet to be created.

    Args:
        objects: The tracked objects, by track name.
        state: What `rng.capture` had returned for the snapshot.
    """

    def __init__(self, objects: Mapping[str, Any], state: dict[str, Any]) -> None:
        self.objects = objects
        self._waiting = [t for t in objects.values() if isinstance(t, (DataLoader, Sampler)) or samplers.is_sampler(t)]
        self._state: dict[str, Any] | None = state

    def put_back(self) -> None:
        """Set the generators to their state in the snapshot again, until the first step."""
        if self._state is not None:
            rng.restore(self._state)

    def step_is_done(self) -> None:
        """Record that training continues: the recorded generators are out of date."""
        self._state = None

    def iterate(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        """Return the iterator that `make` makes of `loader`; its draws are undone if the snapshot holds them already."""
        parts = list(_reached(loader))
        mine = [t for t in self._waiting if any(one is part for one in _reached(t) for part in parts)]
        if not mine:
            return make(loader)
        self._waiting = [t for t in self._waiting if all(t is not m for m in mine)]
        stages = {stage for part in (*mine, *parts) if (stage := getattr(part, "restored_stage", None))}
        before = rng.capture()
        iterator = make(loader)
        # foreign samplers do not tell, the middle of an epoch is likely; a stateful loader continues its own
        if stages <= {"running"} or any(thing is loader for thing in mine):
            # what the program drew between the restore and here is not in the snapshot either; but once one loader
            # has begun, its transforms may have drawn: the next one gives back its own draws alone
            rng.restore(before if self._state is None else self._state)
            self._state = None
        elif "between" in stages and getattr(loader, "persistent_workers", False):
            rng.restore(before)
        return iterator


def _reached(thing: Any) -> Iterator[Any]:
    """Yield a sampler or loader and the samplers inside it."""
    found = [thing]
    for part in found:
        inner = (getattr(part, name, None) for name in ("batch_sampler", "sampler"))
        found += [i for i in inner if i is not None and len(found) < _DEPTH and all(i is not f for f in found)]
    yield from found


def hold(objects: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Keep the generators of a restore for the first iterators of the tracked samplers and loaders."""
    global _held  # noqa: PLW0603 -- one process trains one job
    _held = Held(objects, state)
    stateful = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", DataLoader)
    for kind in {DataLoader, stateful}:  # its own __iter__ does not call that of DataLoader
        if not hasattr(kind.__iter__, "__wrapped__"):
            kind.__iter__ = _watched(kind.__iter__)  # type: ignore[method-assign]  # the aim


def _watched(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807 -- takes its place
        return original(self) if _held is None else _held.iterate(self, original)

    return __iter__


def put_back(objects: Mapping[str, Any]) -> None:
    """Undo what was drawn since the restore of these objects: asked for its state, a stateful loader begins an iterator."""
    if _held is not None and _held.objects is objects:
        _held.put_back()


def step_is_done() -> None:
    """Record that the first step after the restore is done, see `Held.step_is_done`."""
    if _held is not None:
        _held.step_is_done()
