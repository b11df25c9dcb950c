"""The record of each session on the root: what a job cost is known after its memory is gone, whoever was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemons import daemon_of, forked, turn_until
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.checkpoint import history
from flashckpt.checkpoint.history import (
    SessionRecord,
    put_incident,
    read_history,
    read_incidents,
    summary,
    write_session,
)
from flashckpt.checkpoint.root_records import claim_generation
from flashckpt.core.incident import Incident
from flashckpt.core.records import seal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.history import SessionHistory
from flashckpt.shm.control import Control
from flashckpt.shm.incident_files import write_incident
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(str(tmp_path / "root"))
    yield fake
    fake.die()


def trained(job: FakeJob, step: int, *, restored: int = -1) -> None:
    """Fill the control rows as ranks that have trained up to a step."""
    control = Control.open(job.directory.control_path, rows=2)
    for rank in range(2):
        row = control.row(rank)
        row.clear()
        row.rank, row.pid, row.generation, row.step, row.restored_step = (
            rank,
            100 + rank,
            job.generation,
            step,
            restored,
        )
        row.entered, row.restore_started, row.restored, row.first_step = 10**9, 2 * 10**9, 3 * 10**9, 5 * 10**9
    control.close()


def sessions(job: FakeJob) -> list[SessionRecord]:
    return read_history(open_store(job.root))


def test_each_session_leaves_a_record_that_outlives_the_memory(job: FakeJob) -> None:
    trained(job, 12)
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: [one.committed for one in sessions(job)] == [(1, 10)], "the record of the commit")
        job.restart(2, SnapshotId(1, 10))
        trained(job, 15, restored=10)
        turn_until(daemon, lambda: len(sessions(job)) == 2, "the second session")
        line = {"cause": "SIGKILL, but by whom is not known", "rank": 1, "outcome": "restarted", "time": "now"}
        (job.directory.path / "ledger.jsonl").write_text(json.dumps(line) + "\n")
        turn_until(daemon, lambda: sessions(job)[-1].failure, "the line of the ledger")
        job.directory.request("ended")
        job.die()
        assert wait_for(daemon.turn, what="the end of the daemon")
    assert not job.directory.path.exists()
    first, second = sessions(job)
    assert (first.end, first.step, first.committed, first.parent) == ("stopped", 12, (1, 10), None)
    assert (second.end, second.step, second.restored_step, second.parent) == ("ended", 15, 10, (1, 10))
    assert (second.first_step_s, second.restore_s, second.failure) == (4.0, 1.0, line)
    found = summary([first, second])
    assert (found["restarts"], found["restarts_by_cause"], found["steps_lost"]) == (1, {line["cause"]: 1}, 2)
    assert found["down_s"] >= 4


def test_incidents_reach_the_root_once_it_takes_them_and_outlive_the_memory(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every write of the record, until the root has taken them; the oldest are forgotten there."""
    monkeypatch.setattr(history, "MOST_INCIDENTS", 2)
    store = open_store(job.root)
    for number in range(3):
        put_incident(store, f"20250101-00000{number}-0a1b2c.json", b"{}")
    full = True

    def put(store: Store, name: str, raw: bytes) -> None:
        if full:
            raise OSError(28, "no space left on device")
        put_incident(store, name, raw)

    monkeypatch.setattr("flashckpt.daemon.persister.history.put_incident", put)
    found = Incident(id="20261126-051500-0a1b2c", time="now", category="storage", what="full")
    trained(job, 12)
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: sessions(job), "the record")
        assert len(store.list(history.INCIDENTS)) == 2
        write_incident(job.directory.path, found)
        turn_until(daemon, lambda: daemon.history._problem, "an attempt that fails")
        full = False
        job.directory.request("ended")
        job.die()
        assert wait_for(daemon.turn, what="the end of the daemon")
    assert not job.directory.path.exists()
    assert read_incidents(store) == [found]


def test_a_failure_that_no_restart_followed_is_that_of_the_end(job: FakeJob) -> None:
    claim_generation(open_store(job.root), job.record)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: sessions(job), "the record")
        (job.directory.path / "ledger.jsonl").write_text(
            '{"cause": "exit code 1", "outcome": "gave up", "time": "now"}\n'
        )
        turn_until(daemon, lambda: sessions(job)[0].ended_by, "the line of the ledger")
    assert sessions(job)[0].failure == {}


def test_killed_while_it_writes_the_record_before_stays_and_the_next_persister_continues_it(job: FakeJob) -> None:
    trained(job, 7)
    job.step(5, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: [one.committed for one in sessions(job)] == [(1, 5)], "the first record")
    before = sessions(job)
    trained(job, 11)
    job.step(10, persist=True)
    with forked(job, crash_at="history.before-put") as doomed:
        doomed.wait_killed()
    assert sessions(job) == before
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: sessions(job)[0].committed == (1, 10), "the record")
    (after,) = sessions(job)
    assert (after.begun_s, after.step) == (before[0].begun_s, 11)


def test_nothing_is_written_to_a_root_that_is_not_the_jobs(job: FakeJob) -> None:
    with daemon_of(job) as daemon:
        daemon.turn()
        daemon.history.close()
        assert not Path(job.root, "history").exists(), "no generation is claimed there: it may be an empty mount point"
        claim_generation(open_store(job.root), replace(job.record, number=9, token="other"))
        job.restart(2, None)
        daemon.turn()
        daemon.history.close()
    assert not sessions(job), "a newer run has begun there"


def test_a_root_that_fails_costs_no_record(job: FakeJob) -> None:
    store = open_store(job.root)
    claim_generation(store, job.record)
    with daemon_of(job) as daemon:
        daemon.history._connect = lambda config: (_ for _ in ()).throw(OSError("no route to the root"))
        for number in (1, 2):
            job.restart(number, None)
            daemon.turn()
            daemon.history.close()
        daemon.history._connect = lambda config: open_store(config.root)
        job.restart(3, None)
        turn_until(daemon, lambda: [one.generation for one in sessions(job)] == [1, 2, 3], "all records")


def test_readers_leave_out_what_they_do_not_know_and_what_is_damaged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    known = SessionRecord(generation=1, token="aa", job="run", step=3)
    write_session(store, known)
    store.put("history/000002-bb", seal({"generation": 2, "token": "bb", "job": "run", "of a later release": [1]}))
    store.put("history/000003-cc", b"torn")
    store.put("history/notes.txt", b"of somebody else")
    assert read_history(store) == [known, SessionRecord(generation=2, token="bb", job="run")]


def test_the_oldest_sessions_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_SESSIONS", 2)
    store = open_store(tmp_path)
    for number in (999_999, 1_000_000, 1_000_001):
        write_session(store, SessionRecord(generation=number, token="aa", job="run"))
    history.forget_oldest(store)
    assert [one.generation for one in read_history(store)] == [1_000_000, 1_000_001]


def test_a_clean_end_is_no_restart_and_the_time_after_it_is_not_down() -> None:
    first = SessionRecord(generation=1, token="a", job="run", begun_s=100, updated_s=200, step=50, end="ended")
    second = SessionRecord(generation=2, token="b", job="run", begun_s=9000, updated_s=9100, restored_step=50, step=90)
    third = replace(second, generation=3, begun_s=9110, updated_s=9200, restored_step=85, first_step_s=10, step=95)
    found = summary([first, second, third])
    assert (found["restarts"], found["steps_lost"], found["down_s"]) == (1, 5, 20)
    assert found["goodput"] == pytest.approx(1 - (20 + 5 * 100 / 40) / 300)
    assert summary([])["goodput"] is None


def test_an_error_that_nobody_foresaw_keeps_nothing_from_being_persisted(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("on purpose")

    monkeypatch.setattr(SessionHistory, "_rows", fail)
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: daemon.persisting is not None and daemon.persisting.committed, "the commit")
        turn_until(daemon, lambda: "on purpose" in caplog.text, "the line")
    assert caplog.text.count("on purpose") == 1
