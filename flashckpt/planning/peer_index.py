"""Who holds what of one snapshot: an index of rows, spread over all ranks by name. Pure, numpy only.

A restore from peers must find, for boxes that lie on no slot of a node, the slots that hold them. Sending everything to
everybody would be gigabytes per rank at 1,000 nodes. So each name has one rank that receives what is held and what
is wanted of it, and answers: a rank sends and receives about as much as its own table is long, whatever the
size of the job. Rows travel as records of fixed width; names as their digests, so that an equal digest of another
name could only offer a row too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.manifest import Manifest
from flashckpt.core.records import digest
from flashckpt.core.shard import Shard, split_owner
from flashckpt.core.shard_table import ShardTable, chunk_counts, ranges

DIMS = 4
"""Dimensions of a box in a record; of a longer box the rest is taken for intersecting."""
ANYTHING = 255
"""`ndim` of a record that every box intersects."""
COPIES = 2
"""Slots named for each box that several hold alike: the one to read, and one more if that is damaged."""
RECORD = np.dtype([
    ("key", "<u8"), ("name", "<u8"), ("shape", "<u8"), ("box", "<u8"), ("ndim", "u1"),
    ("at", "<i8", (DIMS,)), ("lengths", "<i8", (DIMS,)), ("slot", "<u4"), ("row", "<i4"),
])  # fmt: skip
"""One row that is held, or one box that is wanted.

key: what the record is filed under; name: digest of the exact name (0 in a query for any); shape, box: digests of the
global shape and of the whole box; slot: number of the slot that holds the row; row: in the table of that slot, -1 for a value.
"""
ANSWER = np.dtype([("slot", "<u4"), ("row", "<i4"), ("copy", "u1")])
"""A row that was found: copy 0 is the one to read."""
_SAME = ["key", "name", "shape", "box", "ndim"]

Records = npt.NDArray[np.void]


class PeerQuery(NamedTuple):
    """What a rank lacks.

    Attributes:
        filed_under: The key that it is filed under.
        name: Its exact name; "" for all that is filed there.
        shard: The box; None for all of it.
    """

    filed_under: str
    name: str
    shard: Shard | None


def key_of(text: str) -> int:
    """Return the u64 that a name is filed under."""
    return int(digest(text.encode()))


def owner_of(keys: npt.NDArray[np.uint64], ranks: int) -> npt.NDArray[np.int64]:
    """Return the rank whose part of the index each key belongs to."""
    return (keys % np.uint64(ranks)).astype(np.int64)


def keys_of(fqn: str) -> tuple[str, str]:
    """Return what a row is filed under: its name without coordinate, and everything below its parent."""
    base, _ = split_owner(fqn)
    return base, f"{base.rpartition('.')[0]}.*"


def encode_queries(wanted: Iterable[PeerQuery]) -> Records:
    """Return the records of what is wanted."""
    rows = list(wanted)
    records = np.zeros(len(rows), RECORD)
    for record, (key, name, shard) in zip(records, rows, strict=True):
        record["key"], record["name"], record["row"] = key_of(key), key_of(name) if name else 0, -1
        record["ndim"] = ANYTHING
        if shard is not None:
            record["ndim"], record["shape"] = min(len(shard.lengths), ANYTHING - 1), _digest_of(shard.global_shape)
            kept = min(len(shard.lengths), DIMS)
            record["at"][:kept], record["lengths"][:kept] = shard.offsets[:kept], shard.lengths[:kept]
    return records


def encode_held_rows(manifest: Manifest, slot: int) -> Records:
    """Return the records of everything that slot `slot` holds: rows under their names and aliases, and values."""
    table = manifest.table
    rows = _records_of(table)
    names: dict[str, list[str]] = {fqn: [*keys_of(fqn)] for fqn in table.fqns}
    for alias, fqn in manifest.aliases.items():
        if fqn in names:
            names[fqn].append(split_owner(alias)[0])
    parts = []
    for fqn, keys in names.items():
        for key in keys:
            part = rows[np.asarray(table.rows(fqn), np.int64)]  # a copy
            part["key"], part["name"] = key_of(key), key_of(fqn)
            parts.append(part)
    values = np.zeros(len(manifest.values), RECORD)
    for record, key in zip(values, manifest.values, strict=True):
        record["key"] = record["name"] = key_of(f"={key}")
        record["ndim"], record["row"] = ANYTHING, -1
    found = np.concatenate([*parts, values])
    found["slot"] = slot
    return found


def lookup(held: Records, asked: Mapping[int, Records]) -> dict[int, Records]:
    """Return for each asking rank the rows (of ANSWER) that its queries meet, COPIES of each box that is held alike.

    Ranks that ask for the same box are answered with different copies first, so that reading spreads over the replicas.
    """
    board = _Board(held)
    found = {}
    for rank, asks in asked.items():
        parts = [part for ask in asks for part in board.find(ask, rank)]
        merged = np.concatenate(parts) if parts else np.zeros(0, ANSWER)
        found[rank] = np.unique(merged)
    return found


def part_of(manifest: Manifest, rows: Sequence[int], *, values: bool) -> Manifest:
    """Return the manifest of some of its rows, at the same places: what a holder sends of its slot."""
    table, chosen = manifest.table, np.asarray(rows, np.int64)
    chunks = ranges(table.first_chunk[chosen], chunk_counts(table.nbytes[chosen]))
    return replace(
        manifest,
        table=table.take(chosen),
        digests=manifest.digests[chunks],
        values=manifest.values if values else {},
        figures=None if manifest.figures is None else manifest.figures.take(chosen),
    )


class _Board:
    """Held records in groups of equal boxes, sorted by key."""

    def __init__(self, held: Records) -> None:
        raw = np.ascontiguousarray(held[_SAME].astype([(n, RECORD[n]) for n in _SAME]))
        width = raw.dtype.itemsize
        _, group = np.unique(raw.view(np.dtype((np.void, width))).ravel(), return_inverse=True)
        order = np.lexsort((held["slot"], group.ravel(), held["key"]))
        self._held, group = held[order], group.ravel()[order]
        self._first = np.flatnonzero(np.diff(group, prepend=-1)) if len(group) else np.zeros(0, np.int64)
        self._count = np.diff(np.append(self._first, len(group)))
        self._boxes = self._held[self._first]

    def find(self, ask: np.void, rank: int) -> Iterator[Records]:
        """Yield, per box that the query meets, the slots to read it from."""
        low, high = (int(np.searchsorted(self._boxes["key"], ask["key"], side=side)) for side in ("left", "right"))
        boxes = self._boxes[low:high]
        hits = np.flatnonzero(_meets(boxes, ask))
        if ask["name"] and len(hits):
            hits = _named(boxes, hits, ask)
        for hit in hits.tolist():
            first, count = int(self._first[low + hit]), int(self._count[low + hit])
            for copy in range(min(COPIES, count)):
                record = self._held[first + (rank + copy) % count]
                yield np.array([(record["slot"], record["row"], copy)], ANSWER)


def _meets(boxes: Records, ask: np.void) -> npt.NDArray[np.bool_]:
    """Tell which boxes may hold elements of the query; a box of another shape always may (its owner knows how)."""
    low = np.maximum(boxes["at"], ask["at"])
    high = np.minimum(boxes["at"] + boxes["lengths"], ask["at"] + ask["lengths"])
    if ask["ndim"] == ANYTHING:
        return np.ones(len(boxes), np.bool_)
    dims = np.arange(DIMS) < int(ask["ndim"])
    other = (boxes["ndim"] != ask["ndim"]) | (boxes["shape"] != ask["shape"])
    meets: npt.NDArray[np.bool_] = other | ((high > low) | ~dims).all(axis=1)
    return meets


def _named(boxes: Records, hits: npt.NDArray[np.int64], ask: np.void) -> npt.NDArray[np.int64]:
    """Keep the exact name and the one without a coordinate; where there is neither, what the first slot has."""
    names = boxes["name"][hits]
    exact = (names == ask["name"]) | (names == ask["key"])
    if not exact.any():
        first = hits[np.argmin(boxes["slot"][hits])]
        exact = names == boxes["name"][first]
    kept: npt.NDArray[np.int64] = hits[exact]
    return kept


def _records_of(table: ShardTable) -> Records:
    records = np.zeros(len(table), RECORD)
    records["ndim"] = np.minimum(table.ndim, ANYTHING - 1)
    records["row"] = np.arange(len(table))
    for dim in range(DIMS):
        rows = np.flatnonzero(table.ndim > dim)
        at = table.dim_start[rows] + dim
        records["at"][rows, dim], records["lengths"][rows, dim] = table.offsets[at], table.lengths[at]
    for row in range(len(table)):
        dims = slice(int(table.dim_start[row]), int(table.dim_start[row + 1]))
        records["shape"][row] = _digest_of(table.global_shape[dims])
        records["box"][row] = _digest_of(np.concatenate((table.offsets[dims], table.lengths[dims])))
    return records


def _digest_of(numbers: Sequence[int] | npt.NDArray[np.int64]) -> int:
    return int(digest(np.asarray(numbers, "<i8").tobytes()))
