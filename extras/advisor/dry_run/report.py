"""The document of a dry run, its table, and what does not fit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashckpt.cli.common import human_bytes
from flashckpt.errors import LayoutError
from flashckpt.trainer.dry_run.options import DryRunOptions

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
