"""A user's program with Lightning that draws wherever it may: in samples, layers, validation, hooks."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from flashckpt.integrations.lightning import FlashCheckpoint
from integration.frameworks.augmented import Augmented


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, switches, life):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.switches, self.life = switches, life
        self.automatic_optimization = not switches.get("manual")

    def on_train_batch_start(self, batch, batch_idx):
        self.life.begins()

    def on_train_epoch_start(self):
        if self.switches.get("draws_in_hooks"):
            torch.rand(3)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch / 16).pow(2).mean()
        self.life.saw(batch, loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.net(batch / 16).pow(2).mean() + torch.rand(()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.switches.get("plateau"):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", "strict": False}}
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": self.switches.get("interval", "step")}]


def more_callbacks(switches):
    callbacks = lightning.pytorch.callbacks
    return [
        *([callbacks.EMAWeightAveraging(decay=0.5)] if switches.get("average") else []),
        *([callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1)] if switches.get("swa") else []),
        *([callbacks.GradientAccumulationScheduler({0: 1, 1: 2})] if switches.get("accumulates_later") else []),
    ]


class Steps(lightning.Callback):  # type: ignore[misc]
    """Before FlashCheckpoint, whose step comes last."""

    def __init__(self, life):
        self.life, self.done = life, None

    def on_train_start(self, trainer, module):
        self.done = trainer.global_step
        if later := self.life.later:
            trainer.accumulate_grad_batches = later

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step != self.done:
            self.done = trainer.global_step
            self.life.stepped(self.done)


def train(switches: dict[str, Any], life: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    own = {
        "val_loaders",
        "draws_in_hooks",
        "workers",
        "interval",
        "manual",
        "plateau",
        "average",
        "swa",
        "accumulates_later",
    }
    flash = FlashCheckpoint(life.root, snapshot_every=1, persist_every=1000, job=life.root.name)
    life.owns(flash.checkpointer)
    workers = switches.get("workers", 0)
    options = {"num_sanity_val_steps": 0, **{key: value for key, value in switches.items() if key not in own}}
    trainer = lightning.Trainer(
        max_epochs=3 if switches.get("check_val_every_n_epoch") == 2 else 2, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*more_callbacks(switches), flash, Steps(life)], **options,
    )  # fmt: skip
    loader = DataLoader(
        Augmented(24, draws=not workers),
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        persistent_workers=bool(workers),
    )
    held_out = [DataLoader(Augmented(4, draws=True), batch_size=2) for _ in range(switches.get("val_loaders", 1))]
    trainer.fit(Net(switches, life), loader, held_out)
