"""Lightning: a callback that snapshots, restores and stops with flashckpt; data resumes at the next sample.

pip install lightning
python examples/lightning_fit.py /tmp/run           # kill it at any moment, start it again: it continues
dlrun --nproc-per-node 2 examples/lightning_fit.py /tmp/run
"""

# ruff: noqa: ARG002 -- hooks have the signatures of the framework

from __future__ import annotations

import os
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler


class Loops:
    """The counters of Lightning's fit loop (step, epoch, batches), the same on every rank."""

    flashckpt_replicated = True

    def __init__(self, trainer: lightning.Trainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return self.trainer.fit_loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters."""
        self.trainer.fit_loop.load_state_dict(state)
        # Lightning's loop within an epoch starts over: the sampler knows which samples are left
        self.trainer.fit_loop.restarting = self.trainer.fit_loop.epoch_loop.restarting = False


class FlashCallback(Callback):
    """Snapshots after every optimizer step that is due, and the restore before the first."""

    def __init__(self, ckpt: Checkpointer, sampler: ElasticSampler) -> None:
        self.ckpt, self.sampler, self.done = ckpt, sampler, 0

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Track what Lightning has made, and restore; the loaders do not run yet."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.ckpt.track(
            model=trainer.strategy.model,  # with DDP or FSDP around it: says which tensors are equal on all ranks
            optimizer=trainer.optimizers,
            scheduler=schedulers or None,
            loops=Loops(trainer),
            sampler=self.sampler,
            rng=True,
        )
        self.ckpt.restore()
        self.done = trainer.global_step

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Say that a step is done, where the batch ended one (with accumulation not every batch does)."""
        if trainer.global_step > self.done:
            self.done = trainer.global_step
            self.ckpt.step(self.done)
            if self.ckpt.should_stop:
                trainer.should_stop = True

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Wait for the last commit, give the memory up."""
        self.ckpt.wait()
        self.ckpt.close()


class Regression(lightning.LightningModule):
    """Stands for your module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        if self.trainer.is_global_zero:
            print(f"step {self.trainer.global_step + 1}  loss {loss.item().hex()}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return optimizer and scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def main() -> None:
    root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    inputs = torch.randn(1000, 16)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = ElasticSampler(data, dp_rank=rank, dp_size=size, global_batch_size=16 * size, seed=0)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        use_distributed_sampler=False,  # the sampler deals the ranks their samples itself
        callbacks=[FlashCallback(Checkpointer(root, snapshot_every=2, persist_every=20), sampler)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    # a separate generator: a loader's draws would shift the dropout of a resumed run
    loader = DataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator())
    trainer.fit(Regression(), loader)


if __name__ == "__main__":
    main()
