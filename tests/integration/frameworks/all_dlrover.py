"""DLRover's call shapes for DeepSpeed and Megatron with these themselves: killed, restarted, on other numbers of ranks.

megatron-core runs on a CPU as `megatron_cpu` has it; its training package is on no index (`make test-frameworks`).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from support.dlrun import run_dlrun
from support.nested import assert_same
from support.paths import ROOT

FOLDER = ROOT / "tests/integration/frameworks"


def needs(module: str) -> pytest.MarkDecorator:
    try:
        is_missing = importlib.util.find_spec(module) is None
    except ImportError:
        is_missing = True
    return pytest.mark.skipif(is_missing, reason=f"needs {module} (make test-frameworks)")


def run(program: str, folder: Path, world: int, *words: object, code: int = 0) -> str:
    """Run a program under dlrun to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    words = ("--nproc-per-node", world, FOLDER / program, folder, *words)
    found, output = run_dlrun(
        folder,
        *words,
        deadline_s=500,
        fresh="deepspeed" in program,
        env={"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
    )
    assert found == code, output
    return output


def lines(folder: Path, rank: int) -> dict[int, str]:
    """Return what a rank wrote of each step, the last time it trained it."""
    return {int(line.split()[0]): line for line in (folder / f"rank{rank}.txt").read_text().splitlines()}


def state(folder: Path, rank: int, when: str) -> dict[str, torch.Tensor]:
    """Return the gathered state that a rank wrote."""
    found: dict[str, torch.Tensor] = torch.load(folder / f"rank{rank}-{when}.pt", weights_only=True)
    return found


def ends_as_without_us(program: str, folder: Path, *words: object, ours: tuple[object, ...] = ()) -> Path:
    """Run it on two ranks, once without flashckpt and once with a kill; compare losses bit for bit.

    Args:
        program: What to run.
        folder: For both.
        words: Its arguments.
        ours: Those of the run that is killed alone.
    """
    whole, killed = folder / "whole", folder / "killed"
    run(program, whole, 2, *words, "--plain", "--steps", 7)
    output = run(program, killed, 2, *words, *ours, "--kill-at", 6, "--steps", 7)
    assert "restored step 5 " in output, output
    assert "from memory" in output, output
    for rank in range(2):
        assert sorted(lines(whole, rank)) == list(range(1, 8))
        assert lines(killed, rank) == lines(whole, rank)
        if not ours:
            assert_same(state(killed, rank, "end"), state(whole, rank, "end"))
    return killed


@needs("deepspeed")
@pytest.mark.timeout(600)
def test_deepspeeds_engine_that_is_killed_ends_as_without_us_and_continues_on_one_rank(tmp_path: Path) -> None:
    """The state is gathered by DeepSpeed itself before and after; of a run without us it gathers none."""
    words, ours = ("--stage", 2, "--dtype", "bf16", "--drop", 0.1), ("--dump", "--dlrover")
    killed = ends_as_without_us("deepspeed_job.py", tmp_path, *words, ours=ours)
    left = state(killed, 0, "end")
    output = run("deepspeed_job.py", killed, 1, *words, *ours, "--steps", 8)
    assert "restored step 7 " in output, output
    assert "from storage" in output, output
    assert_same(state(killed, 0, "begin"), left)


@needs("megatron.core")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_megatrons_distributed_optimizer_that_is_killed_ends_as_without_us(dtype: str, tmp_path: Path) -> None:
    """What the optimizer has is gathered by Megatron itself; then, of bf16, from storage on four ranks and on one."""
    words = ("--optimizer", "distributed", "--dtype", dtype, "--drop", 0.1)
    killed = ends_as_without_us("megatron_job.py", tmp_path, *words)
    for world, begun in ((4, 7), (1, 8)) if dtype == "bf16" else ():
        left = state(killed, 0, "end")
        output = run("megatron_job.py", killed, world, *words, "--steps", begun + 1)
        assert f"restored step {begun} " in output, output
        assert "from storage" in output, output
        assert output.count(f"continues at {begun} {begun}00.0") == world
        assert_same(state(killed, 0, "begin"), left)


@needs("megatron.core")
@pytest.mark.timeout(600)
def test_megatron_with_tensor_parallel_ranks_and_loss_scaling(tmp_path: Path) -> None:
    """fp16 begins with steps that overflow; by the functions of megatron_dist_ckpt. Another tensor parallel size is refused."""
    words = ("--optimizer", "plain", "--dtype", "fp16", "--drop", 0.1, "--dist-ckpt")
    killed = ends_as_without_us("megatron_job.py", tmp_path, *words, "--tp", 2)
    scales = {line.split()[2] for line in lines(killed, 0).values()}
    assert len(scales) > 1
    output = run("megatron_job.py", killed, 2, *words, code=10)
    assert "other tensor or pipeline parallel sizes" in output, output


@needs("transformers")
def test_flash_ckpt_trainer_killed_between_its_checkpoints_ends_as_an_unbroken_run(tmp_path: Path) -> None:
    """Snapshots between the saves, so that the kill costs no step; no folder of Trainer's own."""
    run("dlrover_hf_job.py", tmp_path / "whole", 1)
    run("dlrover_hf_job.py", tmp_path / "killed", 1, "--kill-at", 6)
    assert lines(tmp_path / "killed", 0) == lines(tmp_path / "whole", 0)
    assert len(lines(tmp_path / "whole", 0)) == 10
    for folder in ("whole", "killed"):
        assert list((tmp_path / folder / "out/flashckpt").glob("step-000000010.g*/MANIFEST"))
        assert not list((tmp_path / folder / "out").glob("checkpoint-*"))
