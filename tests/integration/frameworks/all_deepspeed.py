"""flashckpt.integrations.deepspeed with DeepSpeed itself: killed, restarted, on other numbers of ranks (`make test-frameworks`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.dlrun import run_dlrun
from support.nested import assert_same
from support.paths import ROOT

from flashckpt import Checkpointer

PROGRAM = ROOT / "tests/integration/frameworks/deepspeed_job.py"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed (make test-frameworks)"
)


def run(folder: Path, world: int, *words: object) -> str:
    """Run the program under dlrun to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    words = ("--nproc-per-node", world, PROGRAM, folder, *words)
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    code, output = run_dlrun(folder, *words, deadline_s=500, fresh=True, env=env)
    assert code == 0, output
    return output


def lines(folder: Path, rank: int) -> dict[int, str]:
    """Return what a rank said of each step, the last time it trained it."""
    said = (folder / f"rank{rank}.txt").read_text().splitlines()
    return {int(line.split()[0]): line.split(maxsplit=1)[1] for line in said}


def joined(folder: Path, world: int, step: int) -> tuple[list[int], float, str]:
    """Return the samples of a step over all ranks, its mean loss, and what the engine counted."""
    words = [lines(folder, rank)[step].split(maxsplit=2) for rank in range(world)]
    samples = sorted(int(number) for word in words for number in word[0].split(","))
    return samples, sum(float.fromhex(word[1]) for word in words) / world, words[0][2]


def state(folder: Path, rank: int, when: str) -> dict[str, torch.Tensor]:
    """Return the gathered state that a rank wrote."""
    found: dict[str, torch.Tensor] = torch.load(folder / f"rank{rank}-{when}.pt", weights_only=True)
    return found


def weights_on_the_root(folder: Path) -> dict[str, torch.Tensor]:
    """Return the trained weights of the newest checkpoint as a program without DeepSpeed reads them."""
    shapes = {"first": (16, 13), "second": (13, 7), "last": (7, 1)}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(*shape) for name, shape in shapes.items()})
    reader = Checkpointer.readonly(folder / "root")
    reader.track(model=model)
    reader.restore(only="model.*")
    return dict(model.state_dict())


@needs_deepspeed
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp16"), (3, "fp32")])
def test_engine_that_is_killed_ends_as_plain_deepspeed_and_continues_on_one_and_four_ranks(
    stage: int, dtype: str, tmp_path: Path
) -> None:
    """With accumulation on two ranks and on one, and on four ranks in another stage; the state is gathered by DeepSpeed itself before and after.

    fp16 is not said to be supported by DeepSpeed on CPU; the first steps overflow, so that the loss scale moves.
    """
    words = ("--stage", stage, "--dtype", dtype)
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    run(plain, 2, *words, "--plain", "--steps", 14)
    output = run(killed, 2, *words, "--kill-at", 5, "--steps", 9, "--dump")
    assert "restored step 4 " in output, output
    assert "from memory" in output, output
    for rank in range(2):
        expected = lines(plain, rank)
        assert sorted(expected) == list(range(1, 15))
        assert lines(killed, rank) == {step: line for step, line in expected.items() if step <= 9}
    left, reached = state(killed, 0, "end"), 9
    other = {1: 3, 3: 2}.get(stage, stage)
    for world, then, last in ((1, stage, 11), (4, other, 14)):  # no persist steps
        output = run(killed, world, "--stage", then, "--dtype", dtype, "--steps", last, "--dump")
        assert f"restored step {reached} " in output, output
        for rank in range(world):
            assert_same(state(killed, rank, "begin"), left)
        for step in range(reached + 1, last + 1):
            (samples, loss, counts), planned = joined(killed, world, step), joined(plain, 2, step)
            assert samples == planned[0]
            same = 2 if dtype == "fp16" else None  # which steps overflow depends on how many ranks add gradients
            assert counts.split()[:same] == planned[2].split()[:same]
            assert loss == pytest.approx(planned[1], rel=1e-4 if dtype == "fp32" else 0.05)
        left, reached = state(killed, 0, "end"), last
    if stage:  # of stage 0 DeepSpeed gathers nothing
        weights = weights_on_the_root(killed)
        assert_same(weights, {name: left[name] for name in weights})


@needs_deepspeed
@pytest.mark.timeout(300)
def test_page_of_deepspeed_runs_and_what_no_snapshot_would_hold_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integration.frameworks.deepspeed_refusals", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all as expected"
