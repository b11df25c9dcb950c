"""`flashckpt inspect`: what is in one checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import click
import numpy as np
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.history import read_history, read_incidents, summary
from flashckpt.cli.common import (
    Command,
    age_of,
    choose,
    human_bytes,
    json_option,
    new_table,
    numbers_of,
    open_root,
    root_options,
    show,
    step_option,
    words_of,
)
from flashckpt.cli.output import FittingTable
from flashckpt.commands.replicas import lags
from flashckpt.commands.status_page import in_short
from flashckpt.console.coverage import coverage_rows, coverage_table, parse_layout, plan_layout, plan_table
from flashckpt.core.incident import as_values
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import split_owner
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning.packs import is_of_values
from flashckpt.printable import counted, plain, printable

MANY = 40
"""Children of a tree node beyond which only a count is shown, unless --all is given."""
MOST_KINDS = 12
"""Kinds of tensors, and values, of the summary."""
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
LINES = 1000
"""Tensors beyond which --all shows lines with whole names, for grep: a tree of so many would take a minute."""


@click.command(cls=Command)
@root_options
@step_option
@click.option("--tensors", "listed", is_flag=True, help="List tensors and values as trees, at most 40 of each branch.")
@click.option("--all", "everything", is_flag=True, help="Show every tensor, however many there are.")
@click.option("--coverage", is_flag=True, help="Show what each tier and rank on this machine covers of the state.")
@click.option("--plan", "layout", metavar="DPxTPxPP", help="Show what a restore under another layout would read.")
@json_option
def inspect(
    *,
    root: str,
    options: tuple[str, ...],
    step: str | None,
    listed: bool,
    everything: bool,
    coverage: bool,
    layout: str | None,
    as_json: bool,
) -> None:
    """Show what is in one checkpoint of ROOT: data position, configuration, kinds of tensors, and what its job has cost.

    --plan is an estimate: layers go to pipeline stages in equal runs, TP cuts the dimension that the
    checkpoint's own TP cut (else the first), FSDP cuts the first dimension. Nothing is read but MANIFEST.

    Examples:
      flashckpt inspect /checkpoints/run7
      flashckpt inspect /checkpoints/run7 --step 120.g3 --tensors
      flashckpt inspect /checkpoints/run7 --plan 4x2x1
    """
    wanted = None if layout is None else parse_layout(layout)
    store = open_root(root, options)
    info = choose(store, step)
    manifest = read_manifest(store, info)
    if coverage:
        rows = coverage_rows(root, manifest)
        behind = lags(root)
        document = {"prefix": info.prefix, "coverage": rows, "replication": behind}
        show(document, as_json=as_json, table=lambda: coverage_table(rows, behind))
        return
    if wanted is not None:
        plan = plan_layout(root, manifest, wanted)
        show({"prefix": info.prefix, "plan": plan}, as_json=as_json, table=lambda: plan_table(plan))
        return
    records, incidents = read_history(store), read_incidents(store, most=3)
    about = {"prefix": info.prefix, "created_s": info.created_s, "root": store.url, "history": summary(records)}
    about["incidents"] = [as_values(one) for one in incidents]
    full = describe(manifest) | about
    show(
        full,
        as_json=as_json,
        table=lambda: _page(
            full | {"remembered": in_short(records) + [one.verdict for one in incidents]},
            manifest,
            listed=listed,
            everything=everything,
        ),
    )


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return everything there is to say about a manifest, as JSON values."""
    table, numbers = manifest.table, numbers_of(manifest)
    return {
        "job": manifest.job,
        "generation": manifest.generation,
        "step": manifest.step,
        "parent": manifest.parent,
        "world_size": manifest.world_size,
        "writers": manifest.writers,
        "nbytes": int(table.nbytes.sum()),
        "writer_bytes": _writer_bytes(manifest),
        "tensors": [_tensor(table, fqn, numbers.get(fqn)) for fqn in sorted(table.fqns)],
        "values": {key: plain(value) for key, value in sorted(manifest.values.items())},
    }


def _tensor(table: ShardTable, fqn: str, numbers: dict[str, Any] | None) -> dict[str, Any]:
    rows = table.rows(fqn)
    shard = table.shard(rows[0])
    return {
        "fqn": fqn,
        "dtype": shard.dtype,
        "shape": shard.global_shape,
        "shards": len(rows),
        "nbytes": int(table.nbytes[np.asarray(rows)].sum()),
    } | ({} if numbers is None else {"numbers": numbers})


def _writer_bytes(manifest: Manifest) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    sizes = np.bincount(manifest.table.object_id, manifest.table.nbytes, len(manifest.objects))
    for name, nbytes in zip(manifest.objects, sizes.tolist(), strict=False):
        if not is_of_values(name):
            sums[name.partition(".")[0]] += int(nbytes)
    return dict(sorted(sums.items()))


def _page(document: dict[str, Any], manifest: Manifest, *, listed: bool, everything: bool) -> Group:
    """Return the page: a summary, and with `listed` or `everything` all tensors and values as trees."""
    parent = document["parent"]
    head = [
        f"{document['prefix']}  of job {document['job']}, {age_of(document['created_s'])} old",
        f"step {document['step']}, generation {document['generation']}, "
        + (f"restored from step {parent[1]} of generation {parent[0]}" if parent else "a fresh start"),
        f"{counted(len(document['tensors']), 'tensor')}, {human_bytes(document['nbytes'])}, "
        f"{counted(document['world_size'], 'rank')}, " + _writers(document["writer_bytes"]),
    ]  # fmt: skip
    parts = [*map(_label, head), *map(_label, document.get("remembered", ()))]
    if listed or everything:
        tree = _tensors(manifest, document["tensors"], everything=everything)
        return Group(*parts, "", tree, "", _values(document["values"], everything=everything))
    return Group(*parts, "", *_short_values(document["values"]), "", *_kinds(document["tensors"]))


def _values(found: dict[str, Any], *, everything: bool) -> Tree:
    values = Tree("values (data position, random state, configuration)")
    shown, others = (found, {}) if everything else _of_one_rank(found)
    for key, value in shown.items():
        _value(values, key, value)
    for name, count in others.items():
        values.add(_label(f"{name}: the same of {counted(count, 'more rank')} (--all shows them)"))
    return values


def _of_one_rank(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values without those that another rank has under the same name, and how many of each name were left out."""
    shown: dict[str, Any] = {}
    seen: dict[str, int] = defaultdict(int)
    for key, value in found.items():
        base, owner = split_owner(key)
        if owner.startswith("rank"):
            seen[base] += 1
        if not owner.startswith("rank") or seen[base] == 1:
            shown[key] = value
    return shown, {name: count - 1 for name, count in seen.items() if count > 1}


def _short_values(found: dict[str, Any]) -> list[Text]:
    """Return one line for each value, with its beginning."""
    shown, others = _of_one_rank(found)
    lines = []
    for key, value in list(shown.items())[:MOST_KINDS]:
        text = printable(f"{key} = {printable(value)}")
        more = others.get(split_owner(key)[0], 0)
        lines.append(
            _label(
                (text if len(text) <= 79 else text[:76] + "...")
                + (f" and {counted(more, 'more rank')}" if more else "")
            )
        )
    return [*lines, *_rest(len(shown), "value")]


def _kinds(tensors: list[dict[str, Any]]) -> list[FittingTable | Text]:
    """Return the tensors by kind, largest first: those that differ in numbers of their names only are one."""
    kinds: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in tensors:
        shape = "x".join(map(str, one["shape"])) or "scalar"
        kinds[_NUMBER.sub("#", one["fqn"]), one["dtype"], shape].append(one["nbytes"])
    table = new_table("TENSORS", ">COUNT", "DTYPE", "SHAPE", ">SIZE")
    for (name, dtype, shape), sizes in sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:MOST_KINDS]:
        table.add_row(name, str(len(sizes)), dtype, shape, human_bytes(sum(sizes)))
    return [table, *_rest(len(kinds), "kind")]


def _rest(number: int, noun: str) -> list[Text]:
    more = number - MOST_KINDS
    return [Text(f"... and {counted(more, f'more {noun}')} (--tensors lists all)")] if more > 0 else []


def _writers(nbytes: dict[str, int]) -> str:
    if not nbytes:
        return "no writers"
    least, most = human_bytes(min(nbytes.values())), human_bytes(max(nbytes.values()))
    return f"{counted(len(nbytes), 'writer')} of {least}" + (f" to {most}" if most != least else "")


def _label(text: object) -> Text:
    return Text(printable(text), overflow="fold")


def _value(tree: Tree, key: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        branch = tree.add(_label(key))
        for name, item in value.items():
            _value(branch, str(name), item)
        return
    text = printable(value)
    tree.add(_label(f"{key} = {text if len(text) <= 100 else text[:97] + '...'}"))


def _tensors(manifest: Manifest, tensors: list[dict[str, Any]], *, everything: bool) -> Tree | FittingTable:
    if everything and len(tensors) > LINES:
        return _lines(tensors)
    tree = Tree(f"tensors of step {manifest.step}")
    branches: dict[str, Tree] = {"": tree}
    counts: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        *path, name = tensor["fqn"].split(".")
        branch, prefix = tree, ""
        for part in path:
            prefix = f"{prefix}.{part}"
            if prefix not in branches:
                branches[prefix] = branch.add(_label(part))
            branch = branches[prefix]
        counts[prefix] += 1
        if everything or counts[prefix] <= MANY:
            shape = "x".join(map(str, tensor["shape"])) or "scalar"
            size = f"{human_bytes(tensor['nbytes'])} in {counted(tensor['shards'], 'shard')}"
            branch.add(_label(f"{name}  {tensor['dtype']} {shape}  {size}  {words_of(tensor.get('numbers'))}".rstrip()))
        elif counts[prefix] == MANY + 1:
            branch.add("... (--all shows the rest)")
    return tree


def _lines(tensors: list[dict[str, Any]]) -> FittingTable:
    table = new_table("TENSOR", "DTYPE", "SHAPE", ">SIZE", ">SHARDS", "NUMBERS")
    for one in tensors:
        shape = "x".join(map(str, one["shape"])) or "scalar"
        size, numbers = human_bytes(one["nbytes"]), words_of(one.get("numbers"))
        table.add_row(one["fqn"], one["dtype"], shape, size, str(one["shards"]), numbers)
    return table
