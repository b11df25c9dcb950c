"""Layouts of a run on so many GPUs: which fit, and which of these is the fastest. Pure.

Candidates within 2 % of each other are ranked by what a published study of layouts found ("Efficient Parallelization
Layouts for Large-Scale Distributed Model Training", arXiv 2311.05610): micro-batches of one sample, model parallelism
before recomputation, pipelines before tensor parallelism; sequence parallelism above 30 G parameters and 2,048 tokens.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.parallel import ParallelConfig
from flashckpt.trainer.flops import count_parameters
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.plan.forecast import Memory, StepTime, is_plain, memory, step_time
from flashckpt.trainer.plan.gpus import Gpu

RECOMPUTE = ("none", "selective", "ffn", "full")
"""From what costs nothing to what costs most."""

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
MICRO_BATCHES = (1, 2, 4, 8)
ZERO = (1, 2, 3)
LOSS_CHUNK = 1024
SHORTEST_PART = 4096
"""Tokens that context parallelism leaves to a rank at least: below, it waits more than it computes."""

LARGE, LONG = 30e9, 2048
_ALIKE = math.log(1.02)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChoice:
    """A layout that fits: `config` is the run with it."""

    config: RunConfig
    layout: Layout
    memory: Memory
    time: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found: candidates, best first, and how many others were dropped for which reason."""

    ranked: tuple[LayoutChoice, ...]
    dropped: dict[str, int]


def search(config: RunConfig, gpus: int, gpu: Gpu, *, ranks_per_node: int, efficiency: float = 0.0) -> Found:
    """Return the layouts of a run that fit, best first.

    Raises:
        LayoutError: None does; names why.
    """
    dropped: Counter[str] = Counter()
    fit: list[LayoutChoice] = []
    for one in _variants(config, gpus, ranks_per_node):
        try:
            layout = resolve_layout(one, gpus)
        except LayoutError as error:
            dropped[error.problem] += 1
            continue
        if layout.padding:  # it would run, and compute nothing in some rows
            dropped["train.global_batch is not divisible by dp x train.micro_batch"] += 1
            continue
        for smaller in _smaller(one):
            needed = memory(smaller, layout, is_plain=is_plain(smaller, layout, gpu))
            if needed.fits(gpu):
                time = step_time(smaller, layout, gpu, needed, ranks_per_node=ranks_per_node, efficiency=efficiency)
                fit.append(LayoutChoice(config=smaller, layout=layout, memory=needed, time=time))
                break
        else:
            dropped[f"needs more than the {gpu.memory / 1e9:.0f} GB of a device"] += 1
    if not fit:
        (reason, _), *_ = dropped.most_common(1) or [("no degree divides", 0)]
        raise LayoutError(
            f"no layout fits {gpus} GPUs",
            found=f"{sum(dropped.values())} candidates, of which most: {reason}",
            expected="one whose fullest rank fits, with batch, heads and layers divided",
            state="Nothing was started.",
            remedy="give more GPUs, GPUs of more memory, or another train.global_batch",
        )
    return Found(ranked=ranked(fit), dropped=dict(dropped.most_common()))


def ranked(candidates: Sequence[LayoutChoice]) -> tuple[LayoutChoice, ...]:
    """Return candidates, best first."""
    return tuple(sorted(candidates, key=_order))


def _order(one: LayoutChoice) -> tuple[float, ...]:
    parallel = one.config.parallel
    return (
        round(math.log(one.time.estimate_s) / _ALIKE),
        one.config.train.micro_batch,
        RECOMPUTE.index(parallel.activation_checkpoint),
        one.layout.tp,
        one.layout.cp,
        one.layout.pp,
        parallel.dp_replicate,
        one.memory.peak,
        one.time.estimate_s,
    )


def corrected(found: Found, gpu: Gpu, ranks_per_node: int, measure: Callable[[LayoutChoice], float]) -> Found:
    """Return what was found, ranked by times with the efficiency that `measure` gives of each candidate."""
    timed = []
    for one in found.ranked:
        efficiency = measure(one)
        time = step_time(one.config, one.layout, gpu, one.memory, ranks_per_node=ranks_per_node, efficiency=efficiency)
        timed.append(replace(one, time=time))
    return replace(found, ranked=ranked(timed))


def reasons(one: LayoutChoice) -> list[str]:
    """Return what speaks for a candidate, and what it costs."""
    parallel, train, layout = one.config.parallel, one.config.train, one.layout
    found = []
    if train.micro_batch == 1:
        found.append("micro-batch 1" + (": the most micro-batches to fill the pipeline" if layout.pp > 1 else ""))
    else:
        found.append(f"micro-batch {train.micro_batch}: fewer gathers of weights")
    if layout.pp > 1:
        found.append(f"PP {layout.pp} sends less than TP would, for a bubble of {layout.bubble:.1%}")
    if layout.tp > 1:
        pays = count_parameters(one.config.model) > LARGE and train.seq_len > LONG
        why = "pays above 30 G parameters and 2,048 tokens" if pays else "keeps less, and moves the same bytes"
        found.append(
            f"TP {layout.tp} inside a node" + (f"; sequence parallel {why}" if parallel.sequence_parallel else "")
        )
    if layout.edp > 1:
        found.append(f"each expert on one of {layout.ep} ranks, cut over the {layout.edp} that have the same")
    again = one.time.hardware_flops / one.time.flops - 1
    found.append(f"computes {again:.0%} again" if again else "nothing is computed again")
    return found


def to_paste(one: LayoutChoice) -> str:
    """Return the settings of a candidate that differ from the defaults, as TOML."""
    parallel, default = one.config.parallel, ParallelConfig()
    lines = ["[parallel]"]
    for name in (
        "pp", "dp_replicate", "dp_shard", "cp", "cp_exchange", "ep", "tp", "sequence_parallel", "loss_parallel", "data_parallel", "schedule",
        "stages_per_rank", "zero", "offload", "activation_checkpoint", "activation_offload", "sync_every", "groups", "outer_rate",
        "outer_momentum",
    ):  # fmt: skip
        value = getattr(parallel, name)
        if value != getattr(default, name):
            text = f'"{value}"' if isinstance(value, str) else str(value).lower()
            lines.append(f"{name} = {text}")
    train = [f"micro_batch = {one.config.train.micro_batch}"]
    train += [f"loss_chunk = {one.config.train.loss_chunk}"] if one.config.train.loss_chunk else []
    return "\n".join([*lines, "", "[train]", *train]) + "\n"


def _variants(config: RunConfig, gpus: int, ranks_per_node: int) -> Iterator[RunConfig]:
    for pp, tp, cp in _degrees(config, gpus, ranks_per_node):
        for data_parallel, replicas, shards in _data_degrees(config, gpus // (pp * tp * cp), tp * cp, ranks_per_node):
            schedules = SCHEDULES if pp > 1 else SCHEDULES[:1]
            degrees = _expert_degrees(config, shards * cp, ranks_per_node // tp)
            stages = ZERO if pp == 1 and shards * cp > 1 and data_parallel == "fsdp" else (-1,)
            for ep, schedule, micro_batch, mode, zero in itertools.product(
                degrees, schedules, MICRO_BATCHES, RECOMPUTE, stages
            ):
                parallel = replace(
                    config.parallel, pp=pp, tp=tp, cp=cp, dp_replicate=replicas, dp_shard=shards, ep=ep,
                    schedule=schedule, stages_per_rank=0, layers_per_stage=(), activation_checkpoint=mode,
                    sequence_parallel=True, loss_parallel=tp > 1 and config.parallel.loss_parallel,
                    data_parallel=data_parallel, zero=zero,
                )  # fmt: skip
                train = replace(config.train, micro_batch=micro_batch)
                yield replace(config, parallel=parallel, train=train)


def _smaller(one: RunConfig) -> Iterator[RunConfig]:
    """Yield a run, and with what needs less memory for some time: pieces of the loss, then what forward keeps, then the state in host memory."""
    yield one
    if one.parallel.tp == 1 and not one.train.loss_chunk:
        one = replace(one, train=replace(one.train, loss_chunk=LOSS_CHUNK))
        yield one
    if one.parallel.activation_checkpoint in ("none", "ffn") and not one.train.compile:
        one = replace(one, parallel=replace(one.parallel, activation_offload=True))
        yield one
    if one.parallel.pp == 1 and one.parallel.data_parallel == "fsdp":
        yield replace(one, parallel=replace(one.parallel, offload="state"))


def _degrees(config: RunConfig, gpus: int, ranks_per_node: int) -> Iterator[tuple[int, int, int]]:
    most = max(1, config.train.seq_len // SHORTEST_PART)
    cuts = dict.fromkeys((config.parallel.cp, *(2**power for power in range(most.bit_length()))))
    for tp in (2**power for power in range(ranks_per_node.bit_length())):
        for pp in range(1, config.model.layers + 1):
            yield from ((pp, tp, cp) for cp in cuts if gpus % (tp * pp * cp) == 0)


def _expert_degrees(config: RunConfig, ranks: int, inside: int) -> list[int]:
    """Return how many of the `ranks` along dp_shard may share the experts: as many as can, and as many as can inside a node."""
    if config.parallel.ep or not config.model.experts:
        return [config.parallel.ep]
    most = math.gcd(config.model.experts, ranks)
    return list(dict.fromkeys(0 if each == ranks else each for each in (most, math.gcd(most, max(1, inside)))))


def _data_degrees(config: RunConfig, dp: int, cut: int, ranks_per_node: int) -> Iterator[tuple[str, int, int]]:
    """Yield (data_parallel, dp_replicate, dp_shard): cut over all, over a node and repeated, or repeated everywhere."""
    if config.parallel.sync_every:  # another number of groups is another run, not another layout
        if dp % config.parallel.dp_replicate == 0:
            yield "fsdp", config.parallel.dp_replicate, dp // config.parallel.dp_replicate
        return
    yield "fsdp", 1, dp
    inside = ranks_per_node // cut
    if 1 < inside < dp and dp % inside == 0:
        yield "fsdp", dp // inside, inside
    if cut == 1 and dp > 1 and not config.model.experts:
        yield "ddp", dp, 1
