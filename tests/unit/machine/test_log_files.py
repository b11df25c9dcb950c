"""The daemon's log lies in memory: it is turned over before it grows large, and every writer follows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import wait_for

from flashckpt.daemon.machine import logs
from flashckpt.daemon.machine.logs import LogCopy, turn_over


@pytest.fixture
def streams(shm_dir: Path) -> Iterator[list[int]]:
    """Two descriptors of a log, as standard output and standard error of a daemon are."""
    first = os.open(shm_dir / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    made = [first, os.dup(first)]
    yield made
    for fd in made:
        os.close(fd)


def test_a_large_log_becomes_the_one_before_and_writers_follow(shm_dir: Path, streams: list[int]) -> None:
    path, before = shm_dir / "daemon.log", shm_dir / "daemon.log.1"
    os.write(streams[1], b"0123456789")
    assert not turn_over(path, streams=streams, limit=10), "not larger than the limit"
    os.write(streams[1], b"!")
    assert turn_over(path, streams=streams, limit=10)
    os.write(streams[0], b"out ")
    os.write(streams[1], b"err, and more")
    assert (before.read_bytes(), path.read_bytes()) == (b"0123456789!", b"out err, and more")
    assert path.stat().st_mode & 0o777 == 0o600
    assert turn_over(path, streams=streams, limit=10)
    assert (before.read_bytes(), path.read_bytes()) == (b"out err, and more", b""), "two files at most"


def test_a_stream_that_is_no_log_of_ours_is_left_alone(shm_dir: Path, streams: list[int]) -> None:
    os.write(streams[0], b"0123456789!")
    assert not turn_over(shm_dir / "missing.log", streams=streams, limit=10)
    other = shm_dir / "other.log"
    other.write_text("of somebody else")
    assert not turn_over(other, streams=streams, limit=10)
    assert other.read_text() == "of somebody else"
    (shm_dir / "daemon.log").unlink()
    assert not turn_over(shm_dir / "daemon.log", streams=streams, limit=10), "the job's directory has gone"


def test_the_log_is_copied_whole_through_a_turn_and_after_its_folder_has_gone(
    shm_dir: Path, tmp_path: Path, streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "COPY_S", 0.001)
    path, copy = shm_dir / "daemon.log", tmp_path / "persister.log"
    os.write(streams[0], b"before\n")
    log = LogCopy(path)
    log.follow(str(tmp_path))
    wait_for(lambda: copy.exists() and copy.read_bytes() == b"before\n", what="the first copy")
    os.write(streams[0], b"last of the old\n")
    turn_over(path, streams=streams, limit=1)
    os.write(streams[1], b"first of the new\n")
    wait_for(lambda: copy.read_bytes().endswith(b"new\n"), what="the new log")
    path.unlink()
    os.write(streams[1], b"after the end of the job directory\n")
    log.close()
    assert copy.read_text().splitlines() == [
        "before", "last of the old", "first of the new", "after the end of the job directory"
    ]  # fmt: skip


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_next_persister_goes_on_with_the_copy(
    shm_dir: Path, tmp_path: Path, streams: list[int], is_turned: bool
) -> None:
    path = shm_dir / "daemon.log"
    for number in range(2):
        os.write(streams[0], b"of %d\n" % number)
        log = LogCopy(path)
        log.follow(str(tmp_path))
        log.close()
        if is_turned:
            turn_over(path, streams=streams, limit=1)
    assert (tmp_path / "persister.log").read_text() == "of 0\nof 1\n"


def test_a_short_job_has_its_log_copied_and_a_folder_that_is_not_there_is_named_once(
    shm_dir: Path, tmp_path: Path, streams: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    os.write(streams[0], b"all of it\n")
    for folder in (tmp_path, tmp_path / "none"):
        log = LogCopy(shm_dir / "daemon.log")
        log.follow(str(folder))
        log.close()
    assert (tmp_path / "persister.log").read_text() == "all of it\n"
    assert not (tmp_path / "none").exists()
    assert [one for one in caplog.messages if "persister.log cannot be written (No such file" in one] == caplog.messages
