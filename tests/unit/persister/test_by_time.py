"""A persister that the clock tells when to persist: one decider, every node the same snapshot, nothing left out by a kill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemons import assert_all_bitwise, assert_bitwise, daemon_of, forked, steps, turn_until
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.daemon.persister import coordinator, messaging, persist
from flashckpt.errors import ShardGapError


class Clock:
    """`time` of the persister, moved by the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.now


def test_by_time_the_newest_snapshot_is_persisted_once_the_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, job = Clock(), FakeJob(str(tmp_path / "root"), persist_every=1, persist_s=600)
    monkeypatch.setattr(coordinator, "time", clock)
    with daemon_of(job) as daemon:
        job.step(1, persist=True)  # the first one at once: storage has been seen to work
        turn_until(daemon, lambda: steps(job) == [1], "the first commit")
        for step in range(2, 6):
            job.step(step, persist=True)
            clock.now += 100
            daemon.turn()
        assert daemon.persisting is not None
        assert (daemon.persisting.negotiation.candidate, daemon.numbers()["lag_persist_steps"]) == (None, 0)
        clock.now += 200
        turn_until(daemon, lambda: steps(job) == [1, 5], "the commit of the newest one")
        job.step(6, persist=True)
        job.directory.request("persist-now")
        turn_until(daemon, lambda: steps(job) == [1, 5, 6], "what is asked for")
        job.step(7, persist=True)
        daemon.turn()
        assert steps(job) == [1, 5, 6]
        job.directory.request("ended")
        turn_until(daemon, lambda: steps(job)[-3:] == [5, 6, 7], "the end of the job")  # retention may be at the first
    job.die()


def test_by_time_what_failed_or_was_given_up_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, job = Clock(), FakeJob(str(tmp_path / "root"), persist_every=1, persist_s=600)
    monkeypatch.setattr(coordinator, "time", clock)
    with daemon_of(job) as daemon:
        job.step(1, persist=True)
        with monkeypatch.context() as broken:
            broken.setattr(coordinator, "commit", lambda *a, **k: (_ for _ in ()).throw(ShardGapError("a gap")))
            turn_until(
                daemon, lambda: daemon.persisting is not None and daemon.persisting.given_up, "it to be given up"
            )
        job.step(2, persist=True)
        turn_until(daemon, lambda: steps(job) == [2], "the next one at once")
    job.die()


@pytest.mark.parametrize(
    ("point", "step"), [("persist.before-intent", 2), ("persist.during-pack", 1), ("persist.after-manifest", 2)]
)
def test_by_time_the_persister_after_one_that_was_killed_waits_for_no_time(
    tmp_path: Path, point: str, step: int
) -> None:
    """What was decided is finished; else the newest is persisted."""
    job = FakeJob(str(tmp_path / "root"), persist_every=1, persist_s=3600)
    job.step(1, persist=True)
    with forked(job, crash_at=point) as daemon:
        daemon.wait_killed()
    job.step(2, persist=True)
    with forked(job):
        wait_for(lambda: step in steps(job), what="the next persister to persist at once")
    assert_all_bitwise(job)
    job.die()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeJob]]:
    """One job on two nodes of one rank each, which persists every ten minutes."""
    monkeypatch.setattr(persist, "LEASE_S", 0.0)
    monkeypatch.setattr(messaging, "ROOT_LOOK_S", 0.0)
    made: list[FakeJob] = []
    for node in range(2):
        (memory := tmp_path / f"node{node}").mkdir()
        monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(memory))
        how = {"world": 2, "ranks": [node], "nodes": 2, "node": node, "persist_every": 1, "persist_s": 600}
        made.append(FakeJob(str(tmp_path / "root"), **how))  # type: ignore[arg-type]
    made[1].record = made[0].record
    made[1].directory.write_generation(made[0].record)
    yield made
    for job in made:
        job.die()


def test_of_several_nodes_the_first_whose_time_has_come_asks_and_the_others_follow(
    nodes: list[FakeJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(coordinator, "time", clock)
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(daemon_of(job)) for job in nodes]

        def turn(until: list[int], what: str) -> None:
            def once() -> bool:
                for daemon in daemons:
                    daemon.turn()
                return steps(nodes[0]) == until

            wait_for(once, what=what)

        for job in nodes:
            job.step(1, persist=True)
        turn([1], "the first commit")
        for job in nodes:
            job.step(2, persist=True)
        for daemon in [*daemons, *daemons, *daemons]:
            daemon.turn()
        assert all(one.persisting is not None and one.persisting.negotiation.candidate is None for one in daemons)
        assert steps(nodes[0]) == [1]
        first = daemons[1].persisting
        assert first is not None
        first._begun_s -= 600.0  # the clock of one node is ahead
        turn([1, 2], "the commit that one node asked for")
    assert_bitwise(nodes, (1, 2))
