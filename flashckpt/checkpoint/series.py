"""Curves on the root: what one session has logged, each thinned to a bounded number of points. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flashckpt.core.records import pack, seal, unpack, unseal
from flashckpt.errors import DamagedError, FormatVersionError, ObjectMissingError
from flashckpt.storage.store import Store

MOST_POINTS = 1000
MOST_NAMES = 64
SUFFIX = ".values"
COURSE = "job/"
"""Before the names of curves that the persister adds to those that are logged."""
Points = dict[str, list[tuple[int, float]]]
"""Steps and values by name, in the order they came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    points: dict[str, Any] = field(default_factory=dict)


def added(points: Points, new: Iterable[tuple[str, int, float]]) -> Points:
    """Return the curves with new points (name, step, value); one with too many loses every second of its older points.

    The steps of a curve ascend within a session: what is there already changes nothing if it comes again.
    """
    found = {name: list(one) for name, one in points.items()}
    for name, step, value in new:
        if name in found or len(found) < MOST_NAMES:
            curve = found.setdefault(name, [])
            if curve and step <= curve[-1][0]:
                continue
            curve.append((step, value))
            if len(curve) > MOST_POINTS:
                curve[:-1] = curve[:-1:2]
    return found


def write_series(store: Store, key: str, points: Points) -> None:
    """Publish the curves of the session whose record is at `key`."""
    plain = {name: [[step for step, _ in one], [value for _, value in one]] for name, one in points.items()}
    store.put(key + SUFFIX, seal(pack(_Series(points=plain))))


def read_series(store: Store, key: str) -> Points:
    """Return the curves of the session whose record is at `key`; {} where there are none that can be read."""
    try:
        raw = unpack(_Series, unseal(store.get(key + SUFFIX), key), partial=True).points
    except (ObjectMissingError, DamagedError, FormatVersionError, ValueError, KeyError):
        return {}
    return {name: _curve(one) for name, one in raw.items() if isinstance(name, str)}


def _curve(found: Any) -> list[tuple[int, float]]:
    try:
        steps, values = found
        return [(int(step), float(value)) for step, value in zip(steps, values, strict=True)]
    except (ValueError, TypeError):
        return []
