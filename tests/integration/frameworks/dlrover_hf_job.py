"""A user's program with DLRover's FlashCkptTrainer, but for the import; says the loss of each step.

dlrover_hf_job.py FOLDER [--kill-at STEP]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from flashckpt.integrations.dlrover_hf_trainer import FlashCkptTrainer


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.loss = 0.0

    def forward(self, x):
        loss = self.net(x).pow(2).mean()
        self.loss = loss.item()
        return {"loss": loss}


class Says(TrainerCallback):  # type: ignore[misc]
    def __init__(self, model, folder, kill_at):
        self.model, self.kill_at = model, kill_at
        self.file = (folder / "rank0.txt").open("a", buffering=1)

    def on_step_end(self, args, state, control, **kwargs):
        print(state.global_step, self.model.loss.hex(), file=self.file)
        if state.global_step == self.kill_at and os.environ["FLASHCKPT_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Net()
    args = TrainingArguments(
        output_dir=str(given.folder / "out"), max_steps=10, per_device_train_batch_size=2, save_strategy="steps",
        save_steps=4, save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    data = [{"x": torch.full((4,), float(i))} for i in range(12)]
    trainer = FlashCkptTrainer(
        model,
        args,
        train_dataset=data,
        callbacks=[Says(model, given.folder, given.kill_at)],
        flash={"snapshot_every": 1},
    )
    trainer.train(resume_from_checkpoint=trainer.get_last_checkpoint())
    trainer.wait_latest_checkpoint()


if __name__ == "__main__":
    main()
