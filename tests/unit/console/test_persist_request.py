"""`flashckpt persist`: a checkpoint on demand, from outside, with an honest answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemons import ForkedDaemon, assert_bitwise, forked, steps
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.cli import main as cli
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.shm.job_directory import DaemonStatus

Captured = pytest.CaptureFixture[str]
LONG = DaemonTimeouts(linger_s=600.0, patience_s=600.0)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = FakeJob(str(tmp_path / "root"), persist_every=None)
    yield made
    made.die()


@contextlib.contextmanager
def running(job: FakeJob, **how: Any) -> Iterator[ForkedDaemon]:
    """A persister that has its lock, or has died of what the test wants."""
    with forked(job, **how) as daemon:
        wait_for(lambda: job.directory.daemon_alive() or daemon.poll() is not None, what="the persister")
        yield daemon


def persist(*words: str, capsys: Captured) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as done:
        cli.main(["persist", *words, "--json"])
    return int(done.value.code or 0), json.loads(capsys.readouterr().out)


def test_the_newest_snapshot_is_committed_though_no_step_said_so(job: FakeJob, capsys: Captured) -> None:
    job.step(5)
    job.step(7)
    with running(job, times=LONG):
        code, found = persist("fake", capsys=capsys)
        assert (code, found["asked"], found["committed"]) == (0, [1, 7], [1, 7])
        assert steps(job) == [7]
        assert_bitwise(job, (1, 7))
        assert persist(job.root, capsys=capsys)[1]["committed"] == [1, 7]  # by its root; it is there already
        job.step(9)
        assert persist("fake", capsys=capsys)[1]["committed"] == [1, 9]


@pytest.mark.parametrize("point", ["persist.before-intent", "persist.during-pack", "persist.before-manifest"])
def test_a_persister_that_is_killed_meanwhile_is_said_and_the_next_one_commits(
    job: FakeJob, point: str, capsys: Captured
) -> None:
    job.step(5)
    with running(job, crash_at=point, times=LONG) as daemon:
        code, found = persist("fake", capsys=capsys)
        daemon.wait_killed()
    assert (code, found["error"]["found"]) == (40, "no persister of this job is running on this machine")
    assert steps(job) == []
    with running(job, times=LONG):
        assert persist("fake", capsys=capsys)[1]["committed"] == [1, 5]
    assert_bitwise(job, (1, 5))


def test_a_storage_that_fails_is_the_answer(job: FakeJob, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "root").rmdir() if (tmp_path / "root").exists() else None
    (tmp_path / "root").write_text("a file where the root should be")
    job.step(5)
    with running(job, times=LONG):
        code, found = persist("fake", capsys=capsys)
    assert code == 40
    assert "root" in found["error"]["found"]


def test_a_hung_persister_ends_with_the_time_that_was_given(job: FakeJob, capsys: Captured) -> None:
    job.step(5)
    with running(job, times=LONG) as daemon:
        wait_for(job.directory.daemon_alive, what="the persister")
        os.kill(daemon.pid, signal.SIGSTOP)
        daemon.wait_stopped()
        code, found = persist("fake", "--timeout", "0.2", capsys=capsys)
        os.kill(daemon.pid, signal.SIGCONT)
    assert (code, found["error"]["found"]) == (40, "not committed after 0.2 s")


def test_without_a_job_or_a_snapshot_it_says_so(job: FakeJob, capsys: Captured) -> None:
    assert persist("other", capsys=capsys)[1]["error"]["found"] == "fake"
    code, found = persist("fake", capsys=capsys)
    assert (code, found["error"]["remedy"]) == (30, "try again after snapshot_every steps")


def test_while_snapshots_come_and_go_what_is_committed_is_as_new_as_asked(job: FakeJob, capsys: Captured) -> None:
    job.step(1)
    is_over = threading.Event()

    def train() -> None:
        step = 1
        while not is_over.wait(0.02):
            step += 1
            job.step(step)

    with running(job, times=LONG):
        thread = threading.Thread(target=train)
        thread.start()
        try:
            code, found = persist("fake", capsys=capsys)
        finally:
            is_over.set()
            thread.join()
    assert code == 0
    assert found["committed"] >= found["asked"]


def test_a_snapshot_that_was_given_up_is_the_answer_at_once(job: FakeJob, capsys: Captured) -> None:
    job.step(5)
    lock = job.directory.hold_daemon()
    job.directory.write_status(DaemonStatus(floor=SnapshotId(1, 5), given_up="step 5 was given up: a gap"))
    code, found = persist("fake", "--timeout", "20", capsys=capsys)
    assert (code, found["error"]["found"]) == (40, "step 5 was given up: a gap")
    assert lock is not None
    lock.close()
