"""`python -m flashckpt.trainer --dry-run --world N --config FILE [--json]`. Torch is imported late.

Ranks of a pipeline differ by their stages. Within one, tensor-parallel ranks and replicas hold parts of one size (what does
not divide was refused), and the ranks that share a tensor of n rows hold ceil(n / ranks) rows each, until none are left.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashckpt.cli.common import human_bytes
from flashckpt.core.shard import Shard
from flashckpt.core.superblock import SegmentSpec
from flashckpt.errors import DataError, LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.dry_run.options import DryRunOptions
from flashckpt.trainer.flops import count_parameters
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.plan.forecast import memory_of
from flashckpt.trainer.plan.held import SLOTS, local_lengths, snapshot_tensors, stored_bytes

VERSION = 1
"""Of the JSON document: members are added, none is renamed or changes its unit without another number."""

_COLUMNS = (
    ("parameters", "parameter_bytes"), ("gradients", "gradient_bytes"), ("optimizer", "optimizer_bytes"),
    ("gathered*", "gathered_bytes"), ("activations*", "activation_bytes"), ("device*", "device_bytes"),
    ("slot", "slot_bytes"), ("snapshots", "snapshot_bytes"),
)  # fmt: skip


def as_text(document: dict[str, Any]) -> str:
    """Return the document for people."""
    model, step, layout = document["model"], document["step"], document["layout"]
    active = f", {model['active_parameters']:,} active" if model["active_parameters"] != model["parameters"] else ""
    lines = [
        f"{model['parameters']:,} parameters{active}",
        f"{document['world']} ranks: {layout['text']}",
        f"{step['tokens']:,} tokens per step",
        f"checkpoint: {human_bytes(document['checkpoint']['bytes'])}",
        f"snapshots: {document['snapshots']['slots']} slots on each rank, {human_bytes(document['snapshots']['node_bytes'])} "
        f"in the memory of a node of {document['snapshots']['ranks_per_node']} ranks"
        if document["snapshots"]["slots"]
        else "snapshots: none, checkpoint.root is empty",
        f"data: {document['data']}",
        "",
        *_table(document["ranks"]),
        "",
        *(["Parameters, gradients and optimizer state are in host memory."] if _on_host(document) else []),
        "Per rank; *: an estimate by formula (docs/trainer-dry-run.md), the rest is counted.",
    ]
    return "\n".join(lines) + "\n"


def _on_host(document: dict[str, Any]) -> bool:
    return any(one["state_on_host_bytes"] for one in document["ranks"])


def _table(ranks: Sequence[dict[str, Any]]) -> list[str]:
    rows = [["ranks", "pp", "dp_shard", "layers", *(title for title, _ in _COLUMNS)]]
    for one in ranks:
        numbers = {**one, **one["estimate"]}
        rows.append(
            [str(one["count"]), spans(one["pp"]), spans(one["dp_shard"]), str(one["layers"])]
            + [human_bytes(numbers[key]) for _, key in _COLUMNS]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def refuse_misfits(document: dict[str, Any], options: DryRunOptions) -> None:
    """Refuse a run that needs more memory than the options allow.

    Raises:
        LayoutError: Of a device, or of a node for its snapshots; names the need.
    """
    most = max(document["ranks"], key=lambda one: one["estimate"]["device_bytes"])
    need = most["estimate"]["device_bytes"]
    if options.device_memory and need > options.device_memory:
        raise LayoutError(
            "the run does not fit into the memory of a device",
            found=f"about {need} bytes ({human_bytes(need)}) on ranks of pp {spans(most['pp'])}, an estimate",
            expected=f"at most {options.device_memory} bytes (--device-memory)",
            state="Nothing was started.",
            remedy="raise parallel.tp, pp or dp_shard, lower train.micro_batch, set parallel.activation_checkpoint = full",
        )
    held = document["snapshots"]["node_bytes"]
    if options.node_memory and held > options.node_memory:
        raise LayoutError(
            "the snapshots do not fit into the memory of a node",
            found=f"{held} bytes ({human_bytes(held)}) for {document['snapshots']['ranks_per_node']} ranks",
            expected=f"at most {options.node_memory} bytes (--node-memory)",
            state="Nothing was started.",
            remedy="spread the run over more nodes; where 3 slots do not fit, a run takes 2",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKind:
    """Ranks that hold parts of the same sizes.

    Attributes:
        pp_ranks: Their coordinates along "pp".
        shards: Their coordinates along "dp_shard".
    """

    pp_ranks: tuple[int, ...]
    shards: tuple[int, ...]

    def count(self, layout: Layout) -> int:
        """Return how many ranks are of this kind."""
        return len(self.pp_ranks) * len(self.shards) * layout.dp_replicate * layout.tp

    def example(self, layout: Layout) -> int:
        """Return one of them: of the last stages, whose tensors have the longest names."""
        return ((self.pp_ranks[-1] * layout.dp_replicate) * layout.dp_shard + self.shards[0]) * layout.tp


def rank_kinds(config: RunConfig, layout: Layout) -> list[RankKind]:
    """Return the kinds of ranks of a layout, in order of their first rank."""
    found = []
    for pp_ranks in _alike([_stages(layout, rank) for rank in range(layout.pp)]):
        shards = [local_lengths(config, layout, pp_ranks[0], index) for index in range(layout.dp_shard)]
        found += [RankKind(pp_ranks=pp_ranks, shards=alike) for alike in _alike(shards)]
    return found


def kinds_by_rank(kinds: Sequence[RankKind], layout: Layout) -> list[int]:
    """Return for every rank of the world the index of its kind."""
    of_place = {
        (pp, shard): number for number, kind in enumerate(kinds) for pp in kind.pp_ranks for shard in kind.shards
    }
    places = (
        (pp, shard)
        for pp in range(layout.pp)
        for _ in range(layout.dp_replicate)
        for shard in range(layout.dp_shard)
        for _ in range(layout.tp)
    )
    return [of_place[place] for place in places]


def _alike(values: Sequence[tuple[object, ...]]) -> list[tuple[int, ...]]:
    """Return the indices of equal values together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return [tuple(group) for group in groups.values()]


def _stages(layout: Layout, pp_rank: int) -> tuple[object, ...]:
    last = layout.stages - 1
    return tuple((stage == 0, stage == last, len(layout.stage_layers[stage])) for stage in layout.stages_of(pp_rank))


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
