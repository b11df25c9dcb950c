"""Which run begins when: waits overlap and work on the same core does not, and what was disturbed is found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from support.paths import ROOT


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    yield importlib.import_module("race.lanes")
    for name in [name for name in sys.modules if name.partition(".")[0] == "race"]:
        del sys.modules[name]


class Clock:
    """Moves by naps alone; like a machine's it does not begin at 0."""

    def __init__(self) -> None:
        self.now = 30_000.0

    def nap(self, seconds: float) -> None:
        self.now += seconds


class Lane:
    """Works, waits 35 s for a rank that was stopped, works again; or works alone."""

    def __init__(self, clock: Clock, after_s: float = 9.0, waits_s: float = 35.0, brief_s: float = 0.0) -> None:
        self.clock, self.after_s, self.waits_s, self.brief_s = clock, after_s, waits_s, brief_s
        self.waits, self.core = waits_s > 0, -1
        self.began = self.struck_at = self.ended_at = 0.0

    def begin(self) -> None:
        self.began = self.clock.now

    def tick(self) -> bool:
        now = self.clock.now
        if not self.struck_at and now >= self.began + 9.0:
            self.struck_at = now
        if self.struck_at and now >= self.struck_at + self.waits_s + self.after_s:
            self.ended_at = now
        return bool(self.ended_at)

    def waits_until(self) -> float:
        until = self.struck_at + self.waits_s
        return until if self.waits and self.struck_at and self.clock.now < until else 0.0

    def worked(self) -> list[tuple[float, float]]:
        return [(self.began, self.struck_at), (self.struck_at + self.waits_s, self.ended_at)]


def drive(lanes: Any, runs: list[Lane], core: int = 0) -> list[Lane]:
    """Run all on one core; return them as they ended."""
    ended: list[Lane] = []
    clock = runs[0].clock
    lanes.drive(lanes.Queue(runs), core, ended.append, lambda: clock.now, clock.nap)
    return ended


def test_waits_overlap_and_work_does_not(lanes: Any) -> None:
    clock = Clock()
    runs = [Lane(clock) for _ in range(6)]
    assert len(drive(lanes, runs)) == 6
    assert lanes.disturbed(runs) == []
    took = clock.now - runs[0].began
    alone = sum(run.ended_at - run.began for run in runs)
    assert took < 0.7 * alone
    assert sorted(run.began for run in runs) == [run.began for run in runs]


def test_a_run_that_never_waits_has_its_core_to_itself(lanes: Any) -> None:
    clock = Clock()
    runs = [Lane(clock, waits_s=0.0), Lane(clock, waits_s=0.0), Lane(clock), Lane(clock, waits_s=0.0)]
    drive(lanes, runs)
    for before, after in pairwise(runs):
        assert after.began >= before.ended_at


def test_a_brief_run_fits_into_the_wait_of_another(lanes: Any) -> None:
    clock = Clock()
    waiting, brief, long = Lane(clock), Lane(clock, waits_s=0.0, brief_s=20.0), Lane(clock, waits_s=0.0, brief_s=60.0)
    assert drive(lanes, [waiting, brief, long]) == [brief, waiting, long]
    assert lanes.disturbed([waiting, brief, long]) == []


def test_runs_that_worked_at_once_on_a_core_are_found(lanes: Any) -> None:
    """The first takes longer at its end than anybody could know, into what the second does after its wait."""
    clock = Clock()
    runs = [Lane(clock, after_s=40.0), Lane(clock), Lane(clock)]
    drive(lanes, runs)
    assert runs[0] in lanes.disturbed(runs)
    assert runs[1] in lanes.disturbed(runs)
    runs[0].core = 1
    assert runs[0] not in lanes.disturbed(runs)


def test_cores_share_a_queue_and_nobody_goes_on_once_it_is_given_up(lanes: Any) -> None:
    clock = Clock()
    queue = lanes.Queue([Lane(clock, waits_s=0.0) for _ in range(3)])
    first = queue.take([], [], clock.now)
    assert queue.take([first], [first], clock.now) is None
    assert queue.take([], [], clock.now) is not first
    ended: list[Lane] = []
    queue.give_up()
    lanes.drive(queue, 0, ended.append, lambda: clock.now, clock.nap)
    assert not ended
    assert len(queue.left) == 1
