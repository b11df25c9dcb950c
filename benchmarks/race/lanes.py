"""Runs whose launcher waits out a fixed time-out, beside each other: the waits overlap, the work does not. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Span = tuple[float, float]
APART_S = 4.0
"""Between what a run that waits did last and the start of the next one: so much longer may its own end take."""


class Lane(Protocol):
    """What is driven here; `race.run.Run` is one."""

    began: float
    struck_at: float

    def begin(self) -> None:
        """Start it."""

    def tick(self) -> bool:
        """Do what is due; return whether it has ended."""

    def waits_until(self) -> float:
        """Return until when it only waits; 0 where it does something."""

    def worked(self) -> list[Span]:
        """Return when it did something."""


L = TypeVar("L", bound=Lane)


def drive(lanes: Sequence[Lane], clock: Callable[[], float] = time.monotonic, nap: Callable[[float], None] = time.sleep) -> None:  # fmt: skip
    """Run all to their ends; one begins where all that have begun wait, and will for longer than it needs to wait too."""
    left, active, begun = list(lanes), [], []  # type: tuple[list[Lane], list[Lane], list[Lane]]
    while left or active:
        if left and has_room(active, begun, clock()):
            active.append(left.pop(0))
            begun.append(active[-1])
            active[-1].begin()
        nap(0.01)
        active = [lane for lane in active if not lane.tick()]


def has_room(active: Sequence[Lane], begun: Sequence[Lane], now: float) -> bool:
    """Whether one more may begin: as long as the slowest before it took until it waited, nobody else will do anything."""
    if not active:
        return True
    if not all(lane.waits_until() for lane in active):
        return False
    needs_s = 1.3 * max(lane.struck_at - lane.began for lane in begun) + APART_S
    newest = max(lane.struck_at for lane in active)
    return all(lane.waits_until() > now + needs_s for lane in active) and now > newest + APART_S


def disturbed(lanes: Sequence[L]) -> list[L]:
    """Return those that worked while another one did: their times are not their own."""
    return [
        lane
        for lane in lanes
        if any(
            mine[0] < theirs[1] and theirs[0] < mine[1]
            for other in lanes
            if other is not lane
            for mine in lane.worked()
            for theirs in other.worked()
        )
    ]
