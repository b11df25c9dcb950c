"""The daemon's log lies in memory: it is turned over before it grows large, and every writer follows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.daemon.machine.logs import turn_over


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
