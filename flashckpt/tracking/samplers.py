"""Tracked samplers: objects with `commit`. Each is committed once per step, and is seen to move. Torch-free."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from flashckpt.errors import ConfigError, SamplerStateError

_PATIENCE = 2
"""Steps in a row without a move that are an error: a single one may be the end of an epoch."""


def is_sampler(thing: Any) -> bool:
    """Whether `ckpt.step()` commits it."""
    return callable(getattr(thing, "commit", None))


def refuse_second(name: str, thing: Any, tracked: Mapping[str, Any]) -> None:
    """Refuse a sampler that another tracked object commits too: every step would count its samples twice.

    Raises:
        ConfigError: Names both, and which to leave out.
    """
    mine = set(map(id, _reached(thing)))
    for other, known in tracked.items():
        if mine & set(map(id, _reached(known))):
            inner = name if any(thing is part for part in _reached(known)) else other
            raise ConfigError(
                f"{other!r} and {name!r} would commit the same sampler, twice in every step",
                found=f"{type(known).__qualname__} as {other!r}, {type(thing).__qualname__} as {name!r}",
                expected="every sampler tracked once",
                state="It was not tracked.",
                remedy=f"leave {inner!r} out of track(): its state is that of the other one",
            )


def _reached(thing: Any) -> Iterator[Any]:
    """Yield the samplers that a commit of `thing` moves: itself and those it wraps."""
    while is_sampler(thing):
        yield thing
        thing = next((p for key in ("sampler", "batch_sampler") if is_sampler(p := getattr(thing, key, None))), None)


class Commits:
    """Commits tracked samplers and notes where they stood."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, int]] = {}

    def commit(self, objects: Mapping[str, Any], samples: int | None, step: int) -> None:
        """Commit every sampler among the tracked objects.

        Args:
            objects: By track name.
            samples: Global samples of the step; None lets each sampler say it.
            step: The step just done.

        Raises:
            SamplerStateError: One of them did not move, for the second step in a row: a restart would repeat samples.
        """
        for name, thing in objects.items():
            if is_sampler(thing):
                before, still = self._seen.get(name) or (_state(thing), 0)
                thing.commit(samples)
                now = _state(thing)
                still = still + 1 if _equal(now, before) else 0
                self._seen[name] = now, still
                if still >= _PATIENCE:
                    raise _stuck(name, now, step)


def _state(thing: Any) -> Any:
    return copy.deepcopy(thing.state_dict())  # some give out the very dict that they go on changing


def _equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # arrays or tensors in the state of somebody's sampler: not to be judged here
        return False


def _stuck(name: str, state: Any, step: int) -> SamplerStateError:
    return SamplerStateError(
        f"the tracked sampler {name!r} has not moved for {_PATIENCE} steps",
        found=f"after the commit of step {step} it stands where it stood: {str(state)[:200]}",
        expected="every step that trains moves it on, or a restart would train the same samples again",
        state="No snapshot of this step was taken; earlier ones are intact.",
        remedy="track the sampler that the loop draws from, and give ckpt.step(step, samples=...) what a step trains",
    )
