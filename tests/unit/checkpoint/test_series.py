"""Curves that a loop logs: bounded, on the root after memory is gone, and nothing that somebody else wrote is believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemons import daemon_of, turn_until
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.checkpoint import history
from flashckpt.checkpoint.history import added, read_history, read_series, write_series
from flashckpt.checkpoint.root_records import claim_generation
from flashckpt.core.records import seal
from flashckpt.shm import logged_values
from flashckpt.shm.logged_values import LoggedValue, append
from flashckpt.storage.factory import open_store


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(str(tmp_path / "root"))
    claim_generation(open_store(fake.root), fake.record)
    yield fake
    fake.die()


def curves(job: FakeJob) -> list[dict[str, list[tuple[int, float]]]]:
    store = open_store(job.root)
    return [read_series(store, one.key) for one in read_history(store)]


def test_what_each_session_logs_is_on_the_root_after_its_end(job: FakeJob) -> None:
    for step in (1, 2):
        append(job.directory.path, LoggedValue(1, step, "loss", 1 / step))
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: curves(job) == [{"loss": [(1, 1.0), (2, 0.5)]}], "the first values")
        turn_until(daemon, lambda: not logged_values.waiting(job.directory.path), "the lines to be forgotten")
        append(job.directory.path, LoggedValue(1, 3, "loss", 0.25))
        job.restart(2, None)
        append(job.directory.path, LoggedValue(2, 3, "loss", 0.75))
        job.directory.request("ended")
        job.die()
        assert wait_for(daemon.turn, what="the end of the daemon")
    assert curves(job) == [{"loss": [(1, 1.0), (2, 0.5), (3, 0.25)]}, {"loss": [(3, 0.75)]}]
    assert logged_values.waiting(job.directory.path) == []


def test_a_persister_that_died_between_its_look_and_its_write_loses_nothing(job: FakeJob) -> None:
    with daemon_of(job) as daemon:
        append(job.directory.path, LoggedValue(1, 1, "loss", 4.0))
        turn_until(daemon, lambda: curves(job) == [{"loss": [(1, 4.0)]}], "the first value")
    append(job.directory.path, LoggedValue(1, 2, "loss", 3.0))
    logged_values.take(job.directory.path)
    append(job.directory.path, LoggedValue(1, 3, "loss", 2.0))
    assert [one.step for one in logged_values.waiting(job.directory.path)] == [2, 3]
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: curves(job) == [{"loss": [(1, 4.0), (2, 3.0), (3, 2.0)]}], "all")


def test_curves_and_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_POINTS", 10)
    monkeypatch.setattr(history, "MOST_NAMES", 2)
    points: history.Points = {}
    for step in range(1, 501):
        points = added(points, [("a", step, 0.5), (f"name {step}", step, 1.0)])
    assert points.keys() == {"a", "name 1"}
    assert 5 <= len(points["a"]) <= 10
    steps = [step for step, _ in points["a"]]
    assert (steps[0], steps[-1], steps) == (1, 500, sorted(steps))


def test_more_lines_than_fit_are_not_kept(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_values, "MOST_BYTES", 40)
    kept = [append(job.directory.path, LoggedValue(1, step, "loss", 1.0)) for step in range(9)]
    assert kept == [True] * 3 + [False] * 6


def test_what_cannot_reach_the_root_takes_a_bounded_part_of_memory(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that fails for hours: what is taken again and again does not pile up beside what is logged."""
    monkeypatch.setattr(logged_values, "MOST_BYTES", 40)
    for step in range(100):
        append(job.directory.path, LoggedValue(1, step, "loss", 1.0))
        logged_values.take(job.directory.path)
    assert sum(path.stat().st_size for path in job.directory.path.glob("values*")) < 3 * 40
    logged_values.forget(logged_values.take(job.directory.path))
    assert append(job.directory.path, LoggedValue(1, 100, "loss", 1.0)) or logged_values.take(job.directory.path).values


def test_lines_and_records_of_others_are_left_out(job: FakeJob, tmp_path: Path) -> None:
    lines = ['[1, 2, "loss", 3]', "{}", "[[[[", '[1, "x", "loss", 3]', '[1, 2, "loss", "nan"]', '[1, 2, "lo']
    (job.directory.path / "values").write_text("\n".join(lines))
    assert [one[:3] for one in logged_values.waiting(job.directory.path)] == [(1, 2, "loss"), (1, 2, "loss")]
    store = open_store(tmp_path)
    store.put(
        "history/000001-a.values",
        seal({"points": {"a": [[1], [2.0]], "b": 7, "c": [[1, 2], [1.0]], "d": [["x"], [1]]}}),
    )
    assert read_series(store, "history/000001-a") == {"a": [(1, 2.0)], "b": [], "c": [], "d": []}
    store.put("history/000001-a.values", b"torn")
    assert read_series(store, "history/000001-a") == read_series(store, "history/000009-none") == {}


def test_curves_go_with_their_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_SESSIONS", 1)
    store = open_store(tmp_path)
    for number in (1, 2):
        record = history.SessionRecord(generation=number, token="aa", job="run")
        history.write_session(store, record)
        write_series(store, record.key, {"loss": [(1, json.loads("1.0"))]})
    history.forget_oldest(store)
    assert sorted(info.key for info in store.list("history/")) == ["history/000002-aa", "history/000002-aa.values"]
