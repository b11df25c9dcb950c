"""Hugging Face's Trainer with its own checkpoints and `get_last_checkpoint`, as its documentation says."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from race import engine_none, problem


class Report(TrainerCallback):  # type: ignore[misc]  # untyped where transformers is missing
    """Logs the samples of each step; before the Trainer saves."""

    def __init__(self, seen: list[int]) -> None:
        self.seen, self.log = seen, problem.Log()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Log one step."""
        time.sleep(problem.SLEEP_S)
        self.log.step(state.global_step, self.seen)
        self.seen.clear()


class Seeing(problem.Net):
    """The model, which notes the samples that it is trained with: the Trainer hands them to nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: Any = None) -> dict[str, torch.Tensor]:
        """Note, then train."""
        self.seen += number.tolist()
        return super().forward(x, y)


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    problem.prepare()
    arguments = TrainingArguments(
        output_dir=str(problem.FOLDER),
        num_train_epochs=problem.EPOCHS,
        per_device_train_batch_size=problem.BATCH // int(os.environ["WORLD_SIZE"]),
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=0.0,
        save_strategy="steps" if problem.EVERY else "no",
        save_steps=problem.EVERY or 500,
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_timeout=int(problem.HANG_S),
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=["y"],
    )
    model = Seeing()
    report = Report(model.seen)
    trainer = Trainer(model=model, args=arguments, train_dataset=problem.Numbers(), callbacks=[report])
    last = get_last_checkpoint(str(problem.FOLDER)) if problem.FOLDER.exists() else None
    if problem.SKIP:
        found = [str(path) for path in engine_none.folders("checkpoint-*")]
        last = found[-1] if found else None
    trainer.train(resume_from_checkpoint=last)
    report.log.end(model)


if __name__ == "__main__":
    main()
