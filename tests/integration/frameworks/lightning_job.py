"""A user's program with Lightning, that says which samples each step trained and with which losses.

lightning_job.py FOLDER [--steps N | --epochs N] [--kill-at STEP | --stop-after STEP] [--micro N] [--strategy S] [--drop P] [--files]
--files: with Lightning's own ModelCheckpoint beside the callback, through FlashCheckpointIO.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from flashckpt.integrations.lightning import FlashCheckpoint, FlashCheckpointIO

SAMPLES, BATCH = 50, 8  # 50 does not divide by 8: the order crosses the end of the data inside a step


class Numbered(Dataset):  # type: ignore[type-arg]
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, x.sum(dim=0, keepdim=True), i


class Sums(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, drop):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(drop), torch.nn.Linear(64, 1))
        self.seen, self.losses = [], []

    def configure_model(self):
        if isinstance(self.trainer.strategy, lightning.pytorch.strategies.ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        x, y, number = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.seen += number.tolist()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]) + torch.rand(()), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}]


class Lines(lightning.Callback):  # type: ignore[misc]
    """One line for each step of this rank; FlashCheckpoint's step comes after it."""

    def __init__(self, file, kill_at, stop_after):
        self.file, self.kill_at, self.stop_after, self.done = file, kill_at, stop_after, 0

    def on_train_start(self, trainer, module):
        self.done = trainer.global_step

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step == self.done:
            return
        self.done = trainer.global_step
        loss = sum(module.losses) / len(module.losses)
        rate, numbers = trainer.optimizers[0].param_groups[0]["lr"], ",".join(map(str, module.seen))
        print(self.done, numbers, loss.hex(), rate, trainer.current_epoch, file=self.file, flush=True)
        module.seen.clear()
        module.losses.clear()
        trainer.should_stop |= self.done == self.stop_after
        is_first = os.environ.get("FLASHCKPT_RESTART", "0") == "0"
        if self.done == self.kill_at and is_first and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=0)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--persist-every", type=int, default=2)
    parser.add_argument("--files", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    world, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    strategy = lightning.pytorch.strategies.ModelParallelStrategy() if given.strategy == "fsdp2" else given.strategy
    with (given.folder / f"rank{rank}.txt").open("a") as file:
        flash = FlashCheckpoint(
            given.folder / "root", global_batch_size=BATCH, snapshot_every=2, persist_every=given.persist_every
        )
        kept = ModelCheckpoint(
            given.folder / "kept", monitor="val", save_top_k=2, save_last=True, enable_version_counter=False
        )
        trainer = lightning.Trainer(
            max_steps=given.steps,
            max_epochs=given.epochs,
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            callbacks=[flash, Lines(file, given.kill_at, given.stop_after), *([kept] if given.files else [])],
            plugins=[FlashCheckpointIO()] if given.files else [],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            val_check_interval=1.0,
        )
        loader = DataLoader(Numbered(), batch_size=given.micro, shuffle=True)
        trainer.fit(Sums(given.drop), loader, DataLoader(Numbered(), batch_size=4))


if __name__ == "__main__":
    main()
