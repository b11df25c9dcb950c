"""`flashckpt ls`: what a root holds, and what this machine's memory holds of it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import click
from rich.table import Table

from flashckpt.checkpoint.catalog import CheckpointInfo, RootContents, read_contents
from flashckpt.checkpoint.choice import refuse_empty
from flashckpt.checkpoint.marks import named_marks
from flashckpt.checkpoint.retention import kept_prefixes
from flashckpt.checkpoint.root_records import parallel, parse_prefix
from flashckpt.cli.common import (
    Command,
    abandoned,
    age_of,
    human_bytes,
    jobs_on_this_machine,
    json_option,
    new_table,
    open_root,
    root_options,
    show,
)
from flashckpt.commands.replicas import kept_replicas, replication
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.shm.inventory import scan
from flashckpt.storage.store import Store


@click.command(cls=Command)
@root_options
@json_option
def ls(root: str, options: tuple[str, ...], as_json: bool) -> None:
    """List the checkpoints of ROOT, newest first, and the snapshots of it in this machine's memory.

    Reads the catalogue, and the summary at the start of the 32 newest MANIFESTs and of those that it lacks;
    flashckpt verify reads everything.

    STATE   committed    restorable
            abandoned    a later generation restored an earlier step
            damaged      MANIFEST is there but its start cannot be used; see flashckpt verify
            unfinished   never committed: being written, or left by a writer that died
            snapshot     in memory only: complete on every rank of this machine
            replica      what this machine keeps in memory of another node

    Examples:
      flashckpt ls /checkpoints/run7
      flashckpt ls s3://bucket/run7 --json | jq '.checkpoints[0].step'
    """
    store = open_root(root, options)
    memory = _memory_rows(root)
    contents = read_contents(store)
    if not contents.infos and not memory:
        refuse_empty(store)
    rows = _storage_rows(store, contents) if contents.infos else []
    rows = sorted(memory + rows, key=lambda row: (row["generation"], row["step"]), reverse=True)
    show({"root": store.url, "checkpoints": rows}, as_json=as_json, table=lambda: _table(rows))


def _state(info: CheckpointInfo, left: Collection[SnapshotId]) -> str:
    if info.problem:
        return "newer format" if info.is_newer else "damaged"
    return "abandoned" if info.identity in left else "committed"


def _storage_rows(store: Store, contents: RootContents) -> list[dict[str, Any]]:
    left = abandoned(store, list(contents.infos))
    kept, names = kept_prefixes(store), {mark.prefix: name for name, mark in named_marks(store)}
    rows = [
        {
            "step": info.step,
            "generation": info.generation,
            "tier": "storage",
            "state": _state(info, left),
            "created_s": info.created_s,
            "nbytes": info.nbytes,
            "tensors": info.tensors,
            "world_size": info.world_size,
            "kept": info.prefix in kept,
            "name": names.get(info.prefix, ""),
            "parent": info.parent,
            "problem": info.problem,
            "suspect": info.suspects > 0,
        }
        for info in contents.infos
    ]
    listed = parallel(lambda prefix: store.list(f"{prefix}/"), contents.uncommitted)
    for prefix, entries in zip(contents.uncommitted, listed, strict=True):
        generation, step = parse_prefix(prefix) or (0, 0)
        rows.append(
            _row(step, generation, "storage", "unfinished", max((e.mtime for e in entries), default=time.time()))
            | {"nbytes": sum(entry.nbytes for entry in entries)}
        )
    return rows


def _memory_rows(root: str) -> list[dict[str, Any]]:
    rows = []
    for directory in jobs_on_this_machine(root):
        record = directory.read_generation()
        view = scan(directory, [record] if record else [])
        state = replication(directory, directory.read_status(), record)
        partners = state["partners"] if state is not None else []
        for identity in view.complete():
            held = view.holders(identity).values()
            created_s = max(one.written_s for one in held)
            rows.append(
                _row(identity[1], identity[0], "memory", "snapshot", created_s)
                | {"nbytes": sum(one.header.data_bytes for one in held), "world_size": view.world_size(identity[0])}
                | {"suspect": any(one.header.suspect for one in held)}
                | ({"partners": partners, "replicated": _is_replicated(identity, state)} if partners else {})
            )
        for one in kept_replicas(directory, record):
            row = _row(one["step"], one["generation"], "memory", "replica", one["created_s"])
            of = {"node": one["node"], "ranks": one["ranks"]}
            rows.append(row | {"nbytes": one["nbytes"], "world_size": one["world_size"], "replica_of": of})
    return rows


def _is_replicated(identity: SnapshotId, state: dict[str, Any] | None) -> bool:
    newest = state["replicated"] if state is not None else None
    return newest is not None and identity <= newest


def _row(step: int, generation: int, tier: str, state: str, created_s: float) -> dict[str, Any]:
    return {
        "step": step,
        "generation": generation,
        "tier": tier,
        "state": state,
        "created_s": created_s,
        "nbytes": 0,
        "tensors": None,
        "world_size": None,
        "kept": False,
        "parent": None,
        "problem": "",
        "suspect": False,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = new_table(">STEP", ">GEN", "TIER", "STATE", ">AGE", ">SIZE", ">TENSORS", ">RANKS", "")
    for row in rows:
        table.add_row(
            str(row["step"]),
            str(row["generation"]),
            row["tier"],
            row["state"],
            age_of(row["created_s"]),
            human_bytes(row["nbytes"]),
            "" if row["tensors"] is None else str(row["tensors"]),
            "" if row["world_size"] is None else str(row["world_size"]),
            row["problem"]
            or "suspect: NaN or infinity" * row.get("suspect", False)
            or (
                f"kept as {row['name']}"
                if row.get("name")
                else "kept"
                if row["kept"]
                else _of(row.get("replica_of")) or _with(row)
            ),
        )
    return table


def _with(row: dict[str, Any]) -> str:
    """Return whether the partners hold a snapshot; "" where there are none."""
    if not (partners := row.get("partners")):
        return ""
    return f"{'with' if row['replicated'] else 'not yet with'} {', '.join(partners)}"


def _of(replica: dict[str, Any] | None) -> str:
    if replica is None:
        return ""
    ranks = ", ".join(map(str, replica["ranks"]))
    return f"of {replica['node'] or 'another node'}: rank{'s' * (len(replica['ranks']) > 1)} {ranks}"
