"""A rank that is stopped, or a restart in which nobody does anything, is found; a slow start, a debugger and a suspended machine are not."""

from __future__ import annotations

import os

import pytest

from flashckpt.daemon.launcher import hang

RANKS = {0: 100, 1: 101, 2: 102}


class Machine:
    """What /proc would say, and a clock that moves by `pace_s` between two looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pace_s: float = 1.0) -> None:
        self.states = dict.fromkeys(RANKS.values(), "S")
        self.cpu_s, self.now_s, self.pace_s, self.waited = 0.0, 1000.0, pace_s, 0.0
        monkeypatch.setattr(hang, "stat_of", lambda pid: [self.states[pid]])
        monkeypatch.setattr(hang, "session_cpu_s", lambda _: self.cpu_s)

    def found_in(
        self, watch: hang.StallWatch, seconds: float, *, is_starting: bool = True, cpu: float = 0.0
    ) -> hang.Stall | None:
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s += self.pace_s
            self.cpu_s += cpu * self.pace_s
            if (found := watch.look(self.now_s, RANKS, is_starting=is_starting, waited=self.waited)) is not None:
                return found
        return None


@pytest.mark.parametrize("is_starting", [True, False])
@pytest.mark.parametrize("known_s", [0.0, 5.0])
@pytest.mark.parametrize(("explicit_s", "limit_s"), [(None, 60.0), (2.0, 2.0), (0.0, None)])
def test_stopped_rank_is_named_in_every_phase(
    is_starting: bool, known_s: float, explicit_s: float | None, limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, watch = Machine(monkeypatch), hang.StallWatch(explicit_s, known_s)
    machine.states[101] = "T"
    found = machine.found_in(watch, 100.0, is_starting=is_starting, cpu=1.0)
    assert (found is not None) == (limit_s is not None)
    if found is not None:
        assert (list(found.ranks), found.limit_s) == ([1], limit_s)
        assert "rank 1 (pid 101) stopped" in found.what


@pytest.mark.parametrize("state", ["t", "S", "R", "D", "Z"])
def test_debugger_or_work_is_no_stop(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, watch = Machine(monkeypatch), hang.StallWatch(None)
    machine.states[101] = state
    assert machine.found_in(watch, 10_000.0) is None


def test_rank_that_is_stopped_again_and_again_is_not_stopped_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, watch = Machine(monkeypatch), hang.StallWatch(None)
    for state in "TSTSTSTS":
        machine.states[101] = state
        assert machine.found_in(watch, 50.0 if state == "T" else 2.0, cpu=1.0) is None


def test_suspended_machine_is_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes between two looks: this process was not there either."""
    machine, watch = Machine(monkeypatch, pace_s=3600.0), hang.StallWatch(None, known_s=1.0)
    machine.states[101] = "T"
    assert machine.found_in(watch, 40 * 3600.0) is None


@pytest.mark.parametrize(
    ("known_s", "explicit_s", "limit_s"),
    [
        (0.0, None, None),
        (0.0, 5.0, None),
        (3.0, 0.0, None),
        (3.0, None, 300.0),
        (90.0, None, 900.0),
        (3.0, 5.0, 9.0),
        (1.0, 5.0, 5.0),
    ],
)
def test_restart_in_which_nobody_does_anything_has_the_limit_of_what_is_known(
    known_s: float, explicit_s: float | None, limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, watch = Machine(monkeypatch), hang.StallWatch(explicit_s, known_s)
    assert machine.found_in(watch, 3000.0, is_starting=False) is None  # hang detection's own matter
    if limit_s is None:
        assert machine.found_in(watch, 100_000.0) is None
        return
    assert machine.found_in(watch, limit_s - 2) is None
    found = machine.found_in(watch, 4.0)
    assert found is not None
    assert (found.limit_s, list(found.ranks)) == (limit_s, [])


@pytest.mark.parametrize("cpu", [0.02, 1.0, 30.0])
def test_slow_start_that_works_has_no_limit(cpu: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte from storage, a compilation: some processor time of some rank, or of what it has started."""
    machine, watch = Machine(monkeypatch), hang.StallWatch(5.0, 1.0)
    assert machine.found_in(watch, 20_000.0, cpu=cpu) is None


def test_wait_for_storage_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, watch = Machine(monkeypatch), hang.StallWatch(None, 1.0)
    for _ in range(20):
        assert machine.found_in(watch, 290.0) is None
        machine.waited += 1.0


def test_ranks_without_a_row_are_part_of_the_report_and_the_stopped_ones_are_the_suspects() -> None:
    row = hang.NoRow(rank=0, pid=os.getpid(), heartbeat_ns=1, step=7)
    beats = hang.beats_of([row], {0: os.getpid(), 1: 2**22 - 1}, 3.0)
    assert [(beat.rank, beat.step, beat.heartbeat_ns) for beat in beats] == [(0, 7, 1), (1, -1, 3_000_000_000)]
    states = hang.states_of(beats, {}, {0: os.getpid(), 1: 2**22 - 1})
    text = hang.render(states, silent_s=1, limit_s=60, stall=hang.Stall(what="rank 1 stopped", ranks=[1], limit_s=60))
    assert text.startswith("rank 1 stopped (hang timeout 60.0 s); look at rank 1")
    assert "rank 1 (step -1) gave no stack: gone" in text
