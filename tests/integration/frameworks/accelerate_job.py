"""A user's program with Accelerate, that says which samples each step trained and with which losses.

accelerate_job.py FOLDER [--steps N] [--kill-at STEP ...] [--drop P] [--prepared] [--workers N]
The Nth start dies at the Nth STEP. --prepared: a stateful loader that is prepared, and FSDP2; else an ElasticSampler, and DDP.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, Dataset

from flashckpt.integrations.accelerate import FlashCheckpoint
from flashckpt.sampler import ElasticSampler

SAMPLES, BATCH, MICRO, EPOCHS = 50, 8, 2, 3


class Counted(Dataset):  # type: ignore[type-arg]
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, x.sum(dim=0, keepdim=True), i


class Watched(torch.nn.Module):
    """Remembers what it was trained with since the last step."""

    def __init__(self, drop):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(drop), torch.nn.Linear(64, 1))
        self.seen, self.losses = [], []

    def forward(self, x, y, number):
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        if self.training:
            self.seen += number.tolist()
            self.losses.append(loss.item())
        return loss


class Mean:
    """What a user registers: a running mean of the losses."""

    def __init__(self):
        self.value, self.count = torch.zeros(()), 0

    def state_dict(self):
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state):
        self.value, self.count = state["value"], state["count"]

    def add(self, loss):
        self.count += 1
        self.value = self.value + (loss - self.value) / self.count


def accelerator_of(given, world):
    config = DataLoaderConfiguration(use_stateful_dataloader=given.prepared, use_seedable_sampler=True)
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=BATCH // (MICRO * world),
        dataloader_config=config,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if given.prepared else None,
        step_scheduler_with_optimizer=False,
    )


class Training:
    def __init__(self, given):
        self.given = given
        self.accelerator = accelerator_of(given, int(os.environ["WORLD_SIZE"]))
        torch.manual_seed(0)
        self.core = Watched(given.drop)
        optimizer = torch.optim.AdamW(self.core.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler, self.held_out = self.accelerator.prepare(
            self.core, optimizer, scheduler, DataLoader(Counted(), batch_size=10)
        )
        self.mean = Mean()
        self.accelerator.register_for_checkpointing(self.mean)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        if given.prepared:
            loader = DataLoader(Counted(), batch_size=MICRO, shuffle=True, num_workers=given.workers)
            self.loader = self.accelerator.prepare(loader)
        else:
            sampler = ElasticSampler(Counted(), dp_rank=rank, dp_size=world, global_batch_size=BATCH, seed=1)
            self.loader = DataLoader(Counted(), batch_size=MICRO, sampler=sampler, num_workers=given.workers)

    def train(self, batch):
        with self.accelerator.accumulate(self.model):
            loss = self.model(*batch)
            self.accelerator.backward(loss)
            self.optimizer.step()
            if self.accelerator.sync_gradients:
                self.scheduler.step()
            self.optimizer.zero_grad()
        self.mean.add(self.accelerator.reduce(loss.detach(), "mean"))

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            for batch in self.held_out:
                self.model(*batch)
        self.model.train()

    def report(self, step, file):
        loss = sum(self.core.losses) / len(self.core.losses)
        numbers, rate = ",".join(map(str, self.core.seen)), self.scheduler.get_last_lr()[0]
        print(step, numbers, loss.hex(), rate, float(self.mean.value).hex(), file=file, flush=True)
        self.core.seen.clear()
        self.core.losses.clear()
        kills, start = self.given.kill_at, int(os.environ["FLASHCKPT_RESTART"])
        if kills[start : start + 1] == [step] and self.accelerator.is_local_main_process == (len(kills) == 1):
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, flash, file):
        for _epoch in flash.epochs(EPOCHS):
            for batch in self.loader:
                self.train(batch)
                if self.accelerator.sync_gradients:
                    self.report(flash.steps + 1, file)
                flash.step(persist=flash.steps + 1 == self.given.steps)
                if flash.should_stop or flash.steps == self.given.steps:
                    return
            if not self.given.prepared:
                self.evaluate()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, nargs="*", default=[])
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--prepared", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    training = Training(given)
    options = {"data": training.loader, "snapshot_every": 1, "persist_every": 4}
    with (
        (given.folder / f"rank{training.accelerator.process_index}.txt").open("a") as file,
        FlashCheckpoint(training.accelerator, given.folder / "root", **options) as flash,
    ):
        flash.restore()
        training.run(flash, file)


if __name__ == "__main__":
    main()
