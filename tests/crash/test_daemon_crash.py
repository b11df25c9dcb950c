"""A daemon killed, doubled or frozen at the worst moment: nothing half visible, nothing lost, the next one finishes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.daemons import (
    QUICK,
    assert_all_bitwise,
    assert_bitwise,
    daemon_of,
    forked,
    identities,
    steps,
    turn_until,
)
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.checkpoint import indexes
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.checkpoint.writer import write_together
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import flush, service
from flashckpt.errors import StoreError
from flashckpt.faults import CRASH_POINTS
from flashckpt.shm.lease import Lease
from flashckpt.storage.factory import open_store

POINTS = [name for name in CRASH_POINTS if name.split(".")[0] in ("persist", "generation", "store")]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(str(tmp_path / "root"), keep_last=1)
    yield fake
    fake.die()


@pytest.mark.parametrize("point", POINTS)
def test_daemon_killed_at_point_nothing_half_visible_and_the_next_one_finishes(job: FakeJob, point: str) -> None:
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(1, 10)], "the first commit")
    job.restart(2, SnapshotId(1, 10))  # so that a claim is made, too
    job.step(20, persist=True)
    with forked(job, crash_at=point) as doomed:
        doomed.wait_killed()
    assert set(identities(job)) <= {(1, 10), (2, 20)}
    assert identities(job), "the last commit is always there"
    assert_all_bitwise(job)

    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(2, 20)], "the second commit, and the first one pruned")
        turn_until(daemon, lambda: daemon.persisting is not None and daemon.persisting.flush is None, "the end of work")
        turn_until(daemon, lambda: not list(Path(job.root).glob("step-000000010*/*.fck")), "the data of step 10 to go")
    assert_bitwise(job, (2, 20))
    assert not [
        path for path in Path(job.root).rglob("*.tmp*") if "step-000000020" not in str(path)
    ] or point.startswith(("store", "persist.during-pack")), "only what the sweep removes by age may be left"


@pytest.mark.parametrize(
    ("point", "slots"),
    [
        ("persist.during-pack", 3),
        ("persist.during-pack:2", 3),
        ("persist.after-pack", 3),
        ("persist.after-pack", 2),
        ("persist.before-index", 2),
    ],
)
@pytest.mark.parametrize("most", [0, 1 << 20], ids=["an object each", "one object"])
def test_daemon_killed_between_the_bytes_of_ranks_the_next_one_finishes(
    tmp_path: Path, point: str, slots: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind one rank's bytes and before the other's; with two slots the first ones are given back behind a pack."""
    monkeypatch.setattr(flush, "TOGETHER_BYTES", most)
    job = FakeJob(str(tmp_path / "root"), slots=slots)
    try:
        job.step(10, persist=True)
        with forked(job, crash_at=point) as doomed:
            doomed.wait_killed()
        assert identities(job) == []
        assert not list(Path(job.root).rglob("*.idx"))
        there = sorted(path.name for path in Path(job.root).rglob("*.fck"))
        assert there == ["r00000-00001.p0.fck"] * (not point.startswith("persist.during")) or not most
        with daemon_of(job) as daemon:
            turn_until(daemon, lambda: identities(job) == [(1, 10)], "the commit")
        names = ["r00000-00001.p0.fck"] if most else ["r00000.p0.fck", "r00001.p0.fck"]
        assert sorted(path.name for path in Path(job.root).rglob("*.fck")) == names
        assert_bitwise(job, (1, 10))
    finally:
        job.die()


@pytest.mark.parametrize("point", ["ranges.before-put", "persist.before-index", "persist.before-manifest"])
def test_daemon_killed_about_values_in_ranges_the_next_one_finishes(
    job: FakeJob, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "RANGED_FROM", 1)
    job.step(10, persist=True)
    with forked(job, crash_at=point) as doomed:
        doomed.wait_killed()
    assert identities(job) == []
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(1, 10)], "the commit")
    assert_bitwise(job, (1, 10))
    store = open_store(job.root)
    assert [info.key for info in store.list(prefix_of(1, 10)) if info.key.endswith(".values.fck")]
    assert len(read_manifest(store, prefix_of(1, 10), values=False).ranged) == len(job.ranks)


def test_index_that_cannot_be_written_packs_are_not_written_again(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One index for both ranks; until it is there, neither of them has written."""
    real, refusals, packs = indexes.put_indexes, [StoreError("no"), StoreError("no")], list[int]()

    def refused(*args: Any) -> None:
        if refusals:
            raise refusals.pop()
        real(*args)

    def counted(pins: Any, *args: Any) -> object:
        packs.append(len(pins))
        return write_together(pins, *args)

    monkeypatch.setattr(flush, "put_indexes", refused)
    monkeypatch.setattr(flush, "write_together", counted)
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(1, 10)], "the commit")
    assert (refusals, packs) == ([], [len(job.ranks)])
    assert_bitwise(job, (1, 10))
    names = sorted(path.name for path in Path(job.root).rglob("*.idx"))
    assert names == ["r00000-00001.idx"]


def test_daemon_killed_after_intent_and_slots_overwritten_intent_is_given_up(job: FakeJob) -> None:
    job.step(10, persist=True)
    with forked(job, crash_at="persist.after-intent") as doomed:
        doomed.wait_killed()
    for step in (15, 20, 25):
        assert job.step(step, persist=step == 25)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(1, 25)], "the commit of the next persist step")
    assert_bitwise(job, (1, 25))
    assert (1, 10) not in identities(job)


def test_daemon_killed_with_all_indexes_written_next_one_commits_without_the_slots(job: FakeJob) -> None:
    job.step(10, persist=True)
    with forked(job, crash_at="persist.before-manifest") as doomed:
        doomed.wait_killed()
    for step in (15, 20, 25):
        assert job.step(step)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(1, 10)], "the commit")
    assert_bitwise(job, (1, 10))


def test_second_daemon_of_a_directory_ends_at_once(job: FakeJob) -> None:
    with forked(job, times=service.DaemonTimeouts()):
        wait_for(job.directory.daemon_alive, what="the first daemon")
        assert service.main([str(job.directory.path)]) == 0


def test_two_daemons_at_once_exactly_one_commit_and_it_is_whole(job: FakeJob, tmp_path: Path) -> None:
    """As after a lock that did not hold: everything either of them writes may be repeated."""
    job.step(10, persist=True)
    other_lock = Lease(tmp_path / "other", create=True)
    other_lock.exclusive(0)
    second = service.Daemon(job.directory, other_lock, QUICK)
    try:
        with daemon_of(job) as first:
            for step in (20, 30, 40):
                turn_until(first, lambda: second.turn() or (first.persisting and second.persisting), "both")
                assert job.step(step, persist=True)
                turn_until(first, lambda: second.turn() or step in steps(job), "a commit")  # noqa: B023
    finally:
        second.close()
    assert_all_bitwise(job)
    assert (second.error, first.error) == ("", "")


def _stop_before_writing() -> None:
    """In the child: stop for good when the first slot is to be written, as a paused container or a lost VM does."""
    real, first = write_together, threading.Lock()

    def frozen(*args: Any, **kwargs: Any) -> object:
        if first.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **kwargs)

    mock.patch.object(flush, "write_together", frozen).start()  # in a child of its own, which ends with it


def test_daemon_frozen_across_a_restart_elsewhere_is_fenced_when_it_wakes(
    job: FakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation 1 freezes while it persists step 10; the job goes on from step 5 on another machine."""
    job.step(5, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: identities(job) == [(1, 5)], "the commit")
    job.step(10, persist=True)
    with forked(job, prepare=_stop_before_writing) as frozen:
        frozen.wait_stopped()
        elsewhere = tmp_path / "other-machine"
        elsewhere.mkdir()
        monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(elsewhere))
        after = FakeJob(job.root, generation=2, parent=SnapshotId(1, 5))
        try:
            after.step(8, persist=True)
            with daemon_of(after) as daemon:
                turn_until(daemon, lambda: (2, 8) in identities(job), "the commit elsewhere")
            frozen.kill(signal.SIGCONT)
            wait_for(lambda: (s := job.directory.read_status()) and "generation 2 was claimed" in s.error, what="fence")
        finally:
            after.die()
    assert (1, 10) not in identities(job)
    assert_bitwise(after, (2, 8))


def test_sigterm_while_a_flush_is_pending_finishes_it_first(job: FakeJob) -> None:
    job.step(10, persist=True)
    with forked(job, prepare=_stop_before_writing) as daemon:
        daemon.wait_stopped()
        daemon.kill(signal.SIGTERM)
        daemon.kill(signal.SIGCONT)
        wait_for(lambda: daemon.poll() is not None, what="the daemon to end")
        assert os.WIFEXITED(daemon.status or 0)
    assert identities(job) == [(1, 10)]
    assert_bitwise(job, (1, 10))


def test_temporary_files_of_a_killed_daemon_go_with_the_sweep(job: FakeJob) -> None:
    from flashckpt.checkpoint.sweeping import sweep

    job.step(10, persist=True)
    with forked(job, crash_at="persist.during-pack") as doomed:
        doomed.wait_killed()
    store = open_store(job.root)
    assert list(Path(job.root).rglob("*.tmp*"))
    sweep(store, older_than_s=-1)
    assert not list(Path(job.root).rglob("*.tmp*"))


def test_launcher_that_is_the_last_process_waits_for_the_flush(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PID 1 of a container: its end would kill the daemon."""
    from flashckpt.daemon.launcher.watch import is_last_process, wait_for_flush

    assert not is_last_process()
    monkeypatch.setenv("FLASHCKPT_WAIT_FLUSH", "1")
    assert is_last_process()
    job.step(5)
    job.directory.request("persist-now")
    assert not wait_for_flush(job.directory), "no daemon lives: it must not wait for ever"
    with forked(job, times=service.DaemonTimeouts()):
        wait_for(job.directory.daemon_alive, what="the daemon")
        assert wait_for_flush(job.directory, limit_s=30)
    assert_bitwise(job, (1, 5))
