"""Where every byte of a structure is in a slot, and how much memory that takes: computed once per structure."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from flashckpt.core.manifest import ShardTable, encode_table
from flashckpt.core.shard import ITEMSIZE, Shard, hash_rows, hashed_part, layout_hash, place, place_sizes
from flashckpt.core.shard_table import first_chunks
from flashckpt.state.box_sets import BoxSet
from flashckpt.state.placement import LocalBox, shard_of
from flashckpt.state.structure import Structure

MANIFEST_SLACK_BYTES = 256 << 10
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What one slot of a rank needs.

    Attributes:
        layout: u64 layout hash; names the segment.
        data_bytes: Bytes of the data area.
        manifest_bytes: Bytes of the manifest area.
    """

    layout: int
    data_bytes: int
    manifest_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, its header page included, and a share of the superblock."""
        return self.data_bytes + self.manifest_bytes + 3 * 4096

    def with_room(self, nbytes: int) -> MemoryNeed:
        """Return the same need with more bytes in the data area, for state that grows."""
        return replace(self, data_bytes=self.data_bytes + nbytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateLayout:
    """A structure and the places of its bytes. Immutable: another structure has another layout.

    Attributes:
        structure: What it is the layout of.
        table: The rows, with their offsets in the data area.
        total: Bytes of the data area.
        row_tensors: np.int64[rows]; the place in the structure of each row's tensor.
        row_boxes: np.int64[rows]; the place in `boxes` of each row's box.
        boxes: The boxes that occur.
        hashed: What the layout hash takes of each box.
    """

    structure: Structure
    table: ShardTable
    total: int
    row_tensors: Ints
    row_boxes: Ints
    boxes: Sequence[LocalBox]
    hashed: Sequence[bytes]

    @classmethod
    def of(cls, structure: Structure) -> StateLayout:
        """Compute the layout of a structure."""
        pieces = _Pieces(structure.box_sets)
        counts = pieces.counts[structure.sets]
        tensors = np.repeat(np.arange(len(structure.names)), counts)
        rows = ranges(pieces.starts[structure.sets], counts)
        placement = place_sizes(pieces.nbytes[rows])
        table = _table(structure, tensors, pieces, rows, placement.offsets)
        return cls(
            structure=structure,
            table=table,
            total=placement.total,
            row_tensors=tensors,
            row_boxes=rows,
            boxes=pieces.boxes,
            hashed=pieces.hashed,
        )

    def with_tensors(self, structure: Structure) -> StateLayout:
        """Return the layout of a structure that has other tensors of the same names and boxes."""
        found = replace(self, structure=structure)
        known = {"table_bytes", "signature"} & self.__dict__.keys()
        found.__dict__.update({name: self.__dict__[name] for name in known})
        return found

    @cached_property
    def table_bytes(self) -> bytes:
        """The table as every manifest of this structure has it: made where somebody asks, as a restore need not."""
        return encode_table(self.table)

    @cached_property
    def signature(self) -> int:
        """u64 layout hash of the rows."""
        fqns = self.structure.names
        if len(self.row_tensors) != len(fqns) or bool((np.diff(self.row_tensors) != 1).any()):
            fqns = [fqns[at] for at in self.row_tensors.tolist()]
        return hash_rows(fqns, self.hashed, self.row_boxes)

    def need(self, value_bytes: int) -> MemoryNeed:
        """Return what a slot needs for this structure, its forecast, and about `value_bytes` of non-tensor state."""
        layout = self._with_forecast
        room = manifest_room(layout.table, len(layout.table_bytes), value_bytes)
        return MemoryNeed(layout=layout.signature, data_bytes=layout.total, manifest_bytes=room)

    def places(self, rows: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the places of the tensors and of the boxes of `rows`."""
        numbers = np.fromiter(rows, np.int64)
        return self.row_tensors[numbers].tolist(), self.row_boxes[numbers].tolist()

    @cached_property
    def _with_forecast(self) -> StateLayout:
        return StateLayout.of(self.structure.with_forecast()) if self.structure.forecast else self

    @property
    def reserved(self) -> ShardTable:
        """The rows together with the forecast."""
        return self._with_forecast.table


class _Pieces:
    """The boxes of all kinds of tensors one after another, as columns."""

    def __init__(self, box_sets: Sequence[BoxSet]) -> None:
        boxes = [(one.dtype, box) for one in box_sets for box in one.boxes]
        shards = [shard_of("", dtype, box) for dtype, box in boxes]
        self.boxes = [box for _, box in boxes]
        self.counts = np.array([len(one.boxes) for one in box_sets], np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.dtypes = [dtype for dtype, _ in boxes]
        self.nbytes = np.array([math.prod(box.lengths) * ITEMSIZE[dtype] for dtype, box in boxes], np.int64)
        self.ndim = np.array([len(box.lengths) for box in self.boxes], np.uint8)
        self.replica = np.array([box.replica for box in self.boxes], np.int32)
        self.hashed = [hashed_part(shard) for shard in shards]

    def dims(self, rows: Ints) -> dict[str, Ints]:
        """Return shapes, offsets and lengths of the boxes of `rows`, the numbers of one row behind those of another."""
        ndim = self.ndim.astype(np.int64)
        which = ranges((np.cumsum(ndim) - ndim)[rows], ndim[rows])
        found = {}
        for name in ("global_shape", "offsets", "lengths"):
            every = chain.from_iterable(map(operator.attrgetter(name), self.boxes))
            found[name] = np.fromiter(every, np.int64)[which]
        return found


def _table(structure: Structure, tensors: Ints, pieces: _Pieces, rows: Ints, offsets: Ints) -> ShardTable:
    names = unique = list(structure.names)
    of_tensor = np.arange(len(names))
    if structure.first_double is not None:
        unique = list(dict.fromkeys(names))
        numbers = {name: number for number, name in enumerate(unique)}
        of_tensor = np.array([numbers[name] for name in names], np.int64)
    kinds = list(dict.fromkeys(pieces.dtypes))
    codes = np.array([kinds.index(dtype) for dtype in pieces.dtypes], np.int64)[rows]
    occurring, firsts = np.unique(codes, return_index=True)
    in_order = occurring[np.argsort(firsts)]  # of first appearance, as the format says
    numbered = np.zeros(len(kinds), np.uint8)
    numbered[in_order] = np.arange(len(in_order))
    nbytes = pieces.nbytes[rows]
    columns: dict[str, np.ndarray] = {
        "fqn_id": of_tensor[tensors].astype(np.uint32),
        "dtype_id": numbered[codes],
        "ndim": pieces.ndim[rows],
        "replica": pieces.replica[rows],
        "byte_offset": offsets,
        "nbytes": nbytes,
        "first_chunk": first_chunks(nbytes),
        "object_id": np.zeros(len(rows), np.int32),
        **pieces.dims(rows),
    }
    return ShardTable(unique, [kinds[code] for code in in_order.tolist()], columns)


def need_of(shards: Sequence[Shard], value_bytes: int = 0) -> MemoryNeed:
    """Return what a slot for `shards` and about `value_bytes` of non-tensor state needs, with room to grow."""
    placement = place(shards)
    table = ShardTable.from_shards(shards, placement.offsets)
    manifest = manifest_room(table, len(encode_table(table)), value_bytes)
    return MemoryNeed(layout=layout_hash(shards), data_bytes=placement.total, manifest_bytes=manifest)


def manifest_room(table: ShardTable, table_bytes: int, value_bytes: int) -> int:
    """Return the bytes to reserve for a manifest: its table and digests, and values that may grow."""
    return 2 * table_bytes + 8 * table.chunks + 8 * len(table) + 4 * value_bytes + MANIFEST_SLACK_BYTES


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Return the indexes start, start + 1, ... of every range, one range behind the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    indexes: Ints = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return indexes
