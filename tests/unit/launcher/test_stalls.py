"""A rank that is stopped, or a restart in which nobody does anything, is found; a slow start, a debugger and a suspended machine are not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from flashckpt.daemon.launcher import hang
from flashckpt.daemon.launcher.agent import DlrunAgent
from flashckpt.daemon.launcher.reporting import FailureReporter
from flashckpt.daemon.zygote.worker import STACKS_SIGNAL

RANKS = {0: 100, 1: 101, 2: 102}


class Machine:
    """What /proc would say, and a clock that moves by `pace_s` between two looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pace_s: float = 1.0) -> None:
        self.states = dict.fromkeys(RANKS.values(), "S")
        self.cpu_s, self.now_s, self.pace_s, self.waited = 0.0, 1000.0, pace_s, 0.0
        monkeypatch.setattr(hang, "state_of", lambda pid: self.states[pid])
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


@pytest.mark.parametrize(("explicit_s", "limit_s"), [(None, 300.0), (10.0, 15.0), (0.0, None)])
def test_behind_a_hang_a_restart_that_is_busy_and_trains_nothing_is_one_too(
    explicit_s: float | None, limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for after_hang in (False, True):
        machine = Machine(monkeypatch)
        watch = hang.StallWatch(explicit_s, 5.0, after_hang=after_hang)
        assert machine.found_in(watch, (limit_s or 300.0) * hang.AT_WORK, cpu=1.0) is None, "it may restore or compile"
        found = machine.found_in(watch, 400.0, cpu=1.0)
        assert (found is not None) == (after_hang and limit_s is not None)
        if found is not None:
            assert (found.limit_s, "no rank has trained a step for" in found.what) == (limit_s, True)
    machine.waited += 1.0  # waits for storage
    assert machine.found_in(watch, 10.0, cpu=1.0) is None


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


@pytest.mark.parametrize("counts_steps", [True, False])
@pytest.mark.parametrize("cpu", [0.0, 0.002, 3.0])
@pytest.mark.parametrize(
    ("known_s", "said_at"), [(0.0, [600, 1200, 2400]), (5.0, [300, 600, 1200, 2400]), (90.0, [900, 1800])]
)
def test_start_that_lasts_is_said_again_and_again_and_not_ended(
    known_s: float, said_at: list[int], cpu: float, counts_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start, several nodes, a rank that spins: 0.002 of a core is what three idle ranks use."""
    start, ran_s, found = hang.SlowStart(known_s), 0, {}
    monkeypatch.setattr(hang, "session_cpu_s", lambda _: ran_s * cpu)
    for ran_s in range(3000):
        if what := start.look(float(ran_s), RANKS.values(), counts_steps=counts_steps):
            found[ran_s] = what
    assert list(found) == (said_at if counts_steps or cpu < 1 else [])
    for seconds, what in found.items():
        assert what.startswith(f"{seconds} s after the start not all ranks have trained a step")
        assert ("a start took" in what) == (known_s > 0)


def test_place_of_each_rank_is_said_with_a_start_that_lasts() -> None:
    states = [hang.RankState(rank=rank, pid=rank, step=-1, stack=("all_reduce (a.py:1)",)) for rank in range(3)]
    states.append(hang.RankState(rank=3, pid=3, step=-1, kernel="state D"))
    text = hang.render_start(states, "it lasts")
    assert text.splitlines() == [
        "it lasts",
        "  rank 0 (step -1), 1 (step -1), 2 (step -1):",
        "    all_reduce (a.py:1)",
        "  rank 3 (step -1) gave no stack: state D",
    ]


@pytest.mark.parametrize("quiet_because", ["", "trained", "paused", "asked to stop"])
def test_agent_says_it_until_all_ranks_have_trained(quiet_because: str) -> None:
    row: Any = SimpleNamespace(rank=0, step=0, paused=int(quiet_because == "paused"), first_step=0)
    agent: Any = mock.Mock(_started_s=time.monotonic() - 1000.0, _slow_start=hang.SlowStart(3.0))
    agent._stop.is_under_way = quiet_because == "asked to stop"
    agent._has_begun = lambda _: quiet_because == "trained"
    context = mock.Mock()
    context.pids.return_value = {0: os.getpid()}
    for _ in range(3):
        DlrunAgent._see_slow_start(agent, context, [row])
    assert agent._reporter.slow_start.call_count == (not quiet_because)


def test_stacks_of_ranks_that_train_on_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = "import sys, time; from flashckpt.daemon.zygote.worker import register_stacks\n"
    program += "def waits_for_ever():\n    print('here', flush=True)\n    time.sleep(600)\n"
    program += "register_stacks(sys.argv[1]); waits_for_ever()"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "s")], stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout is not None
            rank.stdout.readline()
            reporter = FailureReporter(mock.Mock(stacks_file=lambda _: tmp_path / "s"), "")
            beats = hang.beats_of([], {7: rank.pid}, 0.0)
            context = mock.Mock()
            context.pids.return_value = {0: rank.pid}
            with caplog.at_level("WARNING", "flashckpt.dlrun"):
                reporter.slow_start(context, beats, "it lasts")
            assert rank.poll() is None
        finally:
            rank.kill()
    assert caplog.text.count("it lasts\n  rank 7 (step -1):\n    waits_for_ever (") == 1


@pytest.mark.parametrize("how", ["stops", "dies"])
def test_a_rank_that_cannot_give_its_stack_is_not_waited_for(how: str, tmp_path: Path) -> None:
    """One that dies when it is asked is another process's child here: it stays a zombie, as one that dlrun has not reaped."""
    says = (
        "import faulthandler, os, signal, sys; f = open(sys.argv[1], 'w'); number = int(sys.argv[2]); how = sys.argv[3]"
    )
    says += "; signal.signal(number, lambda *_: os._exit(1)) if how == 'dies' else faulthandler.register(number, f, all_threads=True)"
    says += "; print(); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGSTOP) if how == 'stops' else signal.pause()"
    files = {rank: tmp_path / str(rank) for rank in (0, 1)}
    words = [[sys.executable, "-c", says, str(files[rank]), str(int(STACKS_SIGNAL))] for rank in files]
    ranks = [
        subprocess.Popen([*some, one], stdout=subprocess.PIPE) for some, one in zip(words, ("waits", how), strict=True)
    ]
    try:
        files[1].touch()
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()
        if how == "stops":
            os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED | os.WNOWAIT)
        found = hang.collect({rank: one.pid for rank, one in enumerate(ranks)}, files, wait_s=1e9)
        assert [rank for rank in found if found[rank]] == [0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
