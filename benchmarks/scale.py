"""How the cost of coordination grows with the nodes of a job: requests, operations, CPU seconds and bytes.

A simulation in one process: 2 to 2,048 nodes of 8 ranks, with the product's own functions over stores that count
requests and answer at once. Nothing is sent over a network, no tensor data exists, and no time is waited: columns in
"modelled s" are counted requests times a latency (20 ms by default), divided by those in flight. CPU seconds are
measured, in one thread. Exponents are fitted to the logarithms of nodes and cost: 0 does not grow, 1 is linear.

A rank has 20 rows here; `--rows` adds what grows with them, with the layout of a 70B model (`scale_rows`), for each of the
numbers of nodes.

    python benchmarks/scale.py [--nodes 2,16,128,1024,2048] [--rows 20,500,2169] [--latency-ms 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from typing import Any, cast

import numpy as np
import scale_rows

from flashckpt.checkpoint.catalog import manifest_from
from flashckpt.checkpoint.indexes import put_indexes
from flashckpt.checkpoint.intents import Proposals, read_intents
from flashckpt.checkpoint.root_records import IN_FLIGHT, MANIFEST, prefix_of
from flashckpt.checkpoint.writer import commit
from flashckpt.core.intent import NodeProposal
from flashckpt.core.lineage import SlotRecord, common
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.spread import Spread, decode_spread
from flashckpt.daemon.persister.messaging import CARRIED_LOOK_S, IDLE_LOOK_S
from flashckpt.errors import ObjectMissingError
from flashckpt.planning.packs import pack_name
from flashckpt.planning.read_plan import SourceNames, plan_reads
from flashckpt.restore import candidate_sources
from flashckpt.restore.candidate_sources import SpreadSource
from flashckpt.shm.ack_relay import AckRelay
from flashckpt.shm.acks import SnapshotAcks
from flashckpt.shm.control import Control
from flashckpt.storage.store import ObjectInfo, Store

RANKS, PACKS, TENSORS = 8, 2, 20
"""Ranks per node, packs and tensors per rank."""
RANDOM_BYTES = 10_100
"""Values of one rank: mostly the state of its random generators."""


class CountedRoot:
    """A root in memory that counts requests; only what the functions under test ask of it."""

    url = "counted://root"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """Set an object."""
        with self._lock:
            self.requests["put"] += 1
        self.objects[key] = data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Set an object; the functions under test write each once."""
        self.put(key, data)
        return True

    def get(self, key: str) -> bytes:
        """Return an object."""
        with self._lock:
            self.requests["get"] += 1
        if key not in self.objects:
            raise ObjectMissingError(f"the object {key} is missing")
        return self.objects[key]

    def head(self, key: str) -> ObjectInfo | None:
        """Return an object's size and time: as large as any pack."""
        with self._lock:
            self.requests["head"] += 1
        return ObjectInfo(key=key, nbytes=1 << 30, mtime=0.0) if key in self.objects else None

    def delete_many(self, keys: Sequence[str]) -> None:
        """Nothing is replaced here."""
        assert not keys

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the objects below a prefix, 1,000 per request; an empty one is as large as any pack."""
        found = [
            ObjectInfo(key=key, nbytes=len(data) or 1 << 30, mtime=0.0)
            for key, data in self.objects.items()
            if key.startswith(prefix)
        ]
        self.requests["list"] += -(-max(1, len(found)) // 1000)
        return found


class CountedKeys:
    """A key-value store of a process group, in a dict."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.requests = 0

    def set(self, key: str, value: Any, /) -> None:
        """Set a key."""
        self.requests += 1
        self.keys[key] = value

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        self.requests += 1
        return all(key in self.keys for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys."""
        self.requests += 1
        return [self.keys[key] for key in keys]


def cpu_of(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def operations_of(work: Callable[[], object]) -> int:
    """Return the lines of Python that `work` runs."""
    count = 0

    def line(*_: object) -> Any:
        nonlocal count
        count += 1
        return line

    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def acknowledgements(nodes: int) -> dict[str, float]:
    """One snapshot of all ranks: its requests, and what `step()` does to read what is common."""
    keys = CountedKeys()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        control = Control.open(Path(folder) / "control", rows=RANKS)
        ranks = [
            SnapshotAcks(
                control=control, local_rank=r, rank=r, world_size=nodes * RANKS, local_world_size=RANKS, generation=1
            )
            for r in range(RANKS)
        ]
        firsts = [node * RANKS for node in range(nodes)]
        relays = [
            AckRelay(control=control, store=keys, generation=1, firsts=firsts, first=first, local_world_size=RANKS)
            for first in firsts
        ]  # one page stands for those of all nodes: the ranks of all nodes hold the same
        spent = 0.0
        for steps in ([5], [10, 5]):
            for rank in ranks:
                rank.publish([SnapshotId(1, step) for step in steps])
            before = keys.requests
            for _ in range(2):
                spent = cpu_of(relays[0].turn)
                for relay in relays[1:]:
                    relay.turn()
        assert ranks[0].known().common[0] == SnapshotId(1, 10)
        carried = keys.requests - before
        operations = operations_of(ranks[0].known)
        ranks[0].publish([SnapshotId(1, 10)])
        return {
            "operations of step() to read what is common": operations,
            "store requests of publishing and reading": keys.requests - before - carried,
            "store requests per node and snapshot": carried / nodes,
            "CPU s of the job's first rank, in its own thread": spent,
        }


def agreement(nodes: int, latency_s: float) -> dict[str, float]:
    """One look of a persister at the root: where every node has proposed something new, and where none has."""
    root, boards = CountedRoot(), (Proposals(), Proposals())
    store = cast("Store", root)
    for node in range(nodes):
        ranks = tuple(range(node * RANKS, (node + 1) * RANKS))
        boards[0].publish(store, 1, NodeProposal(ranks=ranks, world_size=nodes * RANKS, pinned=SnapshotId(1, 10)))

    def look() -> None:
        read_intents(store, 1)
        boards[1].read(store, 1)

    root.requests.clear()
    cpu_s, reads = cpu_of(look), root.requests["get"]
    lists = root.requests["list"]
    root.requests.clear()
    look()
    leader, other = root.requests.total(), Proposals()
    other.read(store, 1, of_all=False)
    root.requests.clear()
    read_intents(store, 1)
    other.read(store, 1, of_all=False)
    idle = root.requests.total()
    return {
        "root requests of the leader per look, all proposals new": lists + reads,
        "modelled s of such a look": (lists + -(-reads // IN_FLIGHT)) * latency_s + cpu_s,
        "CPU s of such a look": cpu_s,
        "root requests of the leader per look, idle": leader,
        "root requests of any other node per look, idle": idle,
        "root requests of the job per idle minute, modelled": (leader + (nodes - 1) * idle) * 60 / CARRIED_LOOK_S,
        "the same where no ranks run, modelled": (leader + (nodes - 1) * idle) * 60 / IDLE_LOOK_S,
    }


def index_of(rank: int, world: int) -> Manifest:
    shards = [
        Shard(
            fqn=f"model.layers.{i}.weight",
            dtype="float32",
            global_shape=(world * 4, 8),
            offsets=(rank * 4, 0),
            lengths=(4, 8),
        )
        for i in range(TENSORS)
    ]
    table = ShardTable.from_shards(shards, [i * 128 for i in range(TENSORS)])
    return Manifest(
        job="scale", generation=1, step=10, world_size=world, rank=rank, writers=[rank],
        coordinates={"dp": rank}, table=table, values={f"rng@rank{rank}": b"\0" * RANDOM_BYTES},
        parent=None, digests=np.zeros(table.chunks, np.uint64),
        objects=[pack_name(rank, number, ".fck") for number in range(PACKS)],
    )  # fmt: skip


def committing(nodes: int, latency_s: float) -> dict[str, float]:
    """The leader's commit of one checkpoint, whose packs and indexes are there."""
    root, world, prefix = CountedRoot(), nodes * RANKS, prefix_of(1, 10)
    for node in range(nodes):
        indexes = [index_of(rank, world) for rank in range(node * RANKS, (node + 1) * RANKS)]
        root.objects |= dict.fromkeys([f"{prefix}/{name}" for index in indexes for name in index.objects], b"")
        put_indexes(cast("Store", root), prefix, indexes)
    root.requests.clear()
    cpu_s = cpu_of(lambda: commit(cast("Store", root), prefix, range(world)))
    parts = -(-world // 1000)  # of a listing
    reads = root.requests["get"]  # side by side, as the parts of a listing; whatever else is asked, one after the other
    lists = root.requests["list"]
    turns = root.requests.total() - reads - lists + -(-reads // IN_FLIGHT) + -(-lists // min(parts, IN_FLIGHT))
    return {
        "root requests of a commit": root.requests.total(),
        "modelled s of a commit": turns * latency_s + cpu_s,
        "CPU s of a commit": cpu_s,
        "bytes of MANIFEST": len(root.objects[f"{prefix}/{MANIFEST}"]),
        **planning(cast("Store", root), root.objects[f"{prefix}/{MANIFEST}"], world),
    }


def planning(store: Store, raw: bytes, world: int) -> dict[str, float]:
    """A rank that plans its restore from MANIFEST; from the decoded one of the first rank of its node, where that has rows."""
    wanted, found = index_of(world // 2, world).table, []
    decode_s = cpu_of(lambda: found.append(manifest_from("counted://root", prefix_of(1, 10), raw)))
    fd = None if isinstance(found[0], Spread) else candidate_sources.share(found[0])
    tracemalloc.start()

    def plan() -> None:
        if fd is not None:
            manifest = candidate_sources.attach(candidate_sources.path_of(fd))
        else:
            source = SpreadSource(store, decode_spread(raw), prefix_of(1, 10), "nobody")
            source.bring(wanted)
            manifest = source.manifest
        SourceNames([manifest])
        plan_reads(wanted, [manifest.table], names=["MANIFEST"]).require_complete(["MANIFEST"])

    cpu_s = cpu_of(plan)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if fd is not None:
        os.close(fd)
    return {
        "CPU s to decode MANIFEST": decode_s,
        "CPU s of a rank to plan its restore from it": cpu_s,
        "peak bytes of a rank to plan its restore": peak,
    }


def choosing(nodes: int) -> dict[str, float]:
    """What every rank computes in a restart, of the slots of all ranks."""
    world = nodes * RANKS
    records = [
        SlotRecord(rank=rank, node=rank // RANKS, generation=1, step=step, world_size=world)
        for rank in range(world)
        for step in (5, 10, 15)
    ]
    return {"CPU s to find the common snapshots of a restart": cpu_of(lambda: common(records))}


def exponent(nodes: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the slope of log(value) over log(nodes), by least squares; None where a value is 0."""
    if min(values) <= 0 or len(nodes) < 2:
        return None
    x, y = [log(n) for n in nodes], [log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / over


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,16,128,1024,2048", help="numbers of nodes, %(default)s")
    parser.add_argument("--rows", default="", help="also what grows with these numbers of rows per rank (minutes)")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="of a request to the root, %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    sizes, latency_s = [int(part) for part in options.nodes.split(",")], options.latency_ms / 1000
    columns: dict[str, list[float]] = {}
    for nodes in sizes:
        row = acknowledgements(nodes) | agreement(nodes, latency_s) | committing(nodes, latency_s) | choosing(nodes)
        for rows in map(int, filter(None, options.rows.split(","))):
            of_rows = scale_rows.case(nodes * RANKS, rows, 1)
            row |= {f"{name}, {rows:,} rows per rank": values[0] for name, values in of_rows.items()}
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    print(f"{'nodes (of ' + str(RANKS) + ' ranks)':60}" + "".join(f"{n:>14,}" for n in sizes) + "  exponent")
    fitted = {name: exponent(sizes, values) for name, values in columns.items()}
    for name, values in columns.items():
        slope = fitted[name]
        print(
            f"{name:60}"
            + "".join(f"{shown(v):>14}" for v in values)
            + f"{'-' if slope is None else f'{slope:.2f}':>10}"
        )
    print(
        f"simulated: no network, no tensors; modelled: {options.latency_ms:g} ms per request, {IN_FLIGHT} in flight in a commit"
    )
    if options.json is not None:
        machine = {"platform": platform.platform(), "python": platform.python_version()}
        about = {"nodes": sizes, "ranks_per_node": RANKS, "latency_ms": options.latency_ms, "machine": machine}
        options.json.write_text(json.dumps(about | {"cost": columns, "exponent": fitted}, indent=1) + "\n")


if __name__ == "__main__":
    main()
