"""Faults in the middle of a start, while its ranks agree what to restore: each provokes a start, and waits in it for its moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simulation.clock import CLOCK
from simulation.hazards import HAZARDS, kill_node, other_job
from simulation.job import Job
from simulation.machines import Rank

Fault = Callable[[Job, int, float], None]
ALONE, TOGETHER = 20, 40
"""Crash points, requests and messages in the restore of one rank, and of several, about."""


def _in_a_start(work: Callable[[Job, Rank, int, float], None] | None) -> Fault:
    """Return a fault: one of the ranks does something where it has come so far in its restore; without it the rank dies there."""

    def begin(job: Job, target: int, value: float) -> None:
        def arm(ranks: list[Rank]) -> None:
            rank = ranks[target % len(ranks)]
            rank.process.deadly_in = int(value * (TOGETHER if len(ranks) > 1 else ALONE))
            rank.process.at_point = None if work is None else partial(work, job, rank, target, value * 7 % 1)

        job.on_start.append(arm)
        if target % 3 == 0:  # the start is from storage
            for node in job.nodes:
                kill_node(job, node, loses=True, back_s=3 + 5 * value)
        elif job.ranks:
            job.kill(job.ranks[0].process)

    return begin


def _hang(job: Job, rank: Rank, target: int, value: float) -> None:
    """It stands still, and the others wait for it: until it goes on, or the agents start them again."""
    CLOCK.scheduler.pause(rank.process, 5 + 100 * value)
    if target % 2:
        job.later(3 + 40 * (value * 13 % 1), job._recover)


def _lose_root(job: Job, rank: Rank, target: int, value: float) -> None:
    """The root no longer answers this node, or any."""
    trouble, index = job.bucket.trouble, rank.node.index
    if target % 2:
        trouble.cut.add(index)
        job.later(1 + 90 * value, lambda: trouble.cut.discard(index))
    else:
        trouble.is_gone = True
        job.later(1 + 90 * value, lambda: setattr(trouble, "is_gone", False))


def _fill_root(job: Job, rank: Rank, target: int, value: float) -> None:
    """Nothing more can be written to the root, though it can be read."""
    trouble = job.bucket.trouble
    trouble.is_full = True
    job.later(1 + 90 * value, lambda: setattr(trouble, "is_full", False))


def _overtake(job: Job, _: Rank, target: int, value: float) -> None:
    """Another run claims the number that this start has chosen."""
    CLOCK.scheduler.after(0.0, lambda: other_job(job, target, value))


def _lose_node(job: Job, rank: Rank, target: int, value: float) -> None:
    CLOCK.scheduler.after(0.0, lambda: kill_node(job, rank.node, loses=target % 2 == 0, back_s=5 + 60 * value))


def _also(kind: str, times: int = 1) -> Fault:
    """Return one of the other faults, in the middle of a restore, once or several times."""

    def work(job: Job, _: Rank, target: int, value: float) -> None:
        job.met.add(kind)
        for turn in range(1 + target % times):
            CLOCK.scheduler.after(0.0, partial(HAZARDS[kind], job, target + turn, value))

    return _in_a_start(work)


START_HAZARDS: dict[str, Fault] = {
    "die in a restore": _in_a_start(None),
    "hang in a restore": _in_a_start(_hang),
    "lose root in a restore": _in_a_start(_lose_root),
    "lose node in a restore": _in_a_start(_lose_node),
    "root fills in a restore": _in_a_start(_fill_root),
    "other job in a restore": _in_a_start(_overtake),
    "rot in a restore": _also("memory rots", 3),
    "cut MANIFEST in a restore": _also("MANIFEST is cut short"),
    "sweep in a restore": _also("operator sweeps"),
}
