"""`flashckpt watch` and `flashckpt top`: what they say of a job that runs, has stopped, or is on another machine."""

from __future__ import annotations

import json
import os
import pty
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.daemons import daemon_of, turn_until
from support.memory import ended, fork
from support.memory_tier import FakeJob

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.history import ENDED, STOPPED, SessionRecord, write_session
from flashckpt.cli import main as cli
from flashckpt.console import top, watch
from flashckpt.console.watch import WatchedJob, changes
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.dashboard.gather import PageSource
from flashckpt.shm.control import Control
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

Captured = pytest.CaptureFixture[str]
RECORD = SessionRecord(
    generation=1, token="a", job="run7", host="node0", begun_s=time.time(), updated_s=time.time(), step=40
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(tmp_path / "root")
    write_session(made, RECORD)
    return made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    """A job with step 10 committed and 15 in memory."""
    made = FakeJob(str(tmp_path / "root"))
    with daemon_of(made) as daemon:
        made.step(10, persist=True)
        turn_until(daemon, lambda: list_checkpoints(open_store(made.root)), "a commit")
        made.step(15)
        daemon.turn()
        daemon.history.close()
    yield made
    made.die()


def run(*words: str, capsys: Captured) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        cli.main(list(words))
    return int(done.value.code or 0), capsys.readouterr().out


def watched(*words: str, capsys: Captured) -> tuple[int, Any]:
    code, out = run("watch", *words, "--json", capsys=capsys)
    return code, json.loads(out)


def test_a_step_and_a_commit_that_are_there_already_end_it_at_once(job: FakeJob, capsys: Captured) -> None:
    assert watched(job.root, "--committed", "10", capsys=capsys)[0] == 0
    code, found = watched("fake", "--committed", "11", "--timeout", "0", capsys=capsys)
    assert (code, found["reached"], found["committed"], found["end"]) == (124, False, [1, 10], "")


def test_it_waits_for_what_comes(job: FakeJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look of `watch` lets the job go on by itself, as it would on another machine."""
    later: list[Any] = []

    def sleep(_: float) -> None:
        later.pop()()

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(watch, "time", clock)
    with daemon_of(job) as daemon:

        def commits() -> None:
            job.step(20, persist=True)
            turn_until(daemon, lambda: len(list_checkpoints(open_store(job.root))) == 2, "a commit")

        later += [commits, lambda: None]
        code, found = watched(job.root, "--commit", capsys=capsys)
        assert (code, found["committed"], later) == (0, [1, 20], [])
        control = Control.open(job.directory.control_path, rows=1)
        row = control.row(0)
        row.pid, row.generation, row.step = os.getpid(), 1, 20

        def trains() -> None:
            row.step = 30

        later += [trains]
        assert watched(job.root, "--step", "30", capsys=capsys)[0] == 0
        control.close()


@pytest.mark.parametrize(("end", "code"), [(ENDED, 0), (STOPPED, 1)])
def test_the_end_of_a_job_elsewhere_is_read_from_its_root(store: Store, end: str, code: int, capsys: Captured) -> None:
    write_session(store, replace(RECORD, end=end))
    assert watched(store.url, capsys=capsys)[0] == code
    assert watched(store.url, "--step", "40", capsys=capsys)[0] == 0  # done before that
    assert watched(store.url, "--step", "41", capsys=capsys)[0] == 1
    assert watched(store.url, "--commit", capsys=capsys)[0] == 1


def test_a_job_that_nobody_hears_of_and_a_root_that_is_gone_are_said(store: Store, tmp_path: Path) -> None:
    source = PageSource(store.url)
    write_session(store, replace(RECORD, updated_s=time.time() - 400))
    silent = watch.state_of(source, WatchedJob())
    assert (silent.problem, silent.end) == ("nothing was heard of it for 7 min", "")
    write_session(store, replace(RECORD, error="no room"))
    assert watch.state_of(source, WatchedJob()).problem == "persisting fails: no room"
    (tmp_path / "root").rename(tmp_path / "aside")
    (tmp_path / "root").write_text("")
    gone = watch.state_of(source, WatchedJob(generation=1, step=40, committed=SnapshotId(1, 40)))
    assert gone.problem.startswith("the root cannot be read")
    assert (gone.step, gone.committed) == (40, (1, 40))


def test_what_changes_is_said_once() -> None:
    first = WatchedJob(generation=1, step=10, committed=SnapshotId(1, 5))
    assert list(changes(WatchedJob(), first)) == ["generation 1 runs at step 10", "step 5 of generation 1 is committed"]
    assert list(changes(first, first._replace(step=11))) == []
    failing = first._replace(problem="persisting fails: x")
    assert list(changes(first, failing)) == ["persisting fails: x"]
    assert list(changes(failing, first._replace(step=12))) == ["it continues at step 12"]
    assert list(changes(first, first._replace(end=STOPPED, step=12))) == ["stopped at step 12"]


# -- top -------------------------------------------------------------------------------------------------------------


def text_of(document: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    shown = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115 -- nowhere
    shown.print(top.page(document, before))
    shown.file.close()
    return [line.rstrip() for line in shown.export_text().splitlines()]


def test_where_there_is_no_terminal_one_page_is_printed(job: FakeJob, capsys: Captured) -> None:
    code, out = run("top", "fake", capsys=capsys)
    lines = out.splitlines()
    assert (code, lines[0].split()[0]) == (0, "RUNNING")
    assert "in memory 15.g1   on storage 10.g1" in out
    assert any(line.split()[:1] == ["10.g1"] and "committed" in line for line in lines)
    assert json.loads(run("top", "fake", "--json", capsys=capsys)[1])["job"]["job"] == "fake"


def test_a_finished_job_is_shown_by_what_its_root_remembers(store: Store) -> None:
    write_session(store, replace(RECORD, end=STOPPED))
    lines = text_of(PageSource(store.url).document())
    assert any("stopped" in line and "at step 40, generation 1, on node0" in line for line in lines)


def test_a_thousand_ranks_and_hostile_names_stay_on_one_page_of_80_columns(job: FakeJob) -> None:
    document = PageSource(job.root).document()
    rank = {"pid": 5, "silent_s": 1.0, "is_paused": False, "has_ended": False}
    document["ranks"] = [rank | {"rank": k, "step": 90 if k == 700 else 100} for k in range(1000)]
    document["curves"] = [{"generation": 1, "points": {"l\x1b[31m" * 30: [(1, 2.5)], "loss": [(1, 0.5)]}}]
    before = document | {"now_s": document["now_s"] - 4.0, "ranks": [rank | {"rank": 0, "step": 90}]}
    lines = text_of(document, before)
    assert max(map(len, lines)) <= 80
    assert len(lines) < 40, "\n".join(lines)
    assert any(line.split()[:3] == ["700", "90", "10"] for line in lines)
    assert "999 of 1000 ranks here at step 100; farthest behind:" in lines
    assert "2.50 steps/s" in " ".join(lines)
    assert "\x1b" not in "".join(lines)


def test_in_a_terminal_it_is_live_and_q_leaves_it_as_it_was(job: FakeJob) -> None:
    outer, inner = pty.openpty()

    def live() -> None:
        for fd in (0, 1, 2):
            os.dup2(inner, fd)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
        os.environ["TERM"] = "xterm"
        top.EVERY_S = 0.05
        with pytest.raises(SystemExit) as done:
            cli.main(["top", "fake"])
        assert not done.value.code

    before = termios.tcgetattr(inner)
    pid, seen = fork(live), bytearray()

    def read() -> None:
        while b"\x1b[?1049l" not in seen:  # back from the other screen
            seen.extend(os.read(outer, 4096))
            if seen.count(b"RUNNING") >= 2:  # it was drawn again
                os.write(outer, b"q")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert ended(pid) == 0
    reader.join(20)
    assert b"\x1b[?1049h" in seen
    assert termios.tcgetattr(inner) == before
    os.close(outer)
    os.close(inner)
