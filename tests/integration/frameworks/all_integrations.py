"""flashckpt.integrations with the real frameworks: killed, restarted, on other numbers of ranks (`make test-frameworks`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.dlrun import run_dlrun
from support.paths import ROOT

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.storage.factory import open_store

PROGRAMS = ROOT / "tests/integration/frameworks"
STEPS = 21
"""Three epochs of 50 samples in steps of 8."""
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers (make test-frameworks)"
)

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs lightning (make test-frameworks)"
)
LIGHTNING = "lightning_job.py"


def run(folder: Path, world: int, *words: object, program: str = "hf_job.py") -> str:
    """Run the program under dlrun to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    code, output = run_dlrun(
        folder, "--nproc-per-node", world, PROGRAMS / program, folder, *words, deadline_s=500, fresh=True
    )
    assert code == 0, output
    return output


def lines(folder: Path, rank: int) -> dict[int, str]:
    """Return what a rank said of each step, the last time it trained it: samples and loss."""
    said = (folder / f"rank{rank}.txt").read_text().splitlines()
    return {int(line.split()[0]): line.split(maxsplit=1)[1] for line in said}


def newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint on the root."""
    return max(info.step for info in list_checkpoints(open_store(folder / "root")))


def steps(folder: Path, world: int) -> dict[int, tuple[list[int], float]]:
    """Return the samples and the mean loss of each step over all ranks."""
    ranks = [lines(folder, rank) for rank in range(world)]
    found = {}
    for step in sorted(set.intersection(*map(set, ranks))):
        words = [rank[step].split() for rank in ranks]
        samples = sorted(int(number) for word in words for number in word[0].split(","))
        found[step] = samples, sum(float.fromhex(word[1]) for word in words) / world
    return found


@needs_transformers
@pytest.mark.timeout(1100)
def test_trainer_whose_rank_is_killed_ends_as_the_unbroken_run(tmp_path: Path) -> None:
    run(tmp_path / "whole", 2, "--epochs", 3, "--drop", 0.1)
    output = run(tmp_path / "killed", 2, "--epochs", 3, "--drop", 0.1, "--kill-at", 11)
    assert "restored step 10 " in output, output
    assert newest_checkpoint(tmp_path / "killed") == STEPS  # 21 is no persist step
    for rank in range(2):
        whole = lines(tmp_path / "whole", rank)
        assert sorted(whole) == list(range(1, STEPS + 1))
        assert lines(tmp_path / "killed", rank) == whole


@needs_transformers
@pytest.mark.timeout(1100)
def test_trainer_with_sharded_parameters_whose_rank_is_killed_ends_as_the_unbroken_run(tmp_path: Path) -> None:
    """FSDP2 of accelerate, by `max_steps` instead of epochs."""
    words = ("--fsdp", "--steps", 9, "--drop", 0.1)
    run(tmp_path / "whole", 2, *words)
    output = run(tmp_path / "killed", 2, *words, "--kill-at", 5)
    assert "restored step 4 " in output, output
    for rank in range(2):
        whole = lines(tmp_path / "whole", rank)
        assert sorted(whole) == list(range(1, 10))
        assert lines(tmp_path / "killed", rank) == whole


@needs_transformers
@pytest.mark.timeout(1500)
def test_trainer_continues_on_one_rank_and_on_four(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    run(whole, 1, "--epochs", 3)
    expected = steps(whole, 1)
    reached = 0
    for world, last in ((2, 7), (1, 13), (4, STEPS)):  # no persist steps
        for file in moved.glob("rank*.txt"):
            file.unlink()
        run(moved, world, "--epochs", 3, "--persist-every", 4, *(["--stop-after", last] if last < STEPS else []))
        found = steps(moved, world)
        assert sorted(found) == list(range(reached + 1, last + 1))
        for step, (samples, loss) in found.items():
            assert samples == sorted(expected[step][0])
            assert loss == pytest.approx(expected[step][1], rel=1e-4)
        reached = last


ENDS = {
    "early-stop": "step 14 of 14 is on storage, the last one True, the best one False",
    "max-steps": "step 3 is on storage, again 3, trained False",
    "storage-fails": "storage is gone, closed 1 times",
    "stream": "the order of the training data cannot be resumed",
    "by-length": "this order of the training data cannot be resumed",
    "global-batch": "the global batch does not divide into micro-batches",
    "added-late": "the callback FlashCheckpoint was added to a Trainer that was there already",
}


@needs_transformers
@pytest.mark.timeout(600)
def test_trainers_that_end_early_fail_or_are_refused(tmp_path: Path) -> None:
    """The last step is on storage, not the best one; a failed commit is raised after everything is closed."""
    done = subprocess.run(
        [sys.executable, "-m", "integration.frameworks.hf_ends", str(tmp_path), *ENDS],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        check=False,
    )
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.partition(":")[0] in ENDS)
    assert found == ENDS, done.stderr


@needs_lightning
@pytest.mark.timeout(1100)
@pytest.mark.parametrize(("strategy", "kill"), [("ddp", 15), ("fsdp2", 5)])
def test_lightning_whose_rank_is_killed_ends_as_the_unbroken_run(strategy: str, kill: int, tmp_path: Path) -> None:
    """In the middle of the second epoch and after its last step: validation and the epoch's scheduler come there."""
    words = ("--strategy", strategy, "--drop", 0.1, *(("--steps", 9) if strategy == "fsdp2" else ("--epochs", 3)))
    run(tmp_path / "whole", 2, *words, program=LIGHTNING)
    output = run(tmp_path / "killed", 2, *words, "--kill-at", kill, program=LIGHTNING)
    assert f"restored step {kill - 1} " in output, output
    last = 9 if strategy == "fsdp2" else STEPS
    assert newest_checkpoint(tmp_path / "killed") == last
    for rank in range(2):
        whole = lines(tmp_path / "whole", rank)
        assert sorted(whole) == list(range(1, last + 1))
        assert lines(tmp_path / "killed", rank) == whole


@needs_lightning
@pytest.mark.timeout(1500)
def test_lightning_continues_on_one_rank_and_on_four(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    run(whole, 1, "--epochs", 3, program=LIGHTNING)
    expected = steps(whole, 1)
    reached = 0
    for world, last in ((2, 7), (1, 13), (4, STEPS)):  # no persist steps
        for file in moved.glob("rank*.txt"):
            file.unlink()
        stop = ["--stop-after", last] if last < STEPS else []
        run(moved, world, "--epochs", 3, "--persist-every", 4, *stop, program=LIGHTNING)
        found = steps(moved, world)
        assert sorted(found) == list(range(reached + 1, last + 1))
        for step, (samples, loss) in found.items():
            assert samples == sorted(expected[step][0])
            assert loss == pytest.approx(expected[step][1], rel=1e-4)
        reached = last
