"""What torchtitan's manager of flashckpt refuses, each with one error, and what it does without a Trainer; in one process.

torchtitan_refusals.py FOLDER
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from support.paths import ROOT
from torch.utils.data import IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from flashckpt.errors import ConfigError, SamplerStateError
from integration.frameworks import torchtitan_cpu

PAGE = ROOT / "docs/recipes.md"


class Counted:
    """A scheduler, a loader of one's own: anything with state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        yield torch.ones(2)


class AroundStream(Stream):
    """As torchtitan's data sets: it has a stream of `datasets`, here one that a user shuffled, and the state of that."""

    def __init__(self):
        rows = datasets.Dataset.from_list([{"id": 0}]).to_iterable_dataset()
        self._data = rows.shuffle(seed=1, buffer_size=4)

    state_dict, load_state_dict = Counted.state_dict, Counted.load_state_dict


class Own(Sampler):  # type: ignore[type-arg]
    def __iter__(self):
        return iter(range(8))


def settings(integration, folder):
    """By hand and from the command line."""
    from torchtitan.config import ConfigManager

    make = integration.FlashCheckpointManager.Config
    for setting, value, remedy in (
        ("async_mode", "async", "always copied beside training"),
        ("create_seed_checkpoint", True, "--checkpoint.initial-load-path"),
        ("load_only", True, "Checkpointer.readonly(root)"),
        ("exclude_from_loading", ["dataloader"], "--checkpoint.data-on-other-ranks restart"),
    ):
        with pytest.raises(ConfigError) as caught:
            make(**{setting: value})
        assert f"cannot do what checkpoint.{setting} asks" in caught.value.problem, caught.value
        assert remedy in caught.value.remedy, caught.value
    os.environ["TORCHTITAN_JOB_TEXTS"] = str(folder)  # which nothing here reads
    words = ["--module", "integration.frameworks.torchtitan_job", "--config", "flash"]
    given = ConfigManager().parse_args([*words, "--checkpoint.root", "s3://a/b", "--checkpoint.keep-latest-k", "4"])
    found = given.checkpoint
    assert (type(found), found.root, found.interval, found.keep_latest_k) == (make, "s3://a/b", 4, 4)
    with pytest.raises(ConfigError, match=r"checkpoint\.load_only"):
        ConfigManager().parse_args([*words, "--checkpoint.load-only"])


def page(integration, folder):
    """The registry of the page."""
    found = re.search(r"^```python\n(from torchtitan.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(found[1], names)  # type: ignore[index]  # it is there
    config = names["llama3_flash"]().checkpoint
    assert isinstance(config, integration.FlashCheckpointManager.Config)
    assert (config.enable, config.root, config.interval, config.snapshot_every) == (True, "/checkpoints/run7", 500, 5)


def secrets(integration, folder):
    options = {"compression": "zstd", "storage_options": {"secret": "x"}}
    config = integration.FlashCheckpointManager.Config(options=options)
    assert config.to_dict()["options"] == {"compression": "zstd"}


def built(config, **changes):
    parts: dict[str, Any] = {
        "dataloader": None,
        "model_parts": [],
        "optimizers": [],
        "lr_schedulers": Counted(),
        "states": {},
    }
    return config.build(**{**parts, "sd_adapter": None, **changes})


def replicas(integration, folder):
    with pytest.raises(ConfigError) as caught:
        built(integration.FlashCheckpointManager.Config(root=str(folder / "ft")), ft_manager=object())
    assert caught.value.found == "ft_manager"
    assert "TorchFTCheckpointManager" in caught.value.remedy


def switched_off(integration, folder):
    manager = built(integration.FlashCheckpointManager.Config(enable=False))
    assert not manager.load()
    assert not manager.save(1)
    manager.maybe_wait_for_staging()
    manager.close()


def without_trainer(integration, folder):
    """A loader of one's own and no mesh: restored, with the first step on storage."""
    model = torch.nn.Linear(3, 3)
    make = integration.FlashCheckpointManager.Config
    config = make(root=str(folder / "root"), snapshot_every=1, enable_first_step_checkpoint=True)
    found = []
    for first in (1, 2):
        loader, counted = Counted(), Counted()
        optimizer = torch.optim.AdamW(model.parameters())
        parts = {"model_parts": [model], "optimizers": [optimizer], "states": {"own": counted}, "dataloader": loader}
        manager = built(config, base_folder=str(folder), **parts)
        found.append((manager.load(), loader.count, counted.count))
        model(torch.ones(1, 3)).sum().backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        loader.count, counted.count = first * 10, first * 100
        assert manager.save(first)
        manager.close()
        manager.close()
    assert found == [(False, 0, 0), (True, 10, 100)]


def positions(integration, folder):
    """Workers tell their place as often as there are snapshots, and others than recorded have none."""
    loader = StatefulDataLoader(Stream(), snapshot_every_n_steps=500 * 8)
    integration._take_positions(loader, every=5, instead_of=500)
    assert loader.snapshot_every_n_steps == 5 * 8
    position = integration._Position(Counted(), ranks=2)
    position.load_state_dict({"ranks": 3, "loader": {"count": 7}})
    assert position.state_dict() == {"ranks": 2, "loader": {"count": 0}}
    recorded = {"ranks": 2, "loader": {"_snapshot": {"_main_snapshot": {"_num_workers": 3}}}}
    with pytest.raises(SamplerStateError, match="no position with another number of workers") as caught:
        integration._Position(loader, ranks=2).load_state_dict(recorded)
    assert caught.value.remedy.startswith("num_workers=3; ")


def loaders(integration, folder):
    """What repeats samples, or leaves them out, after a restart is refused; of an order of one's own nobody can tell."""
    drawn = RandomSampler(range(8))
    refused = {
        "give its data set state_dict()": StatefulDataLoader(Stream()),
        "StatefulDataLoader(..., shuffle=True)": StatefulDataLoader(range(8), sampler=drawn),
        "leave out shuffle(buffer_size=...)": StatefulDataLoader(AroundStream()),
    }
    for remedy, loader in refused.items():
        with pytest.raises(ConfigError, match="StatefulDataLoader, has no exact position") as caught:
            built(integration.FlashCheckpointManager.Config(root=str(folder / "loaders")), dataloader=loader)
        assert caught.value.remedy.startswith(remedy), caught.value
        assert "ExactLoader" not in caught.value.remedy  # torchtitan iterates over its own
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flashckpt")
    logger.addHandler(handler)
    integration._refuse_inexact(StatefulDataLoader(range(8), sampler=Own()))
    integration._refuse_inexact(StatefulDataLoader(range(8)))
    logger.removeHandler(handler)
    assert [text.partition(":")[0] for text in said] == ["data (StatefulDataLoader)"]


def stops(integration, folder):
    trainer, checkpointer = SimpleNamespace(should_continue_training=lambda: True), SimpleNamespace(should_stop=False)
    integration._end_when_asked(trainer, checkpointer)
    assert trainer.should_continue_training()
    checkpointer.should_stop = True
    assert not trainer.should_continue_training()


def main():
    folder = Path(sys.argv[1])
    torchtitan_cpu.prepare()
    from flashckpt.integrations import torchtitan as integration

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for check in (settings, page, secrets, replicas, switched_off, without_trainer, positions, loaders, stops):
        check(integration, folder)
    dist.destroy_process_group()
    print("all as expected")


if __name__ == "__main__":
    main()
