"""The same script under plain python, torchrun and dlrun: killed in step 5, it goes on from step 4 in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm
from support.agents import pretend_agent
from support.paths import TESTS
from support.ranks import wait_for

SCRIPT = TESTS / "support" / "launched.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DLRUN = ["-m", "flashckpt.daemon.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]


def launch(words: list[str], root: Path, out: Path) -> int:
    out.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(
        [sys.executable, *words, str(SCRIPT), str(root), str(out)], env=environment, check=False, timeout=110
    )
    return done.returncode


@pytest.mark.parametrize(("words", "lives"), [([], 2), (TORCHRUN, 2), (DLRUN, 1)], ids=["python", "torchrun", "dlrun"])
def test_a_killed_script_goes_on_from_memory(words: list[str], lives: int, tmp_path: Path, shm_dir: Path) -> None:
    codes = [launch(words, tmp_path / "root", tmp_path / "out") for _ in range(lives)]
    assert codes[-1] == 0
    assert 0 not in codes[:-1]
    lines = (tmp_path / "out" / "r0").read_text().split("\n")
    assert [line for line in lines if line.startswith("life")] == ["life 1", "life 5"]
    steps = [line.split()[0] for line in lines if line and not line.startswith("life")]
    assert steps == [str(n) for n in range(1, 9)]
    wait_for(lambda: not list(shm_dir.glob("*/*/control")), what="the memory of ended jobs to be removed")


FORGETFUL = """
import sys, torch
from flashckpt import Checkpointer
model = torch.nn.Linear(3000, 3000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = Checkpointer(sys.argv[1], snapshot_every=1, job="t")
ckpt.track(model=model, optimizer=optimizer)
report = ckpt.restore()
print("restored", report.step if report else 0)
step = report.step if report else 0
while True:  # a snapshot that comes before its memory is skipped
    step, skipped = step + 1, ckpt.stats.get("skipped", 0)
    ckpt.step(step)
    if ckpt.stats.get("skipped", 0) == skipped:
        break
print("took", step)
"""


def test_a_script_that_ends_in_the_middle_of_a_copy_without_close_keeps_the_whole_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))  # no daemon is needed for this
    expected = "restored 0"
    program = tmp_path / "program.py"
    program.write_text(FORGETFUL)
    for _ in range(2):
        done = warm.run([str(program), str(tmp_path / "root")], tmp_path)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        expected = done.stdout.splitlines()[-1].replace("took", "restored")
