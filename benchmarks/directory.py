"""What one rank sends, hears and computes to find who holds its state, when all ranks of a job restore from peers.

A simulation of the largest case: parameters and two AdamW states of a 70-layer model (Llama-70B shapes) and a scalar
step each, sharded along dim 0 over all ranks, restored on eight ranks less, so that every rank asks for nearly
everything. Told are the records that one rank sends, the records that the fullest part of the directory hears, and
the seconds to make the former and to answer the latter. No tensor data and no network exist.

    .venv/bin/python benchmarks/directory.py [--ranks 64,1024,8192] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from reshard import STATES, model

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning import peer_index


def shards_of(rank: int, ranks: int) -> list[Shard]:
    """Return one rank's boxes: every tensor cut along its first dimension."""
    found = []
    for tensor in model():
        for state in STATES:
            rows = tensor.shape[0]
            low, high = rows * rank // ranks, rows * (rank + 1) // ranks
            found.append(
                Shard(
                    fqn=f"{state.partition('.')[0]}.{tensor.name}{state.partition('optimizer')[2]}",
                    dtype="float32",
                    global_shape=tensor.shape,
                    offsets=(low, *(0 for _ in tensor.shape[1:])),
                    lengths=(high - low, *tensor.shape[1:]),
                )
            )
        found.append(
            Shard(fqn=f"optimizer.{tensor.name}.step", dtype="float32", global_shape=(), offsets=(), lengths=())
        )
    return found


def manifest_of(shards: list[Shard]) -> Manifest:
    table = ShardTable.from_shards(shards, np.zeros(len(shards), np.int64))
    return Manifest(
        job="j",
        generation=1,
        step=1,
        parent=None,
        world_size=1,
        rank=0,
        writers=[],
        coordinates={},
        table=table,
        digests=np.zeros(table.chunks, np.uint64),
    )


def queries_of(shards: list[Shard]) -> peer_index.Records:
    return peer_index.encode_queries(peer_index.PeerQuery(shard.fqn, shard.fqn, shard) for shard in shards)


def measure(ranks: int) -> dict[str, Any]:
    """Return the figures of one world size."""
    wanting = ranks - 8
    began = time.perf_counter()
    held = peer_index.encode_held_rows(manifest_of(shards_of(ranks // 2, ranks)), ranks // 2)
    asked = queries_of(shards_of(wanting // 2, wanting))
    send_s = time.perf_counter() - began

    owners = Counter(peer_index.owner_of(held["key"], ranks).tolist())
    owners.update(peer_index.owner_of(asked["key"], ranks).tolist())
    (fullest, _), *_ = owners.most_common(1)
    keys = {int(k) for k in (*held["key"], *asked["key"]) if int(k) % ranks == fullest}
    names = [s for s in shards_of(0, ranks) if any(peer_index.key_of(k) in keys for k in peer_index.keys_of(s.fqn))]
    fqns = {s.fqn for s in names}
    board, wanted = [], {}
    for rank in range(ranks):
        records = peer_index.encode_held_rows(manifest_of(shards_of_names(rank, ranks, fqns)), rank)
        board.append(records[np.isin(records["key"], np.array(sorted(keys), np.uint64))])
        if rank < wanting:
            records = queries_of(shards_of_names(rank, wanting, fqns))
            wanted[rank] = records[np.isin(records["key"], np.array(sorted(keys), np.uint64))]
    everything = np.concatenate(board)
    began = time.perf_counter()
    answers = peer_index.lookup(everything, wanted)
    answer_s = time.perf_counter() - began
    heard = everything.nbytes + sum(records.nbytes for records in wanted.values())
    return {
        "ranks": ranks,
        "rows": len(held),
        "sent_bytes": held.nbytes + asked.nbytes,
        "heard_bytes_fullest": heard,
        "answered_bytes_fullest": sum(a.nbytes for a in answers.values()),
        "send_s": send_s,
        "answer_s_fullest": answer_s,
    }


_CACHE: dict[tuple[int, int], list[Shard]] = {}


def shards_of_names(rank: int, ranks: int, fqns: set[str]) -> list[Shard]:
    """Return one rank's boxes of a few tensors."""
    first = _CACHE.setdefault((ranks, len(fqns)), [s for s in shards_of(0, ranks) if s.fqn in fqns])
    found = []
    for shard in first:
        if not shard.global_shape:
            found.append(shard)
            continue
        rows = shard.global_shape[0]
        low, high = rows * rank // ranks, rows * (rank + 1) // ranks
        offsets, lengths = (low, *shard.offsets[1:]), (high - low, *shard.lengths[1:])
        found.append(
            Shard(fqn=shard.fqn, dtype=shard.dtype, global_shape=shard.global_shape, offsets=offsets, lengths=lengths)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512,1024,8192")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(int(ranks)) for ranks in args.ranks.split(",")]
    for row in rows:
        print(
            f"{row['ranks']:6} ranks: {row['rows']} records held, {row['sent_bytes'] / 1e6:.2f} MB sent in "
            f"{row['send_s']:.2f} s; the fullest part hears {row['heard_bytes_fullest'] / 1e6:.2f} MB, answers "
            f"{row['answered_bytes_fullest'] / 1e6:.2f} MB in {row['answer_s_fullest']:.2f} s"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
