"""What is blamed and what is final before a job has trained: commands that are not there, ranks that leave too early."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from flashckpt.daemon.launcher import cli
from flashckpt.daemon.launcher.failure import (
    FailureReport,
    WorkerExit,
    first_failure,
    is_of_stop,
    is_wrong_command,
    left_before,
)
from flashckpt.daemon.launcher.options import CommandError
from flashckpt.daemon.zygote import worker

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2"
TRUE = "ValueError: x"


def ended(rank: int, code: int, at_ms: int, summary: str = "") -> WorkerExit:
    at_ns = at_ms * 1_000_000
    return WorkerExit(local_rank=rank, rank=rank, pid=100 + rank, code=code, at_ns=at_ns, summary=summary)


@pytest.mark.parametrize("form", ["script", "module", "program", "run-path"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_command_that_is_not_there_is_refused_before_anything_is_started(
    form: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("")
    (tmp_path / "there").write_text("#!/bin/sh\n")
    (tmp_path / "there").chmod(0o700)
    words = {
        "script": ["there.py" if is_there else "nope.py", "--lr", "1"],
        "module": ["-m", "there" if is_there else "nope", "x"],
        "program": ["--no-python", "./there" if is_there else "./there.py"],  # which may not be executed
        "run-path": ["--run-path", "there.py" if is_there else "nope.py"],
    }[form]
    before = list(sys.path)
    args = cli.parse_args(words)
    if is_there:
        cli._refuse_missing(args)
    else:
        with pytest.raises(CommandError, match="there is no") as caught:
            cli._refuse_missing(args)
        assert caught.value.exit_code == 2
    assert sys.path == before
    assert "there" not in sys.modules


@pytest.mark.parametrize("words", [["sh"], ["os"], ["xml.dom"], [os.fspath(Path(__file__).parent)]])
def test_what_is_found_elsewhere_is_left_to_the_interpreter(words: list[str]) -> None:
    flag = ["--no-python"] if words == ["sh"] else [] if "/" in words[0] else ["-m"]
    cli._refuse_missing(cli.parse_args([*flag, *words]))


@pytest.mark.parametrize("code", [0, 1, 2, 3, 41, 126, 127, 137, -9, -15])
@pytest.mark.parametrize("step", [-1, 0, 7])
@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("ran_s", [1.0, 3600.0])
def test_code_of_a_wrong_command_line_is_final_before_the_first_step_of_the_job(
    code: int, step: int, has_trained: bool, ran_s: float
) -> None:
    report = FailureReport(first=ended(0, code, 1), host="a", cause="x", step=step)
    wanted = code in (2, 126, 127) and step < 0 and not has_trained and ran_s < 60
    assert is_wrong_command(report, has_trained=has_trained, ran_s=ran_s) == wanted


@pytest.mark.parametrize(("left_ms", "order"), [*itertools.product((0, 990, 1010, 60_000), range(3))])
def test_rank_that_left_with_0_is_blamed_for_lost_connections_and_for_nothing_else(left_ms: int, order: int) -> None:
    """Its end may be seen a little after the errors that it caused; one that ended well long after them had no part in it."""
    exits = [ended(0, 1, 500, CLOSED), ended(1, 0, left_ms), ended(2, 1, 600, CLOSED)]
    exits = exits[order:] + exits[:order]
    first = first_failure(exits)
    assert first.rank == 0
    assert [one.rank for one in left_before(first, exits)] == ([1] if left_ms < 1500 else [])
    assert not first_failure([*exits, ended(3, 1, 700, TRUE)]).is_echo


@pytest.mark.parametrize(
    ("code", "summary", "wanted"),
    [
        *((code, "", True) for code in (-15, -2, -10, -1, -3, 143, 130, 138)),
        *((code, "", False) for code in (-9, -11, -6, 137, 139, 1, 2, 33)),
        (1, "RuntimeError: DataLoader worker (pid 12) is killed by signal: Terminated. ", True),
        (1, "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", True),
        (130, "KeyboardInterrupt: ", True),
        (1, CLOSED, True),
        (1, "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ", False),
        (1, "RuntimeError: DataLoader worker (pid 12) is killed by signal: Segmentation fault. ", False),
        (1, TRUE, False),
        (10, "ConfigError: x", False),
    ],
)
def test_only_what_a_stop_signal_can_have_done_counts_as_part_of_a_stop(code: int, summary: str, wanted: bool) -> None:
    assert is_of_stop(FailureReport(first=ended(0, code, 1, summary), host="a", cause="x")) is wanted


RESET = """  File "/x/torch/utils/data/dataloader.py", line 1291, in _try_get_data
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 370, in _recv
ConnectionResetError: [Errno 104] Connection reset by peer"""


@pytest.mark.parametrize(
    ("trace", "wanted"), [(RESET, False), (RESET + "\n/torch/distributed/", True), (RESET[80:], True), ("", True)]
)
def test_a_connection_to_a_loader_worker_is_none_to_another_rank(trace: str, wanted: bool) -> None:
    """Else a dead worker looks like the end of a rank on another node."""
    item = replace(ended(0, 1, 1, "ConnectionResetError: [Errno 104] Connection reset by peer"), traceback=trace)
    assert item.is_echo == wanted


def test_a_loaders_handler_does_not_disturb_the_report_of_an_error_and_what_it_says_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises in the main thread when a worker has ended: before the report, and while the error file is written."""

    def raises(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    def interrupted(*args: Any, **kwargs: Any) -> str:
        signal.raise_signal(signal.SIGCHLD)
        return json.dumps(*args, **kwargs)

    monkeypatch.setattr(worker, "json", SimpleNamespace(dumps=interrupted))
    path = tmp_path / "error.json"
    before = signal.signal(signal.SIGCHLD, raises)
    try:
        worker._report({"error_file": str(path), "stderr": ""}, ConnectionResetError("reset"))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert "reset" in path.read_text()
    monkeypatch.setattr(signal, "signal", mock.Mock(side_effect=[RuntimeError("worker 7"), None]))
    assert str(worker._undisturbed(ConnectionResetError("reset"))) == "worker 7"


def test_a_loaders_handler_that_raises_as_a_report_begins_is_what_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    raised = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    monkeypatch.setattr(worker, "_run_script", mock.Mock(side_effect=ConnectionResetError("reset")))
    begin = mock.Mock(side_effect=[raised, mock.DEFAULT], return_value=raised)
    monkeypatch.setattr(worker, "_undisturbed", begin)
    request = {"argv": ["x"], "module": False, "error_file": str(path), "stderr": ""}
    assert worker.run_recorded(request) == 1
    assert "DataLoader worker" in path.read_text()
