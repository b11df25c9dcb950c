"""flashckpt.integrations.ray on a real cluster of this machine: a worker killed, another number of them (`make test-frameworks`)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray (make test-frameworks)")
Lines = dict[int, str]


def said(folder: Path, rank: int) -> tuple[list[str], Lines]:
    """Return what a rank said of each start, and of each step, the last time it trained it."""
    lines = (folder / f"rank{rank}.txt").read_text().splitlines()
    starts = [line for line in lines if line.startswith("-")]
    return starts, {int(number): rest for number, rest in (x.split(maxsplit=1) for x in lines) if number != "-"}


def joined(ranks: list[Lines], step: int) -> tuple[list[int], float]:
    """Return the samples of a step over all ranks, and its mean loss."""
    words = [rank[step].split() for rank in ranks]
    samples = sorted(int(number) for word in words for number in word[0].split(","))
    return samples, sum(float.fromhex(word[1]) for word in words) / len(words)


def check_restart(starts: list[str]) -> None:
    """Before the kill, after it from memory alone, and both by the id of the root: 7 is Slurm's."""
    assert starts[0].endswith("None")
    assert re.search(r"restored step [1-7] of generation 1: .* from memory in .*\(same layout\)", starts[1]), starts
    assert "storage" not in starts[1]
    assert all(re.match(r"- 7 root-[0-9a-f]{16} ", start) for start in starts), starts


@needs_ray
@pytest.mark.timeout(600)
def test_ray_restarts_workers_from_memory_and_continues_on_one_and_four(tmp_path: Path) -> None:
    """A worker is killed while the other one is in all_reduce: the run ends as the unbroken one."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests/integration/frameworks/ray_job.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=580,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "this process is not a worker of Ray Train" in done.stdout
    assert (tmp_path / "killed" / "killed").exists()
    assert (tmp_path / "ray" / "killed-root").is_dir()
    whole = [said(tmp_path / "whole", rank)[1] for rank in range(2)]
    killed = [said(tmp_path / "killed", rank) for rank in range(4)]
    assert all(sorted(lines) == list(range(1, 21)) for lines in whole)
    for rank, (starts, lines) in enumerate(killed[:2]):
        check_restart(starts[:2])
        assert {step: lines[step] for step in range(1, 13)} == {step: whole[rank][step] for step in range(1, 13)}
    assert "restored step 12 of generation 2" in killed[0][0][2]
    assert "another layout" in killed[0][0][2]
    assert all("restored step 16 of generation 3" in starts[-1] for starts, _ in killed)
    for step in range(13, 21):
        ranks = [lines for _, lines in killed[: 1 if step < 17 else 4]]
        (expected, mean), (samples, loss) = joined(whole, step), joined(ranks, step)
        assert samples == expected
        assert loss == pytest.approx(mean, rel=1e-4)
