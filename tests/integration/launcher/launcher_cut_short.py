"""Whole jobs whose files in shared memory another process cuts short: what dies of it is started again, nothing is lost."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest
from support.dlrun import ENGINE, dlrun, first_steps, traces

from flashckpt.shm.job_directory import memory_root

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("what", ["control", "*.seg"])
def test_ranks_whose_memory_is_cut_short_end_with_the_state_of_an_unbroken_run(tmp_path: Path, what: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENGINE)
    with dlrun(tmp_path, "--nproc-per-node=2", "--max-restarts=3", script, tmp_path, 60, 0.02) as launch:
        launch.until(partial(first_steps, tmp_path, 0, 2), "training")
        launch.until(lambda: len((tmp_path / "trace0").read_text().splitlines()) > 10, "step 10")
        (job,) = (path.parent for path in memory_root().glob("*/control"))
        for path in job.glob(what):
            os.truncate(path, 0)
        assert launch.wait() == 0
        output = launch.output
    lives = {line.split()[0] for line in (tmp_path / "trace0").read_text().splitlines()}
    if what == "control":
        assert "SIGBUS" in output
        assert output.count("was truncated by another process") == 1
        assert len(lives) > 1, "a rank ended and was started again"
    else:  # found before it is touched, unless just then a snapshot was being copied
        assert "was truncated by another process" in output or "SIGBUS" in output
    for rank in traces(tmp_path, 2):
        assert sorted(rank) == list(range(1, 61))
        assert all(len(losses) == 1 for losses in rank.values()), "a step that was trained twice had the same loss"
    assert not re.search(r"Traceback", output)
