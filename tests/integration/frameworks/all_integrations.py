"""flashckpt.integrations with the real frameworks: killed, restarted, on other numbers of ranks (`make test-frameworks`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.dlrun import run_dlrun
from support.nested import assert_same
from support.paths import ROOT

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.interop.nested_state import read_folder
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
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs accelerate (make test-frameworks)"
)
ACCELERATE = "accelerate_job.py"
LIGHTNING, LIGHTNING_FILES = "lightning_job.py", "lightning_files_job.py"


def run(folder: Path, world: int, *words: object, program: str = "hf_job.py") -> str:
    """Run the program under dlrun to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    words = ("--nproc-per-node", world, PROGRAMS / program, folder, *words)
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    code, output = run_dlrun(folder, *words, deadline_s=500, fresh=True, env=env)
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
    words = (
        "--strategy",
        strategy,
        "--drop",
        0.1,
        *(("--steps", 9) if strategy == "fsdp2" else ("--epochs", 3, "--files")),
    )
    run(tmp_path / "whole", 2, *words, program=LIGHTNING)
    output = run(tmp_path / "killed", 2, *words, "--kill-at", kill, program=LIGHTNING)
    assert f"restored step {kill - 1} " in output, output
    last = 9 if strategy == "fsdp2" else STEPS
    assert newest_checkpoint(tmp_path / "killed") == last
    for rank in range(2):
        whole = lines(tmp_path / "whole", rank)
        assert sorted(whole) == list(range(1, last + 1))
        assert lines(tmp_path / "killed", rank) == whole
    if strategy == "ddp":  # Lightning's own, beside the callback
        ends = [read_folder(tmp_path / name / "kept/last.ckpt") for name in ("whole", "killed")]
        assert [end["global_step"] for end in ends] == [STEPS, STEPS]
        assert_same(ends[1]["state_dict"], ends[0]["state_dict"])
        moments = [dict(sorted(end["optimizer_states"][0]["state"].items())) for end in ends]
        assert_same(moments[1], moments[0])


@needs_lightning
@pytest.mark.timeout(600)
def test_lightnings_own_checkpoints_when_it_dies_in_the_middle_of_one(tmp_path: Path) -> None:
    """The name of the checkpoint that it dies in shows the one before; the plugin loads what Lightning's would."""
    run(tmp_path / "whole", 2, "torch", program=LIGHTNING_FILES)
    output = run(tmp_path / "killed", 2, "flash", "--die-in-save", 4, program=LIGHTNING_FILES)
    trained = [int(line.split()[0]) for line in (tmp_path / "killed/rank0.txt").read_text().splitlines()]
    assert trained == [*range(1, 15), *range(8, STEPS + 1)]  # it died in the second `last.ckpt`: the first was there
    assert "loaded as Lightning loads: callbacks epoch global_step hparams_name hyper_parameters" in output, output
    for rank in range(2):
        whole = lines(tmp_path / "whole", rank)
        assert lines(tmp_path / "killed", rank) == whole
    names = {name: sorted(one.name for one in (tmp_path / name / "kept").iterdir()) for name in ("whole", "killed")}
    assert names["killed"] == names["whole"]


@needs_lightning
@pytest.mark.timeout(120)
def test_lightnings_plugin_refuses_by_name_and_works_behind_the_asynchronous_one(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy

    from flashckpt.integrations.lightning import FlashCheckpointIO

    plugin, path = FlashCheckpointIO(), tmp_path / "deep/a.ckpt"
    remedies = {
        "hyper_parameters": "self.save_hyperparameters(ignore=['loss'])",
        "callbacks": "return numbers, texts and tensors from the callback's state_dict()",
        "own": "convert it in on_save_checkpoint, or remove it there: del checkpoint['own']",
    }
    for top, remedy in remedies.items():
        with pytest.raises(UnsupportedStateError) as caught:
            plugin.save_checkpoint({top: {"loss": print}}, path)
        assert caught.value.problem == f"the value of '{top}.loss' cannot be held in a checkpoint"
        assert caught.value.remedy.startswith(remedy)
    with pytest.raises(ConfigError, match="no storage options"):
        plugin.save_checkpoint({}, path, storage_options={})
    with pytest.raises(ConfigError, match="local and shared file systems only"):
        plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
    strategy = ModelParallelStrategy(save_distributed_checkpoint=False)
    strategy.checkpoint_io = plugin
    with (
        mock.patch.object(type(strategy), "broadcast", lambda _, path: path),
        pytest.raises(ConfigError, match="loads without"),
    ):
        strategy.save_checkpoint({}, path)
    assert not path.parent.exists()
    behind = AsyncCheckpointIO(plugin)
    behind.save_checkpoint({"w": torch.ones(2), "global_step": 3}, str(path))
    behind.teardown()
    assert_same(plugin.load_checkpoint(path), {"w": torch.ones(2), "global_step": 3})
    assert plugin.load_checkpoint(path, map_location="meta")["w"].is_meta
    with pytest.raises(ConfigError, match="map_location"):
        plugin.load_checkpoint(path, map_location=lambda storage, place: storage)
    plugin.remove_checkpoint(path)
    assert list(path.parent.iterdir()) == []
    plugin.remove_checkpoint(path)


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


@needs_accelerate
@pytest.mark.timeout(600)
def test_accelerate_killed_in_an_epoch_continues_exactly_and_on_one_rank(tmp_path: Path) -> None:
    """On one rank from step 13, the last one of the second epoch, of 19 in three: its evaluation comes again."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, 2, program=ACCELERATE)
    output = run(killed, 2, "--kill-at", 9, "--steps", 13, program=ACCELERATE)
    assert "restored step 8 " in output, output
    assert newest_checkpoint(killed) == 13  # no persist step
    for rank in range(2):
        expected = lines(whole, rank)
        assert sorted(expected) == list(range(1, 20))
        assert lines(killed, rank) == {step: line for step, line in expected.items() if step <= 13}
        (killed / f"rank{rank}.txt").unlink()
    run(killed, 1, program=ACCELERATE)
    expected_steps, found = steps(whole, 2), steps(killed, 1)
    assert sorted(found) == list(range(14, 20))
    for step, (samples, loss) in found.items():
        assert samples == sorted(expected_steps[step][0])
        assert loss == pytest.approx(expected_steps[step][1], rel=1e-4)


@needs_accelerate
@pytest.mark.timeout(600)
def test_accelerates_prepared_stateful_loader_and_fsdp2_killed_continue_exactly(tmp_path: Path) -> None:
    words = ("--prepared", "--drop", 0.1)
    run(tmp_path / "whole", 2, *words, program=ACCELERATE)
    output = run(tmp_path / "killed", 2, *words, "--kill-at", 9, 15, program=ACCELERATE)
    assert "restored step 8 " in output, output
    assert "restored step 14 " in output, output
    for rank in range(2):
        whole = lines(tmp_path / "whole", rank)
        assert sorted(whole) == list(range(1, STEPS + 1))
        assert lines(tmp_path / "killed", rank) == whole


@needs_accelerate
@pytest.mark.timeout(300)
def test_accelerates_page_runs_and_what_could_not_be_resumed_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integration.frameworks.accelerate_refusals", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all as expected"
