"""Which ranks are slow, and in what: decided from the times of all ranks. Pure.

Ranks train in step with each other: each step takes all of them the same time, the slow rank because it works, and the others
because they wait for it. So the time of a step says nothing, and a phase with a collective in it is as long on a rank that
waits as on one that works. The phases without one decide (OWN). Only where they show nothing do the others (MIXED), and
then only ranks that are fewer than half: of ranks that wait there are as many as are not slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from flashckpt.core.rank_table import PROCESSOR, RankTimes

SLOW = 1.3
"""A phase that takes so many times the median of the ranks is slow."""
SHARE = 0.05
"""The share of a step by which a phase has to be longer to be worth a word."""
NAMED_S = 60.0
"""Seconds for which a rank is slow before it is named, or is not before it has recovered."""
OWN, MIXED = ("data", "snapshot", PROCESSOR), ("forward", "backward", "sync", "clip", "optimizer")
Place = tuple[int, int]
"""Node and rank; the rank is -1 for the whole node."""


class Slow(NamedTuple):
    """A phase of a rank, or of each rank of a node, in seconds of each step; `pid` and `step` of the rank."""

    phase: str
    seconds: float
    median: float
    host: str = ""
    pid: int = 0
    step: int = -1


class PaceChange(NamedTuple):
    """Something to say: a place is slow, or has been so for `since_s` seconds and is no more."""

    place: Place
    slow: Slow
    recovered: bool
    since_s: float


def slow_places(ranks: Sequence[RankTimes]) -> dict[Place, Slow]:
    """Return what is slow at this moment; a node with several ranks, all of them slow, once."""
    stages = [[one for one in ranks if one.stage == stage] for stage in sorted({one.stage for one in ranks})]
    found: dict[Place, Slow] = {}
    for phases in (OWN, MIXED):
        for peers in stages:
            for phase in phases:
                _add_slow(found, peers, phase)
        if found:
            break
    for node in {place[0] for place in found}:
        here = [one for one in ranks if one.node == node]
        if len(here) > 1 and all((node, one.rank) in found for one in here):
            slow = max((found.pop((node, one.rank)) for one in here), key=lambda one: one.seconds - one.median)
            found[node, -1] = slow._replace(pid=0)
    return found


def _add_slow(found: dict[Place, Slow], peers: Sequence[RankTimes], phase: str) -> None:
    """Add the ranks of one stage that are slow in a phase; of a rank the phase in which it loses most."""
    known = [one for one in peers if phase in one.seconds]
    if len(known) < 2:
        return
    middle, step_s = (
        median_low(values) for values in ([one.seconds[phase] for one in known], [one.step_s for one in known])
    )
    slow = [one for one in known if one.seconds[phase] > max(SLOW * middle, middle + SHARE * step_s)]
    if phase in MIXED and 2 * len(slow) >= len(known):
        return
    for one in slow:
        place, seconds = (one.node, one.rank), one.seconds[phase]
        if place not in found or seconds - middle > found[place].seconds - found[place].median:
            found[place] = Slow(phase, seconds, middle, one.host, one.pid, one.step)


class Naming:
    """Remembers since when a place is slow, and what was named."""

    def __init__(self) -> None:
        self._since: dict[Place, float] = {}
        self._fast: dict[Place, float] = {}
        self.named: dict[Place, Slow] = {}

    def look(self, now: float, slow: Mapping[Place, Slow]) -> list[PaceChange]:
        """Return what is to be said at `now` (seconds of any clock), and remember that it was."""
        found = []
        for place in [*slow, *(place for place in self._since if place not in slow)]:
            is_slow = place in slow or (place in self.named and (place[0], -1) in slow)
            if is_slow:
                since = self._since.setdefault(place, now)
                self._fast.pop(place, None)
                if now - since >= NAMED_S and place not in self.named:
                    self.named[place] = slow[place]
                    found.append(PaceChange(place, slow[place], recovered=False, since_s=now - since))
            elif place not in self.named:
                del self._since[place]
            elif now - self._fast.setdefault(place, now) >= NAMED_S:
                since, was = self._since.pop(place), self.named.pop(place)
                found.append(PaceChange(place, was, recovered=True, since_s=self._fast.pop(place) - since))
        return found


def marked(ranks: Iterable[RankTimes], named: Mapping[Place, Slow]) -> Iterable[tuple[RankTimes, str]]:
    """Yield each rank with the phase in which it, or its node, is named."""
    for one in ranks:
        slow = named.get((one.node, one.rank)) or named.get((one.node, -1))
        yield one, slow.phase if slow is not None else ""
