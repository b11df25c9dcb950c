"""Removal of dead jobs' memory: only what is dead, only when it may, and whole."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from support.memory import killed_at, restorable, spec_of, take

from flashckpt.core.lineage import Generation
from flashckpt.errors import JobInUseError, NoCheckpointError
from flashckpt.shm.gc import dead_memory, remove, remove_unused
from flashckpt.shm.job_directory import JobDirectory, memory_root
from flashckpt.shm.segment import Segment


def run_and_be_killed(job: str) -> JobDirectory:
    """A job that is SIGKILLed right after a snapshot: no handler runs, nothing is given back."""

    def rank() -> None:
        directory = JobDirectory.open(job)
        directory.write_generation(Generation(number=1))
        take(Segment.create(directory.segment_path(0, 5), spec_of(job=job)), 0, 10)

    killed_at("slot.after-complete", rank)
    return JobDirectory(memory_root() / job)


def test_a_job_killed_as_a_whole_leaves_only_what_gc_lists_and_removes() -> None:
    directory = run_and_be_killed("j1")
    (dead,) = dead_memory()
    assert (dead.job, dead.path, dead.is_expired) == ("j1", directory.path, False)
    assert dead.nbytes >= 3 << 20
    assert restorable(directory.segments()[0]) == [10], "listing removes nothing"
    remove(dead)
    assert list(memory_root().iterdir()) == []


def test_memory_of_a_dead_job_is_kept_for_a_day(monkeypatch: Any) -> None:
    directory = run_and_be_killed("j1")
    assert not dead_memory()[0].is_expired
    for path in (directory.path, *directory.path.rglob("*")):
        os.utime(path, (0, time.time() - 90_000))
    assert dead_memory()[0].is_expired
    monkeypatch.setenv("FLASHCKPT_KEEP_DEAD", "100000")
    assert not dead_memory()[0].is_expired


@pytest.mark.parametrize("what", ["nothing", "a segment", "a snapshot", "a record", "a rank"])
def test_what_a_refused_opening_leaves_is_removed_where_it_holds_nothing_and_nobody_uses_it(what: str) -> None:
    directory = run_and_be_killed("j1") if what == "a snapshot" else JobDirectory.open("j1")
    if what == "a segment":
        Segment.create(directory.segment_path(0, 5), spec_of(job="j1")).close()
    if what == "a record":
        directory.write_generation(Generation(number=1))
    if what != "a rank":
        directory.let_go()
    remove_unused(directory.path)
    assert list(memory_root().iterdir()) == ([] if what in ("nothing", "a segment") else [directory.path])
    remove_unused(memory_root() / "another")


def test_a_live_job_is_neither_listed_nor_removed() -> None:
    directory = JobDirectory.open("alive")
    assert dead_memory() == []
    with pytest.raises(JobInUseError, match="alive"):
        dead_memory("alive")
    directory.hold_live().close()
    lock = directory.hold_daemon()
    assert lock is not None
    assert dead_memory() == [], "its daemon is still at work"
    lock.close()
    assert [dead.job for dead in dead_memory()] == ["alive"]


def test_a_job_that_comes_to_life_after_it_was_listed_is_kept() -> None:
    directory = run_and_be_killed("j1")
    (dead,) = dead_memory()
    again = JobDirectory.open("j1")
    with pytest.raises(JobInUseError, match="was just started"):
        remove(dead)
    assert restorable(directory.segments()[0]) == [10]
    again.hold_live().close()


def test_an_unknown_job_is_an_error() -> None:
    with pytest.raises(NoCheckpointError, match="nothing-here"):
        dead_memory("nothing-here")


def test_a_removal_that_was_cut_short_is_finished() -> None:
    directory = run_and_be_killed("j1")
    directory.path.rename(directory.path.with_name(".j1.ended-123"))
    (dead,) = dead_memory()
    assert dead.is_expired
    remove(dead)
    assert list(memory_root().iterdir()) == []
