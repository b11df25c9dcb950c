"""Jumps over calm change no figure of a job, and none is made where something leaks in each cycle."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from simulation.test_simulation import in_a_child

HOURS = 1.0


def _measured(nodes: int, seed: int) -> Any:
    """Return [rule, kept steps, repeated ones, commits, requests per commit, share that was run] of a job, in full and with jumps."""
    from simulation.forecast import measure
    from simulation.job import Setup

    setup = Setup(nodes=nodes, step_s=20.0, persist_every=2, faults_s=3600 * HOURS)
    found = []
    for jumps in (False, True):
        one = measure(setup, mtbf_s=900.0, lost_nodes=0.3, jumps=jumps, seed=seed)
        found.append((one.kept, one.lost * len(one.outages), len(one.outages), one.commits, one.requests / one.commits,
                      one.goodput, one.run_s / one.seconds))  # fmt: skip
    return found


@pytest.mark.parametrize(("nodes", "seed"), [(2, 1), (4, 3)])
def test_a_job_with_jumps_is_like_one_that_is_run_in_full(nodes: int, seed: int) -> None:
    full, quick = in_a_child(lambda: _measured(nodes, seed))
    kept, lost, failures, commits, requests, goodput, share = quick
    assert full[6] == 1.0
    assert share < 0.75
    assert failures == full[2] > 2
    assert goodput == pytest.approx(full[5], abs=0.02)  # a step of 180 is 0.006
    assert abs(lost - full[1]) <= 1.5 * failures  # a fault comes in another moment of a cycle of two steps
    assert commits == pytest.approx(full[3], abs=failures)
    assert requests == pytest.approx(full[4], rel=0.05)
    assert kept == pytest.approx(full[0], abs=2 * failures)


def _object(job: Any, turn: int) -> None:
    job.bucket.set(f"forgotten/{turn}", b"")


def _file(job: Any, turn: int) -> None:
    from simulation import memory

    memory.FILES.make(job.nodes[0].folder / f"forgotten{turn}")


def _pin(job: Any, turn: int) -> None:
    from simulation import memory

    (path,) = [one for one in job.nodes[0].folder.iterdir() if one.name.endswith(".seg")]
    memory.SimLease(path).shared(1000 + turn)


def _fiber(job: Any, turn: int) -> None:
    from simulation.clock import CLOCK

    CLOCK.scheduler.spawn(job.nodes[0].persister, CLOCK.scheduler.block)


def _memory(job: Any, turn: int) -> None:
    from flashckpt.core.snapshot_id import SnapshotId

    job.nodes[0].daemon.persisting.negotiation._seen.add(SnapshotId(9, turn))


LEAKS = {
    "an object on the root": (_object, "_root"),
    "a file of the job": (_file, "_shared"),
    "a lock on a slot": (_pin, "_node"),
    "a thread of a persister": (_fiber, "_shared"),
    "what a persister remembers": (_memory, "_node"),
}
"""What is left behind by cycles, and the part of a look that sees it."""


def _jumps(leak: str, blind: str, every: int = 1) -> int:
    """Return how often a job of eight minutes jumps in which every so many cycles leak, where looks leave a part out."""
    from simulation import calm, run
    from simulation.job import Job, Setup

    committed, turns = Job.committed, iter(range(10**6))

    def forgets(self: Job, identity: Any) -> None:
        committed(self, identity)
        if leak and (turn := next(turns)) % every == 0:
            LEAKS[leak][0](self, turn)

    Job.committed = forgets  # type: ignore[method-assign]
    for name in blind.split():
        setattr(calm.Look, name, lambda *_: None)
    run.simulate(1, Setup(nodes=2, faults_s=480.0), [], jumps=True)
    calendar: calm.Calendar = run._current[0].calendar
    return calendar.skipped.jumps


@pytest.mark.parametrize("leak", LEAKS)
def test_what_leaks_in_each_cycle_prevents_a_jump(leak: str) -> None:
    blind = "_node _shared" if leak == "a lock on a slot" else LEAKS[leak][1]  # it is also a descriptor that stays open
    assert in_a_child(lambda: _jumps(leak, "")) == 0
    assert in_a_child(lambda: _jumps(leak, "", every=2)) == 0
    assert in_a_child(lambda: _jumps(leak, blind)) > 0


def _told(runs_all: bool, nodes: int, seed: int) -> Any:
    from simulation import relays, run
    from simulation.job import Setup
    from simulation.plan import Fault

    if runs_all:
        relays.__dict__["turns_in_vain"] = lambda _: False
    faults = [Fault(90.0, "kill rank", 1), Fault(150.0, "cut between nodes", 1, 0.2), Fault(220.0, "lose node", 2, 0.1)]
    outcome = run.simulate(seed, Setup(nodes=nodes, persist_every=4, faults_s=300.0), faults, jumps=False)
    return [outcome.rule, outcome.story, outcome.counts, sum(run._current[0].bucket.requests.values())]


@pytest.mark.parametrize(("nodes", "seed"), [(3, 1), (5, 2)])
def test_turns_of_relays_that_are_not_run_would_have_changed_nothing(nodes: int, seed: int) -> None:
    run, counted = (in_a_child(partial(_told, runs_all, nodes, seed)) for runs_all in (True, False))
    assert run[2]["commits"] > 3
    assert run[2]["starts"] >= 3
    assert counted == run
