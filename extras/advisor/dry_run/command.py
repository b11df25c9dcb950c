"""`python -m flashckpt.trainer --dry-run --world N --config FILE [--json]`. Torch is imported late."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashckpt.core.shard import Shard
from flashckpt.core.superblock import SegmentSpec
from flashckpt.errors import DataError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.dry_run.kinds import RankKind, kinds_by_rank, rank_kinds
from flashckpt.trainer.dry_run.options import DryRunOptions
from flashckpt.trainer.dry_run.report import VERSION, as_text, refuse_misfits
from flashckpt.trainer.model.flops import count_parameters
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.plan.forecast import memory_of
from flashckpt.trainer.plan.held import SLOTS, snapshot_tensors, stored_bytes

_VALUE_BYTES = 34_000
"""Text of the other values of a snapshot: 32 kB of random states, settings of the optimizer, the data position."""


def dry_run(config: RunConfig, options: DryRunOptions) -> int:
    """Print what a run would hold; return the exit code.

    Raises:
        LayoutError: The layout does not fit, or the run does not fit.
        ConfigError: The prepared data has more tokens than the model.
    """
    document = describe(config, options)
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if options.json else as_text(document))
    refuse_misfits(document, options)
    return 0


def describe(config: RunConfig, options: DryRunOptions) -> dict[str, Any]:
    """Return the JSON document of a dry run; raises as `dry_run`, except for what does not fit."""
    config = on_device(config, "cpu" if config.train.device == "cpu" else "cuda")
    layout = resolve_layout(config, options.world)  # refused before torch is imported
    data = _data(config)
    kinds = rank_kinds(config, layout)
    slots = [slot_of(config, layout, kind) for kind in kinds]
    return {
        "version": VERSION,
        "world": options.world,
        "layout": {
            "text": layout.describe(), "pp": layout.pp, "dp_replicate": layout.dp_replicate,
            "dp_shard": layout.dp_shard, "cp": layout.cp, "ep": layout.ep if config.model.experts else 0, "tp": layout.tp,
            "stages": layout.stages,
            "micro_batches": layout.micro_batches, "padding": layout.padding, "bubble": layout.bubble,
        },
        "model": {
            "parameters": count_parameters(config.model),
            "active_parameters": count_parameters(config.model, active=True),
        },
        "step": {"tokens": config.train.global_batch * config.train.seq_len},
        "checkpoint": {"bytes": stored_bytes(config, layout)},
        "snapshots": {
            "slots": SLOTS if config.checkpoint.root else 0,
            "ranks_per_node": options.ranks_per_node,
            "node_bytes": _node_bytes(config, kinds, slots, layout, options),
        },
        "data": data,
        "ranks": [_row(config, layout, kind, slot) for kind, slot in zip(kinds, slots, strict=True)],
    }  # fmt: skip


def _data(config: RunConfig) -> str:
    if not config.data.sources:
        return "text as bytes, prepared by the run"
    from flashckpt.trainer.data.prepared import check_sources

    try:
        check_sources(config)
    except DataError as error:
        return f"not prepared ({error.problem}); see data prepare"
    return "prepared"


def slot_of(config: RunConfig, layout: Layout, kind: RankKind) -> SegmentSpec:
    """Return the memory for snapshots of a rank; of those of a kind, the one whose tensors have the longest names."""
    from flashckpt.state.state_layout import need_of  # imports torch

    tensors = list(snapshot_tensors(config, layout, kind.pp_ranks[-1], kind.shards[0]))
    values = _VALUE_BYTES + len(repr(recorded_values(config))) + len(str(Path.cwd()))
    values += sum(len(name) for name, *_ in tensors if name.startswith(("model.", "group")))  # in groups of optimizers
    shards = [
        Shard(fqn=name, dtype="float32", global_shape=whole, offsets=(0,) * len(part), lengths=part)
        for name, whole, part in tensors
        if math.prod(part)
    ]
    need = need_of(shards, values)
    return SegmentSpec(
        job="", root_digest=0, rank=0, slots=SLOTS, layout_hash=need.layout,
        manifest_capacity=need.manifest_bytes, data_capacity=need.data_bytes,
    )  # fmt: skip


def _node_bytes(
    config: RunConfig, kinds: Sequence[RankKind], slots: Sequence[SegmentSpec], layout: Layout, options: DryRunOptions
) -> int:
    """Return the memory that snapshots take on the node that needs most of it."""
    if not config.checkpoint.root:
        return 0
    of_rank, per_node = kinds_by_rank(kinds, layout), options.ranks_per_node
    nodes = [of_rank[first : first + per_node] for first in range(0, len(of_rank), per_node)]
    return max(sum(slots[kind].nbytes for kind in node) for node in nodes)


def _row(config: RunConfig, layout: Layout, kind: RankKind, slot: SegmentSpec) -> dict[str, Any]:
    first = kind.pp_ranks[0]  # has the most in flight
    needed = memory_of(config, layout, first, kind.shards[0])
    held = needed.held
    return {
        "count": kind.count(layout),
        "example": kind.example(layout),
        "pp": list(kind.pp_ranks),
        "dp_shard": list(kind.shards),
        "layers": sum(len(layout.stage_layers[stage]) for stage in layout.stages_of(first)),
        "parameter_bytes": held.parameters,
        "gradient_bytes": held.gradients,
        "optimizer_bytes": held.optimizer,
        "slot_data_bytes": slot.data_capacity,
        "slot_bytes": slot.slot_bytes,
        "snapshot_bytes": slot.nbytes if config.checkpoint.root else 0,
        "state_on_host_bytes": needed.state_on_host,
        "estimate": {
            "gathered_bytes": needed.gathered,
            "activation_bytes": needed.activations,
            "activations_on_host_bytes": needed.moved,
            "device_bytes": needed.step,
        },
    }
