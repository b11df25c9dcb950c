"""Hugging Face Trainer: one callback snapshots, restores and stops; data resumes at the next sample.

pip install transformers accelerate
python examples/hf_trainer.py /tmp/run              # kill it at any moment, start it again: it continues
dlrun --nproc-per-node 2 examples/hf_trainer.py /tmp/run
"""

# ruff: noqa: ARG002 -- hooks have the signatures of the framework

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from flashckpt.integrations.transformers import FlashCheckpoint


class Regression(torch.nn.Module):
    """Stands for your model: anything that returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


class Numbers(Dataset[Any]):
    """Stands for your data."""

    def __init__(self) -> None:
        self.x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "labels": self.x[i].sum(dim=0, keepdim=True)}


class Show(TrainerCallback):
    """Prints logged losses bit for bit."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print one line."""
        if "loss" in (logs or {}) and state.is_world_process_zero:
            print(f"step {state.global_step}  loss {float(logs['loss']).hex()}", flush=True)


def main() -> None:
    root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=root + "-trainer",
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    flash = FlashCheckpoint(root, snapshot_every=2, persist_every=20)
    Trainer(model=Regression(), args=args, train_dataset=Numbers(), callbacks=[flash, Show()]).train()


if __name__ == "__main__":
    main()
