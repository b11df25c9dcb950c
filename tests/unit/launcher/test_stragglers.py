"""Slow ranks: who is named, in which phase and when, from times of ranks as agents send them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from flashckpt.core.incident import Incident
from flashckpt.core.rank_table import PROCESSOR, RankTimes
from flashckpt.core.records import pack
from flashckpt.daemon.launcher import stragglers
from flashckpt.daemon.launcher.slowness import NAMED_S, Naming, slow_places
from flashckpt.daemon.launcher.stop import Group
from flashckpt.daemon.launcher.stragglers import LOOK_S, PhaseMeter, Stragglers, processor_ns
from flashckpt.errors import ConfigError
from flashckpt.hooks.sender import of_incident
from flashckpt.session.session import Session
from flashckpt.shm.control import PHASES, Control
from flashckpt.shm.rank_table import read_table

STEP_S = 1.0


def times(rank: int, *, node: int | None = None, stage: int = 0, **seconds: float) -> RankTimes:
    known = {"data": 0.1, "forward": 0.3, "backward": 0.5} | seconds
    return RankTimes(rank=rank, pid=100 + rank, step=7, node=rank // 4 if node is None else node, host=f"h{rank // 4}",
                     stage=stage, step_s=STEP_S, seconds=known)  # fmt: skip


def accused(*ranks: RankTimes) -> dict[tuple[int, int], str]:
    return {place: slow.phase for place, slow in slow_places(ranks).items()}


def test_nobody_is_named_where_all_are_alike() -> None:
    assert accused(*(times(rank, data=0.1 + rank / 500, processor=0.9) for rank in range(8))) == {}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_slow_loading_is_named_and_not_those_that_wait_for_it(count: int) -> None:
    """The others wait in the first collective: their backward is as much longer as its loading."""
    others = [times(rank, backward=0.9) for rank in range(1, count)]
    assert accused(times(0, data=0.5), *others) == {(0, 0): "data"}


def test_node_with_all_its_ranks_slow_is_named_once_also_where_it_is_half_of_the_job() -> None:
    slow, fast = [times(rank, data=0.5) for rank in range(4)], [times(rank, backward=0.9) for rank in range(4, 8)]
    assert accused(*slow, *fast) == {(0, -1): "data"}


def test_slow_compute_without_a_collective_in_it_is_named() -> None:
    """DDP: the slow rank's forward is longer, and the others wait in backward, as most ranks do."""
    assert accused(times(0, forward=0.7, backward=0.5), *(times(rank, backward=0.9) for rank in range(1, 8))) == {
        (0, 0): "forward"
    }


def test_most_ranks_waiting_in_a_phase_are_not_slow() -> None:
    assert accused(times(0), *(times(rank, forward=0.7) for rank in range(1, 4))) == {}


def test_a_thread_that_runs_while_others_wait_is_named_without_any_phase_of_the_loop() -> None:
    ranks = [RankTimes(rank=rank, step_s=STEP_S, seconds={PROCESSOR: 0.9 if rank == 2 else 0.4}) for rank in range(4)]
    assert accused(*ranks) == {(0, 2): PROCESSOR}


def test_less_than_a_twentieth_of_the_step_is_not_worth_a_word() -> None:
    assert accused(times(0, data=0.049), *(times(rank, data=0.001) for rank in range(1, 4))) == {}
    assert accused(times(0, data=0.052), *(times(rank, data=0.001) for rank in range(1, 4))) == {(0, 0): "data"}


def test_stages_of_a_pipeline_are_compared_among_themselves() -> None:
    first, last = (
        [times(rank, data=0.4) for rank in range(4)],
        [times(rank, stage=1, data=0.01) for rank in range(4, 8)],
    )
    assert accused(*first, *last) == {}


def test_named_after_a_minute_and_again_when_it_recovers_for_one() -> None:
    naming, slow = Naming(), slow_places([times(0, data=0.5), times(1)])
    said: list[tuple[float, bool]] = []
    for now in range(0, 400, 10):
        # slow with one fast look at 20, then from 30 to 200
        is_slow = now < 20 or 30 <= now <= 200
        said += [(now, change.recovered) for change in naming.look(float(now), slow if is_slow else {})]
    assert said == [(30 + NAMED_S, False), (210 + NAMED_S, True)]
    assert naming.named == {}


def test_rank_of_a_node_that_is_slow_as_a_whole_has_not_recovered() -> None:
    naming = Naming()
    one, whole = (
        slow_places([times(0, data=0.5), *(times(rank) for rank in range(1, 8))]),
        {(0, -1): slow_places([times(0, data=0.5), times(1)])[0, 0]},
    )
    for now in (0.0, 60.0):
        changes = naming.look(now, one)
    assert [change.place for change in changes] == [(0, 0)]
    assert not any(change.recovered for now in range(70, 400, 10) for change in naming.look(float(now), whole))


def row(control: Control, rank: int, step: int, **seconds: float) -> Any:
    found = control.row(rank)
    found.rank, found.pid, found.first_step, found.step = rank, os.getpid(), 1, step
    found.heartbeat_ns = step * 10**9
    for name, spent in seconds.items():
        found.spent(name, spent)
    return found


def test_meter_takes_the_steps_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_ns = iter(range(10**9, 10**10, 10**9))  # one second in each look
    monkeypatch.setattr(stragglers, "processor_ns", lambda pid: next(ran_ns))
    control, meter = Control.open(tmp_path / "control", rows=1), PhaseMeter()
    assert meter.look([row(control, 0, 10, data=100.0)]) == []
    assert meter.look([row(control, 0, 10)]) == [], "no step was done"
    row(control, 0, 14, data=0.4).stall_ns += 2 * 10**9
    (found,) = meter.look([row(control, 0, 14)])
    assert (found.step_s, found.seconds["data"], found.seconds["snapshot"]) == (1.0, 0.1, 0.5)
    assert found.seconds[PROCESSOR] == 2 / 4, "from the look before the first step on"
    control.row(0).paused = 1
    assert meter.look([row(control, 0, 20)]) == [], "evaluation is no step"
    control.close()


def test_unknown_phase_is_refused_and_known_ones_add_up(tmp_path: Path) -> None:
    control = Control.open(tmp_path / "control", rows=1)
    session: Any = SimpleNamespace(_row=control.row(0))
    Session.phases(session, {"data": 0.25, "log": 0.5})
    Session.phases(session, {"data": 0.25})
    assert dict(zip(PHASES, control.row(0).phases(), strict=True))["data"] == 5 * 10**8
    for name in ("snapshot", "lunch"):
        with pytest.raises(ConfigError, match="phase of phases\\(\\) is not known"):
            Session.phases(session, {name: 1.0})
    assert control.row(0).published is None
    control.close()


def test_processor_time_of_a_process_that_is_gone_is_not_known() -> None:
    assert processor_ns(os.getpid()) > 0
    assert processor_ns(2**22 + 5) == 0


class Reports(list[Incident]):
    starts = 3

    def report(self, found: Incident) -> None:
        self.append(found)


def test_first_agent_names_a_rank_of_another_node_and_what_a_stranger_writes_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(f"{stragglers.__name__}.time", SimpleNamespace(monotonic=lambda: clock[0]))
    store = HashStore()
    reports: Any = Reports()
    watch: Any = SimpleNamespace(job=SimpleNamespace(job="run7", path=tmp_path))
    first, controls = (
        Stragglers(watch, reports),
        [Control.open(tmp_path / f"control-{node}", rows=2) for node in range(2)],
    )
    second = Stragglers(watch, reports)
    store.set("flashckpt/times/2", json.dumps([pack(times(9)) | {"seconds": {"data": "\x1b[31m"}}]))
    monkeypatch.setattr(stragglers, "processor_ns", lambda pid: 0)
    for look in range(1, 20):
        is_slow = look < 10
        rows = [
            row(controls[node], node, look, data=0.5 if node and is_slow else 0.1, backward=0.2) for node in range(2)
        ]
        clock[0] += LOOK_S
        second.tick(rows[1:], Group(store=store, rank=1, size=3))
        for _ in range(2):
            first.tick(rows[:1], Group(store=store, rank=0, size=3))
    assert [(one.rank, one.node, one.category) for one in reports] == [(1, 1, "data")] * 2
    assert reports[0].verdict.endswith("0.5 s of each step, the median of the ranks is 0.1 s -> continue")
    assert "is as fast as the others again, after" in reports[1].what
    assert [one["event"] for one in of_incident({**pack(reports[0]), "verdict": "", "class": "machine"})] == [
        "incident"
    ]
    ranks, updated_s = read_table(tmp_path)
    assert [(one.rank, one.node, one.slow) for one in ranks] == [(0, 0, ""), (1, 1, "")]
    assert updated_s <= time.time()
    for control in controls:
        control.close()


def test_hundreds_of_reports_do_not_push_out_others() -> None:
    reports: Any = Reports()
    watch: Any = SimpleNamespace(job=None)
    them = Stragglers(watch, reports)
    slow = slow_places([times(0, data=0.5), times(1)])
    for _ in range(50):
        naming = Naming()
        naming.look(0.0, slow)
        for change in naming.look(NAMED_S, slow):
            them._report(change, [0])
    assert len(reports) == stragglers.MOST_REPORTS
