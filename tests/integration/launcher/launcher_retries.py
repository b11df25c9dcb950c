"""Whole jobs that fail: dlrun starts them again as often as the table of docs/launching.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.dlrun import run_dlrun

from flashckpt.daemon.launcher.budget import RESTARTS

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("body", "code", "starts", "words"),
    [
        ("from flashckpt.errors import ReplicaMismatchError\nraise ReplicaMismatchError('x')", 17, 1, "exit code 17"),
        ("import sys; sys.exit(12)", 12, 1, "exit code 12"),
        ("import os, sys; sys.exit(41 if os.environ['FLASHCKPT_RESTART'] < '2' else 12)", 12, 3, "since this may pass"),
        ("from flashckpt.errors import DamagedError\nraise DamagedError('x')", 33, 2, "the same error"),
        ("import sys; sys.exit(9)", 1, RESTARTS + 1, f"not restarting: all {RESTARTS} restarts were used"),
    ],
)
def test_dlrun_retries_what_the_table_says_without_being_asked_to(
    tmp_path: Path, body: str, code: int, starts: int, words: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(body)
    found, output = run_dlrun(tmp_path, path)
    assert (found, output.count("started rank 0 pid")) == (code, starts), output
    assert words in output
