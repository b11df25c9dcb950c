"""The first step of a run, rehearsed before its ranks are forked: dlrun's copy of the zygote calls `rehearse`.

Tensor parallelism is what makes a first step slow: DTensor plans some eighty operators on every rank. Layouts without it
have next to nothing to plan, and a model whose step takes longer than its plans has little to gain: they are left alone.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from flashckpt import entry_points
from flashckpt.environment import env
from flashckpt.errors import ConfigError, FlashckptError
from flashckpt.rehearsal import leftovers, pretend_rank, unsupported
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.config.command_line import take_value
from flashckpt.trainer.data.windows import Batch
from flashckpt.trainer.optim.builders import build_optimizers
from flashckpt.trainer.parallel.apply import Parallel, build_parallel
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.train.optim import clip_gradients
from flashckpt.trainer.train.step import TrainStep

OTHER_WORDS = frozenset(
    ("hub", "generate", "data", "plan", "--check", "--evaluate", "--dry-run", "--print-config", "--help", "-h")
)
"""Words of a command line that trains nothing."""
MOST_WORK = 1e11
"""Multiplications and additions of a rehearsed step: about two seconds of one core."""


def rehearse(words: Sequence[str]) -> str:
    """Plan the first step of the run that these words start; return why there is nothing to inherit, or ""."""
    if reason := unsupported():
        return reason
    try:
        config = on_device(_run_of(list(words)), "cpu")
        layout = resolve_layout(config, env.WORLD_SIZE)
    except FlashckptError as error:  # the ranks will say so
        return error.problem
    if reason := _unsuitable(config, layout):
        return reason
    torch.set_num_threads(1)
    for rank in ranks_of_node(layout, env.RANK, env.LOCAL_WORLD_SIZE):
        with pretend_rank(rank, layout.world), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if reason := _step(config, layout):
                return reason
    gc.collect()
    return ""


def _run_of(words: list[str]) -> RunConfig:
    if OTHER_WORDS.intersection(words):
        raise ConfigError("these words start no training run")
    config = read_config(take_value(words, "--config"), words)
    if config.init.from_:
        config = entry_points.load(entry_points.EXTRAS, "hub-model")(config)
    return config


def ranks_of_node(layout: Layout, first: int, count: int) -> list[int]:
    """Return one rank for every pipeline stage among `count` ranks from `first` on: the others plan the same."""
    per_stage = layout.world // layout.pp
    return sorted({rank // per_stage: rank for rank in range(first + count - 1, first - 1, -1)}.values())


def _unsuitable(config: RunConfig, layout: Layout) -> str:
    if config.train.device not in ("auto", "cpu"):
        return f"train.device = {config.train.device}"
    if layout.tp == 1:
        return "without tensor parallelism there is little to plan"
    if config.parallel.loss_parallel and layout.pp > 1:
        return "with parallel.loss_parallel the stages of a pipeline ask each other for their shapes"
    if (
        config.train.compile
        or config.train.float8 != "off"
        or config.train.loss_chunk
        or config.parallel.offload != "none"
    ):
        return "train.compile, train.float8, train.loss_chunk or parallel.offload"
    return ""


def _step(config: RunConfig, layout: Layout) -> str:
    """Train one step as the rank that this process pretends to be."""
    parallel = build_parallel(config, layout, torch.device("cpu"))
    if reason := _unplannable(config, parallel):
        return reason
    parallel.fill(config)
    optimizers = build_optimizers(config.optim, parallel.parts, tied=config.model.tied_embeddings)
    step = TrainStep(parallel, ["rehearsal"], settings=config.parallel)
    totals = step.backward(_batch(config, layout))
    clip_gradients(parallel, totals.norm, config.optim.clip_norm)
    for optimizer in optimizers:
        optimizer.step()
    for parameter in parallel.parameters():
        torch.empty_like(parameter)  # as a restore makes the state of an optimizer that has not stepped
    return ""


def _unplannable(config: RunConfig, parallel: Parallel) -> str:
    if strange := leftovers(parallel.mesh):
        return f"meshes of dimensions {', '.join(dict.fromkeys(strange))} cannot be passed on"
    work = 6.0 * sum(p.numel() for p in parallel.parameters()) * parallel.layout.local_batch * config.train.seq_len
    if work > MOST_WORK:
        return f"a step of {work:.1e} multiplications and additions takes longer than its plans"
    if any(not _is_even(parameter) for parameter in parallel.parameters()):
        return "a parameter is not divided evenly: a plan may hold the shape of one rank"
    return ""


def _is_even(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    sizes = dict.fromkeys(range(parameter.dim()), 1)
    for placement, parts in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if placement.is_shard():
            sizes[placement.dim % parameter.dim()] *= parts  # type: ignore[attr-defined]  # of Shard
    return all(parameter.shape[dim] % parts == 0 for dim, parts in sizes.items())


def _batch(config: RunConfig, layout: Layout) -> Batch:
    shape = (layout.local_batch, config.train.seq_len)
    targets = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int64)
    return Batch(tokens=torch.zeros(shape, dtype=torch.int64), targets=targets, ids=None)  # type: ignore[arg-type]  # unused
