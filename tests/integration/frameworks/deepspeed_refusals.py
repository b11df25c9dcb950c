"""What FlashCheckpoint of DeepSpeed refuses, each with one error, and the loop of its page; in one process.

deepspeed_refusals.py FOLDER
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from support.paths import ROOT
from torch.utils.data import DataLoader, TensorDataset

from flashckpt.errors import ConfigError, FlashckptError, UnsupportedStateError
from flashckpt.integrations.deepspeed import FlashCheckpoint
from flashckpt.integrations.dlrover import DeepSpeedCheckpointer, StorageType
from flashckpt.sampler import ElasticSampler

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2))


def engine_of(make=torch.optim.AdamW, **changes):
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **changes,
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    engine, *_ = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config)
    return engine


def elastic(**changes):
    return ElasticSampler(DATA, **{"dp_rank": 0, "dp_size": 1, "global_batch_size": 4, **changes})


def refused(problem, found, make, kind: type[FlashckptError] = ConfigError):
    with pytest.raises(kind) as caught:
        make()
    error = caught.value
    assert problem in error.problem, error
    assert found in error.found, error
    assert error.remedy, error


class Pipeline(DeepSpeedEngine):  # type: ignore[misc]  # it is Any where deepspeed is not installed
    """Stands for the pipeline engine."""


def settings(folder, engine):
    """Of the engine: what it says of itself when they are given."""
    nvme = SimpleNamespace(device=SimpleNamespace(value="nvme"))
    sgd = SimpleNamespace(optimizer=type("OnebitAdam", (), {})())
    cases = [
        ("MoE", "has_moe_layers", True, "each group of ranks has other experts"),
        ("nvme", "zero_offload_param", lambda: nvme, "ZeRO-Infinity keeps state on NVMe"),
        ("zero_hpz_partition_size", "zero_hpz_partition_size", lambda: 2, "ZeRO++ keeps a second"),
        ("zero_quantized_gradients", "zero_quantized_gradients", lambda: True, "ZeRO++ keeps a second"),
        ("model parallel 2", "mp_world_size", 2, "data-parallel training only"),
        ("sequence parallel 2", "sequence_parallel_size", 2, "data-parallel training only"),
        ("OnebitAdam", "optimizer", sgd, "a 1-bit optimizer"),
        ("load_universal", "load_universal_checkpoint", lambda: True, "waits for a universal checkpoint"),
        ("float16", "torch_autocast_z0_gradscaler", object(), "loss scale of torch_autocast"),
        ("curriculum", "curriculum_learning_enabled", lambda: True, "trains on by a schedule"),
        ("NoneType", "optimizer", None, "does not know where this optimizer"),
    ]
    for found, name, value, problem in cases:
        with mock.patch.object(engine, name, value):
            refused(problem, found, lambda: FlashCheckpoint(engine, folder, data=elastic()))
    pipeline = object.__new__(Pipeline)
    pipeline.__dict__["pipeline_parallelism"] = True
    refused("the pipeline engine", "Pipeline", lambda: FlashCheckpoint(pipeline, folder, data=elastic()))
    refused(
        "is not what deepspeed.initialize()", "Linear", lambda: FlashCheckpoint(torch.nn.Linear(1, 1), folder, data=0)
    )
    offloaded = engine_of(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})
    refused("ZeRO-Offload moves", "optimizer to cpu", lambda: FlashCheckpoint(offloaded, folder, data=elastic()))


def loaders(folder, engine):
    def flash(data):
        return lambda: FlashCheckpoint(engine, folder, data=data)

    refused("data= is missing", "", flash(None))
    refused("a loader cannot be resumed", "RandomSampler", flash(DataLoader(DATA, batch_size=2, shuffle=True)))
    refused("the samples of another rank", "dp_rank 1 of dp_size 2", flash(elastic(dp_rank=1, dp_size=2)))
    batch = DataLoader(DATA, batch_size=2, sampler=elastic(global_batch_size=8))
    refused("is not what an optimizer step trains", "micro-batches of 2 and 2 gradient", flash(batch))
    with mock.patch.object(engine, "training_dataloader", object()):
        refused("the loader that DeepSpeed makes", "training_data", flash(elastic()))


def optimizers(folder, engine):
    sgd = engine_of(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    flash = FlashCheckpoint(sgd, folder / "sgd", data=elastic())
    refused("creates its state in step 1", "SGD", flash.restore, UnsupportedStateError)
    flash = FlashCheckpoint(engine, folder / "root", data=elastic())
    engine.global_steps += 1
    refused("restore() was not called", "", flash.step)
    engine.global_steps -= 1


def other_groups(folder):
    """Trained with one group, continued with two: refused; the weights alone are taken."""

    def two(params):
        params = list(params)
        return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.5}])

    first = engine_of()
    with FlashCheckpoint(first, folder / "groups", data=elastic(), job="groups") as flash:
        flash.restore()
        for _ in range(2):
            first.backward(first(DATA[:2][0]).sum())
            first.step()
            flash.step(persist=True)
        assert flash.steps == 1
    whole = [param.detach().clone() for param in first.module.parameters()]
    first.destroy()
    other = engine_of(two)
    refused(
        "other parameters than in the snapshot",
        "a group of 1",
        FlashCheckpoint(other, folder / "groups", data=elastic(), job="groups").restore,
    )
    other = engine_of(two)
    with FlashCheckpoint(other, folder / "others", data=elastic(), job="others") as flash:
        flash.restore(root=str(folder / "groups"), only="model.*")
    assert all(map(torch.equal, whole, other.module.parameters()))


def loop_of_the_page(folder):
    """Twice: the second time it continues where the first one ended."""
    page = (ROOT / "docs/recipes.md").read_text()
    (block,) = re.findall(r"```python\n(from flashckpt.integrations.deepspeed .*?)```", page, flags=re.DOTALL)
    for epochs, steps in ((2, 10), (3, 15)):
        names = {
            "engine": engine_of(), "epochs": epochs, "DataLoader": DataLoader, "root": folder / "page", "torch": torch,
            "data": TensorDataset(torch.ones(20, 2), torch.ones(20, 1)), "loss_of": torch.nn.functional.mse_loss,
        }  # fmt: skip
        exec(block, names)
        assert names["flash"].steps == steps
        names["engine"].destroy()


def dlrovers_calls(folder):
    """The first save begins from scratch; what of DLRover's arguments cannot be done is refused."""
    root = str(folder / "dlrover")
    engine = engine_of()
    flash = DeepSpeedCheckpointer(engine, root)
    refused("by its tag", "tag='100'", lambda: flash.load_checkpoint(root, tag="100"))
    refused("from a path", "elsewhere", lambda: flash.load_checkpoint(folder / "elsewhere"))
    for part in ({"load_module_only": True}, {"load_optimizer_states": False}, {"load_module_strict": False}):
        refused("loaded whole", "part of it", lambda part=part: flash.load_checkpoint(root, **part))
    refused("deletion strategy", "object", lambda: DeepSpeedCheckpointer(engine, root, deletion_strategy=object()))
    assert flash.load_checkpoint(root) == (None, None)
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    with pytest.raises(ConfigError, match="unknown storage type"):
        flash.save_checkpoint(root, "1", {"epoch": 3}, storage_type="disk")  # type: ignore[arg-type]  # on purpose
    flash.save_checkpoint(root, "1", {"epoch": 3}, storage_type=StorageType.DISK)
    flash.wait_latest_checkpoint(60)
    flash.close()
    again = DeepSpeedCheckpointer(other := engine_of(), root)
    assert again.load_checkpoint(root) == (root, {"epoch": 3})
    assert other.global_steps == engine.global_steps == 1
    for one, two in zip(other.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(one, two)
    again.close()


def main():
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at the first start
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    deepspeed.init_distributed()
    engine = engine_of()
    settings(folder, engine)
    loaders(folder, engine)
    optimizers(folder, engine)
    other_groups(folder)
    loop_of_the_page(folder)
    dlrovers_calls(folder)
    dist.destroy_process_group()
    print("all as expected")


if __name__ == "__main__":
    main()
