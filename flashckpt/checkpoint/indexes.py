"""The indexes of a checkpoint: one object for all ranks of a node that follow each other.

At 16,384 ranks the leader reads 2,048 objects instead of 16,384, and what only one rank ever asks for, the state of its
generators, lies in an object beside them: it is neither read for a commit nor a part of MANIFEST. Nor is what an index
says of its rows, where the indexes are large: then MANIFEST has their outlines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgpack
import numpy as np

from flashckpt.checkpoint.root_records import IN_FLIGHT, parallel
from flashckpt.core.manifest import Manifest, by_design, cover, decode_manifest, encode_manifest
from flashckpt.core.outline import encode_outline, outline_of
from flashckpt.core.values import NO_RANGES, concatenate, cut
from flashckpt.errors import DamagedError, ObjectMissingError, PersistError
from flashckpt.faults import crash_point
from flashckpt.planning.packs import PACK_SUFFIX, index_name, ranks_of_index, values_name
from flashckpt.storage.store import Store

RANGED_FROM = 64
"""Ranks of a job from which on values of one rank are ranges: below, MANIFEST is small, and older releases read it."""


def put_indexes(store: Store, prefix: str, indexes: Iterable[Manifest]) -> None:
    """Write what some ranks' packs hold: from here on these ranks have written.

    The packs of all of them are durable.

    Raises:
        StoreError, RootError: The storage failed; may be called again.
    """
    for run in _runs(sorted(indexes, key=lambda index: index.rank)):
        parts = _with_ranges(store, prefix, run) if run[0].world_size >= RANGED_FROM else run
        index = parts[0] if len(parts) == 1 else cover(parts)
        if index.world_size >= RANGED_FROM:
            index = _outlined(index, parts)
        crash_point("persist.before-index")
        store.put(f"{prefix}/{index_name(run[0].rank, run[-1].rank)}", encode_manifest(index))


def missing_writers(store: Store, prefix: str, writers: Sequence[int]) -> list[int]:
    """Return the writers whose index is not there yet (a lagging listing may name one too many, never one too few)."""
    found = (ranks_of_index(key.rpartition("/")[2]) for key in _listed(store, prefix, writers))
    written = {rank for ranks in found if ranks is not None for rank in ranks}
    return [rank for rank in writers if rank not in written]


class IndexList(NamedTuple):
    """The indexes that together are those of all writers, and what else there is.

    Attributes:
        ranks: Those of each index, ascending.
        sizes: Key -> bytes of all packs and indexes, as a listing shows them.
    """

    ranks: list[range]
    sizes: Mapping[str, int]

    def nbytes(self, prefix: str) -> int:
        """Bytes of the indexes."""
        return sum(self.sizes.get(f"{prefix}/{index_name(ranks[0], ranks[-1])}", 0) for ranks in self.ranks)


def list_indexes(store: Store, prefix: str, writers: Sequence[int]) -> IndexList:
    """Return the fewest indexes that stand for all writers."""
    sizes = _listed(store, prefix, writers)
    names = (key.rpartition("/")[2] for key in sizes)
    there = [ranks for name in names if (ranks := ranks_of_index(name)) is not None]
    return IndexList(_needed(there, writers), sizes)


def read_indexes(store: Store, prefix: str, writers: Sequence[int], there: IndexList | None = None) -> list[Manifest]:
    """Return indexes that together are those of all writers, by rank, their packs looked at.

    `there` says which ones exist; the root is asked if it is None.

    Raises:
        PersistError: A writer has none, or one is not of the ranks in its name.
        DamagedError: One cannot be decoded, or a pack is missing or too short.
    """
    there = list_indexes(store, prefix, writers) if there is None else there
    indexes = list(each_index(store, prefix, there.ranks))
    check_packs(store, prefix, (one for index in indexes for one in needed_bytes(index)), there.sizes)
    return indexes


def each_index(store: Store, prefix: str, wanted: Sequence[range], *, rows: bool = True) -> Iterator[Manifest]:
    """Yield indexes, decoded: `rows` as in `decode_manifest`, errors as above. The bytes of some are held at a time."""
    # decoded in one thread: 64 of them in Python take half as long again
    for at in range(0, len(wanted), IN_FLIGHT):
        some = wanted[at : at + IN_FLIGHT]
        found = parallel(lambda ranks: _get_index(store, prefix, ranks), some)
        for ranks in some:
            yield _decoded(store, prefix, ranks, found.pop(0), rows=rows)


Need = tuple[str, int, int]
"""An object of an index, the bytes that its rows need of it, and those that the object must have as it is."""


def check_packs(store: Store, prefix: str, needs: Iterable[Need], sizes: Mapping[str, int]) -> None:
    """Raise DamagedError where a pack is missing or shorter than its rows say.

    A listing may lag behind, so where it lacks a pack or shows a shorter one, the pack itself is asked for.

    `sizes` maps keys to bytes, as a listing of the checkpoint shows them; it may be empty.
    """

    def check(name: str, needed: int, needed_there: int) -> None:
        info = store.head(key := f"{prefix}/{name}")
        if info is None or info.nbytes < needed_there:
            raise DamagedError(
                f"the pack {key} of {store.url} is {'missing' if info is None else 'truncated'}",
                found="no object" if info is None else f"{info.nbytes} bytes",
                expected=f"at least {needed} bytes",
                state="MANIFEST was not written.",
            )

    parallel(lambda one: check(*one), [one for one in needs if sizes.get(f"{prefix}/{one[0]}", -1) < one[2]])


def needed_bytes(index: Manifest) -> Iterator[Need]:
    """Yield what an index needs of each of its objects."""
    table = index.table
    ends = np.zeros(len(index.objects), np.int64)
    held = table.nbytes > 0
    np.maximum.at(ends, table.object_id[held], (table.byte_offset + table.nbytes)[held])
    return needs_of(index.objects, np.maximum(ends, index.ranged.ends(len(index.objects))).tolist())


def needs_of(objects: Sequence[str], ends: Sequence[int]) -> Iterator[Need]:
    """Yield the same of objects whose bytes in use end there."""
    for name, needed in zip(objects, ends, strict=True):
        yield name, needed, needed if name.endswith(PACK_SUFFIX) else 0  # a compressed one is shorter than its rows


def _outlined(index: Manifest, parts: Sequence[Manifest]) -> Manifest:
    """Return an index with its outline, and what a commit asks of it besides."""
    known = by_design([index])
    outline = replace(
        outline_of([(one.rank, one.table) for one in parts]),
        suspects=index.suspects,
        by_design=None if known is None else sorted(known),
    )
    needs = tuple(needed for _, needed, _ in needed_bytes(index))
    return replace(index, outline=bytes(msgpack.packb(encode_outline(outline))), needs=needs)


def _listed(store: Store, prefix: str, writers: Sequence[int]) -> dict[str, int]:
    """Return the bytes of packs and indexes by key: 1,000 per request, and those of each 1,000 ranks side by side.

    Of many ranks only near the writers: each node asks for its own, whose index is named by the first rank of a node, not far below.
    """
    first, last = min(writers, default=0) // 1000, max(writers, default=0) // 1000
    starts = ["r"] if last == 0 else [f"r{k:02d}" for k in range(max(0, first - 1), last + 1)]
    return {info.key: info.nbytes for part in parallel(lambda s: store.list(f"{prefix}/{s}"), starts) for info in part}


def _runs(indexes: Sequence[Manifest]) -> list[list[Manifest]]:
    """Return the indexes in groups of ranks that follow each other."""
    runs: list[list[Manifest]] = []
    for index in indexes:
        if runs and index.rank == runs[-1][-1].rank + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _with_ranges(store: Store, prefix: str, run: list[Manifest]) -> list[Manifest]:
    """Write the values of single ranks into an object of theirs; return the indexes that name it."""
    name, at, blobs, found = values_name(run[0].rank, run[-1].rank), 0, [], []
    for index in run:
        stays, ranges, blob = cut(index.values, at)
        found.append(replace(index, values=stays, ranged=ranges))
        blobs.append(blob)
        at += len(blob)
    if not at:
        return run
    crash_point("ranges.before-put")
    store.put(f"{prefix}/{name}", b"".join(blobs))
    ranges = concatenate((index.ranged, len(run[0].objects)) for index in found)
    first = replace(found[0], objects=[*found[0].objects, name], ranged=ranges)
    return [first, *(replace(index, ranged=NO_RANGES) for index in found[1:])]


def _needed(there: Iterable[range], writers: Sequence[int]) -> list[range]:
    """Return the fewest indexes that stand for all writers: the widest first; one of a single rank where none is there."""
    left, chosen = set(writers), []
    for ranks in sorted(there, key=lambda ranks: (-len(ranks), ranks.start)):
        if not left.isdisjoint(ranks):
            chosen.append(ranks)
            left.difference_update(ranks)
    return sorted([*chosen, *(range(rank, rank + 1) for rank in left)], key=lambda ranks: ranks.start)


def _get_index(store: Store, prefix: str, ranks: range) -> bytes:
    key = f"{prefix}/{index_name(ranks[0], ranks[-1])}"
    try:
        return store.get(key)
    except ObjectMissingError as error:
        raise PersistError(
            f"the checkpoint {prefix} cannot be committed yet",
            found=f"{key} is missing",
            expected="every writer's index",
        ) from error


def _decoded(store: Store, prefix: str, ranks: range, raw: bytes, *, rows: bool) -> Manifest:
    key = f"{prefix}/{index_name(ranks[0], ranks[-1])}"
    try:
        index = decode_manifest(raw, rows=rows)
    except DamagedError as error:
        raise DamagedError(f"the index {key} of {store.url} is damaged", found=error.found) from error
    if (index.covers or (index.rank,)) != tuple(ranks):
        raise PersistError(
            f"the index {key} belongs to other ranks", found=f"{index.covers or index.rank}", expected=f"{[*ranks]}"
        )
    return index
