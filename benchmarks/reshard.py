"""How long one rank takes to decode a MANIFEST and plan its reads under another layout, for 64 to 16,384 ranks.

A simulation: the metadata of a 70-layer model (Llama-70B shapes; parameters and two AdamW states in float32, a
scalar step each) is made for a saved layout DP x TP x PP, encoded as MANIFEST, and one rank of another layout
decodes it and plans. No tensor data exists. Each line runs in a separate process; memory is the growth of its
resident set, from before it reads the file to the end of the plan.

    .venv/bin/python benchmarks/reshard.py [--ranks 64,1024,16384] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.core.manifest import Manifest, decode_manifest, encode_manifest
from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning.read_plan import plan_reads

LAYERS, HIDDEN, INNER, HEADS_KV, VOCAB = 70, 8192, 28672, 1024, 128256
STATES = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
LAYOUTS = {64: (2, 8, 4), 256: (8, 8, 4), 1024: (16, 8, 8), 4096: (64, 8, 8), 16384: (128, 8, 16)}
"""Saved DP x TP x PP by number of ranks."""
WANTED = {64: (4, 4, 4), 256: (16, 4, 4), 1024: (64, 4, 4), 4096: (128, 4, 8), 16384: (512, 4, 8)}
"""Layout of the rank that plans."""


@dataclass(frozen=True)
class Tensor:
    """A parameter: its name, shape, and the dimension tensor parallelism cuts (None: replicated)."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    layer: int


def model() -> list[Tensor]:
    tensors = [Tensor("embed.weight", (VOCAB, HIDDEN), 0, 0)]
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        tensors += [
            Tensor(prefix + "attention.wq.weight", (HIDDEN, HIDDEN), 0, layer),
            Tensor(prefix + "attention.wk.weight", (HEADS_KV, HIDDEN), 0, layer),
            Tensor(prefix + "attention.wv.weight", (HEADS_KV, HIDDEN), 0, layer),
            Tensor(prefix + "attention.wo.weight", (HIDDEN, HIDDEN), 1, layer),
            Tensor(prefix + "mlp.w1.weight", (INNER, HIDDEN), 0, layer),
            Tensor(prefix + "mlp.w2.weight", (HIDDEN, INNER), 1, layer),
            Tensor(prefix + "mlp.w3.weight", (INNER, HIDDEN), 0, layer),
            Tensor(prefix + "attention_norm.weight", (HIDDEN,), None, layer),
            Tensor(prefix + "mlp_norm.weight", (HIDDEN,), None, layer),
        ]
    return [
        *tensors,
        Tensor("norm.weight", (HIDDEN,), None, LAYERS - 1),
        Tensor("head.weight", (VOCAB, HIDDEN), 0, LAYERS - 1),
    ]


def edges(length: int, parts: int) -> np.ndarray:
    """FSDP's rule: equal parts rounded up, the last ones short or empty."""
    size = -(-length // parts)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * size, length)


def grid(tensor: Tensor, dp: int, tp: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths of all distinct boxes of a tensor: TP cuts its dimension, then FSDP dimension 0 of the part."""
    if tensor.tp_dim is None:
        a = edges(tensor.shape[0], dp)
        offsets, lengths = a[:-1, None], np.diff(a)[:, None]
    elif tensor.tp_dim == 0:
        outer = tensor.shape[0] // tp
        a = edges(outer, dp)
        starts = (np.arange(tp)[:, None] * outer + a[:-1]).ravel()
        offsets = np.stack((starts, np.zeros_like(starts)), 1)
        lengths = np.stack((np.tile(np.diff(a), tp), np.full(tp * dp, tensor.shape[1])), 1)
    else:
        a, width = edges(tensor.shape[0], dp), tensor.shape[1] // tp
        offsets = np.stack((np.tile(a[:-1], tp), np.repeat(np.arange(tp) * width, dp)), 1)
        lengths = np.stack((np.tile(np.diff(a), tp), np.full(tp * dp, width)), 1)
    keep = (lengths > 0).all(1)
    return offsets[keep], lengths[keep]


def saved_manifest(dp: int, tp: int, pp: int) -> Manifest:
    """The merged MANIFEST of all dp x tp x pp writers, built column by column."""
    fqns: list[str] = []
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("fqn_id", "ndim", "nbytes", "object_id")}
    dims: dict[str, list[np.ndarray]] = {name: [] for name in ("global_shape", "offsets", "lengths")}

    def add(
        fqn: str, shape: tuple[int, ...], offsets: np.ndarray, lengths: np.ndarray, stage: int, itemsize: int
    ) -> None:
        count = len(offsets)
        parts["fqn_id"].append(np.full(count, len(fqns), np.uint32))
        parts["ndim"].append(np.full(count, len(shape), np.uint8))
        parts["nbytes"].append(lengths.prod(1).astype(np.int64) * itemsize)
        parts["object_id"].append(np.arange(count) % (dp * tp) + stage * dp * tp)
        dims["global_shape"].append(np.tile(np.array(shape, np.int64), count))
        dims["offsets"].append(offsets.ravel())
        dims["lengths"].append(lengths.ravel())
        fqns.append(fqn)

    for tensor in model():
        offsets, lengths = grid(tensor, dp, tp)
        stage = tensor.layer * pp // LAYERS
        for state in STATES:
            add(f"{state}.{tensor.name}", tensor.shape, offsets, lengths, stage, 4)
        add(f"optimizer.step.{tensor.name}", (), np.zeros((1, 0), np.int64), np.ones((1, 0), np.int64), stage, 4)
    columns: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in (parts | dims).items()}
    rows = len(columns["fqn_id"])
    chunks = -(-columns["nbytes"] // CHUNK_BYTES)
    columns |= {
        "dtype_id": np.zeros(rows, np.uint8),
        "replica": np.zeros(rows, np.int32),
        "byte_offset": np.zeros(rows, np.int64),
        "first_chunk": np.cumsum(chunks) - chunks,
        "object_id": columns["object_id"].astype(np.int32),
    }
    world = dp * tp * pp
    return Manifest(
        job="simulated",
        generation=1,
        step=1000,
        parent=None,
        world_size=world,
        rank=-1,
        writers=list(range(world)),
        coordinates={},
        table=ShardTable(fqns, ["float32"], columns),
        digests=np.zeros(int(chunks.sum()), np.uint64),
        objects=[f"r{rank:05d}.p0.fck" for rank in range(world)],
    )


def wanted_shards(dp: int, tp: int, pp: int, rank: int) -> list[Shard]:
    """What one rank of the new layout holds."""
    stage, inner = divmod(rank, dp * tp)
    d, t = divmod(inner, tp)
    shards = []
    for tensor in model():
        if tensor.layer * pp // LAYERS != stage:
            continue
        offsets, lengths = grid(tensor, dp, tp)
        index = d if tensor.tp_dim is None else t * dp + d
        if len(offsets) not in (dp, dp * tp):  # empty parts were left out: this rank may have none
            index = min(index, len(offsets) - 1)
        box = tuple(offsets[index].tolist()), tuple(lengths[index].tolist())
        shards += [
            Shard(
                fqn=f"{state}.{tensor.name}", dtype="float32", global_shape=tensor.shape, offsets=box[0], lengths=box[1]
            )
            for state in STATES
        ]
        shards.append(
            Shard(fqn=f"optimizer.step.{tensor.name}", dtype="float32", global_shape=(), offsets=(), lengths=())
        )
    return shards


def resident_bytes(word: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(word)))


def one_rank(path: Path, layout: tuple[int, int, int]) -> dict[str, float]:
    """Decode and plan in this process; what it took."""
    dp, tp, pp = layout
    shards = wanted_shards(dp, tp, pp, rank=(dp * tp * pp) // 2 + 1)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident_bytes("VmRSS")
    started = time.perf_counter()
    raw = path.read_bytes()
    read = time.perf_counter()
    manifest = decode_manifest(raw)
    size = len(raw)
    del raw
    decoded = time.perf_counter()
    plan = plan_reads(shards, [manifest.table])
    done = time.perf_counter()
    plan.require_complete()
    assert int(plan.nbytes.sum()) == sum(s.nbytes for s in shards)
    return {
        "read_s": read - started,
        "decode_s": decoded - read,
        "plan_s": done - decoded,
        "total_s": done - started,
        "peak_bytes": resident_bytes("VmHWM") - before,
        "manifest_bytes": size,
        "rows": len(manifest.table),
        "wanted": len(shards),
        "reads": len(plan),
    }


def in_child(path: Path, layout: tuple[int, int, int]) -> dict[str, float]:
    """Run `one_rank` in a forked process, so that no memory of another run is reused."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_fd, json.dumps(one_rank(path, layout)).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        text = file.read()
    os.waitpid(pid, 0)
    found: dict[str, float] = json.loads(text)
    return found


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    saved, wanted = LAYOUTS[ranks], WANTED[ranks]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "MANIFEST"
        path.write_bytes(encode_manifest(saved_manifest(*saved)))
        runs = [in_child(path, wanted) for _ in range(repeats)]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {
        "ranks": ranks,
        "saved": saved,
        "wanted_layout": wanted,
        **middle,
        "worst_s": max(r["total_s"] for r in runs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", default=",".join(map(str, LAYOUTS)), help="numbers of ranks, of " + str(list(LAYOUTS))
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    )
    print(
        "ranks   saved        wanted       rows      MANIFEST   read s  decode s  plan s  total s (worst)  peak MB  reads"
    )
    results = []
    for ranks in map(int, options.ranks.split(",")):
        one = measure(ranks, options.repeats)
        results.append(one)
        layouts = ["x".join(map(str, one[key])) for key in ("saved", "wanted_layout")]
        print(
            f"{ranks:<7} {layouts[0]:<12} {layouts[1]:<12} {one['rows']:<9.0f} {one['manifest_bytes'] / 1e6:6.1f} MB  "
            f"{one['read_s']:6.3f}  {one['decode_s']:8.3f}  {one['plan_s']:6.3f}  {one['total_s']:7.3f} ({one['worst_s']:.3f})  "
            f"{one['peak_bytes'] / 1e6:7.0f}  {one['reads']:.0f} for {one['wanted']:.0f} shards"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
