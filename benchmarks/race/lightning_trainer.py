"""Lightning's Trainer with its own ModelCheckpoint and `ckpt_path="last"`, as its documentation says."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torchdata.stateful_dataloader import StatefulDataLoader

from race import engine_none, problem


class Module(lightning.LightningModule):  # type: ignore[misc]  # untyped where lightning is missing
    """The model with its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.core = problem.Net()

    def training_step(self, batch: dict[str, Any], _: int) -> Any:
        """Return the loss."""
        return self.core(batch["x"], batch["y"])["loss"]

    def configure_optimizers(self) -> Any:
        """Return the same optimizer as all have."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Report(Callback):  # type: ignore[misc]
    """Logs the samples of each step; ModelCheckpoint comes last."""

    log: problem.Log

    def on_train_start(self, *_: Any) -> None:
        """Begin when the process group is there."""
        self.log = problem.Log()

    def on_train_batch_end(self, trainer: Any, _: Any, __: Any, batch: Any, *___: Any) -> None:
        """Log one step."""
        time.sleep(problem.SLEEP_S)
        self.log.step(trainer.global_step, batch["number"].tolist())


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    problem.prepare()
    world = int(os.environ["WORLD_SIZE"])
    report, module = Report(), Module()
    callbacks: list[Any] = [report]
    if problem.EVERY:
        callbacks.append(
            ModelCheckpoint(
                dirpath=problem.FOLDER,
                filename="step_{step}",
                auto_insert_metric_name=False,
                every_n_train_steps=problem.EVERY,
                save_top_k=2,
                monitor="step",
                mode="max",
                save_last=True,
            )
        )
    trainer = lightning.Trainer(
        max_epochs=problem.EPOCHS,
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=problem.TIMEOUT),
        callbacks=callbacks,
        enable_checkpointing=bool(problem.EVERY),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=problem.FOLDER,
    )
    # Lightning keeps the position of a loader that has state, which a plain DataLoader has not
    loader = StatefulDataLoader(problem.Numbers(), batch_size=problem.BATCH // world, shuffle=True)
    path = "last" if problem.EVERY else None
    if problem.SKIP:
        found = [path.with_suffix(".ckpt") for path in engine_none.folders("step_*")]
        path = str(found[-1]) if found else None
    trainer.fit(module, loader, ckpt_path=path)
    report.log.end(module.core)


if __name__ == "__main__":
    main()
