"""torchtitan's own program with its debug model, that says of each step its loss, and what was loaded and what it ended with.

torchtitan_job.py FOLDER [--kill-at STEP] [--steps N] [--registry NAME] [--validate] [options of torchtitan]
FOLDER/../assets has a tokenizer and texts. The first start dies at STEP, on its last rank. NAME is a function of this file.
With loaders of torchdata as in torchtitan 0.3, and with those of Grain that came after it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from integration.frameworks import torchtitan_cpu

STEPS = 12
"""Of the schedule of the learning rate, also where a run ends earlier."""
TEXTS = "TORCHTITAN_JOB_TEXTS"
"""Variable with the folder of the texts, for what torchtitan imports as a registry."""


def debug_model():
    """torchtitan's, that reads our texts."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    if has_grain():
        config.dataloader.dataset = config.validator.dataloader.dataset = grain_texts()
    return config


def has_grain():
    return importlib.util.find_spec("torchtitan.components.data") is not None


def grain_texts():
    from torchtitan.components.data import ConcatThenSplitPackingConfig, IndexedJsonlSource, SingleDatasetConfig
    from torchtitan.hf_datasets.text_datasets import TextProcessor

    source = IndexedJsonlSource.Config(patterns=(f"{os.environ[TEXTS]}/*.jsonl",))
    rows = SingleDatasetConfig(
        source=source, processor=TextProcessor.Config(), post_filters=(lambda row: row is not None,)
    )
    return ConcatThenSplitPackingConfig(dataset=rows)


def flash():
    """What a user writes into a registry."""
    from flashckpt.integrations.torchtitan import FlashCheckpointManager

    config = debug_model()
    config.checkpoint = FlashCheckpointManager.Config(snapshot_every=2, interval=4)
    return config


def plain():
    """With torchtitan's own manager."""
    config = debug_model()
    config.checkpoint.enable, config.checkpoint.interval = True, 4
    return config


def digests(trainer):
    """Return name -> digest of the parameters and moments of this rank's model parts, each of them whole."""
    tensors: dict[str, torch.Tensor] = {}
    for part in trainer.model_parts:
        names = {param: name for name, param in part.named_parameters()}
        tensors |= {name: param.detach() for param, name in names.items()}
        held = [(names[p], state) for one in trainer.optimizers for p, state in one.state.items() if p in names]
        tensors |= {f"{name}:{key}": value for name, state in held for key, value in state.items()}
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}
    return {name: hashlib.sha256(one.numpy().tobytes()).hexdigest() for name, one in whole.items()}


class Witness:
    """Writes down what a Trainer does."""

    def __init__(self, trainer, given):
        self.trainer, self.folder, self.kill_at = trainer, given.folder, given.kill_at
        self.rank, self.last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
        self.is_restart = os.environ["FLASHCKPT_RESTART"] != "0"
        self.log, self.load = trainer.metrics_processor.log, trainer.checkpointer.load
        trainer.metrics_processor.log, trainer.checkpointer.load = self.step_is_done, self.loading

    def write(self, what):
        (self.folder / f"{what}{self.rank}.json").write_text(json.dumps(digests(self.trainer)))

    def loading(self, step):
        found = self.load(step)
        if found and not self.is_restart:
            self.write("loaded")
        return found

    def step_is_done(self, step, loss, most, norm, extra_metrics):
        """After the optimizer, before the snapshot."""
        self.log(step, loss, most, norm, extra_metrics)
        words = step, float(loss).hex(), float(norm).hex(), self.trainer.ntokens_seen, float(torch.rand(())).hex()
        with (self.folder / f"rank{self.rank}.txt").open("a") as file:
            print(*words, file=file)
        if step == self.kill_at and not self.is_restart and self.rank == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def observed(loop, given):
    def run(trainer):
        witness = Witness(trainer, given)
        loop(trainer)
        witness.write("ended")

    return run


def of_the_data(given, texts) -> dict[str, Any]:
    """Rows of 64 tokens, two in a batch; with --validate a worker of the loader too, where it has any."""
    validate: dict[str, Any] = (
        {"validator.enable": None, "validator.freq": 3, "validator.steps": 2} if given.validate else {}
    )
    if has_grain():
        return {"training.num-tokens-per-microbatch-per-dp-rank": 128, "training.max-context-length": 64} | validate
    if validate:
        validate |= {"validator.dataloader.dataset": "c4_test", "validator.dataloader.dataset-path": texts}
        validate["dataloader.num-workers"] = 1
    return {"training.local-batch-size": 2, "training.seq-len": 64, "dataloader.dataset-path": texts} | validate


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--registry", default="flash")
    parser.add_argument("--validate", action="store_true")
    given, rest = parser.parse_known_args()
    torchtitan_cpu.prepare()
    from torchtitan import train
    from torchtitan.trainer import Trainer

    Trainer.train = observed(Trainer.train, given)
    assets = given.folder.parent / "assets"
    os.environ[TEXTS] = str(assets / "texts")
    options = {
        "module": "integration.frameworks.torchtitan_job",
        "config": given.registry,
        "hf-assets-path": assets,
        "dump-folder": given.folder,
        "training.steps": given.steps,
        "lr-scheduler.total-steps": STEPS,
        "training.disable-cuda-graphs": None,
        "training.mixed-precision-param": "float32",
        "parallelism.spmd-backend": "partial_dtensor",
        "parallelism.pipeline-parallel-schedule": "1F1B",
        "debug.seed": 7,
    } | of_the_data(given, assets / "texts")
    words = [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]
    sys.argv[1:] = [*map(str, words), *rest, "activation-checkpoint:none"]
    train.main()


if __name__ == "__main__":
    main()
