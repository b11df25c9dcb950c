"""What a rank makes of its configuration before it trains, and what it says of it."""

from __future__ import annotations

import logging

import torch

from flashckpt import entry_points
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.model.initial import name_seed
from flashckpt.trainer.model.moe import described_products
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.parallel.distributed import device_name
from flashckpt.trainer.parallel.float8 import described_float8
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import host_memory_switches
from flashckpt.trainer.train.phases import Phase
from flashckpt.trainer.train.record import say_once


def training_data(config: RunConfig, seed: int, parallel: Parallel, layout: Layout) -> TrainingData:
    """Return this rank's batches of a phase; `layout` is that of the run."""
    return TrainingData(
        open_data(config, "train"),
        dp_rank=parallel.dp_rank,
        dp_size=layout.dp,
        global_batch=config.train.global_batch,
        rows=resolve_layout(config, layout.world).local_batch,
        seed=seed,
        ahead=config.data.read_ahead,
        pin=parallel.device.type != "cpu",
    )


def seed_rng(config: RunConfig, parallel: Parallel) -> None:
    """Seed torch's generators: for dropout, as far as ranks may drop different activations."""
    # Without sequence parallelism the tensor-parallel ranks hold the same activations: same dropout.
    tp = parallel.coordinate("tp") if config.parallel.sequence_parallel else 0
    name = f"rng:{parallel.coordinate('pp')}:{parallel.dp_rank}:{tp}"
    if parallel.context is not None:  # other tokens of the same rows
        name += f":{parallel.context.rank}"
    torch.manual_seed(name_seed(config.train.seed, name))


def announce(config: RunConfig, layout: Layout, parallel: Parallel) -> None:
    """Log the layout, the plan, and what has no effect."""
    device = parallel.device
    where = f"{config.train.precision} on {device.type}, {config.parallel.data_parallel}"
    say_once(logging.INFO, f"{layout.describe()}; {where}")
    if device.type == "cpu" and (moved := host_memory_switches(config.parallel)):
        say_once(logging.WARNING, f"{moved}: all is in host memory on a CPU: nothing is saved")
    if float8 := described_float8(config, parallel.parts):
        say_once(logging.INFO, float8)
    if products := described_products(parallel.parts[0]):
        say_once(logging.INFO, products)
    if (start_line := entry_points.optional("start-line")) is not None:
        say_once(logging.INFO, start_line(config, layout, device_name(device)))
    if not config.checkpoint.root:
        say_once(logging.WARNING, "no checkpoints are made: checkpoint.root is empty, [checkpoint] has no effect")


def announce_phase(phase: Phase) -> None:
    """Log what a phase changes; the first one changes nothing."""
    if phase.number:
        config = phase.config
        say_once(
            logging.INFO,
            f"phase {phase.number} from step {phase.first_step}: seq_len {config.train.seq_len}, global batch "
            f"{config.train.global_batch}, rope base {config.model.rope_base:g}, lr {config.optim.lr:g}",
        )
