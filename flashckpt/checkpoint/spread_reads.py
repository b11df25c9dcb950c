"""Read the rows of a MANIFEST that names indexes: all of them for a tool, those of a few nodes for a restore. And values by range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashckpt.checkpoint.root_records import IN_FLIGHT, parallel
from flashckpt.core.manifest import Manifest, decode_manifest, merge
from flashckpt.core.schema import TensorFigures, stacked
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.spread import IndexEntry, Spread
from flashckpt.core.values import NO_RANGES
from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.planning.packs import index_name
from flashckpt.storage.store import Store

READ_BYTES = 8 << 20
"""Values of one object that are read by one request."""


def read_rows(store: Store, prefix: str, spread: Spread) -> Manifest:
    """Return a MANIFEST with all rows, as one that does not name indexes has them.

    Raises:
        DamagedError: An index is missing, damaged, or holds something else than was committed.
        StoreError, RootError: The storage failed.
    """
    return merge(list(each_entry(store, prefix, spread, spread.indexes)))


def read_part(store: Store, prefix: str, spread: Spread, entries: Sequence[IndexEntry]) -> Manifest:
    """Return a MANIFEST with the rows of some indexes, and one of nothing for each tensor that they do not have.

    So names, dtypes, shapes and what is known of numbers are those of all rows. Errors as `read_rows`.
    """
    outline, is_whole = spread.outline, len(entries) == len(spread.indexes)
    part = merge(list(each_entry(store, prefix, spread, entries))) if entries else spread.head
    known = set(part.table.fqns)
    nowhere = [name for name in outline.kinds if name not in known]
    infinite = [] if is_whole else [*(outline.by_design or ()), *outline.suspects]  # in rows that were not read, too
    rest = outline.without_boxes([*nowhere, *infinite])
    figures = None
    if outline.by_design is not None:
        more = TensorFigures.unknown(len(rest))
        more.largest[len(nowhere) :] = np.inf
        more.suspect[len(rest) - len(outline.suspects) if infinite else len(rest) :] = True
        figures = stacked([(part.figures, len(part.table)), (more, len(rest))])
    return replace(
        spread.head,
        table=ShardTable.stacked([part.table, rest]).in_order_of(outline.fqns),
        digests=np.concatenate((part.digests, np.zeros(rest.chunks, np.uint64))),
        objects=part.objects if entries else [],
        ranged=NO_RANGES,
        figures=figures,
    )


def copy_indexes(source: Store, target: Store, prefix: str, spread: Spread) -> None:
    """Give the same checkpoint on another root its indexes, each verified where it is then; errors as `read_rows`."""
    for entry in spread.indexes:
        key = f"{prefix}/{index_name(entry.first, entry.last)}"
        target.put(key, _get(source, prefix, entry))
        crash_point("copy.after-index")
    for _ in each_entry(target, prefix, spread, spread.indexes, rows=False):
        pass


def each_entry(
    store: Store, prefix: str, spread: Spread, entries: Sequence[IndexEntry], *, rows: bool = True
) -> Iterator[Manifest]:
    """Yield indexes that a MANIFEST names; errors as `read_rows`."""
    for at in range(0, len(entries), IN_FLIGHT):
        some = entries[at : at + IN_FLIGHT]
        found = parallel(lambda entry: _get(store, prefix, entry), some)
        for entry in some:
            yield _checked(store, prefix, spread, entry, found.pop(0), rows=rows)


def _get(store: Store, prefix: str, entry: IndexEntry) -> bytes:
    try:
        return store.get(f"{prefix}/{index_name(entry.first, entry.last)}")
    except ObjectMissingError as error:
        raise _damaged(store, prefix, entry, "no object") from error


def _checked(store: Store, prefix: str, spread: Spread, entry: IndexEntry, raw: bytes, *, rows: bool) -> Manifest:
    try:
        index = decode_manifest(raw, rows=rows)
    except DamagedError as error:
        raise _damaged(store, prefix, entry, error.found) from error
    if (index.job, index.identity) != (spread.head.job, spread.identity) or IndexEntry.of(index) != entry:
        raise _damaged(store, prefix, entry, f"what {index.identity} of ranks {index.covers or index.rank} holds")
    return index


def _damaged(store: Store, prefix: str, entry: IndexEntry, found: str) -> DamagedError:
    return DamagedError(
        f"the index {prefix}/{index_name(entry.first, entry.last)} of {store.url} is damaged",
        found=found,
        expected=f"what MANIFEST was committed with (digest {entry.digest:016x})",
        state="Nothing was restored from it.",
        remedy=f"flashckpt ls {store.url} shows the checkpoints that are intact",
    )


def with_values(store: Store, prefix: str, manifest: Manifest, *, owner: str | None = None) -> Manifest:
    """Return a MANIFEST that holds its values itself.

    With `owner` only the values whose key ends with `@owner`.

    Raises:
        DamagedError: A value is missing or not what was written; the message names value and object.
        StoreError, RootError: The storage failed.
    """
    ranged = manifest.ranged
    if not len(ranged):
        return manifest
    entries = list(range(len(ranged))) if owner is None else ranged.of_owner(owner)
    found: dict[str, Any] = {}
    for values in parallel(lambda group: _read(store, prefix, manifest, group), list(_groups(manifest, entries))):
        found |= values
    return replace(manifest, values=manifest.values | found, ranged=NO_RANGES)


def _groups(manifest: Manifest, entries: Sequence[int]) -> Iterator[list[int]]:
    """Yield the entries of one request each: of one object, close together."""
    group: list[int] = []
    for entry in sorted(entries, key=manifest.ranged.range):
        number, offset, nbytes = manifest.ranged.range(entry)
        if group:
            first_number, first, _ = manifest.ranged.range(group[0])
            if number != first_number or offset + nbytes - first > READ_BYTES:
                yield group
                group = []
        group.append(entry)
    if group:
        yield group


def _read(store: Store, prefix: str, manifest: Manifest, entries: Sequence[int]) -> dict[str, Any]:
    places = [manifest.ranged.range(entry) for entry in entries]
    first, last = places[0][1], max(offset + nbytes for _, offset, nbytes in places)
    key, raw = f"{prefix}/{manifest.objects[places[0][0]]}", bytearray(last - first)
    try:
        store.get_range(key, first, memoryview(raw))
        parts = [bytes(raw[offset - first : offset - first + nbytes]) for _, offset, nbytes in places]
        return dict(manifest.ranged.value(entry, part) for entry, part in zip(entries, parts, strict=True))
    except (DamagedError, ObjectMissingError) as error:
        raise DamagedError(
            f"values of {prefix} in {store.url} cannot be read",
            found=f"{key}: {error.problem}" + (f" ({error.found})" if error.found else ""),
            state="Nothing was restored from it.",
            remedy=f"flashckpt ls {store.url} shows the checkpoints that are intact",
        ) from error
