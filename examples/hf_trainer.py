"""Hugging Face Trainer: a callback that snapshots, restores and stops with flashckpt; data resumes at the next sample.

pip install transformers accelerate
python examples/hf_trainer.py /tmp/run              # kill it at any moment, start it again: it continues
dlrun --nproc-per-node 2 examples/hf_trainer.py /tmp/run
"""

# ruff: noqa: ARG002 -- hooks have the signatures of the framework

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler


class FlashTrainer(Trainer):
    """A Trainer whose training data comes from an ElasticSampler: each sample once, whatever happens in between."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's samples; Trainer moves the batches to the device itself."""
        args = self.args
        batch = args.per_device_train_batch_size
        self.sampler = ElasticSampler(
            self.train_dataset,
            dp_rank=args.process_index,
            dp_size=args.world_size,
            global_batch_size=batch * args.gradient_accumulation_steps * args.world_size,
            seed=args.seed,
        )
        return DataLoader(
            self.train_dataset,
            batch_size=batch,
            sampler=self.sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            generator=torch.Generator(),  # separate: a loader's draws would shift the dropout of a resumed run
        )


class FlashCallback(TrainerCallback):
    """Snapshots after every optimizer step that is due, and the restore before the first."""

    def __init__(self, trainer: FlashTrainer, ckpt: Checkpointer) -> None:
        self.trainer, self.ckpt = trainer, ckpt

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Track what Trainer has made, and restore."""
        trainer = self.trainer
        self.ckpt.track(
            model=trainer.model_wrapped,  # with DDP or FSDP around it: says which tensors are equal on all ranks
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),  # without accelerate's wrapper
            scheduler=getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler),
            sampler=trainer.sampler,
            rng=True,
        )
        if report := self.ckpt.restore():
            state.global_step = trainer._globalstep_last_logged = report.step  # noqa: SLF001 -- else the first logged loss is wrong

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that the step is done."""
        self.ckpt.step(state.global_step)
        sampler = self.trainer.sampler
        state.epoch = sampler.position / sampler.length
        if self.ckpt.should_stop:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the last commit, give the memory up."""
        self.ckpt.wait()
        self.ckpt.close()


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
    trainer = FlashTrainer(model=Regression(), args=args, train_dataset=Numbers())
    trainer.add_callback(FlashCallback(trainer, Checkpointer(root, snapshot_every=2, persist_every=20)))
    trainer.add_callback(Show())
    trainer.train()


if __name__ == "__main__":
    main()
