"""Which run begins when: one on each core, and in the fixed wait of one the work of others. Pure, but for the clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Span = tuple[float, float]
APART_S = 3.0
"""Between what a run that waits did last and the start of the next one: so much longer may its own end take."""


class Lane(Protocol):
    """What is driven here; `race.run.Run` is one."""

    began: float
    struck_at: float
    core: int
    waits: bool
    brief_s: float

    def begin(self) -> None:
        """Start it."""

    def tick(self) -> bool:
        """Do what is due; return whether it has ended."""

    def waits_until(self) -> float:
        """Return until when it only waits; 0 where it does something."""

    def worked(self) -> list[Span]:
        """Return when it did something."""


L = TypeVar("L", bound=Lane)


class Queue(Generic[L]):
    """What is still to run; each core takes from it, in a thread apart.

    Args:
        lanes: In order: behind one that waits best one that is brief.
    """

    def __init__(self, lanes: Sequence[L]) -> None:
        self.left, self._taking, self.is_given_up = deque(lanes), threading.Lock(), False

    def take(self, active: Sequence[L], begun: Sequence[L], now: float) -> L | None:
        """Return the next one, if it may begin on a core where these are active and those have begun."""
        with self._taking:
            return self.left.popleft() if self.left and has_room(self.left[0], active, begun, now) else None

    def give_up(self) -> None:
        """Let nobody begin or continue."""
        self.is_given_up = True


def drive(
    queue: Queue[L],
    core: int,
    ended: Callable[[L], None],
    clock: Callable[[], float] = time.monotonic,
    nap: Callable[[float], None] = time.sleep,
) -> None:
    """Run on a core what is left, to its end."""
    active, begun = [], []  # type: tuple[list[L], list[L]]
    while (queue.left or active) and not queue.is_given_up:
        if lane := queue.take(active, begun, clock()):
            lane.core = core
            active.append(lane)
            begun.append(lane)
            lane.begin()
        nap(0.01)
        for lane in [lane for lane in active if lane.tick()]:
            active.remove(lane)
            ended(lane)


def has_room(lane: Lane, active: Sequence[Lane], begun: Sequence[Lane], now: float) -> bool:
    """Whether it may begin: beside others that wait, if it waits itself, or has ended, by the time that they work again."""
    if not active:
        return True
    if not (lane.waits or lane.brief_s) or not all(one.waits_until() for one in active):
        return False
    works_s = 1.3 * max(one.struck_at - one.began for one in begun if one.waits) if lane.waits else lane.brief_s
    newest = max(one.struck_at for one in active)
    return all(one.waits_until() > now + works_s + APART_S for one in active) and now > newest + APART_S


def disturbed(lanes: Sequence[L]) -> list[L]:
    """Return those that worked while another one did on the same core: their times are not their own."""
    return [
        lane
        for lane in lanes
        if any(
            mine[0] < theirs[1] and theirs[0] < mine[1]
            for other in lanes
            if other is not lane and other.core == lane.core
            for mine in lane.worked()
            for theirs in other.worked()
        )
    ]
