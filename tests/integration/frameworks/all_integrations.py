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

PROGRAMS = ROOT / "tests/integration/frameworks"
STEPS = 21
"""Three epochs of 50 samples in steps of 8."""
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers (make test-frameworks)"
)


def run(folder: Path, world: int, *words: object) -> str:
    """Run the program under dlrun to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    code, output = run_dlrun(
        folder, "--nproc-per-node", world, PROGRAMS / "hf_job.py", folder, *words, deadline_s=500, fresh=True
    )
    assert code == 0, output
    return output


def lines(folder: Path, rank: int) -> dict[int, str]:
    """Return what a rank said of each step, the last time it trained it: samples and loss."""
    said = (folder / f"rank{rank}.txt").read_text().splitlines()
    return {int(line.split()[0]): line.split(maxsplit=1)[1] for line in said}


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
    for rank in range(2):
        whole = lines(tmp_path / "whole", rank)
        assert sorted(whole) == list(range(1, STEPS + 1))
        assert lines(tmp_path / "killed", rank) == whole


@needs_transformers
@pytest.mark.timeout(1500)
def test_trainer_continues_on_one_rank_and_on_four(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    run(whole, 1, "--epochs", 3)
    expected = steps(whole, 1)
    reached = 0
    for world, last in ((2, 6), (1, 14), (4, STEPS)):
        for file in moved.glob("rank*.txt"):
            file.unlink()
        run(moved, world, "--epochs", 3, *(["--stop-after", last] if last < STEPS else []))
        found = steps(moved, world)
        assert sorted(found) == list(range(reached + 1, last + 1))
        for step, (samples, loss) in found.items():
            assert samples == sorted(expected[step][0])
            assert loss == pytest.approx(expected[step][1], rel=1e-4)
        reached = last


@needs_transformers
@pytest.mark.timeout(300)
def test_trainer_with_data_that_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    program = (
        "from torch.utils.data import IterableDataset\n"
        "import sys, torch, transformers\n"
        "from flashckpt.integrations.transformers import FlashCheckpoint\n"
        "class Stream(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        yield {'x': torch.ones(1)}\n"
        "args = transformers.TrainingArguments(sys.argv[1], max_steps=2, use_cpu=True, report_to=[])\n"
        "flash = FlashCheckpoint(sys.argv[1] + '/root')\n"
        "transformers.Trainer(torch.nn.Linear(1, 1), args, train_dataset=Stream(), callbacks=[flash]).train()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ,
        check=False,
    )
    assert done.returncode != 0
    assert "the order of the training data cannot be resumed" in done.stderr
