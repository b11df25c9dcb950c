"""Lightning: one callback snapshots, restores and stops; data resumes at the next sample.

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
from torch.utils.data import DataLoader, TensorDataset

from flashckpt.integrations.lightning import FlashCheckpoint


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
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.manual_seed(0)
    inputs = torch.randn(1000, 16)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=local,
        num_nodes=max(1, int(os.environ.get("WORLD_SIZE", "1")) // local),
        callbacks=[FlashCheckpoint(root, snapshot_every=2, persist_every=20)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
