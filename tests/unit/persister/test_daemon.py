"""The persisting daemon: what is committed, when, and what a killed or fenced one leaves behind."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemons import assert_bitwise, daemon_of, steps, turn_until
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import coordinator, metrics
from flashckpt.daemon.persister.flush import Flush
from flashckpt.errors import StoreError
from flashckpt.restore import gather
from flashckpt.storage.factory import open_store


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
    assert_bitwise(job, (1, 10))
    status = job.directory.read_status()
    assert status is not None
    assert (status.committed, status.failures, status.lag) == ((1, 10), 0, 0)


def test_a_commit_is_in_the_status_before_the_slots_are_released(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a commit does not wait for the unmapping of slots, which takes a while where they are large."""
    said: list[tuple[SnapshotId | None, str] | None] = []
    close = Flush.close

    def noted(flush: Flush) -> None:
        status = job.directory.read_status()
        said.append((status.committed, status.error) if status else None)
        close(flush)

    monkeypatch.setattr(Flush, "close", noted)
    with daemon_of(job) as daemon:
        daemon.attempts.failed(StoreError("the disk is full"), 1)
        job.step(10, persist=True)
        turn_until(daemon, lambda: steps(job) == [10] and said, "the commit")
    assert said == [((1, 10), "")], "and the failure before it is over"


def test_root_emptied_while_no_persister_runs_next_one_does_not_hide_it_from_a_restore(job: FakeJob) -> None:
    """It reads the root before the ranks do, and finds nothing: that something was committed there stays known."""
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [10], "the commit")
    shutil.rmtree(job.root)
    job.step(11)
    job.step(12)
    job.step(13)  # step 10 is no longer there to be persisted again
    for _ in range(2):
        with daemon_of(job) as daemon:
            daemon._introduce()
            daemon.turn()
        status = job.directory.read_status()
        assert status is not None
        assert status.committed is None
        assert gather._committed(job.directory) == (1, 10)


def test_daemon_process_runs_without_torch() -> None:
    code = "import flashckpt.daemon.persister.service, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_job_that_ended_cleanly_is_persisted_and_leaves_no_memory(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    job.directory.ensure_daemon()
    job.step(10, persist=True)
    wait_for(lambda: steps(job) == [10], what="the commit")
    job.step(15)
    job.directory.request("ended")
    job.die()
    around = job.directory.path.parent  # the daemon renames the directory, then removes its files
    wait_for(lambda: not [p for p in around.iterdir() if "fake" in p.name], what="the job directory to go")
    assert steps(job) == [10, 15]


def test_all_ranks_killed_newest_common_snapshot_is_persisted_and_memory_kept(job: FakeJob) -> None:
    job.step(5)
    job.ranks[0].snapshot(1, 7, persist=True)
    job.die()
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [5], "the commit")
        assert wait_for(daemon.turn, what="the daemon to end")
    assert_bitwise(job, (1, 5))
    assert len(job.directory.segments()) == 2


def test_persist_now_request_persists_a_snapshot_of_no_persist_step(job: FakeJob) -> None:
    job.step(5)
    with daemon_of(job) as daemon:
        daemon.turn()
        assert steps(job) == []
        job.directory.request("persist-now")
        turn_until(daemon, lambda: not job.directory.request_path("persist-now").exists(), "the request")
    assert steps(job) == [5]


def test_persist_now_while_training_goes_on_persists_once_not_every_snapshot(job: FakeJob) -> None:
    job.step(5)
    job.directory.request("persist-now")
    with daemon_of(job) as daemon:
        for step in range(6, 40):
            daemon.turn()
            assert job.step(step)
        turn_until(daemon, lambda: not job.directory.request_path("persist-now").exists(), "the request")
        for step in range(40, 45):
            daemon.turn()
            job.step(step)
    assert len(steps(job)) == 1
    job.directory.request("persist-now")
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: 44 in steps(job), "the second request")


def test_another_run_claimed_the_generation_nothing_is_persisted(job: FakeJob) -> None:
    from flashckpt.checkpoint.root_records import claim_generation
    from flashckpt.core.lineage import Generation

    store = open_store(job.root)
    assert claim_generation(store, Generation(number=1, token="other"))
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: "belongs to another run" in daemon.error, "the fence")
        assert store.folders("") == ["generations"]
        job.restart(2, SnapshotId(1, 10))
        turn_until(daemon, lambda: steps(job) == [10], "the commit under a generation of our own")


def test_newer_generation_on_the_root_fences_the_older_daemon(job: FakeJob) -> None:
    from flashckpt.checkpoint.root_records import claim_generation
    from flashckpt.core.lineage import Generation

    store = open_store(job.root)
    assert claim_generation(store, Generation(number=7, token="newer"))
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: "generation 7 was claimed" in daemon.error, "the fence")
        assert store.list("step") == []


def test_segments_of_an_earlier_layout_go_once_the_new_world_has_a_common_snapshot(job: FakeJob) -> None:
    job.step(10)
    job.die()
    after = FakeJob(job.root, world=3, generation=2, parent=SnapshotId(1, 10))
    try:
        with daemon_of(after) as daemon:
            daemon.turn()
            after.ranks[0].snapshot(2, 15, persist=False, parent=SnapshotId(1, 10))
            after.ranks[1].snapshot(2, 15, persist=False, parent=SnapshotId(1, 10))
            daemon.turn()
            assert len(job.directory.segments()) == 5
            after.ranks[2].snapshot(2, 15, persist=False, parent=SnapshotId(1, 10))
            turn_until(daemon, lambda: len(job.directory.segments()) == 3, "the retirement")
    finally:
        after.die()


def test_metrics_on_loopback_only_where_asked_for(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        daemon.turn()
        assert daemon.endpoint is None
    monkeypatch.setenv("FLASHCKPT_METRICS_PORT", "0")
    monkeypatch.delenv("FLASHCKPT_METRICS_HOST", raising=False)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [10], "the commit")
        job.step(15)
        turn_until(daemon, lambda: daemon.numbers()["snapshot_step"] == 15, "the next snapshot")
        turn_until(daemon, lambda: daemon.numbers()["committed_step"] == 10, "word of the commit")
        assert daemon.endpoint is not None
        text = urllib.request.urlopen(f"http://127.0.0.1:{daemon.endpoint.port}/metrics").read().decode()
    labels = '{job="fake",node="0"}'
    for line in (
        f"flashckpt_committed_step{labels} 10.0",
        f"flashckpt_snapshot_step{labels} 15.0",
        f"flashckpt_lag_persist_steps{labels} 0.0",
        f"flashckpt_failing{labels} 0.0",
        f"flashckpt_failures_total{labels} 0.0",
        "# HELP flashckpt_commits_total Checkpoints committed, as seen by this daemon.",
        "# TYPE flashckpt_segment_bytes gauge",
    ):
        assert line in text.splitlines(), text


def test_metrics_listen_on_the_address_that_was_asked_for_and_one_that_is_none_costs_only_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Nothing:
        def numbers(self) -> dict[str, float]:
            return {}

    monkeypatch.setenv("FLASHCKPT_METRICS_PORT", "0")
    addresses = {}
    for host in ("", "127.0.0.3", "0.0.0.0", "no such host"):
        monkeypatch.setenv("FLASHCKPT_METRICS_HOST", host)
        endpoint = metrics.serve(Nothing(), job="x", node=0)
        addresses[host] = None if endpoint is None else endpoint._server.server_address[0]
        if endpoint is not None:
            endpoint.close()
    assert addresses == {"": "127.0.0.1", "127.0.0.3": "127.0.0.3", "0.0.0.0": "0.0.0.0", "no such host": None}
    assert "no such host cannot be used" in caplog.text


def test_log_lines_carry_generation_rank_and_step(job: FakeJob) -> None:
    job.directory.ensure_daemon()
    job.step(10, persist=True)
    wait_for(lambda: steps(job) == [10], what="the commit")
    job.directory.request("ended")
    log = job.directory.path / "daemon.log"

    def lines() -> str:
        return log.read_text()

    wait_for(lambda: "committed after" in lines(), what="the line")
    assert re.search(r"INFO \[gen 1 \| rank 0 \| step 10\] wrote 0\.0 MB of 2 ranks in 1 packs in", lines())
    assert re.search(r"INFO \[gen 1 \| rank - \| step 10\] committed after", lines())
    job.die()
    wait_for(lambda: not job.directory.path.exists(), what="the daemon to end")


def test_snapshot_abandoned_by_a_restore_is_not_persisted_any_more(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.step(5, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [5], "the first commit")
        job.step(10, persist=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coordinator, "missing_writers", lambda store, prefix, writers: [99])  # it waits
            turn_until(daemon, lambda: daemon.persisting and daemon.persisting.flush, "the flush of step 10")
            job.restart(2, SnapshotId(1, 5))
            turn_until(daemon, lambda: daemon.persisting and not daemon.persisting.flush, "its end")
        assert steps(job) == [5]
        job.step(8, persist=True)
        turn_until(daemon, lambda: steps(job) == [5, 8], "the commit of the new generation")
    assert_bitwise(job, (2, 8))


def test_candidate_abandoned_while_storage_fails_gives_its_slot_back(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: str, **options: object) -> object:
        raise StoreError("unreachable")

    with pytest.MonkeyPatch.context() as patch, daemon_of(job) as daemon:
        patch.setattr(coordinator, "open_store", refuse)
        job.step(10, persist=True)
        turn_until(daemon, lambda: daemon.error and job.ranks[0].segment.busy(), "the candidate")
        job.restart(2, SnapshotId(1, 5))
        turn_until(daemon, lambda: not job.ranks[0].segment.busy(), "the slot")
