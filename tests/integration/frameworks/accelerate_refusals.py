"""What FlashCheckpoint of Accelerate refuses, each with one error, and the loop of its page; in one process.

accelerate_refusals.py FOLDER
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType
from support.paths import ROOT
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flashckpt.errors import ConfigError, FlashckptError, SamplerStateError
from flashckpt.integrations.accelerate import FlashCheckpoint
from flashckpt.integrations.prepared_data import PreparedPosition
from flashckpt.sampler import ElasticBatchSampler, ElasticSampler

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        yield torch.ones(2)


def accelerator_of(*, stateful=False, seedable=True, dispatch=None, accumulation=1):
    config = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=seedable, dispatch_batches=dispatch
    )
    return Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=accumulation)


def elastic(**changes):
    return ElasticSampler(DATA, **{"dp_rank": 0, "dp_size": 1, "global_batch_size": 4, **changes})


def loader_of(**options):
    return DataLoader(DATA, batch_size=4, **options)


def refused(problem, found, make, kind: type[FlashckptError] = ConfigError):
    with pytest.raises(kind) as caught:
        make()
    error = caught.value
    assert problem in error.problem, error
    assert found in error.found, error
    assert error.remedy, error


def engines(folder):
    layout = SimpleNamespace(tp_size=1, cp_size=1, sp_size=1)
    for kind, name in ((DistributedType.DEEPSPEED, "DeepSpeed"), (DistributedType.MEGATRON_LM, "Megatron-LM")):
        fake = SimpleNamespace(distributed_type=kind, parallelism_config=layout)
        refused(f"{name} keeps the state", kind.value, lambda fake=fake: FlashCheckpoint(fake, folder, data=elastic()))
    layout.tp_size = 2
    fake = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, parallelism_config=layout)
    refused("data-parallel training only", "tp_size=2", lambda: FlashCheckpoint(fake, folder, data=elastic()))


def loaders(folder):
    plain = accelerator_of()

    def flash(data, accelerator=plain):
        return lambda: FlashCheckpoint(accelerator, folder, data=data)

    refused("data= is missing", "", flash(None))
    refused("a loader cannot be resumed", "not prepared", flash(loader_of(shuffle=True)))
    prepared = "the position of a prepared loader"
    refused(prepared, "use_stateful_dataloader=False", flash(plain.prepare(loader_of())))
    plain.prepare(loader_of(shuffle=True))
    refused("a prepared loader shuffles", "TensorDataset", flash(elastic()))
    plain._dataloaders.clear()
    for twice in (loader_of(sampler=elastic()), DataLoader(DATA, batch_sampler=ElasticBatchSampler(elastic(), 4))):
        made = plain.prepare(twice)
        refused("dealt to the ranks twice", "", flash(made))
        refused("dealt to the ranks twice", "", flash(elastic()))
        plain._dataloaders.clear()
    share = loader_of(sampler=elastic(dp_rank=1, dp_size=2))
    refused("the samples of another rank", "dp_rank 1 of dp_size 2", flash(share))
    batch = loader_of(sampler=elastic(global_batch_size=8))
    refused("is not what an optimizer step trains", "micro-batches of 4 and 1 gradient", flash(batch))
    several = accelerator_of(accumulation=2)
    short = loader_of(sampler=elastic(global_batch_size=8, tail="short"))
    refused("would have fewer batches", "tail='short'", flash(short, several))
    stateful = accelerator_of(stateful=True, seedable=False)
    refused(prepared, "RandomSampler", flash(stateful.prepare(loader_of(shuffle=True)), stateful))
    stateful = accelerator_of(stateful=True)
    refused(prepared, "rank 0 reads for all", flash(stateful.prepare(DataLoader(Stream())), stateful))
    plain._dataloaders.clear()
    return plain


def order_of_calls(folder, accelerator):
    flash = FlashCheckpoint(accelerator, folder / "root", data=elastic())
    refused("restore() was not called", "", flash.step)
    refused("there is nothing to restore yet", "0 models and 0 optimizers", flash.restore)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with FlashCheckpoint(accelerator, folder / "root", data=elastic()) as flash:
        flash.restore()
        accelerator.register_for_checkpointing(torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters())))
        refused("prepared or registered after restore()", "1 custom_objects", flash.step)


def other_ranks():
    accelerator = accelerator_of(stateful=True)
    loader = accelerator.prepare(loader_of(shuffle=True))
    state = PreparedPosition(loader, ranks=1).state_dict()
    other = PreparedPosition(loader, ranks=2)
    problem, found = "the position of a prepared loader is one on other ranks", "1 ranks with 4 samples together"
    refused(problem, found, lambda: other.load_state_dict(state), SamplerStateError)


def loop_of_the_page(folder):
    """Twice: the second time it continues where the first one ended."""
    page = (ROOT / "docs/recipes.md").read_text()
    (block,) = re.findall(r"```python\n(from flashckpt.integrations.accelerate .*?)```", page, flags=re.DOTALL)
    for epochs, steps in ((2, 8), (3, 12)):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        names = {
            "accelerator": accelerator_of(accumulation=4), "model": model, "optimizer": optimizer, "epochs": epochs,
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "DataLoader": DataLoader, "root": folder / "page",
            "data": TensorDataset(torch.ones(256, 2), torch.ones(256, 1)), "loss_of": torch.nn.functional.mse_loss,
        }  # fmt: skip
        exec(block, names)
        assert names["flash"].steps == steps
        names["accelerator"].free_memory()


def main():
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    engines(folder)
    order_of_calls(folder, loaders(folder))
    other_ranks()
    loop_of_the_page(folder)
    print("all as expected")


if __name__ == "__main__":
    main()
