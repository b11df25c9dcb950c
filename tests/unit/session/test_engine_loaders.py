"""Killed under a DataLoader and started again: every loss and every generator as in the unbroken run, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir
from support.loader_loop import program

END_OF_EPOCH = 6  # of 22 samples in batches of 4: the sixth goes on into the next epoch


@pytest.fixture(autouse=True)
def agent_of_the_test(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()


def assert_exact(tmp_path: Path, *kills: int, **options: Any) -> None:
    """Compare the unbroken run with one that is killed after each of the steps, one kill behind the other."""
    whole = program(tmp_path / "whole", **options)
    lines: list[str] = []
    for number, step in enumerate(kills):
        lines += program(tmp_path / "killed", kill_at=step, started_seed=number, **options)
    lines += program(tmp_path / "killed", started_seed=99, **options)
    assert lines == whole


CASES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "augmentation": {"augment": True},
    "augmentation, no epochs": {"augment": True, "loop": "forever"},
    "augmentation, range of epochs": {"augment": True, "loop": "range"},
    "2 workers": {"workers": 2},
    "2 workers, range of epochs": {"workers": 2, "loop": "range"},
    "persistent workers": {"workers": 2, "persistent": True},
    "persistent workers, no epochs": {"workers": 2, "persistent": True, "loop": "forever"},
    "persistent workers, batch sampler, no epochs": {
        "workers": 2,
        "persistent": True,
        "batch_sampler": True,
        "loop": "forever",
    },
    "generator=": {"augment": True, "own_generator": True},
    "accumulation": {"augment": True, "accumulation": 2, "length": 44},
    "evaluation": {"augment": True, "evaluate": True},
    "evaluation, 2 workers": {"workers": 2, "evaluate": True},
    "batch sampler": {"augment": True, "batch_sampler": True},
    "two loaders": {"augment": True, "second": True},
    "two loaders, one begun late": {"augment": True, "second": True, "late_second": True},
    "two loaders, workers": {"workers": 1, "second": True},
    "batches fetched ahead": {"loop": "ahead"},
    "batches fetched ahead, workers": {"loop": "ahead", "workers": 2},
    "batches fetched ahead, SeededSamples": {"loop": "ahead", "augment": True, "seeded": True},
    "SeededSamples": {"augment": True, "seeded": True},
    "SeededSamples, persistent workers": {"augment": True, "seeded": True, "workers": 2, "persistent": True},
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_killed_in_an_epoch_and_at_its_end_the_rest_is_that_of_the_unbroken_run(case: str, tmp_path: Path) -> None:
    assert_exact(tmp_path, 3, END_OF_EPOCH, **CASES[case])


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("stateful", "loop"), [("alone", "epochs"), ("alone", "forever"), ("both", "epochs")])
def test_a_stateful_loader_tracked_as_an_object(stateful: str, loop: str, workers: int, tmp_path: Path) -> None:
    """By itself, its sampler committing by itself; and beside its sampler."""
    pytest.importorskip("torchdata")
    assert_exact(tmp_path, 3, END_OF_EPOCH, stateful=stateful, loop=loop, workers=workers, augment=not workers)
