"""A job with random kills, restarts and requests: whatever is visible is whole, and nothing committed goes backwards."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.daemons import ForkedDaemon, assert_bitwise, identities
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.checkpoint.catalog import newest_checkpoint
from flashckpt.daemon.persister import service
from flashckpt.faults import CRASH_POINTS
from flashckpt.storage.factory import open_store

POINTS = [None, None, *(name for name in CRASH_POINTS if name.split(".")[0] in ("persist", "store"))]
SEEDS = [int(seed) for seed in os.environ.get("FLASHCKPT_TORTURE_SEEDS", "1").split(",")]


def restart(job: FakeJob, dice: random.Random) -> int:
    """Begin the next generation from a snapshot in memory or a checkpoint; return its step."""
    store = open_store(job.root)
    committed = newest_checkpoint(store, generations=[job.record])
    choices = [identity for identity in job.common() if identity[0] == job.generation]
    if committed is not None:
        choices.append(committed.identity)
    parent = dice.choice(choices) if choices else None
    if parent is None:
        return -1
    for rank in job.ranks:  # what the restore abandons
        for slot, header in enumerate(rank.segment.headers()):
            if header.is_complete and header.identity > parent:
                rank.segment.mark_empty(slot)
    job.restart(job.generation + 1, parent)
    return parent[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_kills_restarts_and_requests_nothing_half_visible(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}: run it alone with FLASHCKPT_TORTURE_SEEDS={seed}")
    dice = random.Random(seed)
    job = FakeJob(str(tmp_path / "root"), keep_last=2)
    daemon = ForkedDaemon(job, crash_at=dice.choice(POINTS), times=service.DaemonTimeouts())
    step, kills = 0, 0
    checked: set[tuple[int, int]] = set()
    try:
        end = time.monotonic() + 6
        while time.monotonic() < end:
            step += 1
            job.step(step, persist=step % 4 == 0)
            time.sleep(dice.random() * 0.01)
            if dice.random() < 0.05:
                daemon.kill(signal.SIGKILL)
            if daemon.poll() is not None:
                kills += 1
                daemon = ForkedDaemon(job, crash_at=dice.choice(POINTS), times=service.DaemonTimeouts())
            if dice.random() < 0.03 and (restored := restart(job, dice)) >= 0:
                step = restored
            if dice.random() < 0.03:
                job.directory.request("persist-now")
            if dice.random() < 0.1:
                for identity in set(identities(job)) - checked:
                    _check(job, identity)
                    checked.add(identity)
        daemon.kill(signal.SIGKILL)
        daemon = ForkedDaemon(job, times=service.DaemonTimeouts())
        last = (job.generation, step + 8)
        for later in range(step + 1, step + 9):
            job.step(later, persist=later == step + 8)
        wait_for(lambda: last in identities(job), what="the last persist step", deadline_s=60)
        _check(job, last)
        newest = newest_checkpoint(open_store(job.root), generations=[job.record])
        assert newest is not None
        assert newest.identity == last
        assert kills >= 3
    finally:
        daemon.kill(signal.SIGKILL)
        job.die()


def _check(job: FakeJob, identity: tuple[int, int]) -> None:
    """Verify one checkpoint, unless retention takes it away meanwhile."""
    try:
        assert_bitwise(job, identity)
    except Exception:
        if identity in identities(job):
            raise
