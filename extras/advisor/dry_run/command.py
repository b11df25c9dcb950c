"""`python -m flashckpt.trainer --dry-run --world N --config FILE [--json]`. Torch is imported late."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashckpt.errors import DataError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.dry_run.kinds import RankKind, kinds_by_rank, rank_kinds
from flashckpt.trainer.dry_run.options import DryRunOptions
from flashckpt.trainer.dry_run.report import VERSION, as_text, refuse_misfits
from flashckpt.trainer.model.flops import count_parameters
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import with_precision
from flashckpt.trainer.plan.activations import estimate
from flashckpt.trainer.plan.held import SLOTS

if TYPE_CHECKING:
    from flashckpt.trainer.dry_run.held import RankHoldings


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
    config = with_precision(config, "cpu" if config.train.device == "cpu" else "cuda")
    layout = resolve_layout(config, options.world)  # refused before torch is imported
    data = _data(config)
    from flashckpt.trainer.dry_run.child import held_in_child

    built = [(kind, held_in_child(config, layout, kind.example(layout))) for kind in rank_kinds(config, layout)]
    shared = {kind.pp_ranks: held.shared for kind, held in built}
    total = sum(len(ranks) * nbytes for ranks, nbytes in shared.items())
    total += sum(kind.count(layout) * held.own for kind, held in built)
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
        "checkpoint": {"bytes": total},
        "snapshots": {
            "slots": SLOTS if config.checkpoint.root else 0,
            "ranks_per_node": options.ranks_per_node,
            "node_bytes": _node_bytes([kind for kind, _ in built], [held for _, held in built], layout, options),
        },
        "data": data,
        "ranks": [_row(config, layout, kind, held) for kind, held in _merged(built)],
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


def _merged(built: Sequence[tuple[RankKind, RankHoldings]]) -> list[tuple[RankKind, RankHoldings]]:
    """Return the kinds, those of one pipeline rank that turned out to be equal as one."""
    groups: dict[tuple[tuple[int, ...], RankHoldings], list[tuple[RankKind, RankHoldings]]] = {}
    for kind, held in built:  # the room for manifests differs with random states
        groups.setdefault((kind.pp_ranks, replace(held, slot=0, snapshots=0)), []).append((kind, held))
    found = []
    for (ranks, _), alike in groups.items():
        shards = sorted(shard for kind, _ in alike for shard in kind.shards)
        largest = max((held for _, held in alike), key=lambda held: held.slot)
        found.append((RankKind(pp_ranks=ranks, shards=tuple(shards)), largest))
    return found


def _node_bytes(kinds: Sequence[RankKind], held: Sequence[RankHoldings], layout: Layout, options: DryRunOptions) -> int:
    """Return the memory that snapshots take on the node that needs most of it."""
    of_rank, per_node = kinds_by_rank(kinds, layout), options.ranks_per_node
    nodes = [of_rank[first : first + per_node] for first in range(0, len(of_rank), per_node)]
    return max(sum(held[kind].snapshots for kind in node) for node in nodes)


def _row(config: RunConfig, layout: Layout, kind: RankKind, held: RankHoldings) -> dict[str, Any]:
    first = kind.pp_ranks[0]  # has the most in flight
    guess = estimate(config, layout, first, block=held.block, rest=held.rest, whole=held.whole)
    state = held.parameters + held.gradients + held.optimizer
    on_host = state if config.parallel.offload == "state" else 0
    return {
        "count": kind.count(layout),
        "example": kind.example(layout),
        "pp": list(kind.pp_ranks),
        "dp_shard": list(kind.shards),
        "layers": sum(len(layout.stage_layers[stage]) for stage in layout.stages_of(first)),
        "parameter_bytes": held.parameters,
        "gradient_bytes": held.gradients,
        "optimizer_bytes": held.optimizer,
        "slot_data_bytes": held.slot_data,
        "slot_bytes": held.slot,
        "snapshot_bytes": held.snapshots,
        "state_on_host_bytes": on_host,
        "estimate": {
            "gathered_bytes": guess.gathered,
            "activation_bytes": guess.activations,
            "activations_on_host_bytes": guess.moved,
            "device_bytes": state - on_host + guess.gathered + guess.activations,
        },
    }
