"""A user's program with Lightning's own checkpoints, once per epoch, continued by `ckpt_path="last"`; no callback of ours.

lightning_files_job.py FOLDER flash|torch [--die-in-save N]: the first start dies while it writes its Nth checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from support.nested import assert_same
from torch.utils.data import DataLoader

from flashckpt import faults
from flashckpt.integrations.lightning import FlashCheckpointIO
from integration.frameworks.lightning_job import Lines, Numbered, Sums


class Pair(Sums):
    """With what a user's module puts into a checkpoint."""

    def __init__(self, width, folder):
        super().__init__(0.0)
        self.save_hyperparameters()
        self.net.append(torch.nn.Identity())

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = {"shape": self.net[0].weight.shape, 0: (1, None)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=["flash", "torch"])
    parser.add_argument("--die-in-save", type=int, default=0)
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    if given.die_in_save and not rank and os.environ["FLASHCKPT_RESTART"] == "0":
        faults.arm(f"export.before-rename:{given.die_in_save}")
    with (given.folder / f"rank{rank}.txt").open("a") as file:
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy="ddp",
            plugins=[FlashCheckpointIO() if given.kind == "flash" else TorchCheckpointIO()],
            callbacks=[
                Lines(file, 0, 0),
                EarlyStopping("val", patience=9),
                ModelCheckpoint(given.folder / "kept", monitor="val", save_last=True, enable_version_counter=False),
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        loader = DataLoader(Numbered(), batch_size=4, shuffle=True)
        trainer.fit(Pair(16, given.folder), loader, DataLoader(Numbered(), batch_size=4), ckpt_path="last")
    if not rank and given.kind == "flash":
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        loaded: list[Any] = []
        for plugin, name in ((FlashCheckpointIO(), "flash.ckpt"), (TorchCheckpointIO(), "torch.ckpt")):
            plugin.save_checkpoint(checkpoint, given.folder / name)
            loaded.append(plugin.load_checkpoint(given.folder / name, weights_only=False))
        assert_same(loaded[0], loaded[1])
        print("loaded as Lightning loads:", *sorted(loaded[0]))


if __name__ == "__main__":
    main()
