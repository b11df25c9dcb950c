"""A user's program with Accelerate whose samples draw in the training process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from flashckpt.integrations.accelerate import FlashCheckpoint
from flashckpt.sampler import ElasticSampler
from integration.frameworks.augmented import Augmented


def train(switches: dict[str, Any], life: Any) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    own = {"gradient_accumulation_steps", "workers", "shuffle", "loaders", "prepared", "draws_behind"}
    options = {key: value for key, value in switches.items() if key not in own}
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=switches.get("gradient_accumulation_steps", 1),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, **options),
    )
    core = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(core.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(core, optimizer)
    workers, count = switches.get("workers", 0), switches.get("loaders", 1)
    data = Augmented(11, draws=not workers)  # the last batch is a smaller one
    if switches.get("prepared", True):
        made = [
            DataLoader(data, batch_size=3, shuffle=switches.get("shuffle", True), num_workers=workers)
            for _ in range(count)
        ]
        loaders = [accelerator.prepare(one) for one in made]
    else:
        sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=3, seed=1)
        loaders = [DataLoader(data, batch_size=3, sampler=sampler)]
    options = {"snapshot_every": 1, "persist_every": 1000, "job": life.root.name}
    with FlashCheckpoint(accelerator, life.root, data=loaders, **options) as flash:
        life.owns(flash.checkpointer)
        flash.restore()
        for _ in flash.epochs(2):
            for batches in zip(*loaders, strict=True):
                life.begins()
                with accelerator.accumulate(model):
                    loss = sum(model(batch / 16).pow(2).mean() for batch in batches)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                life.saw(sum(batch.sum() for batch in batches), loss)
                if accelerator.sync_gradients:
                    life.stepped(flash.steps + 1)
                flash.step()
            if switches.get("draws_behind"):
                torch.rand(())  # as an evaluation does
