"""What a commit and a restore cost by the rows of a rank: the layout of a 70B model under FSDP2, without its data.

Every rank holds a part of each parameter and of two moments of it: 2,169 rows with all 723 parameters; fewer rows are those
of the first parameters. Each node of 8 ranks has written its index; packs are files with holes. Each case is a separate
process that commits, and another one that plans the restore of one rank in the same layout, for CPU seconds and peak memory.
`--form rows` writes MANIFEST with a row for each box, as releases before 1.3 of the format do, whatever its size.

    python benchmarks/scale_rows.py [--ranks 16,256,1024,4096,16384] [--rows 20,500,2169] [--form indexes] [--times 1]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from flashckpt.checkpoint import merging
from flashckpt.checkpoint.catalog import manifest_from, read_manifest_bytes
from flashckpt.checkpoint.indexes import put_indexes
from flashckpt.checkpoint.root_records import MANIFEST, prefix_of
from flashckpt.checkpoint.writer import commit
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard_table import ShardTable, first_chunks
from flashckpt.core.spread import Spread
from flashckpt.planning.packs import PACK_BYTES, pack_name
from flashckpt.planning.read_plan import plan_reads
from flashckpt.restore import candidate_sources
from flashckpt.restore.candidate_sources import SpreadSource
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

RANKS = 8
"""Ranks per node."""
WIDTH, INNER, KEYS, WORDS, LAYERS = 8192, 28672, 1024, 128256, 80
PREFIX = prefix_of(1, 10)
FORM = "FLASHCKPT_SCALE_FORM"


def parameters() -> list[tuple[str, int, int]]:
    """Return (name, rows, columns; 0: it has one dimension) of each parameter."""
    found = [("embed.weight", WORDS, WIDTH)]
    for k in range(LAYERS):
        shapes = {
            "attention.q": (WIDTH, WIDTH), "attention.k": (KEYS, WIDTH), "attention.v": (KEYS, WIDTH),
            "attention.o": (WIDTH, WIDTH), "mlp.gate": (INNER, WIDTH), "mlp.up": (INNER, WIDTH),
            "mlp.down": (WIDTH, INNER), "norm.attention": (WIDTH, 0), "norm.mlp": (WIDTH, 0),
        }  # fmt: skip
        found += [(f"layers.{k}.{name}.weight", *shape) for name, shape in shapes.items()]
    return [*found, ("norm.weight", WIDTH, 0), ("head.weight", WORDS, WIDTH)]


def tensors(rows: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return names, rows and columns of the first tensors: each parameter with its two moments."""
    every = [
        (f"{kind}{name}", high, wide)
        for name, high, wide in parameters()
        for kind in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    ][:rows]
    return [name for name, _, _ in every], np.array([h for _, h, _ in every]), np.array([w for _, _, w in every])


def table_of(rank: int, world: int, rows: int) -> ShardTable:
    """Return what a rank holds: its part of each tensor, cut along the first dimension as FSDP2 does."""
    names, high, wide = tensors(rows)
    part = -(-high // world)
    start = np.minimum(high, rank * part)
    length = np.minimum(part, high - start)
    held = np.flatnonzero(length > 0)
    ndim = np.where(wide[held] > 0, 2, 1).astype(np.uint8)
    has_second = np.stack([np.ones(len(held), bool), ndim == 2], axis=1)

    def dims(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.stack([first[held], second[held]], axis=1)[has_second].astype(np.int64)
        return found

    nbytes = (length[held] * np.maximum(1, wide[held]) * 4).astype(np.int64)
    ends = np.cumsum(-(-nbytes // 64) * 64)
    at = ends - -(-nbytes // 64) * 64
    columns = {
        "fqn_id": np.arange(len(held), dtype=np.uint32),
        "dtype_id": np.zeros(len(held), np.uint8),
        "ndim": ndim,
        "replica": np.zeros(len(held), np.int32),
        "byte_offset": at % PACK_BYTES,
        "nbytes": nbytes,
        "first_chunk": first_chunks(nbytes),
        "object_id": (at // PACK_BYTES).astype(np.int32),
        "global_shape": dims(high, wide),
        "offsets": dims(start, 0 * wide),
        "lengths": dims(length, wide),
    }
    return ShardTable([names[at] for at in held.tolist()], ["float32"], columns)


def index_of(rank: int, world: int, rows: int) -> Manifest:
    """Return what a rank's index says."""
    table = table_of(rank, world, rows)
    random = np.random.default_rng(rank)
    packs = int(table.object_id.max(initial=-1)) + 1
    return Manifest(
        job="scale", generation=1, step=10, world_size=world, rank=rank, writers=[rank], coordinates={"dp": rank},
        table=table, values={"step": 10, f"rng@rank{rank}": b"\0" * 10_100}, parent=None,
        digests=random.integers(0, 1 << 63, table.chunks, np.uint64),
        objects=[pack_name(rank, number) for number in range(packs)],
    )  # fmt: skip


def write(folder: Path, world: int, rows: int) -> None:
    """Write what all nodes have written before a commit."""
    (folder / PREFIX).mkdir(parents=True)
    root = SimpleNamespace(
        put=lambda key, data: (folder / key).write_bytes(data),
        put_if_absent=lambda key, data: (folder / key).write_bytes(data),
    )
    for first in range(0, world, RANKS):
        indexes = [index_of(rank, world, rows) for rank in range(first, min(world, first + RANKS))]
        for name in (name for index in indexes for name in index.objects):
            with (folder / PREFIX / name).open("wb") as file:
                file.truncate(PACK_BYTES + (1 << 32))
        put_indexes(cast("Store", root), PREFIX, indexes)


def peak_mb() -> float:
    """Return the most memory that this process had at a time."""
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) / 1024


def committing(folder: Path, world: int, rows: int) -> dict[str, float]:
    """The leader's commit."""
    del rows
    merging.SPREAD_BYTES = 1 << 60 if os.environ.get(FORM) == "rows" else merging.SPREAD_BYTES
    store, before, began = open_store(str(folder)), peak_mb(), time.process_time()
    assert commit(store, PREFIX, range(world))
    spent = time.process_time() - began
    return {
        "bytes of MANIFEST": (folder / PREFIX / MANIFEST).stat().st_size,
        "CPU s of a commit": spent,
        "peak MB of a commit": peak_mb() - before,
    }


def sharing(folder: Path, world: int, rows: int) -> dict[str, float]:
    """What the first rank of a node does with MANIFEST for all of them; a child is one of the others."""
    store, before, began = open_store(str(folder)), peak_mb(), time.process_time()
    manifest = manifest_from(store.url, PREFIX, read_manifest_bytes(store, PREFIX))
    if isinstance(manifest, Spread):  # nothing is shared: each rank has the bytes of MANIFEST, and does the same
        return child("bringing", folder, world, rows)
    fd = candidate_sources.share(manifest)
    found = {"CPU s of a node's first rank": time.process_time() - began, "peak MB of it": peak_mb() - before}
    path = candidate_sources.path_of(fd)
    return found | child("planning", folder, world, rows, path)


def planning(path: str, world: int, rows: int) -> dict[str, float]:
    """The other ranks of the node: what they want is what they wrote."""
    wanted, before, began = table_of(world // 2, world, rows), peak_mb(), time.process_time()
    manifest = candidate_sources.attach(path)
    plan_reads(wanted, [manifest.table], names=["MANIFEST"]).require_complete(["MANIFEST"])
    return {"CPU s of every other rank": time.process_time() - began, "peak MB of every other rank": peak_mb() - before}


def bringing(folder: Path, world: int, rows: int) -> dict[str, float]:
    """Any rank, of a MANIFEST that names indexes: what it wants is what it wrote."""
    store, wanted = open_store(str(folder)), table_of(world // 2, world, rows)
    raw = read_manifest_bytes(store, PREFIX)
    before, began = peak_mb(), time.process_time()
    spread = manifest_from(store.url, PREFIX, raw)
    assert isinstance(spread, Spread)
    source = SpreadSource(store, spread, PREFIX, "nobody")
    source.bring(wanted)
    plan_reads(wanted, [source.manifest.table], names=["MANIFEST"]).require_complete(["MANIFEST"])
    spent, peak = time.process_time() - began, peak_mb() - before
    return {
        "CPU s of a node's first rank": spent,
        "peak MB of it": peak,
        "CPU s of every other rank": spent,
        "peak MB of every other rank": peak,
    }


def child(what: str, folder: Path, world: int, rows: int, path: str = "") -> dict[str, float]:
    """Run one part in a separate process."""
    command = [sys.executable, __file__, "--part", what, str(folder), str(world), str(rows), path]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def part(what: str, folder: str, world: str, rows: str, path: str) -> dict[str, float]:
    """Do what `child` asked for."""
    if what == "planning":
        return planning(path, int(world), int(rows))
    work = {"committing": committing, "sharing": sharing, "bringing": bringing}[what]
    return work(Path(folder), int(world), int(rows))


def case(world: int, rows: int, times: int) -> dict[str, Any]:
    """Return each figure of one size: the median, the least and the most of `times` runs."""
    runs = []
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="flashckpt-scale-") as folder:
            write(Path(folder), world, rows)
            runs.append(child("committing", Path(folder), world, rows) | child("sharing", Path(folder), world, rows))
    spread = {name: sorted(run[name] for run in runs) for name in runs[0]}
    return {name: [values[len(values) // 2], values[0], values[-1]] for name, values in spread.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="16,256,1024,4096,16384", help="ranks of the job, %(default)s")
    parser.add_argument("--rows", default="20,500,2169", help="rows of each rank, %(default)s")
    parser.add_argument("--form", choices=("indexes", "rows"), default="indexes", help="of MANIFEST, %(default)s")
    parser.add_argument("--times", type=int, default=1, help="runs of each size, %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--part", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        sys.stdout.write(json.dumps(part(*options.part)))
        return
    os.environ[FORM] = options.form
    found: dict[str, dict[str, Any]] = {}
    for rows in map(int, options.rows.split(",")):
        for world in map(int, options.ranks.split(",")):
            found[f"{world} ranks x {rows} rows"] = figures = case(world, rows, options.times)
            print(f"{world} ranks x {rows} rows")
            for name, (median, least, most) in figures.items():
                print(f"    {name:32}{median:>16,.4g}   {least:,.4g} to {most:,.4g}", flush=True)
    if options.json is not None:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        about = {
            "machine": machine,
            "load": os.getloadavg()[0],
            "times": options.times,
            "form": options.form,
            "spread": "median, least, most",
        }
        options.json.write_text(json.dumps(about | {"cost": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
