"""Which bytes of a slot go into which pack: page-aligned runs of the rows this rank writes. Pure.

A pack is a concatenation of *runs*, each a range of the slot's data area that starts and ends on a
page. So every byte can go from the slot to the disk by O_DIRECT without a copy; whatever is between two
written rows on the same page (padding, rows that a replica writes) is copied along and never read.
Where the ranks of a node have little, the packs of several are one object, each from a page on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from flashckpt.core.manifest import Manifest
from flashckpt.core.records import chunk_count
from flashckpt.core.shard_table import ShardTable

PACK_BYTES = 256 << 20
"""Size at which a pack is closed, between 64 and 512 MiB; no row is larger unless its tensor cannot be cut."""

TOGETHER_BYTES = 8 << 20
"""Bytes of ranks whose packs are one object: beyond, requests side by side outrun one to S3 (8 x 1 MB: as fast; 8 x 2 MB: 0.6)."""

PAGE_BYTES = 4096

PACK_SUFFIX = ".fck"
COMPRESSED_SUFFIX = ".fcz"
INDEX_SUFFIX = ".idx"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """One object to be written.

    Attributes:
        runs: (start, stop) in the slot's data area, bytes, in the order they are written.
        rows: Rows of the slot's table, by ascending place in the pack.
        offsets: Place of each of those rows in the pack, bytes.
    """

    runs: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def pack_name(rank: int, number: int, suffix: str = PACK_SUFFIX, *, last: int | None = None) -> str:
    """Return the object name of the n-th pack of a rank, or of those up to `last`: "r00003.p0.fck", "r00000-00007.p0.fck"."""
    return f"{_ranks(rank, last)}.p{number}{suffix}"


def index_name(first: int, last: int | None = None) -> str:
    """Return the object name of the index of a rank, or of ranks that follow each other: "r00003.idx", "r00000-00007.idx"."""
    return f"{_ranks(first, last)}{INDEX_SUFFIX}"


def values_name(first: int, last: int) -> str:
    """Return the object name of the values that only their own ranks ask for, e.g. "r00000-00007.values.fck"."""
    return f"{_ranks(first, last)}.values{PACK_SUFFIX}"


def is_of_values(name: str) -> bool:
    """Return whether `values_name` made this name."""
    return name.endswith(f".values{PACK_SUFFIX}")


def ranks_of_index(name: str) -> range | None:
    """Return the ranks that an index of this name stands for; None for the name of anything else."""
    stem, ends = name.removesuffix(INDEX_SUFFIX), name.endswith(INDEX_SUFFIX)
    numbers = stem[1:].split("-")
    if not ends or stem[:1] != "r" or len(numbers) > 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
        return None
    return range(int(numbers[0]), int(numbers[-1]) + 1)


def _ranks(first: int, last: int | None) -> str:
    return f"r{first:05d}" if last is None or last == first else f"r{first:05d}-{last:05d}"


def plan_packs(table: ShardTable, data_bytes: int, pack_bytes: int = PACK_BYTES) -> list[Pack]:
    """Return the packs of the rows with replica 0 and at least one byte, in order of their place in the slot.

    Args:
        table: Of the slot.
        data_bytes: Used bytes of the slot's data area; no run goes beyond.
        pack_bytes: A pack is closed before the row that would make it larger.
    """
    rows = np.flatnonzero((table.replica == 0) & (table.nbytes > 0))
    rows = rows[np.argsort(table.byte_offset[rows], kind="stable")]
    packs: list[Pack] = []
    runs: list[tuple[int, int]] = []
    taken: list[int] = []
    offsets: list[int] = []
    size = 0
    for row in rows.tolist():
        start, stop = int(table.byte_offset[row]), int(table.byte_offset[row] + table.nbytes[row])
        first, last = start - start % PAGE_BYTES, min(-(-stop // PAGE_BYTES) * PAGE_BYTES, data_bytes)
        if runs and size + last - max(first, runs[-1][1]) > pack_bytes:
            packs.append(Pack(runs=tuple(runs), rows=tuple(taken), offsets=tuple(offsets), nbytes=size))
            runs, taken, offsets, size = [], [], [], 0
        if runs and first <= runs[-1][1]:
            size += max(0, last - runs[-1][1])
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
            size += last - first
        base = size - (runs[-1][1] - runs[-1][0])
        taken.append(row)
        offsets.append(base + start - runs[-1][0])
    if runs:
        packs.append(Pack(runs=tuple(runs), rows=tuple(taken), offsets=tuple(offsets), nbytes=size))
    return packs


def together(nbytes: Mapping[int, int], most: int) -> list[list[int]]:
    """Return the ranks in groups whose packs are one object: ranks that follow each other, with at most `most` bytes in all.

    Which groups they are does not change where only some of these are asked for again.

    Args:
        nbytes: What each rank writes.
        most: A rank with more is alone.
    """
    groups: list[list[int]] = []
    held = 0
    for rank in sorted(nbytes):
        held += nbytes[rank]
        if groups and rank == groups[-1][-1] + 1 and held <= most:
            groups[-1].append(rank)
        else:
            groups.append([rank])
            held = nbytes[rank]
    return groups


def index_manifest(manifest: Manifest, packs: list[Pack], objects: list[str]) -> Manifest:
    """Return what a writer's index says: the rows it wrote, at their places in its packs, and all values."""
    table = manifest.table
    written = {row: (number, at) for number, p in enumerate(packs) for row, at in zip(p.rows, p.offsets, strict=True)}
    empty = np.flatnonzero((table.replica == 0) & (table.nbytes == 0)).tolist()
    rows = sorted([*written, *empty])
    selected = ShardTable.from_shards(
        [table.shard(row) for row in rows],
        [written.get(row, (0, 0))[1] for row in rows],
        object_ids=np.array([written.get(row, (0, 0))[0] for row in rows], np.int32),
    )
    pieces = [
        manifest.digests[first : first + chunk_count(int(table.nbytes[row]))]
        for row, first in ((row, int(table.first_chunk[row])) for row in rows)
    ]
    digests = np.concatenate(pieces) if pieces else np.zeros(0, np.uint64)
    figures = None if manifest.figures is None else manifest.figures.take(rows)
    return replace(manifest, table=selected, digests=digests, objects=list(objects), figures=figures)
