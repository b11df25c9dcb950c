"""Trainers that end in other ways than after their last step, one after another in one process.

hf_ends.py FOLDER CASE ...: prints "CASE: " and what came of each.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from flashckpt import Checkpointer
from flashckpt.errors import ConfigError, PersistError
from flashckpt.integrations.transformers import FlashCheckpoint
from flashckpt.snapshot.stager import Snapshot, Stager
from integration.frameworks.hf_job import Numbers, Regression


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        yield {"x": torch.ones(1)}


class Texts(Numbers):
    def __getitem__(self, i):
        if i >= len(self):
            raise IndexError(i)  # Trainer iterates over it for the lengths
        return {"input_ids": [1] * (i + 1)}


class WorseAndWorse(Trainer):  # type: ignore[misc]
    """The first evaluation is the best one."""

    def evaluate(self, *_args, **_kwargs):
        metrics = {"eval_score": -self.state.global_step}
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Kept(TrainerCallback):  # type: ignore[misc]
    """The parameters after the newest step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.step = state.global_step
        self.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}


def trainer(
    folder: Path, kind: type = Trainer, callbacks: Any = None, data: Any = None, flash: Any = None, **arguments
):
    given = {"max_steps": 3, "per_device_train_batch_size": 8, "save_strategy": "no", **arguments}
    flash = flash or FlashCheckpoint(folder / "root", persist_every=1000)
    args = TrainingArguments(str(folder / "trainer"), use_cpu=True, report_to=[], disable_tqdm=True, **given)
    return kind(
        model=Regression(0.0), args=args, train_dataset=data or Numbers(), eval_dataset=Numbers(), callbacks=[*(callbacks or []), flash]
    )  # fmt: skip


def on_storage(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the newest checkpoint's step and parameters."""
    model = Regression(0.0)
    reader = Checkpointer.readonly(folder / "root")
    reader.track(model=model)
    report = reader.restore()
    return report.step, dict(model.named_parameters())


@contextlib.contextmanager
def copies_that_wait(made: Any) -> Iterator[None]:
    """Let each copy of what is persisted begin when the best model is there; after 2 s, where somebody waits for it first."""
    loaded, take, load = threading.Event(), Stager._copy, made._load_best_model

    def late(self: Stager, snapshot: Snapshot) -> None:
        if snapshot.request.persist:
            loaded.wait(2.0)
        take(self, snapshot)

    def load_best() -> None:
        load()
        loaded.set()

    with mock.patch.object(Stager, "_copy", late), mock.patch.object(made, "_load_best_model", load_best):
        yield


def early_stop(folder: Path) -> str:
    kept = Kept()
    made = trainer(
        folder, WorseAndWorse, [kept, EarlyStoppingCallback(1)], max_steps=-1, num_train_epochs=9, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    with copies_that_wait(made):
        made.train()
    step, found = on_storage(folder)
    is_last = all(torch.equal(found[name], kept.parameters[name]) for name in found)
    is_best = all(torch.equal(found[name], p) for name, p in made.model.named_parameters())
    return f"step {step} of {kept.step} is on storage, the last one {is_last}, the best one {is_best}"


def max_steps(folder: Path) -> str:
    """Three steps are less than an epoch; started again, nothing is left to do."""
    trainer(folder).train()
    again = Kept()
    output = trainer(folder, callbacks=[again]).train()
    return f"step {on_storage(folder)[0]} is on storage, again {output.global_step}, trained {hasattr(again, 'step')}"


def storage_fails(folder: Path) -> str:
    flash = FlashCheckpoint(folder / "root", persist_every=1000)
    real: Any = flash.checkpointer
    fails = mock.patch.object(real, "wait", side_effect=PersistError("storage is gone"))
    with fails, mock.patch.object(real, "close", wraps=real.close) as close:
        try:
            trainer(folder, flash=flash).train()
        except PersistError as error:
            return f"{error.problem}, closed {close.call_count} times"
    return "no error"


def refusal(folder: Path, **arguments: Any) -> str:
    try:
        trainer(folder, **arguments).train()
    except ConfigError as error:
        return error.problem
    return "accepted"


def added_late(folder: Path) -> str:
    made = trainer(folder, callbacks=[])
    made.callback_handler.callbacks.pop()
    made.add_callback(FlashCheckpoint(folder / "root"))
    try:
        made.train()
    except ConfigError as error:
        return error.problem
    return "accepted"


CASES: dict[str, Callable[[Path], str]] = {
    "early-stop": early_stop,
    "max-steps": max_steps,
    "storage-fails": storage_fails,
    "stream": lambda folder: refusal(folder, data=Stream()),
    "by-length": lambda folder: refusal(folder, data=Texts(), train_sampling_strategy="group_by_length"),
    "global-batch": lambda folder: refusal(folder, flash=FlashCheckpoint(folder / "root", global_batch_size=9)),
    "added-late": added_late,
}


def main() -> None:
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        print(f"{name}: {CASES[name](folder)}", flush=True)


if __name__ == "__main__":
    main()
