"""Callbacks and logs that fail: written down, counted, and training goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import request_of
from support.one_rank import agent_of_the_test, crash, opened  # noqa: F401 -- fixtures

from flashckpt import Checkpointer
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory


def raises(*_: object) -> None:
    raise ZeroDivisionError("of the user")


def leaves(*_: object) -> None:
    raise SystemExit(3)


def test_every_callback_may_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    ckpt = opened(tmp_path, model=model)
    ckpt.step(1)
    crash(ckpt)
    again = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    again.on_restore = again.on_snapshot = again.on_failure = again.on_commit = raises
    again.track(model=model)
    with caplog.at_level(logging.ERROR, logger="flashckpt"):
        report = again.restore()
        assert report is not None
        JobDirectory.open("t").write_status(DaemonStatus(committed=SnapshotId(1, 1)))
        again.step(2)
        assert again._session is not None
        again._session._stager.finish()
        again._session._failed(snapshot_of(again, 3), ValueError("discarded"))
    assert again.stats["callback_errors"] == 4
    for name in ("on_restore", "on_snapshot", "on_failure", "on_commit"):
        (record,) = [r for r in caplog.records if f"callback {name} failed" in r.message]
        assert record.exc_info is not None
        assert record.exc_info[0] is ZeroDivisionError, "with its traceback"
    again.step(3)
    crash(again)


def test_pauses_of_several_threads_overlap(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, model=torch.nn.Linear(2, 2))
    assert ckpt._session is not None
    row = ckpt._session._row
    evaluation, reading = ckpt.paused(), ckpt.paused()
    evaluation.__enter__()
    reading.__enter__()
    evaluation.__exit__(None, None, None)
    assert row.paused, "data is still waited for"
    reading.__exit__(None, None, None)
    assert not row.paused
    crash(ckpt)


def snapshot_of(ckpt: Checkpointer, step: int) -> Any:
    """Something that has the request of a snapshot."""
    from types import SimpleNamespace

    return SimpleNamespace(request=request_of(2, step), needs_other_plan=False)


def test_a_callback_that_exits_does_not_end_the_copy_thread_and_ends_the_program_from_step(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, model=torch.nn.Linear(2, 2))
    ckpt.on_snapshot = leaves
    for step in (1, 2, 3):  # a copy thread that had ended would never finish the next one
        ckpt.step(step)
    assert ckpt._session is not None
    ckpt._session._stager.finish()
    assert ckpt.stats["snapshots"] == 3
    assert ckpt.stats["callback_errors"] == 3
    ckpt.on_commit = leaves
    JobDirectory.open("t").write_status(DaemonStatus(committed=SnapshotId(1, 1)))
    with pytest.raises(SystemExit):
        ckpt.step(4)
    ckpt._session._stager.finish()
    assert ckpt.stats["snapshots"] == 4, "what was prepared before the callback is taken"
    crash(ckpt)


def test_the_copy_begins_after_everything_else_that_step_does(tmp_path: Path) -> None:
    """It wants the GIL, and would get it wherever `step()` reads a file, for up to 5 ms each time."""
    ckpt = opened(tmp_path, model=torch.nn.Linear(2, 2))
    session = ckpt._session
    assert session is not None
    begun: list[bool] = []
    ckpt.on_commit = lambda *_: begun.append(session._stager._prepared is None)
    JobDirectory.open("t").write_status(DaemonStatus(committed=SnapshotId(1, 1)))
    ckpt.step(1)
    assert begun == [False]
    session._stager.finish()
    assert ckpt.stats["snapshots"] == 1
    crash(ckpt)


def test_a_status_is_read_again_only_when_another_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = opened(tmp_path, model=torch.nn.Linear(2, 2))
    directory = JobDirectory.open("t")
    seen: list[tuple[int, int]] = []
    ckpt.on_commit = lambda *snapshot: seen.append(snapshot)
    reads: list[object] = []
    read = JobDirectory.read_status
    monkeypatch.setattr(JobDirectory, "read_status", lambda self: reads.append(self) or read(self))  # type: ignore[func-returns-value]
    file = directory.path / "daemon.msgpack"

    def write(committed: int, age_s: int) -> None:
        directory.write_status(DaemonStatus(committed=SnapshotId(1, committed)))
        os.utime(file, ns=(0, file.stat().st_mtime_ns - age_s * 10**9))

    write(1, age_s=5)
    for step in (1, 2, 3):
        ckpt.step(step)
    assert (len(reads), seen) == (1, [(1, 1)])
    write(2, age_s=3)
    ckpt.step(4)
    ckpt.step(5)
    assert (len(reads), seen) == (2, [(1, 1), (1, 2)])
    monkeypatch.setattr(
        "flashckpt.shm.job_directory._SETTLED_NS", 10**12
    )  # a moment ago: it may be written in place again
    write(3, age_s=2)
    ckpt.step(6)
    ckpt.step(7)
    assert (len(reads), seen[2:]) == (4, [(1, 3)])
    crash(ckpt)


class Full(logging.Handler):
    """A handler on a full disk that does not catch what it meets, as those of users do not."""

    lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        Full.lines += 1
        raise OSError(28, "No space left on device")


@pytest.fixture
def full() -> Iterator[None]:
    logger, handler = logging.getLogger("flashckpt"), Full()
    logger.addHandler(handler)
    level, Full.lines = logger.level, 0
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, full: None) -> None:
    model = torch.nn.Linear(2, 2)
    ckpt = opened(tmp_path, model=model)
    ckpt.on_snapshot = raises  # its report cannot be written either
    ckpt.step(1)
    assert ckpt._session is not None
    ckpt._session._stager.finish()
    ckpt._session._skip(2)
    ckpt.step(3)
    crash(ckpt)
    again = opened(tmp_path, model=model)
    assert again._session is not None
    assert again._session.outcome.report is not None
    crash(again)
    assert Full.lines > 4


@pytest.mark.matrix
def test_standard_streams_that_are_full_or_closed_end_nothing(tmp_path: Path) -> None:
    """A program of its own, whose output goes to /dev/full, and one that has closed both."""
    import os
    import subprocess
    import sys

    program = f"""
import os, sys, torch
from flashckpt import Checkpointer
if sys.argv[1] == "closed":
    sys.stdout.close(); sys.stderr.close()
def raises(*_): raise ZeroDivisionError
ckpt = Checkpointer({str(tmp_path)!r}, snapshot_every=1, job="t")
ckpt.on_snapshot = raises
ckpt.track(model=torch.nn.Linear(2, 2))
ckpt.restore()
for step in range(ckpt._session._last_step + 1, 4 + ckpt._session._last_step): ckpt.step(step)
ckpt._session.close()
os._exit(7)
"""
    for how in ("full", "closed"):
        with Path("/dev/full").open("w") as full:
            streams: dict[str, Any] = {"stdout": full, "stderr": full} if how == "full" else {}
            done = subprocess.run(
                [sys.executable, "-c", program, how], check=False, timeout=110, env=dict(os.environ), **streams
            )
        assert done.returncode == 7
