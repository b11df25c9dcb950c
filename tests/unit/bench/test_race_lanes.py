"""Runs that wait for a time-out side by side: the waits overlap and the work does not, and what was disturbed is found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
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
    """Works, waits 35 s for a rank that was stopped, works again."""

    def __init__(self, clock: Clock, before_s: float = 9.0, after_s: float = 9.0, waits_s: float = 35.0) -> None:
        self.clock, self.before_s, self.after_s, self.waits_s = clock, before_s, after_s, waits_s
        self.began = self.struck_at = self.ended_at = 0.0

    def begin(self) -> None:
        self.began = self.clock.now

    def tick(self) -> bool:
        now = self.clock.now
        if not self.struck_at and now >= self.began + self.before_s:
            self.struck_at = now
        if self.struck_at and now >= self.struck_at + self.waits_s + self.after_s:
            self.ended_at = now
        return bool(self.ended_at)

    def waits_until(self) -> float:
        until = self.struck_at + self.waits_s
        return until if self.struck_at and self.clock.now < until else 0.0

    def worked(self) -> list[tuple[float, float]]:
        return [(self.began, self.struck_at), (self.struck_at + self.waits_s, self.ended_at)]


def test_waits_overlap_and_work_does_not(lanes: Any) -> None:
    clock = Clock()
    runs = [Lane(clock) for _ in range(6)]
    lanes.drive(runs, lambda: clock.now, clock.nap)
    assert all(run.ended_at for run in runs)
    assert lanes.disturbed(runs) == []
    took = clock.now - runs[0].began
    alone = sum(run.ended_at - run.began for run in runs)
    assert took < 0.7 * alone
    assert sorted(run.began for run in runs) == [run.began for run in runs]


def test_a_run_that_never_waits_has_the_cores_to_itself(lanes: Any) -> None:
    clock = Clock()
    runs = [Lane(clock, waits_s=0.0), Lane(clock, waits_s=0.0), Lane(clock)]
    lanes.drive(runs, lambda: clock.now, clock.nap)
    assert runs[1].began >= runs[0].ended_at
    assert runs[2].began >= runs[1].ended_at


def test_runs_that_worked_at_once_are_found(lanes: Any) -> None:
    """The first takes longer at its end than anybody could know, into what the second does after its wait."""
    clock = Clock()
    runs = [Lane(clock, after_s=40.0), Lane(clock), Lane(clock)]
    lanes.drive(runs, lambda: clock.now, clock.nap)
    assert runs[0] in lanes.disturbed(runs)
    assert runs[1] in lanes.disturbed(runs)
