"""A user's program with a Hugging Face Trainer, that says which samples each step trained and with which losses.

hf_job.py FOLDER [--steps N | --epochs N] [--kill-at STEP | --stop-after STEP] [--micro N] [--fsdp] [--drop P]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from flashckpt.integrations.transformers import FlashCheckpoint

SAMPLES, BATCH = 50, 8  # 50 does not divide by 8: the order crosses the end of the data inside a step


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x.sum(dim=0, keepdim=True), "number": i}


class Regression(torch.nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(drop), torch.nn.Linear(64, 1))
        self.seen, self.losses = [], []

    def forward(self, x, labels, number):
        loss = torch.nn.functional.mse_loss(self.net(x), labels)
        if self.training:
            self.seen += number.tolist()
            self.losses.append(loss.item())
        return {"loss": loss}


class Report(TrainerCallback):  # type: ignore[misc]
    """One line for each step of this rank; before FlashCheckpoint, whose step comes last."""

    def __init__(self, core, file, kill_at, stop_after):
        self.core, self.file, self.kill_at, self.stop_after = core, file, kill_at, stop_after

    def on_step_end(self, args, state, control, **kwargs):
        loss = sum(self.core.losses) / len(self.core.losses)
        numbers = ",".join(map(str, self.core.seen))
        print(state.global_step, numbers, loss.hex(), file=self.file, flush=True)
        self.core.seen.clear()
        self.core.losses.clear()
        control.should_training_stop |= state.global_step == self.stop_after
        is_first = os.environ.get("FLASHCKPT_RESTART", "0") == "0"
        if state.global_step == self.kill_at and is_first and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=0)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--persist-every", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(0)
    fsdp = {"fsdp": True, "fsdp_config": {"fsdp_version": 2}} if given.fsdp else {}
    args = TrainingArguments(
        output_dir=str(given.folder / "trainer"),
        max_steps=given.steps,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.micro,
        per_device_eval_batch_size=4,
        eval_strategy="epoch",
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **fsdp,
    )
    model = Regression(given.drop)
    with (given.folder / f"rank{args.process_index}.txt").open("a") as file:
        flash = FlashCheckpoint(
            given.folder / "root", global_batch_size=BATCH, snapshot_every=2, persist_every=given.persist_every
        )
        report = Report(model, file, given.kill_at, given.stop_after)
        Trainer(
            model=model, args=args, train_dataset=Numbers(), eval_dataset=Numbers(), callbacks=[report, flash]
        ).train()


if __name__ == "__main__":
    main()
