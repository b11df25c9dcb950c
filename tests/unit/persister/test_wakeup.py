"""What wakes the daemon: a touched file at once by inotify, by polling where inotify cannot be had, said once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from pathlib import Path

import pytest
from watchdog.observers import Observer

from flashckpt.daemon.persister import wakeup as wakeup_module
from flashckpt.daemon.persister.wakeup import Wakeup


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


def test_reading_a_file_does_not_wake(tmp_path: Path) -> None:
    file = tmp_path / "r00000"
    file.write_text("x")
    with contextlib.closing(Wakeup([tmp_path])) as wakeup:
        wakeup.wait(0.2)
        file.read_text()
        assert not wakeup.wait(0.3)
        wakeup.wake()
        assert wakeup.wait(0.0)
