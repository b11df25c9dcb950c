"""Storage that fails: training and the memory tier go on, it is said once, and persisting resumes by itself."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemons import assert_bitwise, daemon_of, forked, identities, steps, turn_until
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.checkpoint import root_records
from flashckpt.daemon.persister import attempts, coordinator, service
from flashckpt.errors import RootError, StoreError
from flashckpt.storage import factory as stores


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setattr(attempts, "BACKOFF_S", (0.0, 0.01))
    fake = FakeJob(str(tmp_path / "root"))
    yield fake
    fake.die()


class Sick:
    """A root whose operations fail while `error` is set; every call of a failing method is counted."""

    def __init__(self, root: str) -> None:
        self.inner = stores.open_store(root)
        self.error: Exception | None = None
        self.calls = 0
        self.opened = 0

    def open(self, root: str, **options: object) -> Sick:
        self.opened += 1
        return self

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value) or name == "close":
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.error is not None:
                self.calls += 1
                raise self.error
            return value(*args, **kwargs)

        return call


class FullDisk(Sick):
    """Only data does not fit: a put of a large object stops in the middle, as ENOSPC does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        if self.error is not None:
            self.calls += 1
            next(iter(parts))
            raise self.error
        self.inner.put_object(key, parts, nbytes)


class Stuck(FullDisk):
    """Data goes nowhere and nothing says so, as on a network file system whose server is gone."""

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        threading.Event().wait()


FAILURES = {
    "unreachable endpoint": (Sick, StoreError("s3://b/run cannot be reached", found="connection refused")),
    "revoked credentials": (Sick, RootError("s3://b/run refuses the credentials", found="403 AccessDenied")),
    "read-only root": (Sick, RootError("the checkpoint root cannot be written", found="EROFS")),
    "full disk": (FullDisk, StoreError("the disk of the root is full", found=os.strerror(errno.ENOSPC))),
}


@pytest.mark.parametrize("name", FAILURES)
def test_storage_fails_and_comes_back_training_goes_on_and_the_newest_step_is_committed(
    job: FakeJob, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind, error = FAILURES[name]
    sick = kind(job.root)
    monkeypatch.setattr(coordinator, "open_store", sick.open)
    with daemon_of(job) as daemon, caplog.at_level(logging.INFO):
        sick.error = error
        for step in range(1, 31):
            assert job.step(step, persist=step % 10 == 0), "the memory tier goes on"
            daemon.turn()
        turn_until(daemon, lambda: sick.calls > 5, "some attempts")
        status = job.directory.read_status()
        assert status is not None
        assert status.failures > 2
        assert error.problem in status.error
        assert status.lag >= 1
        assert len([r for r in caplog.records if "persist failed" in r.message]) == 1
        assert identities(job) == []

        sick.error = None
        turn_until(daemon, lambda: 30 in steps(job), "the newest persist step")
        turn_until(daemon, lambda: (s := job.directory.read_status()) and not s.error, "the error to go")
        assert len([r for r in caplog.records if "persist succeeded again" in r.message]) == 1
    for identity in identities(job):
        assert_bitwise(job, identity)


def test_two_slots_and_storage_that_fails_the_memory_tier_goes_on_and_the_newest_snapshot_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned slot of two would leave none to write for as long as storage fails."""
    monkeypatch.setattr(attempts, "BACKOFF_S", (3600.0,))
    job = FakeJob(str(tmp_path / "root"), slots=2)
    sick = FullDisk(job.root)
    monkeypatch.setattr(coordinator, "open_store", sick.open)
    sick.error = StoreError("the disk of the root is full")
    with daemon_of(job) as daemon:
        assert job.step(9)
        assert job.step(10, persist=True)
        turn_until(daemon, lambda: daemon.error, "the failure")
        for step in range(11, 19):
            daemon.turn()
            assert job.step(step), "no slot is pinned between two attempts"
        for _ in range(2):
            failures = daemon.attempts.failures
            job.directory.ask("retry-now")
            turn_until(daemon, lambda: daemon.attempts.failures > failures, "another failure")  # noqa: B023 -- called at once
            daemon.turn()
            assert job.step(step := step + 1)
        assert identities(job) == []
        sick.error = None
        job.directory.ask("retry-now")
        turn_until(daemon, lambda: identities(job), "the commit")
    assert identities(job) == [(1, step)], "step 10 is long overwritten: the newest takes its place"
    assert_bitwise(job, identities(job)[0])
    job.die()


def test_credentials_are_read_anew_after_a_failure(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    sick = Sick(job.root)
    monkeypatch.setattr(coordinator, "open_store", sick.open)
    with daemon_of(job) as daemon:
        job.step(10, persist=True)
        turn_until(daemon, lambda: 10 in steps(job), "a commit")
        sick.error = RootError("the token has expired")
        job.step(20, persist=True)
        turn_until(daemon, lambda: sick.calls > 2 and sick.opened > 2, "attempts with a store that is opened again")
        sick.error = None
        turn_until(daemon, lambda: 20 in steps(job), "the next commit")


def test_damaged_snapshot_in_memory_is_never_committed_and_the_next_one_is(job: FakeJob) -> None:
    job.step(10, persist=True)
    segment = job.ranks[1].segment
    with segment.path.open("r+b") as file:  # a bit flips in the slot, after the digests were taken
        slot = next(k for k, header in enumerate(segment.headers()) if header.is_complete)
        file.seek(segment.spec.data_at(slot) + 5)
        file.write(b"\xff\xfe")
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: daemon.persisting and daemon.persisting.floor == (1, 10), "step 10 to be given up")
        assert identities(job) == []
        assert "is damaged in the snapshot of step 10" in daemon.error
        job.step(20, persist=True)
        turn_until(daemon, lambda: identities(job) == [(1, 20)], "the next commit")
    assert_bitwise(job, (1, 20))


def test_pack_lost_between_index_and_commit_is_written_again(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashckpt.checkpoint.writer import commit as real

    lost: list[Path] = []

    def commit(store: Any, prefix: str, writers: Any, **more: Any) -> bool:
        if not lost:
            lost.append(next(Path(job.root).glob(f"{prefix}/*.fck")))
            lost[0].unlink()
        return real(store, prefix, writers, **more)

    monkeypatch.setattr(coordinator, "commit", commit)
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(1, 10)], "the commit")
    assert lost
    assert_bitwise(job, (1, 10))


def test_job_ended_while_storage_fails_memory_is_kept(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    sick = Sick(job.root)
    sick.error = StoreError("unreachable")
    monkeypatch.setattr(coordinator, "open_store", sick.open)
    job.step(10, persist=True)
    job.directory.request("ended")
    job.die()
    with daemon_of(job) as daemon:
        wait_for(daemon.turn, what="the daemon to run out of patience")
    assert len(job.directory.segments()) == 2


@pytest.mark.parametrize("stuck", [False, True], ids=["storage that fails", "storage that never answers"])
def test_sigterm_while_storage_is_gone_ends_the_daemon_after_its_grace_time_and_says_what_is_undone(
    job: FakeJob, stuck: bool, tmp_path: Path
) -> None:
    sick = Stuck(job.root) if stuck else FullDisk(job.root)
    sick.error = StoreError("the disk of the root is full")

    def prepare() -> None:
        logging.basicConfig(filename=tmp_path / "log", level=logging.INFO, force=True)
        vars(coordinator)["open_store"] = sick.open

    job.step(10, persist=True)
    times = service.DaemonTimeouts(linger_s=0.0, patience_s=0.5 if stuck else 600.0, grace_s=0.2)
    with forked(job, prepare=prepare, times=times) as daemon:
        wait_for(lambda: any(Path(job.root).glob("intents/*")), what="the flush to begin")
        daemon.kill(signal.SIGTERM)
        wait_for(lambda: daemon.poll() is not None, what="the daemon to end")
    assert os.WIFEXITED(daemon.status or 0)
    assert os.WEXITSTATUS(daemon.status or 0) == (40 if stuck else 41)
    said = (tmp_path / "log").read_text()
    assert "persister stopped before step 10 of generation 1 was committed" in said
    assert ("did not answer in time" if stuck else "the disk of the root is full") in said
    assert identities(job) == []
    with daemon_of(job) as successor:
        turn_until(successor, lambda: identities(job) == [(1, 10)], "the next daemon to finish")
    assert_bitwise(job, (1, 10))


def test_memory_of_a_daemon_that_persists_is_bounded_by_its_parts(tmp_path: Path) -> None:
    """192 MiB in two slots; the private memory of the process grows by less than 40 MiB."""
    job = FakeJob(str(tmp_path / "root"), shapes={"w": (3072, 16384)})
    try:
        job.step(10, persist=True)
        with forked(job, times=service.DaemonTimeouts()) as daemon:
            peak = first = 0
            end = time.monotonic() + 60
            while 10 not in steps(job):
                assert time.monotonic() < end
                peak = max(peak, _private_kib(daemon.pid))
                first = first or peak
            assert peak - first < 40 << 10, f"{first} KiB at first, {peak} KiB at most"
    finally:
        job.die()


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def test_a_root_that_was_emptied_is_said_once_and_written_again(job: FakeJob, caplog: pytest.LogCaptureFixture) -> None:
    with daemon_of(job) as daemon:
        job.step(5, persist=True)
        turn_until(daemon, lambda: steps(job) == [5], "the first commit")
        root = Path(stores.open_store(job.root).url)
        root.rename(root.with_name("away"))
        for count in (1, 2):
            job.step(5 + 5 * count, persist=True)
            turn_until(daemon, lambda: len(steps(job)) == count, "a commit on the emptied root")  # noqa: B023 -- called here
    assert caplog.text.count("is no longer the root that this job has written to") == 1
    assert daemon.attempts.failures == 1


def test_nothing_is_written_to_another_file_system_in_place_of_the_root(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(stores.open_store(job.root).url)
    with daemon_of(job) as daemon:
        job.step(5, persist=True)
        turn_until(daemon, (root / "LATEST").exists, "all of the first commit")
        turn_until(daemon, lambda: [*root.glob("catalog/step-*")], "what housekeeping writes after it")
        daemon.history.close()  # else it may be between its look at the claim and its write
        device = root.stat().st_dev
        monkeypatch.setattr(root_records, "_device", lambda _: device + 1)
        root.rename(away := root.with_name("away"))
        job.step(10, persist=True)
        turn_until(daemon, lambda: daemon.attempts.failures > 2, "attempts that are refused")
        assert "another file system" in daemon.error
        assert "mount it again" in daemon.error
        assert [str(path) for path in root.rglob("*") if path.is_file()] == []
        shutil.rmtree(root, ignore_errors=True)
        away.rename(root)
        monkeypatch.setattr(root_records, "_device", lambda _: device)
        turn_until(daemon, lambda: steps(job) == [5, 10], "the commit after it was mounted again")
        assert not daemon.error
