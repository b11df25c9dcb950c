"""Who owns the persister sees every way in which it can be missing, says it once, and replaces it."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.dlrun import alive
from support.ranks import wait_for

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm import persister_owner
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory
from flashckpt.shm.persister_owner import PersisterOwner
from flashckpt.shm.persister_process import last_words

PYTHON = sys.executable
LOG = logging.getLogger("flashckpt.test")
STAND_IN = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(persister_owner.__file__).parents[2])!r})
from flashckpt.shm.job_directory import DaemonStatus, JobDirectory
directory = JobDirectory(Path(sys.argv[-1]))
lease = directory.hold_daemon()
while lease is not None and directory.anyone_alive():
    if not (directory.path / "hang").exists():
        before = directory.read_status() or DaemonStatus()
        directory.write_status(DaemonStatus(failures=before.failures, pid=os.getpid(), updated_ns=time.time_ns()))
    time.sleep(0.02)
"""


class Owned:
    """A job whose persister is a program of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = JobDirectory.open("owned")
        self.live = self.directory.hold_live()
        self.owner = PersisterOwner(self.directory, LOG)
        (folder / "stand_in.py").write_text(STAND_IN)
        self.program(f'exec {PYTHON} {folder}/stand_in.py "$@"')

    def program(self, script: str) -> None:
        path = self.folder / "new"
        path.write_text(f"#!/bin/sh\necho >> {self.folder}/starts\n{script}\n")
        path.chmod(0o755)
        path.replace(self.folder / "python")

    @property
    def status(self) -> DaemonStatus:
        return self.directory.read_status() or DaemonStatus()

    @property
    def starts(self) -> int:
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def until(self, condition: Callable[[], object], what: str) -> None:
        def once() -> object:
            self.owner.tick()
            return condition()

        wait_for(once, what=what)

    def running(self, other_than: int = 0) -> bool:
        pid = self.status.pid
        return bool(pid) and pid != other_than and self.directory.daemon_alive() and alive(pid)


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Owned]:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(persister_owner, "LOOK_S", 0.02)
    monkeypatch.setattr(persister_owner, "STOPPED_S", 0.4)
    monkeypatch.setattr(persister_owner, "_WAITS_S", (0.0, 0.1, 0.2, 0.4))
    caplog.set_level(logging.WARNING)
    job = Owned(tmp_path)
    yield job
    job.live.close()  # the stand-in ends
    job.owner.close()
    if job.status.pid not in (0, os.getpid()) and alive(job.status.pid):
        os.kill(job.status.pid, signal.SIGKILL)


CANNOT_START = {
    "says why": ("echo 'ConfigError: X is wrong' >&2; exit 10", "ConfigError: X is wrong"),
    "error of several lines": (
        "printf 'X is wrong\\n  found:    7\\n  exit code 10\\n' >&2; exit 10",
        "X is wrong; found: 7",
    ),
    "missing module": (f"exec {PYTHON} -c 'import no_such_module'", "ModuleNotFoundError: No module named"),
    "no interpreter": ("exec /no/such/python", "not found"),
    "dies in silence": ("kill -SEGV $$", "its log says nothing"),
    "ends at once with 0": ("exit 0", "its log says nothing"),
}


@pytest.mark.parametrize(("code", "said"), [(2, b""), (254, b"\n"), (0, b"\n")])
def test_shell_that_cannot_fork_is_said_and_tried_again(
    owned: Owned, code: int, said: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """dash and bash at a limit on processes: they print no pid, and some an empty line."""
    tries: list[int] = []

    def refused(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        tries.append(1)
        return subprocess.CompletedProcess([], code, said)

    with monkeypatch.context() as limit:
        limit.setattr("flashckpt.shm.job_directory.subprocess.run", refused)
        owned.until(lambda: len(tries) >= 3, "some tries")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"cannot be started: /bin/sh ended with exit code {code}" in line
    owned.until(owned.running, "a persister")


@pytest.mark.matrix
@pytest.mark.parametrize("why", CANNOT_START)
def test_persister_that_cannot_start_is_one_line_a_status_and_fewer_and_fewer_starts(
    owned: Owned, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, words = CANNOT_START[why]
    owned.program(script)
    owned.directory.write_status(DaemonStatus(committed=SnapshotId(1, 5), failures=3, pid=1))
    asked_ns = owned.directory.ask("retry-now")
    owned.until(lambda: owned.starts >= 4 and owned.status.failures >= 6, "some starts")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert words in line
    assert "exit code 10\n" not in line
    assert words in owned.status.error
    assert owned.status.committed == SnapshotId(1, 5)
    assert owned.status.answered_ns >= asked_ns, "who waits is answered"
    assert owned.status.pid == 0
    owned.program(f'exec {PYTHON} {owned.folder}/stand_in.py "$@"')
    owned.until(owned.running, "one that starts")
    owned.until(lambda: "runs again" in caplog.text, "the line that says so")


def test_request_to_retry_ends_the_pause_before_the_next_start(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persister_owner, "_WAITS_S", (1e6,))
    owned.program("exit 3")
    owned.until(lambda: owned.status.failures, "the failure")
    starts = owned.starts
    for _ in range(3):
        owned.owner.tick()
    assert owned.starts == starts
    owned.directory.ask("retry-now")
    owned.until(lambda: owned.starts > starts, "another start")


@pytest.mark.matrix
@pytest.mark.parametrize(("how", "times"), [(signal.SIGKILL, 1), (signal.SIGKILL, 3), (signal.SIGSTOP, 2)])
def test_persister_that_was_killed_or_stopped_is_replaced_and_never_two_run(
    owned: Owned, how: int, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    owned.until(owned.running, "the first one")
    for number in range(1, times + 1):
        before = owned.status.pid
        os.kill(before, how)
        owned.until(lambda: owned.running(before), "the next one")  # noqa: B023
        assert not alive(before), "it could wake"
        assert owned.status.failures == number
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1
    assert ("is stopped" if how == signal.SIGSTOP else "ended") in lines[0]


def test_persister_that_runs_and_hangs_is_replaced_later_and_each_time_later_still(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned.owner._patience_s = 0.8
    owned.until(owned.running, "the first one")
    before = owned.status.pid
    (owned.directory.path / "hang").touch()
    owned.until(lambda: not alive(before), "its end")
    (owned.directory.path / "hang").unlink()
    owned.until(lambda: owned.running(before), "the next one")
    assert owned.owner._patience_s == 1.6


def test_another_process_with_the_persisters_number_is_not_killed(
    owned: Owned, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    lock = owned.directory.hold_daemon()
    assert lock is not None
    try:
        os.kill(stranger.pid, signal.SIGSTOP)
        owned.directory.write_status(DaemonStatus(pid=stranger.pid, updated_ns=1))
        owned.until(lambda: "cannot be replaced from here" in caplog.text, "the line")
        assert stranger.poll() is None
    finally:
        lock.close()
        stranger.kill()
        stranger.wait()


def test_time_in_which_the_owner_itself_was_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("flashckpt.shm.persister_owner.time.monotonic", lambda: now)
    from flashckpt.shm.persister_owner import Silence

    silence, status = Silence(), DaemonStatus(pid=1, updated_ns=10**18)
    assert silence.see(status) == 0
    now = 3600.0
    assert silence.see(status) <= 2
    for _ in range(20):
        now += 1
        silence.see(status)
    assert silence.seconds >= 20
    assert silence.see(DaemonStatus(pid=1, updated_ns=1)) == 0, "a clock that was set back is no silence either"


def test_failure_of_storage_is_a_warning_once_and_its_end_another(
    owned: Owned, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = owned.directory.hold_daemon()
    assert lock is not None
    try:
        for number in range(1, 9):
            failing = 2 <= number <= 6
            owned.directory.write_status(
                DaemonStatus(
                    committed=SnapshotId(1, number),
                    failures=number,
                    error=f"disk {number} is full\n  found:    0 B\n  exit code 41" if failing else "",
                    pid=os.getpid(),
                    updated_ns=number,
                )
            )
            seen = owned.owner._looked_s
            owned.until(lambda: owned.owner._looked_s > seen, "a look")  # noqa: B023
    finally:
        lock.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "failures so far: 2" in lines[0]
    assert "disk 2 is full; found: 0 B; it is retried" in lines[0]
    assert "of step 2" in lines[0]
    assert lines[1] == "persisting works again: the newest checkpoint on storage is of step 7"


def test_a_start_that_the_system_refuses_is_a_failure_too(
    owned: Owned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(subprocess, "run", refuse)
    owned.until(lambda: owned.status.failures >= 2, "two failures")
    assert caplog.text.count("no more processes") == 1


def test_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_text("Traceback (most recent call last):\n  File x\n    raise\nValueError: no\n\n")
    assert last_words(log) == "ValueError: no"
    assert last_words(log, log.stat().st_size + 9) == "ValueError: no", "turned over meanwhile"
    start = log.stat().st_size
    assert last_words(log, start) == ""
