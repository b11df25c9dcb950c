"""A user's program with a Hugging Face Trainer whose samples draw in the training process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from flashckpt.integrations.transformers import FlashCheckpoint
from integration.frameworks.augmented import Augmented


class Named(Augmented):
    """As the Trainer wants them."""

    def __getitem__(self, i: int) -> Any:
        return {"x": super().__getitem__(i)}


class Net(torch.nn.Module):
    def __init__(self, life: Any) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.life = life

    def floating_point_ops(self, inputs: dict[str, torch.Tensor]) -> int:
        return 10 * len(inputs["x"])

    def forward(self, x: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        loss = self.net(x / 16).pow(2).mean() + (0 if self.training else torch.rand(()))
        if self.training:
            self.life.saw(x, loss)
        return {"loss": loss}


class Steps(TrainerCallback):  # type: ignore[misc]
    """Before FlashCheckpoint, whose step comes last."""

    def __init__(self, life: Any) -> None:
        self.life = life
        self.trainer: Any = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if later := self.life.later:
            args.gradient_accumulation_steps = later

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.life.begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.life.says(f"{state.total_flos + self.trainer.current_flos:.0f}")
        self.life.stepped(state.global_step)


def train(switches: dict[str, Any], life: Any) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(life.root.parent / "trainer"), per_device_train_batch_size=3,
        per_device_eval_batch_size=4, learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        logging_strategy="no", **{"num_train_epochs": 2, **switches},
    )  # fmt: skip
    flash = FlashCheckpoint(life.root, snapshot_every=1, persist_every=1000, job=life.root.name)
    life.owns(flash.checkpointer)
    draws = not args.dataloader_num_workers
    steps = Steps(life)
    steps.trainer = Trainer(
        model=Net(life), args=args, train_dataset=Named(12, draws=draws), eval_dataset=Named(7, draws=draws),
        callbacks=[steps, flash],
    )  # fmt: skip
    steps.trainer.train()
