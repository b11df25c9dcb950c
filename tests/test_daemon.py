"""The persisting daemon: what is committed, when, and what a killed or fenced one leaves behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.memory_tier import FakeJob, FakeRank
from support.ranks import wait_for

from flashckpt.checkpoints import list_checkpoints, read_manifest
from flashckpt.daemon.service import Daemon, Times
from flashckpt.restore import Target, fill
from flashckpt.sources import StorageSource
from flashckpt.store import open_store

QUICK = Times(linger_s=0.0, patience_s=0.0)


@contextlib.contextmanager
def daemon_of(job: FakeJob, times: Times = QUICK) -> Iterator[Daemon]:
    """A daemon in this process, turned by hand."""
    lock = job.directory.hold_daemon()
    assert lock is not None
    daemon = Daemon(job.directory, lock, times)
    try:
        yield daemon
    finally:
        daemon.close()


def turn_until(daemon: Daemon, condition, what: str) -> None:
    def once():
        daemon.turn()
        return condition()

    wait_for(once, what=what)


def steps(job: FakeJob) -> list[int]:
    return sorted(info.step for info in list_checkpoints(open_store(job.root)))


def assert_bitwise(job: FakeJob, step: int, generation: int = 1) -> None:
    """The checkpoint holds exactly what the ranks held, verified through the restore path."""
    store = open_store(job.root)
    (info,) = [i for i in list_checkpoints(store) if i.identity == (generation, step)]
    source = StorageSource(store, read_manifest(store, info), info.prefix)
    for rank in job.ranks:
        for shard in rank.shards:
            buffer = bytearray(shard.nbytes)
            fill([Target(shard=shard, buffer=memoryview(buffer))], [source])
            assert bytes(buffer) == FakeRank.bytes_of(shard, generation, step)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(str(tmp_path / "root"))
    yield fake
    fake.die()


def test_persist_step_is_committed_bitwise_and_others_are_not(job: FakeJob) -> None:
    job.step(5)
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [10], "the commit")
        job.step(15)
        for _ in range(3):
            daemon.turn()
    assert steps(job) == [10]
    assert_bitwise(job, 10)
    status = job.directory.read_status()
    assert status is not None
    assert (status.committed, status.failures, status.lag) == ((1, 10), 0, 0)


def test_daemon_process_runs_without_torch() -> None:
    code = "import flashckpt.daemon.service, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
