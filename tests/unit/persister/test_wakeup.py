"""What wakes the daemon: a touched file at once by inotify, by polling where inotify cannot be had, said once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.daemons import QUICK, identities
from support.memory_tier import FakeJob
from support.ranks import wait_for
from watchdog.observers import Observer

from flashckpt.checkpoint.writer import write_together
from flashckpt.daemon.persister import flush, service
from flashckpt.daemon.persister import wakeup as wakeup_module
from flashckpt.daemon.persister.wakeup import Wakeup
from flashckpt.shm.job_directory import DaemonStatus
from flashckpt.shm.persisted import await_persister


@pytest.mark.parametrize("polling", [False, True])
def test_touched_file_wakes(
    tmp_path: Path, polling: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if polling:

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, "inotify watch limit reached")

        monkeypatch.setattr(Observer, "schedule", refuse)
    file = tmp_path / "r00000"
    file.touch()
    with caplog.at_level(logging.WARNING), contextlib.closing(Wakeup([tmp_path], poll_s=0.05)) as wakeup:
        assert wakeup.is_polling is polling
        assert len([r for r in caplog.records if "inotify is not available" in r.message]) == polling
        end = time.monotonic() + 30
        woken = False
        while not woken and time.monotonic() < end:  # the first look of a polling observer may come late
            os.utime(file, ns=(time.time_ns(), time.time_ns()))
            woken = wakeup.wait(1.0)
        assert woken


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "inotify instance limit reached"), RuntimeError("no thread")])
@pytest.mark.parametrize("polls", [True, False])
def test_observer_that_cannot_even_be_made_costs_the_quick_wakeup_only(
    tmp_path: Path, error: Exception, polls: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(wakeup_module, "Observer", refuse)
    if not polls:
        monkeypatch.setattr(wakeup_module, "PollingObserver", refuse)
    with caplog.at_level(logging.WARNING), contextlib.closing(Wakeup([tmp_path], poll_s=0.05)) as wakeup:
        assert not wakeup.wait(0.0)
        wakeup.wake()
        assert wakeup.wait(0.0)
    assert len(caplog.records) == (1 if polls else 2)


IN_A_NAMESPACE = """
import os, sys, threading
from pathlib import Path
from flashckpt.daemon.persister.wakeup import Wakeup

wakeup = Wakeup([Path(sys.argv[1]), Path(sys.argv[2])], poll_s=0.05)
number, woken = 0, False
while not woken and number < 600:
    number += 1
    (Path(sys.argv[2]) / str(number)).touch()
    woken = wakeup.wait(0.05)
wakeup.close()
print(woken, wakeup.is_polling, threading.active_count(), sum("inotify" in os.readlink(f"/proc/self/fd/{fd}") for fd in held()))
"""
HELD = """
def held():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
"""


@pytest.mark.parametrize(("limit", "number"), [("instances", 0), ("watches", 0), ("watches", 1), ("watches", 2)])
def test_limits_of_the_kernel_cost_the_quick_wakeup_only_and_leave_nothing_behind(
    tmp_path: Path, limit: str, number: int
) -> None:
    """Lowered in a user namespace, since they are counted per user: with one watch the first of two folders has it."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    enter = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    lower = f'echo {number} > /proc/sys/user/max_inotify_{limit} && exec "$@"'
    if subprocess.run([*enter, lower, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no user namespaces")
    command = [sys.executable, "-c", HELD + IN_A_NAMESPACE, *map(str, folders)]
    done = subprocess.run([*enter, lower, "sh", *command], capture_output=True, text=True, check=True, timeout=100)
    keeps = limit == "watches" and number < 2 and [*map(int, version("watchdog").split("."))] < [7, 1]  # a descriptor
    assert done.stdout.split() == ["True", str(number < 2), "1", str(int(keeps))], done
    assert done.stderr.count("inotify is not available") == (number < 2)


def test_reading_a_file_does_not_wake(tmp_path: Path) -> None:
    file = tmp_path / "r00000"
    file.write_text("x")
    with contextlib.closing(Wakeup([tmp_path])) as wakeup:
        wakeup.wait(0.2)
        file.read_text()
        assert not wakeup.wait(0.3)
        wakeup.wake()
        assert wakeup.wait(0.0)


def test_the_end_of_a_write_wakes_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks once a minute here, and is asleep before the bytes are written: nothing else tells it of them."""
    monkeypatch.setattr(service, "SCAN_S", 60.0)
    monkeypatch.setattr(service, "BUSY_S", 60.0)
    job, asleep, real = FakeJob(str(tmp_path / "root")), threading.Event(), write_together

    def write(*args: Any, **options: Any) -> object:
        assert asleep.wait(30)
        return real(*args, **options)

    def wait(self: Wakeup, timeout_s: float) -> bool:
        flushing = daemon.persisting is not None and daemon.persisting.flush is not None
        asleep.set() if flushing else None
        return woken(self, timeout_s)

    woken = Wakeup.wait
    monkeypatch.setattr(flush, "write_together", write)
    monkeypatch.setattr(Wakeup, "wait", wait)
    lock = job.directory.hold_daemon()
    assert lock is not None
    daemon = service.Daemon(job.directory, lock, QUICK)
    job.step(10, persist=True)
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: identities(job) == [(1, 10)], what="the commit")
    finally:
        asleep.set()
        daemon.stop(0, None)
        job.die()
        thread.join(30)
    assert not thread.is_alive()


def test_who_waits_reads_a_status_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """Ten minutes are between two looks where nothing changes."""
    job = FakeJob(str(tmp_path / "root"))
    looked = threading.Event()

    def is_over(status: DaemonStatus | None) -> bool:
        looked.set()
        return status is not None and status.failures == 7

    found: list[bool] = []
    options = {"timeout_s": 30, "poll_s": 600.0}
    work = lambda: found.append(await_persister(job.directory, is_over, **options))  # noqa: E731 -- of a thread
    threading.Thread(target=work, daemon=True).start()
    assert looked.wait(30)
    job.directory.write_status(DaemonStatus(failures=7))
    wait_for(lambda: found == [True], what="the end of the wait")
    job.die()
