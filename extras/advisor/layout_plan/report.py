"""The document of a plan. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.flops import count_parameters
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import bubble
from flashckpt.trainer.plan.beyond import run_days, run_document
from flashckpt.trainer.plan.failures import failure_forecast, gpu_hours
from flashckpt.trainer.plan.forecast import (
    RESERVED,
    WAITED_FOR,
    Memory,
    float8_rate,
    is_plain,
    memory,
    speed,
    step_time,
)
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.held import SLOTS, stored_bytes, zero_bytes
from flashckpt.trainer.plan.options import PlanOptions
from flashckpt.trainer.plan.search import RECOMPUTE, Found, LayoutChoice, reasons, to_paste
from flashckpt.trainer.plan.wire import sharded_passes

VERSION = 1
"""Of the JSON document: members are added, none is renamed or changes its unit without another number."""


def candidate(config: RunConfig, options: PlanOptions) -> LayoutChoice:
    """Return the run as it is configured.

    Raises:
        LayoutError: The layout does not divide.
    """
    layout = resolve_layout(config, options.gpus)
    needed = memory(config, layout, is_plain=is_plain(config, layout, options.gpu))
    time = step_time(
        config, layout, options.gpu, needed, ranks_per_node=options.ranks_per_node, efficiency=options.efficiency
    )
    return LayoutChoice(config=config, layout=layout, memory=needed, time=time)


def plan_document(one: LayoutChoice, options: PlanOptions, found: Found | None, efficiency_from: str) -> dict[str, Any]:
    """Return what a plan prints, as JSON.

    Args:
        one: The run that is described.
        options: What was asked.
        found: What a search found; None without.
        efficiency_from: "fitted to published runs", "given" or "measured on DEVICE".
    """
    config, layout, gpu = one.config, one.layout, options.gpu
    parameters = count_parameters(config.model)
    checkpoint = stored_bytes(config, layout)
    failures = failure_forecast(
        one.memory, checkpoint, gpus=options.gpus, ranks_per_node=options.ranks_per_node,
        hours=gpu_hours(options.failures), step_s=one.time.estimate_s,
    )  # fmt: skip
    step = step_document(one, gpu, options, failures["goodput"])
    return {
        "version": VERSION,
        "gpus": options.gpus,
        "gpu": {**asdict(gpu), "ranks_per_node": options.ranks_per_node},
        "efficiency": {"share": _efficiency(one), "from": efficiency_from},
        "model": {
            "parameters": parameters,
            "active_parameters": count_parameters(config.model, active=True),
            "flops_per_token": one.time.flops,
            "hardware_flops_per_token": one.time.hardware_flops,
        },
        "float8": _float8(one, gpu),
        "layout": layout_document(layout, config),
        "memory": memory_document(one.memory, gpu, options.ranks_per_node),
        "activations": _by_recompute(config, layout, gpu),
        "zero": _by_stage(parameters, layout),
        "bubbles": _by_schedule(layout),
        "wire": [{**asdict(moved), "seconds": moved.seconds} for moved in one.time.traffic],
        "step": step,
        "run": run_document(config, layout, one.time, gpu, tokens=step["run_tokens"], goodput=failures["goodput"]),
        "failures": failures | {"preset": options.failures},
        "checkpoint_bytes": checkpoint,
        "search": None if found is None else search_document(found, options),
    }  # fmt: skip


def _float8(one: LayoutChoice, gpu: Gpu) -> dict[str, float] | None:
    if not one.time.float8_flops:
        return None
    return {"flops_per_token": one.time.float8_flops, "rate": float8_rate(one.config, gpu)}


def _efficiency(one: LayoutChoice) -> float:
    return one.time.peak_s / one.time.products_s


def layout_document(layout: Layout, config: RunConfig) -> dict[str, Any]:
    """Return degrees, schedule and batch."""
    return {
        "text": layout.describe(), "pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard,
        "cp": layout.cp, "ep": layout.ep if config.model.experts else 0, "tp": layout.tp, "stages": layout.stages,
        "micro_batch": config.train.micro_batch,
        "micro_batches": layout.micro_batches, "bubble": layout.bubble, "data_parallel": config.parallel.data_parallel,
        "zero": config.parallel.zero, "loss_chunk": config.train.loss_chunk, "offload": config.parallel.offload,
        "activation_offload": config.parallel.activation_offload,
        "recompute": config.parallel.activation_checkpoint, "sequence_parallel": config.parallel.sequence_parallel,
    }  # fmt: skip


def memory_document(needed: Memory, gpu: Gpu, ranks_per_node: int) -> dict[str, Any]:
    """Return bytes of the fullest rank."""
    return {
        "pp": needed.pp_rank,
        "parameter_bytes": needed.held.parameters,
        "gradient_bytes": needed.held.gradients,
        "optimizer_bytes": needed.held.optimizer,
        "gathered_bytes": needed.gathered,
        "activation_bytes": needed.activations,
        "start_bytes": needed.start,
        "restore_bytes": needed.restore,
        "step_bytes": needed.step,
        "usable_bytes": int(gpu.memory * (1 - RESERVED)),
        "fits": needed.fits(gpu),
        "slots": SLOTS,
        "slot_bytes": needed.held.state,
        "state_on_host_bytes": needed.state_on_host,
        "activations_on_host_bytes": needed.moved,
        "host_node_bytes": needed.host * ranks_per_node,
    }


def _by_recompute(config: RunConfig, layout: Layout, gpu: Gpu) -> dict[str, int]:
    modes = dict.fromkeys((*RECOMPUTE, config.parallel.activation_checkpoint))
    found = {}
    for mode in modes:
        other = replace(config, parallel=replace(config.parallel, activation_checkpoint=mode))
        found[mode] = memory(other, layout, is_plain=is_plain(config, layout, gpu)).activations
    return found


def _by_stage(parameters: int, layout: Layout) -> list[dict[str, float]]:
    held = parameters / (layout.tp * layout.pp)
    return [
        {
            "stage": stage,
            "bytes": zero_bytes(held, layout.dp * layout.cp, stage).total,
            "wire_passes": sharded_passes(stage),
        }
        for stage in range(4)
    ]


def _by_schedule(layout: Layout) -> dict[str, float]:
    """Return the idle share of every schedule with this layout's ranks and micro-batches, at its usual stages per rank."""
    if layout.pp == 1:
        return {}
    stages = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2}
    stages |= {"ZBVZeroBubble": 2, "DualPipeV": 2}
    stages[layout.schedule] = layout.stages_per_rank
    return {name: bubble(name, layout.pp, per_rank, layout.micro_batches) for name, per_rank in stages.items()}


def step_document(one: LayoutChoice, gpu: Gpu, options: PlanOptions, goodput: float) -> dict[str, Any]:
    """Return times, utilisation, and days, of which failures and checkpoints leave `goodput`."""
    time, train = one.time, one.config.train
    batch = train.global_batch * train.seq_len
    bounds = {
        name: asdict(speed(one.config, time, gpu, one.layout.world, seconds)) | {"seconds": seconds}
        for name, seconds in (("lower", time.lower_s), ("estimate", time.estimate_s), ("upper", time.upper_s))
    }
    tokens = options.tokens or float(batch * train.steps)
    days = run_days(one.config, time, tokens, goodput)
    return {
        "tokens": batch,
        "compute_s": time.compute_s,
        "products_s": time.products_s,
        "communication_s": sum(moved.seconds for moved in time.traffic),
        "exposed_s": time.exposed_s + sum(moved.seconds for moved in time.traffic if moved.dimension in WAITED_FOR),
        "host_s": time.host_s,
        "optimizer_s": time.optimizer_s,
        "straggling": time.straggling,
        **bounds,
        "run_tokens": tokens,
        "days": days,
        "gpu_hours": days * 24 * options.gpus,
    }


def search_document(found: Found, options: PlanOptions) -> dict[str, Any]:
    """Return the first candidates with reasons, what was dropped and why, and the settings of the best."""
    shown = found.ranked[: options.top]
    return {
        "fit": len(found.ranked),
        "dropped": found.dropped,
        "ranked": [
            layout_document(one.layout, one.config)
            | {
                "peak_bytes": one.memory.peak,
                "step_s": one.time.estimate_s,
                "mfu": speed(one.config, one.time, options.gpu, one.layout.world, one.time.estimate_s).mfu,
                "efficiency": _efficiency(one),
                "reasons": reasons(one),
            }
            for one in shown
        ],
        "paste": to_paste(found.ranked[0]),
    }


def refuse_misfit(one: LayoutChoice, gpu: Gpu) -> None:
    """Raise LayoutError if a run does not fit into the memory of a device."""
    if not one.memory.fits(gpu):
        raise LayoutError(
            "the run does not fit into the memory of a device",
            found=f"about {one.memory.peak / 1e9:.1f} GB on ranks of pp {one.memory.pp_rank}, of which activations {one.memory.activations / 1e9:.1f}",
            expected=f"at most {gpu.memory * (1 - RESERVED) / 1e9:.1f} GB of {gpu.memory / 1e9:.0f} ({gpu.name})",
            state="Nothing was started.",
            remedy="add --search to find layouts that fit, or raise parallel.tp, pp or dp_shard",
        )
