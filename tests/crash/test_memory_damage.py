"""What others do to a live job's memory and clock: said once and clearly, training goes on, nothing waits for ever."""

from __future__ import annotations

import logging
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from support.engine import net
from support.memory_tier import FakeJob
from support.one_rank import agent_of_the_test  # noqa: F401 -- a fixture

from flashckpt import Checkpointer
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, PersistError
from flashckpt.shm.control import PAGE, Control, RankAcks
from flashckpt.shm.inventory import scan
from flashckpt.shm.job_directory import JobDirectory


def test_a_row_with_a_damaged_counter_can_be_published_again(tmp_path: Path) -> None:
    path = tmp_path / "control"
    control = Control.open(path, rows=1)
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(b"\xff" * 512)
    row = control.row(0)
    row.generation = 3
    row.publish(RankAcks.of([SnapshotId(3, 7)]))
    assert row.complete == [(3, 7)]
    control.close()


def test_a_request_is_newer_than_what_was_asked_and_answered_before_the_clock_was_set_back(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = JobDirectory.open("t")
    first = directory.ask("retry-now")
    monkeypatch.setattr(time, "time_ns", lambda: first - 10**12)
    second = directory.ask("retry-now")
    assert first < second == directory.asked_ns("retry-now")
    assert directory.ask("retry-now", after=second + 10**12) > second + 10**12
    directory.let_go()


def test_a_damaged_record_names_the_way_out(shm_dir: Path) -> None:
    directory = JobDirectory.open("t")
    directory.write_generation(Generation(number=1))
    path = directory.path / "generation.msgpack"
    for raw in (b"", bytes([*path.read_bytes()[:-1], 0xC1]), struct.pack("q", 1) * 9):
        path.write_bytes(raw)
        with pytest.raises(DamagedError) as caught:
            directory.read_generation()
        assert "flashckpt forget --job t --apply" in caught.value.remedy
    directory.let_go()


def remove_while_it_is_used(path: Path) -> None:
    """Remove a folder in which others make files meanwhile."""
    end = time.monotonic() + 60
    while path.exists() and time.monotonic() < end:
        shutil.rmtree(path, ignore_errors=True)
    assert not path.exists()


def test_memory_that_is_removed_under_a_rank_is_said_once_and_wait_and_close_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=5, job="t")
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.restore()
    ckpt.step(1)
    ckpt.fence()
    remove_while_it_is_used(JobDirectory.open("t", create=False).path)
    for step in range(2, 6):
        ckpt.step(step)
        ckpt._alive()._stager.finish()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 1
    assert "removed this job's shared memory" in said[0]
    with pytest.raises(PersistError):
        ckpt.wait(0.1)
    ckpt.close()


def test_a_segment_that_cannot_be_read_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = FakeJob(str(tmp_path / "root"))
    job.step(1)
    path = job.directory.segments()[0]
    path.write_bytes(b"\0" * path.stat().st_size)
    for _ in range(3):
        scan(job.directory)
    assert caplog.text.count("is ignored") == 1
    job.die()
