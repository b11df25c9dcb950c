"""From the indexes of all writers to the bytes of MANIFEST: with a row for each box, or with the outline of a large job.

Where the indexes have more than `SPREAD_BYTES`, MANIFEST names them instead of repeating them. They are then read without
their rows, which nobody needs before a restore. Where their outlines do not tile each tensor (ranks that wrote the same
box, or left a gap), or ranks have nothing in common, rows decide as they always did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np

from flashckpt.checkpoint import indexes
from flashckpt.checkpoint.indexes import IndexList, Need, check_packs, each_index, list_indexes, needs_of, read_indexes
from flashckpt.checkpoint.root_records import prefix_of
from flashckpt.core.manifest import Manifest, encode_manifest, merge
from flashckpt.core.outline import Outline, decode_outline, merge_outlines
from flashckpt.core.schema import cut_tensors_with_gaps, products
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.spread import IndexEntry, Spread, encode_spread
from flashckpt.core.values import RangedValues
from flashckpt.errors import PersistError, ShardGapError
from flashckpt.storage.store import Store

SPREAD_BYTES = 8 << 20
"""Bytes of all indexes from which on MANIFEST names them: below it is small, and earlier releases read it."""
ROWS_PER_PATTERN_ROW = 4
"""Least rows for each row of a pattern: a layout in which no two ranks are alike is as fast to search by rows."""
HELD = 64
"""Indexes whose values are held at a time."""


def encoded_manifest(store: Store, prefix: str, writers: Sequence[int], token: str = "") -> bytes:
    """Return the MANIFEST of all writers, whose indexes and packs are there. Arguments and errors as `writer.commit`."""
    there = list_indexes(store, prefix, writers)
    is_large = len(writers) >= indexes.RANGED_FROM and there.nbytes(prefix) >= SPREAD_BYTES
    if is_large:
        with contextlib.suppress(
            KeyError, TypeError, ValueError, IndexError
        ):  # an outline that is none: its rows decide
            if (spread := _spread(store, prefix, there, token)) is not None:
                return encode_spread(spread)
    parts = read_indexes(store, prefix, writers, there)
    for index in parts:
        _refuse_other(prefix, index, token)
    merged = merge(parts)
    refuse_gaps(merged.table)
    return encode_manifest(merged)


def refuse_gaps(table: ShardTable) -> None:
    """Raise ShardGapError where the boxes of a tensor do not cover it."""
    if gaps := cut_tensors_with_gaps(table):
        rows = table.rows(table.fqns[gaps[0]])
        held, whole = (products(column, table)[rows] for column in (table.lengths, table.global_shape))
        raise ShardGapError(
            f"the writers do not hold the whole tensor {table.fqns[gaps[0]]!r}",
            found=f"{int(held.sum())} elements in {len(rows)} boxes ({len(gaps)} tensors with gaps)",
            expected=f"boxes that cover {int(whole[0])} elements",
            state="MANIFEST was not written.",
        )


def _spread(store: Store, prefix: str, there: IndexList, token: str) -> Spread | None:
    """Return the MANIFEST that names its indexes; None where these do not make one."""
    heads: list[Manifest] = []
    outlines: list[Outline] = []
    entries: list[IndexEntry] = []
    needs: list[Need] = []
    for index in each_index(store, prefix, there.ranks, rows=False):
        _refuse_other(prefix, index, token)
        if not index.outline or len(index.needs) != len(index.objects):
            return None
        needs += needs_of(index.objects, index.needs)
        entries.append(IndexEntry.of(index))
        outlines.append(decode_outline(msgpack.unpackb(index.outline)))
        heads.append(_head_of(index))
        if len(heads) == HELD:  # what most of them have in common is kept once
            heads, outlines = [_folded(heads)], [merge_outlines(outlines)]
    check_packs(store, prefix, needs, there.sizes)
    spread = Spread(head=merge(heads), outline=merge_outlines(outlines), indexes=entries)
    outline = spread.outline
    is_regular = outline.rows >= ROWS_PER_PATTERN_ROW * sum(len(pattern.kind) for pattern in outline.patterns)
    if not is_regular or outline.ranks.tolist() != spread.head.writers:
        return None
    spread.check()  # that the boxes tile each tensor, too
    return spread


def _head_of(index: Manifest) -> Manifest:
    """Return an index without digests and packs: with its values, and the objects of those in ranges."""
    numbers, names = np.unique(index.ranged.columns["object_id"], return_inverse=True)
    columns = index.ranged.columns | {"object_id": names.ravel().astype(np.int32)}
    objects = [index.objects[number] for number in numbers.tolist()]
    ranged = RangedValues(index.ranged.keys, columns)
    return replace(index, digests=index.digests[:0], objects=objects, ranged=ranged, outline=b"", needs=())


def _folded(heads: Sequence[Manifest]) -> Manifest:
    """Return the one that stands for several."""
    ranks = tuple(sorted({rank for one in heads for rank in one.covers or (one.rank,)}))
    return replace(merge(heads), rank=ranks[0], covers=ranks)


def _refuse_other(prefix: str, index: Manifest, token: str) -> None:
    if token and index.token and index.token != token:
        raise PersistError(
            f"an index of {prefix} belongs to another run, which took the same generation number without the root",
            found=f"rank {index.rank}, token {index.token}",
            expected=f"token {token}, which is claimed",
            state="MANIFEST was not written; what was trained since then is persisted under its own number.",
        )
    if not prefix.endswith(found := prefix_of(*index.identity)):
        raise PersistError(
            f"an index of {prefix} belongs to another snapshot",
            found=f"rank {index.rank}, {found}",
            expected=f"rank {index.rank}, {prefix}",
        )
