"""What a state of training is: which bytes each rank has in it, and which snapshot holds it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, NamedTuple

from flashckpt.core.records import mark_of
from flashckpt.core.shard import Shard, place
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId

SAMPLES, BATCH = 30, 8
"""Of the data set, and of each step: epochs end in the middle of a step."""


class State(NamedTuple):
    """A snapshot, of one of the generations that have its number."""

    identity: SnapshotId
    mark: int

    @classmethod
    def of(cls, identity: SnapshotId, token: str) -> State:
        """Return that of the generation with a token."""
        return cls(identity, mark_of(token))


_tables: dict[tuple[int, int], tuple[ShardTable, int]] = {}


def bytes_of(chain: str, rank: int) -> tuple[bytes, bytes]:
    """Return what a rank's row, and what every rank holds alike, is in a state."""
    row = hashlib.blake2b(f"{chain} {rank}".encode(), digest_size=64).digest()
    return row, hashlib.blake2b(chain.encode(), digest_size=16).digest()


def table_of(rank: int, world: int) -> tuple[ShardTable, int]:
    """Return the shards of a rank and their bytes."""
    if (rank, world) not in _tables:
        common: dict[str, Any] = {"dtype": "float32", "replica": 0}
        shards = [
            Shard(fqn="weight", global_shape=(world, 16), offsets=(rank, 0), lengths=(1, 16), **common),
            Shard(
                fqn="bias", global_shape=(4,), offsets=(0,), lengths=(4,), dtype="float32", replica=rank
            ),
        ]  # fmt: skip
        placement = place(shards)
        _tables[rank, world] = ShardTable.from_shards(shards, placement.offsets), int(placement.total)
    return _tables[rank, world]


@lru_cache(maxsize=1 << 15)
def whole_of(chain: str, rank: int, world: int) -> bytes:
    """Return the bytes of a rank's slot in a state."""
    table, total = table_of(rank, world)
    whole = bytearray(total)
    for start, part in zip(table.byte_offset.tolist(), bytes_of(chain, rank), strict=True):
        whole[start : start + len(part)] = part
    return bytes(whole)
