"""What `flashckpt inspect --coverage` and `--plan` show: where the state is, and what another layout would read."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from flashckpt.cli.common import human_bytes, jobs_on_this_machine, new_table
from flashckpt.commands.replicas import lag_in_words, replica_slots
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import ConfigError
from flashckpt.planning.pieces import cut_pieces, merge_pieces
from flashckpt.planning.read_plan import coverage, plan_reads
from flashckpt.printable import counted
from flashckpt.shm.inventory import Identity, pin, scan

MOST_RANKS = 64
"""Ranks that are planned for one answer; of a larger layout, this many evenly spread ones."""
_LAYER = re.compile(r"\.(?:layers|blocks|h)\.(\d+)\.")


def whole_state(manifest: Manifest) -> list[Shard]:
    """Return every tensor of a checkpoint as one shard."""
    found = []
    for fqn in manifest.table.fqns:
        shard = manifest.table.shard(manifest.table.rows(fqn)[0])
        zeros = tuple(0 for _ in shard.global_shape)
        found.append(_shard(shard, zeros, shard.global_shape))
    return found


@contextlib.contextmanager
def memory_manifests(root: str) -> Iterator[dict[Identity, list[tuple[str, Manifest]]]]:
    """Give, by snapshot, the manifests that this machine's memory holds of a root, with a name for each."""
    found: dict[Identity, list[tuple[str, Manifest]]] = defaultdict(list)
    for directory in jobs_on_this_machine(root):
        lineage = [record] if (record := directory.read_generation()) else []
        own = [(f"rank {held.rank}", held) for held in scan(directory, lineage).slots]
        kept = [(f"replica of rank {held.rank}", held) for held in replica_slots(directory)]
        kept = [(name, held) for name, held in kept if not is_rolled_back(held.header.identity, lineage)]
        for name, held in [*own, *kept]:
            taken = pin(held) if held.header.is_complete else None
            if taken is not None:
                with taken:
                    found[held.header.identity].append((name, taken.manifest()))
    yield found


def coverage_rows(root: str, manifest: Manifest) -> list[dict[str, Any]]:
    """Return, for this checkpoint's state, what each source of each snapshot covers, alone and together.

    Of memory only this node's can be seen; which node that is stands in every row.
    """
    state = whole_state(manifest)
    total = sum(shard.nbytes for shard in state)
    rows = [_row(manifest.identity, "storage", "checkpoint", coverage(state, [manifest.table]), total)]
    with memory_manifests(root) as memory:
        for identity, held in sorted(memory.items(), reverse=True):
            held.sort(key=lambda one: one[1].rank)
            for name, one in held:
                rows.append(_row(identity, "memory", name, coverage(state, [one.table]), total))
            together = coverage(state, [one.table for _, one in held])
            rows.append(_row(identity, "memory", "all ranks here", together, total))
    return rows


def _row(identity: Identity, tier: str, source: str, covered: tuple[list[int], int], total: int) -> dict[str, Any]:
    given, missing = covered
    return {
        "generation": identity[0],
        "step": identity[1],
        "tier": tier,
        "node": socket.gethostname() if tier == "memory" else "",
        "source": source,
        "nbytes": sum(given),
        "missing_bytes": missing,
        "share": sum(given) / total if total else 1.0,
    }


def coverage_table(rows: Sequence[dict[str, Any]], replication: Sequence[dict[str, Any]]) -> Table:
    """Return the rows for people, and below them how far replicas are."""
    table = new_table(
        ">STEP", ">GEN", "TIER", "NODE", "SOURCE", ">COVERS", ">MISSING", ">SHARE", title="coverage of the state"
    )
    for row in rows:
        table.add_row(
            str(row["step"]),
            str(row["generation"]),
            row["tier"],
            row["node"],
            row["source"],
            human_bytes(row["nbytes"]),
            human_bytes(row["missing_bytes"]),
            f"{row['share']:.1%}",
        )
    if replication:
        table.caption = "\n".join(f"replicas of {one['job']}: {lag_in_words(one)}" for one in replication)
    return table


def parse_layout(text: str) -> tuple[int, int, int]:
    """Return (dp, tp, pp) of "DPxTPxPP"; ConfigError for anything else."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(re.fullmatch("[1-9][0-9]{0,5}", part) for part in parts):
        expected = "DPxTPxPP, each 1 to 999999, e.g. 2x4x1"
        raise ConfigError("a layout cannot be read", found=text[:100], expected=expected)
    return int(parts[0]), int(parts[1]), int(parts[2])


def plan_layout(root: str, manifest: Manifest, layout: tuple[int, int, int]) -> dict[str, Any]:
    """Return what a restore of this checkpoint under another layout would read, without reading it.

    An estimate: the other layout's shards are not known before its model is built. Layers go to
    pipeline stages in equal runs, TP cuts the dimension that the checkpoint's own TP cut (else the
    first), FSDP cuts the first dimension of what is left, and all other tensors go to the first stage.
    """
    dp, tp, pp = layout
    world = dp * tp * pp
    ranks = sorted({int(rank) for rank in np.linspace(0, world - 1, min(world, MOST_RANKS))})
    with memory_manifests(root) as memory:
        near = [one.table for _, one in sorted(memory.get(manifest.identity, []), key=lambda one: one[1].rank)]
    tables = [*near, manifest.table]
    state = whole_state(manifest)
    cut_dims = {shard.fqn: _tp_dim(manifest.table, shard) for shard in state}
    started = time.perf_counter()
    found = [_plan_rank(_rank_shards(state, cut_dims, layout, rank), tables) for rank in ranks]
    return {
        "layout": "x".join(map(str, layout)),
        "world_size": world,
        "ranks_planned": len(ranks),
        "plan_s": (time.perf_counter() - started) / len(ranks),
        "needed_bytes": [one["needed_bytes"] for one in found],
        "read_bytes": [one["read_bytes"] for one in found],
        "requests": [one["requests"] for one in found],
        "memory_bytes": [one["memory_bytes"] for one in found],
    }


def _plan_rank(shards: list[Shard], tables: list[ShardTable]) -> dict[str, int]:
    plan = plan_reads(shards, tables)
    plan.require_complete()
    pieces = cut_pieces(plan)
    spans = np.unique(np.column_stack((pieces.source, pieces.row, pieces.start, pieces.stop)), axis=0)
    return {
        "needed_bytes": plan.needed_bytes,
        "read_bytes": int((spans[:, 3] - spans[:, 2]).sum()),
        "requests": len(merge_pieces(pieces)),
        "memory_bytes": plan.needed_bytes - plan.nbytes_of(len(tables) - 1),
    }


def _rank_shards(
    state: Sequence[Shard], cut_dims: dict[str, int], layout: tuple[int, int, int], rank: int
) -> list[Shard]:
    dp, tp, pp = layout
    stage, inner = divmod(rank, dp * tp)
    d, t = divmod(inner, tp)
    layers = 1 + max((int(m[1]) for shard in state if (m := _LAYER.search(f".{shard.fqn}"))), default=0)
    shards = []
    for shard in state:
        match = _LAYER.search(f".{shard.fqn}")
        if (int(match[1]) * pp // layers if match else 0) != stage:
            continue
        box = ([0] * len(shard.global_shape), [*shard.global_shape])
        if box[1]:
            _cut(box, cut_dims[shard.fqn], t, tp)
            _cut(box, 0, d, dp)
        shards.append(_shard(shard, tuple(box[0]), tuple(box[1])))
    return shards


def _cut(box: tuple[list[int], list[int]], dim: int, part: int, parts: int) -> None:
    """Keep part `part` of `parts` of a box along `dim`: equal parts rounded up, the last ones short or empty."""
    size = -(-box[1][dim] // parts)
    start = min(part * size, box[1][dim])
    box[0][dim] += start
    box[1][dim] = min(size, box[1][dim] - start)


def _tp_dim(table: ShardTable, whole: Shard) -> int:
    """Return the dimension besides the first that most shards cut, 0 if none does."""
    counts: Counter[int] = Counter()
    for row in table.rows(whole.fqn)[:64]:
        shard = table.shard(row)
        counts.update(k for k in range(1, len(shard.lengths)) if shard.lengths[k] < shard.global_shape[k])
    return counts.most_common(1)[0][0] if counts else 0


def _shard(shard: Shard, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Shard:
    return Shard(fqn=shard.fqn, dtype=shard.dtype, global_shape=shard.global_shape, offsets=offsets, lengths=lengths)


def plan_table(plan: dict[str, Any]) -> Table:
    """Return a plan for people."""
    title = (
        f"estimate of a restore as {plan['layout']}: {counted(plan['world_size'], 'rank')}, {plan['ranks_planned']} "
        f"of them planned in {plan['plan_s'] * 1000:.1f} ms each; --help says what it assumes"
    )
    table = new_table("PER RANK", ">LEAST", ">MEAN", ">MOST", title=title)
    words = {
        "needed_bytes": "needed",
        "read_bytes": "read, rounded out to 1 MiB chunks",
        "memory_bytes": "of the needed, from this machine's memory",
        "requests": "requests",
    }
    for key, word in words.items():
        numbers = plan[key]
        shown = [min(numbers), sum(numbers) / len(numbers), max(numbers)]
        table.add_row(word, *(f"{n:.0f}" if key == "requests" else human_bytes(n) for n in shown))
    return table
