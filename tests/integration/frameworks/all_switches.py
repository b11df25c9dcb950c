"""The frameworks' own switches: killed after each step, with the same losses as the unbroken run (`make test-frameworks`).

Each life is forked from this process, which has imported the frameworks; it trains one step, and dies where the next one begins.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import signal
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flashckpt.errors import SamplerStateError
from integration.frameworks.run import in_child

Switches = dict[str, Any]
FRAMEWORKS = {"lightning": "lightning", "accelerate": "accelerate", "trainer": "transformers"}


def lightning_switches() -> list[Switches]:
    """Where it validates, how it accumulates, and what it does first: each pair of two switches somewhere."""
    validations: list[Switches] = [
        {"val_check_interval": 0.5},
        {"val_check_interval": 3},
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2},
    ]
    others: list[Switches] = [
        {},
        {"accumulate_grad_batches": 2, "num_sanity_val_steps": 2},
        {"limit_val_batches": 1, "val_loaders": 2, "draws_in_hooks": True},
    ]
    return [{**one, **other} for one, other in product(validations, others)] + [
        {"limit_val_batches": 0},
        {"workers": 1},
        {"interval": "epoch", "average": True},
        {"gradient_clip_val": 0.1, "precision": "bf16-mixed"},
    ]


def accelerate_switches() -> list[Switches]:
    """What `prepare` makes of loaders."""
    found: list[Switches] = [
        {"split_batches": split, "gradient_accumulation_steps": steps, "workers": workers}
        for split, steps, workers in product((False, True), (1, 2), (0, 1))
        if not (workers and (split or steps > 1))
    ]
    return [
        *found,
        {"shuffle": False},
        *({"draws_behind": True, "loaders": loaders} for loaders in (1, 2)),
        {"non_blocking": True, "even_batches": False},
        *({"draws_behind": draws, "prepared": False} for draws in (False, True)),
    ]


def trainer_switches() -> list[Switches]:
    """When it evaluates, how it accumulates, who loads."""
    evaluations: list[Switches] = [{"eval_strategy": "steps", "eval_steps": 3}, {"eval_strategy": "epoch"}, {}]
    others: list[Switches] = [{}, {"gradient_accumulation_steps": 2, "eval_on_start": True}]
    found = [{**one, **other} for one, other in product(evaluations, others) if one or not other]
    plateau = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1},
        "metric_for_best_model": "eval_loss",
    }
    found += [{"eval_strategy": "steps", "eval_steps": 2, **plateau}, {"optim": "adafactor", "max_grad_norm": 0.1}]
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3}
    return [*found, {**evaluations[0], **workers}]


CASES = [
    pytest.param(framework, switches, id=f"{framework} " + ", ".join(f"{k}={v}" for k, v in switches.items()))
    for framework, made in zip(FRAMEWORKS, (lightning_switches, accelerate_switches, trainer_switches), strict=True)
    for switches in made()
]


class Life:
    """What one life is to do, and where it says what it did.

    Args:
        root: Checkpoint root.
        file: Gets one line for each step.
        steps: It dies when it begins the step after so many; None: it lives to the end.
        later: The accumulation that a callback of the user sets when training has begun; None: none does.
    """

    def __init__(self, root: Path, file: Path, steps: int | None, *, later: int | None = None) -> None:
        self.root, self.steps, self.done, self.later = root, steps, 0, later
        self._file, self._words = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), list[str]()
        self._checkpointer: Any = None

    def owns(self, checkpointer: Any) -> None:
        """Take note of its checkpointer: no daemon persists what it leaves."""
        self._checkpointer = checkpointer
        checkpointer.wait = lambda *_: None

    def saw(self, batch: Any, loss: Any) -> None:
        """Take note of a batch; where the life is over, die instead."""
        self._words.append(f"{float(batch.sum()).hex()}/{float(loss).hex()}")

    def says(self, word: str) -> None:
        """Take note of something else that must be the same."""
        self._words.append(word)

    def begins(self) -> None:
        """Die, once the last snapshot is complete, if all steps are done."""
        if self.done == self.steps:
            self._checkpointer._session._stager.finish()
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self, step: int) -> None:
        """Say what a step was made of."""
        os.write(self._file, f"{step} {' '.join(self._words)}\n".encode())
        self._words.clear()
        self.done += 1


def live(framework: str, switches: Switches, life: Life) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["FLASHCKPT_AGENT_DIR"] = tempfile.mkdtemp(dir=life.root.parent)  # no daemon is started
    importlib.import_module(f"integration.frameworks.{framework}_switches").train(switches, life)


def steps_of(file: Path) -> list[tuple[int, str]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(line.split()[0]), line) for line in lines]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("framework", "switches"), CASES)
def test_killed_after_each_step_it_is_the_unbroken_run(
    framework: str, switches: Switches, tmp_path: Path, shm_dir: Path
) -> None:
    pytest.importorskip(FRAMEWORKS[framework])
    importlib.import_module(f"integration.frameworks.{framework}_switches")  # once, for all that are forked
    whole, cut = tmp_path / "whole.txt", tmp_path / "cut.txt"
    run = functools.partial(live, framework, switches)
    in_child(lambda: run(Life(tmp_path / "whole", whole, None)), tmp_path / "unbroken")
    expected = steps_of(whole)
    assert len(expected) >= 4, (tmp_path / "unbroken/out0").read_text()
    for at, (step, line) in enumerate(expected):
        in_child(lambda: run(Life(tmp_path / "root", cut, 1)), tmp_path / f"life{at}")
        said = (tmp_path / f"life{at}/out0").read_text()
        assert steps_of(cut)[at:] == [(step, line)], said[-3000:]


SAID: dict[str, dict[str, Any]] = {
    "automatic_optimization=False": {"manual": True},
    "StochasticWeightAveraging": {"swa": True},
    "GradientAccumulationScheduler": {"accumulates_later": True},
    "limit_train_batches": {"limit_train_batches": 5},
    "the state of EMAWeightAveraging is in no snapshot": {"average": True},
    "ReduceLROnPlateau: a validation directly behind step 1": {"plateau": True},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("said", SAID)
def test_what_lightning_does_and_a_restart_does_not_continue_is_said(said: str, tmp_path: Path, shm_dir: Path) -> None:
    pytest.importorskip("lightning")
    importlib.import_module("integration.frameworks.lightning_switches")

    def lives() -> None:
        logging.basicConfig(force=True)  # to standard error, not to pytest
        live("lightning", SAID[said], Life(tmp_path / "root", tmp_path / "cut", 1))

    for life in ("first", "second"):
        in_child(lives, tmp_path / life)
    assert said in (tmp_path / "second/out0").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("later", [1, 4])
@pytest.mark.parametrize(
    ("framework", "setting"), [("lightning", "accumulate_grad_batches"), ("trainer", "gradient_accumulation_steps")]
)
def test_accumulation_that_is_changed_behind_the_callback_is_an_error(
    framework: str, setting: str, later: int, tmp_path: Path, shm_dir: Path
) -> None:
    """Two micro-batches of three were planned for each step."""
    pytest.importorskip(FRAMEWORKS[framework])

    told = tmp_path / "told"

    def run() -> None:
        try:
            live(framework, {setting: 2}, Life(tmp_path / "root", tmp_path / "steps.txt", None, later=later))
        except SamplerStateError as error:
            told.write_text(str(error))

    in_child(run, tmp_path / "life")
    assert told.exists(), (tmp_path / "life/out0").read_text()[-3000:]
    assert f"{3 * later} samples taken" in told.read_text()
