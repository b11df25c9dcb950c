"""The manifest: ONE schema for slot, pack index and MANIFEST. Pure: bytes in, bytes out; msgpack, never pickle.

The table of shards is static while the structure of the state is, so `encode_table` is called once per
structure and a snapshot only adds its digests and values: about a millisecond for 20,000 tensors.
Byte tables are in docs/format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import msgpack
import numpy as np

from flashckpt.core.records import CHUNK_BYTES, NAME, digest_of, integer, snapshot_id, text
from flashckpt.core.schema import (
    HEADER,
    KEY,
    MAGIC,
    MAJOR,
    MAJOR_WITH_RANGES,
    MINOR,
    MINOR_WITH_SUMMARY,
    PREFIX,
    ManifestHeader,
    TensorFigures,
    broken_schema,
    check_objects,
    check_rows,
    cut_tensors_with_gaps,
    damaged,
    encode_manifest_header,
    figures_from,
    read_frame,
    stacked,
)
from flashckpt.core.shard_table import ShardTable, columns_of, table_from_columns
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.core.values import NO_RANGES, RangedValues, concatenate, pack_values, packed, ranged_from, unpack_values
from flashckpt.errors import DisagreementError

__all__ = [
    "Manifest",
    "ShardTable",
    "by_design",
    "cover",
    "decode_manifest",
    "encode_manifest",
    "encode_table",
    "merge",
]

_NO_ROWS = ShardTable.from_shards([], [])


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Every shard of one rank's snapshot, or of a whole checkpoint: where its bytes are and their digests.

    Attributes:
        generation: Of the worker group that took it.
        step: The optimizer step just completed.
        parent: (generation, step) this generation was restored from; None on a fresh start.
        rank: Global rank; -1 in a merged MANIFEST.
        writers: Global ranks whose manifests make up the whole snapshot.
        coordinates: Mesh coordinate of `rank` by dimension name.
        digests: np.uint64; chunk k of row i is at `table.first_chunk[i] + k`.
        values: Non-tensor state by key; None, bool, int, float, str, bytes, list, tuple, dict only.
        objects: Pack names that `table.object_id` points into; [] in a slot.
        is_part: It lacks rows that its rank holds, for other nodes hold them too: it is of a replica slot.
        covers: Ranks whose indexes one index of several ranks stands for; () anywhere else.
        ranged: Values that are not in `values`, but in an object of `objects`.
        figures: What the numbers of each row are; None in one of an earlier release.
        outline: In an index of a large job, which boxes its ranks hold (`core/outline`); b"" anywhere else.
        needs: Beside it, how many bytes of each object are in use.
        token: Of its generation; "" in one of an earlier release.
    """

    job: str
    generation: int
    step: int
    parent: SnapshotId | None
    world_size: int
    rank: int
    writers: list[int]
    coordinates: dict[str, int]
    table: ShardTable
    digests: np.ndarray
    values: dict[str, Any] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    is_part: bool = False
    covers: tuple[int, ...] = ()
    ranged: RangedValues = NO_RANGES
    figures: TensorFigures | None = None
    outline: bytes = b""
    needs: tuple[int, ...] = ()
    token: str = ""

    @classmethod
    def of(
        cls,
        request: SnapshotRequest,
        *,
        table: ShardTable,
        digests: np.ndarray,
        values: dict[str, Any],
        figures: TensorFigures | None = None,
    ) -> Manifest:
        """Return the manifest of one rank's snapshot in its slot."""
        return cls(
            job=request.job,
            generation=request.id.generation,
            step=request.id.step,
            parent=request.parent,
            world_size=request.world_size,
            rank=request.rank,
            writers=[request.rank],
            coordinates=request.coordinates,
            table=table,
            digests=digests,
            values=values,
            figures=figures,
            token=request.token,
        )

    @property
    def identity(self) -> SnapshotId:
        """(generation, step)."""
        return SnapshotId(self.generation, self.step)

    @property
    def suspects(self) -> list[str]:
        """Tensors that hold numbers that are not finite, and did not before."""
        if self.figures is None:
            return []
        return sorted({self.table.fqn(row) for row in np.flatnonzero(self.figures.suspect).tolist()})

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tensors, with the name that each goes by in the table."""
        found = self.values.get("aliases")
        return {} if type(found) is not dict else {k: v for k, v in found.items() if type(k) is type(v) is str}


def encode_table(table: ShardTable) -> bytes:
    """Return the static part of a manifest; cache it per structure and hand it to `encode_manifest`."""
    return bytes(msgpack.packb(columns_of(table)))


def encode_manifest(m: Manifest, *, table_bytes: bytes | None = None) -> bytes:
    """Return the manifest as bytes, header and digest included.

    `table_bytes` is `encode_table(m.table)` from earlier, or None.

    Raises:
        UnsupportedStateError: A value is not of the allowed types; names its key.
    """
    body_map: dict[str, Any] = {KEY: encode_manifest_header(header_of(m))} if m.rank < 0 else {}
    fields = fields_of(m)
    values = fields.pop("values")
    body_map |= fields
    body_map |= {
        "objects": list(m.objects),
        "table": encode_table(m.table) if table_bytes is None else table_bytes,
        "digests": np.ascontiguousarray(m.digests, "<u8").tobytes(),
        "values": values,
    }
    body_map |= {"is_part": True} if m.is_part else {}
    body_map |= {"covers": list(m.covers)} if m.covers else {}
    body_map |= {"figures": m.figures.packed()} if m.figures is not None else {}
    has_ranges = len(m.ranged) > 0
    body_map |= {"ranged": m.ranged.packed()} if has_ranges else {}
    body_map |= {"outline": m.outline, "needs": list(m.needs)} if m.outline else {}
    body = msgpack.packb(body_map)
    body_map.clear()  # the table of many ranks, which is in the body now
    # A program that does not know ranges would restore without these values, so it has to refuse the whole.
    return frame_of(MAJOR_WITH_RANGES if has_ranges else MAJOR, MINOR_WITH_SUMMARY if m.rank < 0 else MINOR, body)


def fields_of(m: Manifest) -> dict[str, Any]:
    """Return the fields that every kind of manifest has, as msgpack types."""
    return {
        "job": m.job,
        "generation": m.generation,
        "step": m.step,
        "parent": None if m.parent is None else list(m.parent),
        "world_size": m.world_size,
        "rank": m.rank,
        "writers": [int(r) for r in m.writers],
        "coordinates": {str(k): int(v) for k, v in m.coordinates.items()},
        "digest": NAME,
        "chunk_bytes": CHUNK_BYTES,
        "values": pack_values(m.values),
    } | ({"token": m.token} if m.token else {})


def frame_of(major: int, minor: int, body: bytes) -> bytes:
    """Return a body behind its frame."""
    prefix = PREFIX.pack(MAGIC, major, minor, 0, len(body))
    return b"".join((prefix, struct.pack("<Q", digest_of(prefix, body)), body))


def header_of(m: Manifest) -> ManifestHeader:
    """Return what a listing shows of a merged manifest."""
    return ManifestHeader(
        job=m.job,
        generation=m.generation,
        step=m.step,
        parent=m.parent,
        world_size=m.world_size,
        writers=len(m.writers),
        tensors=len(m.table.fqns),
        nbytes=int(m.table.nbytes.sum()),
        suspects=len(m.suspects),
    )


def decode_manifest(buf: Any, *, rows: bool = True) -> Manifest:
    """Return the manifest in `buf` (bytes or memoryview, nothing before or after it).

    Unknown keys of a newer minor version are ignored.

    Without `rows` it has no rows and figures, which cost most.

    Raises:
        DamagedError: Not a manifest, cut short, its digest does not hold, or its fields and rows contradict each other.
        FormatVersionError: Written by a newer major version.
    """
    body = body_of(buf)
    try:
        return _manifest_from(msgpack.unpackb(body, strict_map_key=False), rows=rows)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        broken_schema(error)


def body_of(buf: Any, *, majors: Sequence[int] = (MAJOR, MAJOR_WITH_RANGES)) -> memoryview:
    """Return the body of a manifest once its digest holds; errors as `decode_manifest`."""
    raw = memoryview(buf).cast("B")  # no copies: the MANIFEST of 16,384 ranks has 150 MB
    body_bytes, expected = read_frame(raw, majors)
    body = raw[HEADER.size :]
    if len(body) != body_bytes:
        damaged(f"{len(body)} bytes after the header", f"{body_bytes} bytes")
    if (found := digest_of(raw[: PREFIX.size], body)) != expected:
        damaged(f"digest {found:016x}", f"digest {expected:016x}")
    return body


def merge(manifests: Sequence[Manifest]) -> Manifest:
    """Return one MANIFEST of all writers' manifests: rank -1, objects renumbered, one copy of equal boxes.

    Of equal boxes the lowest rank's copy is kept. A value that several ranks give is kept once; where
    they differ, the lowest rank's stays under its key and the others move to `<key>@rank<r>`. The merger of mergers
    (`cover`) is the merger of them all.

    Raises:
        DisagreementError: The manifests are not of one snapshot.
    """
    parts = sorted(manifests, key=lambda m: m.rank)
    first = parts[0]
    for m in parts:
        if _of(m) != _of(first):
            raise DisagreementError(
                "manifests of different snapshots cannot make one checkpoint",
                found=f"rank {m.rank}: job {m.job}, (generation, step) {m.identity}, parent {m.parent}, token {m.token!r}",
                expected=f"rank {first.rank}: job {first.job}, {first.identity}, parent {first.parent}, {first.token!r}",
            )
    table, digests, kept = ShardTable.concatenate([(m.table, m.digests, len(m.objects)) for m in parts])
    figures = stacked([(m.figures, len(m.table)) for m in parts])
    objects, places = _objects(parts)
    ranged = concatenate([(m.ranged, start) for m, start in zip(parts, _first_objects(parts), strict=True)])
    return Manifest(
        job=first.job,
        generation=first.generation,
        step=first.step,
        parent=first.parent,
        world_size=first.world_size,
        rank=-1,
        writers=sorted({r for m in parts for r in (m.writers or [m.rank])}),
        coordinates={},
        table=table.in_objects(places),
        digests=digests,
        values=_without(_merge_values(parts), ranged.keys),
        objects=objects,
        ranged=ranged.in_objects(places),
        figures=None if figures is None else figures.take(kept),
        token=first.token,
    )


def _of(m: Manifest) -> tuple[Any, ...]:
    return m.job, m.identity, m.parent, m.world_size, m.token


def cover(manifests: Sequence[Manifest]) -> Manifest:
    """Return the one index that stands for those of several ranks."""
    ranks = tuple(sorted(m.rank for m in manifests))
    return replace(merge(manifests), rank=ranks[0], covers=ranks)


def by_design(manifests: Iterable[Manifest]) -> set[str] | None:
    """Return the tensors that are not finite in a snapshot, and not suspect; None where nothing is known of its numbers."""
    known = [one for one in manifests if one.figures is not None]
    found: set[str] = set()
    for one in known:
        assert one.figures is not None
        rows = np.flatnonzero(np.isinf(one.figures.largest) & ~one.figures.suspect)
        found |= {one.table.fqn(row) for row in rows.tolist()}
    return found if known else None


def _without(values: dict[str, Any], ranged: Sequence[str]) -> dict[str, Any]:
    """Return the values without those that are in ranges as well: a rank may be in two indexes."""
    return {key: value for key, value in values.items() if key not in known} if (known := set(ranged)) else values


def _objects(parts: Sequence[Manifest]) -> tuple[list[str], np.ndarray]:
    """Return all names, each once, and which of them each one is: a rank may be in two indexes that cover several."""
    names = [name for m in parts for name in m.objects]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return list(places), np.array([places[name] for name in names], np.int32)


def _first_objects(parts: Sequence[Manifest]) -> list[int]:
    return [0, *accumulate(len(m.objects) for m in parts[:-1])]


def _merge_values(parts: Sequence[Manifest]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for m in parts:
        for key, value in m.values.items():
            if m.covers and _is_what_all_have(key, value, m, values):
                continue
            if key not in values:
                values[key] = value
            elif packed(values[key]) != packed(value):  # by bytes: 1 and 1.0, or NaN, compare wrongly by ==
                own = {name: value for rank in m.covers or (m.rank,) if (name := f"{key}@rank{rank}") not in m.values}
                values |= own
    return values


def _is_what_all_have(key: str, value: Any, m: Manifest, values: dict[str, Any]) -> bool:
    """Whether one of several ranks differs from the first of them, and not from the first of all."""
    base, _, owner = key.rpartition("@rank")
    return base in m.values and owner.isdecimal() and int(owner) in m.covers and packed(values[base]) == packed(value)


def head_from(head: Any) -> Manifest:
    """Return a manifest without rows, digests and figures from the map of its body.

    Raises:
        ValueError, TypeError, KeyError, IndexError: It contradicts itself.
    """
    if type(head) is not dict:
        raise TypeError("the body is not a map")
    if head["digest"] != NAME or head["chunk_bytes"] != CHUNK_BYTES:
        raise ValueError(f"digest {head['digest']!r:.40} per {head['chunk_bytes']!r:.40} bytes is not known")
    m = Manifest(
        job=text(head["job"]),
        generation=integer(head["generation"]),
        step=integer(head["step"]),
        parent=None if head["parent"] is None else snapshot_id(head["parent"]),
        world_size=integer(head["world_size"]),
        rank=integer(head["rank"], least=-1),
        writers=[integer(rank) for rank in _list(head["writers"])],
        coordinates={text(name): integer(place) for name, place in _map(head["coordinates"]).items()},
        table=_NO_ROWS,
        digests=np.zeros(0, np.uint64),
        values=unpack_values(head["values"]),
        objects=[text(name) for name in _list(head["objects"])],
        token=text(head.get("token", "")),
    )
    check_objects(m.objects)
    if "ranged" in head:
        m = replace(m, ranged=ranged_from(_map(head["ranged"]), objects=len(m.objects), others=m.values))
    return m


def _manifest_from(head: Any, *, rows: bool) -> Manifest:
    """Return the manifest of a body, every field and row checked against the others; errors as `head_from`."""
    m = replace(
        head_from(head),
        digests=np.frombuffer(head["digests"], "<u8").astype(np.uint64, copy=False),
        is_part=head.get("is_part") is True,
        covers=tuple(integer(rank) for rank in _list(head.get("covers", []))),
        outline=_bytes(head.get("outline", b"")),
        needs=tuple(integer(nbytes) for nbytes in _list(head.get("needs", []))),
    )
    if not rows:
        return m
    m = replace(m, table=table_from_columns(_map(msgpack.unpackb(head["table"]))))
    if "figures" in head:
        m = replace(m, figures=figures_from(_map(head["figures"]), len(m.table)))
    check_rows(m.table, objects=len(m.objects), digests=m.digests.size, is_slot=m.rank >= 0 and not m.objects)
    if m.rank < 0 and (gaps := cut_tensors_with_gaps(m.table)):
        raise ValueError(f"the boxes of {m.table.fqns[gaps[0]]!r} do not cover it ({len(gaps)} tensors with gaps)")
    return m


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise TypeError(f"{type(value).__name__} where bytes are expected")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{type(value).__name__} where a list is expected")
    return value


def _map(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"{type(value).__name__} where a map is expected")
    return value
