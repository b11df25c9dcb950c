"""What a job may expect as long as nothing goes wrong: each persist step committed, soon, with few requests, and no snapshot left out."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from flashckpt.core.snapshot_id import SnapshotId
from simulation.clock import CLOCK
from simulation.watches import Violation

if TYPE_CHECKING:
    from simulation.job import Job

FREE_S = 10.0
"""Seconds between two persist steps from which on each has time to be committed before the next."""
COMMIT_S, REQUESTS_DEEP = 7.0, 45
"""Seconds from a snapshot to its commit, with as many requests one behind another."""
MORE_S = 4.0
"""Seconds more in jobs of many nodes."""
REQUESTS_A_COMMIT = 80
"""Of one node, with retention and what it asks besides."""

MINUTE_S, MOST_REQUESTS = 60.0, 3000
"""Of one node to the root in a minute, whatever fails."""


def is_calm(job: Job) -> bool:
    """Whether nothing went wrong yet that makes any of it late."""
    setup = job.setup
    return (
        not job.met
        and not setup.discards
        and not setup.persist_s
        and setup.slots >= 3
        and setup.persist_every * setup.step_s >= FREE_S
        and setup.latency_s <= 0.15
    )


def committed(job: Job, identity: SnapshotId) -> None:
    """Something was committed: each persist step is, and soon."""
    if not is_calm(job):
        return
    taken, before = job.rules.taken_at.get(identity), max(job.committed_at, default=None)
    limit_s = COMMIT_S + MORE_S * (job.setup.nodes > 8) + job.setup.copy_s * 1.5 + REQUESTS_DEEP * job.setup.latency_s
    if taken is not None and (took_s := CLOCK.scheduler.now - taken) > limit_s:
        raise Violation("a calm job commits soon", f"{identity} after {took_s:.1f} s, not {limit_s:.1f}")
    if before is not None and identity.step - before.step != job.setup.persist_every:
        raise Violation("a calm job commits each persist step", f"{identity} came behind {before}")


def skipped(job: Job, identity: SnapshotId) -> None:
    """A rank has no slot for a snapshot."""
    if is_calm(job) and job.setup.step_s >= 3 and not job.setup.replicate:
        raise Violation("a calm job leaves no snapshot out", f"{identity}")


def count_requests(job: Job) -> None:
    """No node asks the root without end, whatever fails, and seldom where nothing does."""
    before, commits = job.asked
    most = REQUESTS_A_COMMIT * (1 + job.counts["commits"] - commits) if is_calm(job) else MOST_REQUESTS
    for node, count in job.bucket.requests.items():
        asked, what = count - before[node], "most requests of a node in a minute"
        job.counts[what] = max(job.counts[what], asked)
        if asked > most:
            raise Violation("bounded requests", f"{asked} of node {node} in a minute, not {most}")
    job.asked = Counter(job.bucket.requests), job.counts["commits"]
    job.later(MINUTE_S, partial(count_requests, job))
