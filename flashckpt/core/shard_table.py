"""The columnar table of shards that every manifest carries. Pure, numpy only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from flashckpt.core.records import CHUNK_BYTES
from flashckpt.core.shard import ITEMSIZE, Shard

_COLUMNS: dict[str, str] = {  # name on disk -> numpy type; little-endian, one entry per row
    "fqn_id": "<u4",
    "dtype_id": "<u1",
    "ndim": "<u1",
    "replica": "<i4",
    "byte_offset": "<i8",
    "nbytes": "<i8",
    "first_chunk": "<i8",
    "object_id": "<i4",
}
_DIMS = ("global_shape", "offsets", "lengths")  # int64, the rows' dimensions one after another
_ODD = np.uint64(0x9E3779B97F4A7C15)
KEPT_SHARDS = 1 << 16
"""Most rows of a table that are kept as Shards: a plan asks for the same one several times. About 40 MB."""


class ShardTable:
    """Shards with their byte ranges, one numpy entry per row.

    Attributes:
        fqns: Names of the tensors, each once, in order of first appearance; `fqn(row)` gives a row's name.
        dtypes: Names of the dtypes that occur.
        fqn_id, dtype_id, ndim, replica, byte_offset, nbytes, first_chunk, object_id: columns, one entry
            per row. `byte_offset` counts from the data area of the slot, or from the start of the pack
            `object_id`; `first_chunk` is the index of the row's first digest.
        global_shape, offsets, lengths: np.int64, all rows' dimensions one after another; row i starts
            at `dim_start[i]`.
    """

    def __init__(self, fqns: list[str], dtypes: list[str], columns: dict[str, np.ndarray]) -> None:
        self.fqns, self.dtypes = fqns, dtypes
        self.fqn_id, self.dtype_id, self.ndim = columns["fqn_id"], columns["dtype_id"], columns["ndim"]
        self.replica, self.byte_offset, self.nbytes = columns["replica"], columns["byte_offset"], columns["nbytes"]
        self.first_chunk, self.object_id = columns["first_chunk"], columns["object_id"]
        self.global_shape, self.offsets, self.lengths = columns["global_shape"], columns["offsets"], columns["lengths"]
        self._shards: dict[int, Shard] = {}
        self._asked: tuple[Sequence[str] | None, np.ndarray] = None, np.zeros(0, np.int64)

    @classmethod
    def from_shards(
        cls, shards: Sequence[Shard], byte_offsets: Any, *, object_ids: Sequence[int] | np.ndarray | None = None
    ) -> ShardTable:
        """Return the table of `shards` that lie at `byte_offsets` (bytes) of slot or pack `object_ids` (default 0)."""
        return cls.from_boxes(
            [s.fqn for s in shards],
            [s.dtype for s in shards],
            [s.global_shape for s in shards],
            [s.offsets for s in shards],
            [s.lengths for s in shards],
            byte_offsets=byte_offsets,
            replicas=[s.replica for s in shards],
            object_ids=object_ids,
        )

    @classmethod
    def from_boxes(
        cls,
        fqns: Sequence[str],
        dtypes: Sequence[str],
        global_shapes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
        *,
        byte_offsets: Any = None,
        replicas: Sequence[int] | None = None,
        object_ids: Sequence[int] | np.ndarray | None = None,
    ) -> ShardTable:
        """Return the table of boxes that are known to lie in their tensors, one entry per row in each sequence.

        What is not given is 0 in all rows: boxes that are wanted lie nowhere yet.
        """
        count = len(fqns)
        fqn_ids = {fqn: i for i, fqn in enumerate(dict.fromkeys(fqns))}
        dtype_ids = {dtype: i for i, dtype in enumerate(dict.fromkeys(dtypes))}
        sizes = np.array([ITEMSIZE[dtype] for dtype in dtype_ids], np.int64)
        columns: dict[str, np.ndarray] = {
            "fqn_id": np.array([fqn_ids[fqn] for fqn in fqns], np.uint32),
            "dtype_id": np.array([dtype_ids[dtype] for dtype in dtypes], np.uint8),
            "ndim": np.array([len(one) for one in lengths], np.uint8),
            "replica": np.zeros(count, np.int32) if replicas is None else np.array(replicas, np.int32),
            "byte_offset": np.zeros(count, np.int64) if byte_offsets is None else np.asarray(byte_offsets, np.int64),
            "object_id": np.zeros(count, np.int32) if object_ids is None else np.asarray(object_ids, np.int32),
        }
        for name, boxes in zip(_DIMS, (global_shapes, offsets, lengths), strict=True):
            columns[name] = np.fromiter(itertools.chain.from_iterable(boxes), np.int64)
        columns["nbytes"] = _products(columns["lengths"], columns["ndim"]) * sizes[columns["dtype_id"]]
        columns["first_chunk"] = first_chunks(columns["nbytes"])
        return cls(list(fqn_ids), list(dtype_ids), columns)

    @classmethod
    def stacked(cls, tables: Sequence[ShardTable], *, are_distinct: bool = False) -> ShardTable:
        """Return the rows of several tables one after another, each where it lies.

        Args:
            tables: The tables.
            are_distinct: No two of them have a name in common.
        """
        dtype_ids: dict[str, int] = {}
        pieces: dict[str, list[np.ndarray]] = {name: [] for name in (*_COLUMNS, *_DIMS)}
        every = list(itertools.chain.from_iterable(table.fqns for table in tables))
        fqns, numbers = _numbered(every, are_distinct=are_distinct)
        ends = np.cumsum([len(table.fqns) for table in tables], dtype=np.int64).tolist()
        for table, end in zip(tables, ends, strict=True):
            names = numbers[end - len(table.fqns) : end]
            kinds = np.array([dtype_ids.setdefault(d, len(dtype_ids)) for d in table.dtypes], np.uint8)
            for name, column in pieces.items():
                column.append(getattr(table, name))
            pieces["fqn_id"][-1] = names[table.fqn_id] if len(table) else table.fqn_id
            pieces["dtype_id"][-1] = kinds[table.dtype_id] if len(table) else table.dtype_id
        columns = {name: np.concatenate(arrays) for name, arrays in pieces.items()}
        columns["first_chunk"] = first_chunks(columns["nbytes"])
        return cls(fqns, list(dtype_ids), columns)

    def renamed(self, fqns: Sequence[str]) -> ShardTable:
        """Return the same rows under other names, one for each entry of `self.fqns`; two may become one."""
        ids = {fqn: i for i, fqn in enumerate(dict.fromkeys(fqns))}
        columns = {name: getattr(self, name) for name in (*_COLUMNS, *_DIMS)}
        if len(self):
            columns["fqn_id"] = np.array([ids[fqn] for fqn in fqns], np.uint32)[self.fqn_id]
        return ShardTable(list(ids), self.dtypes, columns)

    def in_order_of(self, fqns: list[str]) -> ShardTable:
        """Return the same rows with `fqns`, which has all names, as the list of names."""
        place = {name: number for number, name in enumerate(fqns)}
        columns = {name: getattr(self, name) for name in (*_COLUMNS, *_DIMS)}
        columns["fqn_id"] = np.array([place[name] for name in self.fqns], np.uint32)[self.fqn_id]
        return ShardTable(fqns, self.dtypes, columns)

    def under(self, fqns: Sequence[str], rows: np.ndarray, *, are_distinct: bool = False) -> ShardTable:
        """Return rows of this table, each as often as it is named in `rows`, under the names `fqns`, one per row.

        Args:
            fqns: The names.
            rows: np.int64.
            are_distinct: No name is there twice.
        """
        names, numbers = _numbered(fqns, are_distinct=are_distinct)
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        dims = ranges(self.dim_start[:-1][rows], columns["ndim"])
        columns |= {name: getattr(self, name)[dims] for name in _DIMS}
        columns["fqn_id"] = numbers
        columns["first_chunk"] = first_chunks(columns["nbytes"])
        return ShardTable(names, list(self.dtypes), columns)

    @classmethod
    def concatenate(
        cls, parts: Sequence[tuple[ShardTable, np.ndarray, int]]
    ) -> tuple[ShardTable, np.ndarray, np.ndarray]:
        """Return one table, its digests, and which rows it has of all, from (table, digests, number of objects) per writer.

        Object numbers are shifted behind those of the writers before; of rows with the same fqn and box
        the first is kept.
        """
        tables = [table for table, _, _ in parts]
        whole, rows = cls.stacked(tables), np.array([len(table) for table in tables])
        shifts, starts = (
            np.repeat(np.cumsum(counts) - counts, rows)
            for counts in (np.array([count for _, _, count in parts]), np.array([len(found) for _, found, _ in parts]))
        )
        first = np.concatenate([table.first_chunk for table in tables]) + starts  # where its writer says
        whole.object_id = whole.object_id + shifts.astype(np.int32)
        keep = _first_of_each_box(whole)
        if len(keep) == len(whole) and np.array_equal(first, whole.first_chunk):  # nearly always: nothing is copied
            digests = np.concatenate([found for _, found, _ in parts])
            if len(digests) == whole.chunks:
                return whole, digests, keep
        columns = {name: getattr(whole, name)[keep] for name in _COLUMNS}
        dims = ranges(whole.dim_start[:-1][keep], columns["ndim"])
        columns |= {name: getattr(whole, name)[dims] for name in _DIMS}
        columns["first_chunk"] = first_chunks(columns["nbytes"])
        chunks = ranges(first[keep], chunk_counts(columns["nbytes"]))
        digests = np.concatenate([found for _, found, _ in parts])[chunks]
        return cls(whole.fqns, whole.dtypes, columns), digests, keep

    def __len__(self) -> int:
        return len(self.fqn_id)

    @cached_property
    def dim_start(self) -> np.ndarray:
        """Where the dimensions of each row begin, and where those of the last one end."""
        return np.concatenate(([0], np.cumsum(self.ndim, dtype=np.int64)))

    @cached_property
    def chunks(self) -> int:
        """Digests needed: one past the last chunk of any row."""
        return int((self.first_chunk + chunk_counts(self.nbytes)).max(initial=0))

    def fqn(self, row: int) -> str:
        """Return the name of the tensor that `row` is a part of."""
        return self.fqns[int(self.fqn_id[row])]

    def shard(self, row: int) -> Shard:
        """Return row `row` as a Shard."""
        known = self._shards.get(row)
        if known is not None:
            return known
        dims = slice(self.dim_start[row], self.dim_start[row + 1])
        if len(self._shards) >= KEPT_SHARDS:  # somebody goes over all rows of a large job: nothing comes again
            self._shards.clear()
        self._shards[row] = made = Shard(
            fqn=self.fqn(row),
            dtype=self.dtypes[self.dtype_id[row]],
            global_shape=tuple(self.global_shape[dims].tolist()),
            offsets=tuple(self.offsets[dims].tolist()),
            lengths=tuple(self.lengths[dims].tolist()),
            replica=int(self.replica[row]),
        )
        return made

    def rows(self, fqn: str) -> Sequence[int]:
        """Return the rows that are parts of tensor `fqn`, ascending; empty if there is none."""
        i = self.ids.get(fqn)
        if i is None:
            return ()
        order, starts = self.rows_by_tensor
        rows: list[int] = order[starts[i] : starts[i + 1]].tolist()
        return rows

    @cached_property
    def ids(self) -> dict[str, int]:
        """The place of each name in `fqns`."""
        return dict(zip(self.fqns, range(len(self.fqns)), strict=True))

    def places(self, fqns: Sequence[str]) -> np.ndarray:
        """Return where names stand in `fqns` of this table, np.int64; -1 for none.

        The answer for the list that was asked last is kept: a plan and its report ask for the same wanted names.
        """
        asked, found = self._asked
        if asked is not fqns:
            found = np.fromiter(map(self.ids.get, fqns, itertools.repeat(-1)), np.int64, len(fqns))
            self._asked = fqns, found
        return found

    def note_places(self, fqns: Sequence[str], places: np.ndarray) -> None:
        """Take note of what `places` is to return for this list of names, where the caller knows it already."""
        self._asked = fqns, places

    @cached_property
    def rows_by_tensor(self) -> tuple[np.ndarray, np.ndarray]:
        """(order, starts): the rows of tensor i are `order[starts[i] : starts[i + 1]]`, ascending."""
        order = np.argsort(self.fqn_id, kind="stable")
        return order, np.searchsorted(self.fqn_id[order], np.arange(len(self.fqns) + 1))

    @cached_property
    def ascending(self) -> tuple[np.ndarray, np.ndarray]:
        """(where along the first dimension each row of `rows_by_tensor` begins, which tensors have rows that follow each other).

        In a tensor that is cut along its first dimension the rows that meet a box are then found without a look at all.
        """
        order, _ = self.rows_by_tensor
        at, has = self.dim_start[:-1][order], self.ndim[order] > 0
        begins, ends = np.zeros((2, len(order)), np.int64)
        begins[has] = self.offsets[at[has]]
        ends[has] = begins[has] + self.lengths[at[has]]
        owner = self.fqn_id[order]
        follow = np.ones(len(self.fqns), np.bool_)
        follow[owner[~has]] = False
        follow[owner[1:][(owner[1:] == owner[:-1]) & (ends[:-1] > begins[1:])]] = False
        return begins, follow

    @property
    def derived(self) -> dict[str, np.ndarray]:
        """What is computed from all rows, for another process that maps it instead."""
        (order, starts), (begins, follow) = self.rows_by_tensor, self.ascending
        return {"dim_start": self.dim_start, "order": order, "starts": starts, "begins": begins, "follow": follow}

    def adopt(self, derived: dict[str, np.ndarray]) -> None:
        """Take what `derived` of an equal table gave."""
        self.__dict__["dim_start"] = derived["dim_start"]
        self.__dict__["rows_by_tensor"] = derived["order"], derived["starts"]
        self.__dict__["ascending"] = derived["begins"], derived["follow"]

    def dims(self, column: np.ndarray, rows: np.ndarray, width: int, fill: int) -> np.ndarray:
        """Return the dimensions of some rows as np.int64[len(rows), width], behind the last dimension `fill`.

        Args:
            column: One of `global_shape`, `offsets` and `lengths`.
            rows: np.int64, at most `width` dimensions each.
            width: Columns of the result.
            fill: What stands where a row has no dimension.
        """
        found = np.full((len(rows), width), fill, np.int64)
        ndim, starts = self.ndim[rows], self.dim_start[rows]
        for dim in range(width):
            having = slice(None) if len(ndim) and int(ndim.min()) > dim else np.flatnonzero(ndim > dim)
            found[having, dim] = column[starts[having] + dim]
        return found

    def in_objects(self, places: np.ndarray) -> ShardTable:
        """Return the table with object n called `places[n]`; the table itself where that changes nothing."""
        if np.array_equal(places, np.arange(len(places))):
            return self
        columns = {name: getattr(self, name) for name in (*_COLUMNS, *_DIMS)}
        held = np.flatnonzero(self.nbytes > 0)  # rows without bytes may name an object that there is not
        columns["object_id"] = self.object_id.copy()
        columns["object_id"][held] = places[self.object_id[held]]
        return ShardTable(self.fqns, self.dtypes, columns)

    def take(self, rows: np.ndarray) -> ShardTable:
        """Return the table of some rows, at the places where they are; `first_chunk` counts from 0."""
        rows = np.asarray(rows, np.int64)
        kept, names = np.unique(self.fqn_id[rows], return_inverse=True)
        order = np.argsort(np.unique(names, return_index=True)[1], kind="stable")  # names by first appearance
        place = np.empty(len(kept), np.uint32)
        place[order] = np.arange(len(kept), dtype=np.uint32)
        dims = ranges(self.dim_start[:-1][rows], self.ndim[rows])
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS} | {
            name: getattr(self, name)[dims] for name in _DIMS
        }
        columns["fqn_id"] = place[names.ravel()] if len(kept) else self.fqn_id[:0]
        columns["first_chunk"] = first_chunks(columns["nbytes"])
        return ShardTable([self.fqns[i] for i in kept[order].tolist()], list(self.dtypes), columns)


def _numbered(fqns: Sequence[str], *, are_distinct: bool = False) -> tuple[list[str], np.ndarray]:
    """Return the names, each once, and the number of each of `fqns` among them."""
    names = list(fqns) if are_distinct else list(dict.fromkeys(fqns))
    if len(names) == len(fqns):
        return names, np.arange(len(fqns), dtype=np.uint32)
    ids = {name: i for i, name in enumerate(names)}
    return names, np.array([ids[fqn] for fqn in fqns], np.uint32)


def columns_of(table: ShardTable) -> dict[str, Any]:
    """Return what is written of a table: lists of names, and the bytes of little-endian columns, not copied."""
    kinds = _COLUMNS | dict.fromkeys(_DIMS, "<i8")
    columns = {name: raw_bytes(np.ascontiguousarray(getattr(table, name), kind)) for name, kind in kinds.items()}
    return {"rows": len(table), "fqns": table.fqns, "dtypes": table.dtypes, **columns}


def raw_bytes(column: np.ndarray) -> memoryview:
    """Return the bytes of an array where they lie."""
    return column.data.cast("B") if column.size else memoryview(b"")


def table_from_columns(columns: dict[str, Any]) -> ShardTable:
    """Return the table that `columns_of` wrote; raises ValueError or KeyError if columns do not fit together."""
    rows = columns["rows"]
    arrays = {name: np.frombuffer(columns[name], kind) for name, kind in _COLUMNS.items()}
    dims = {name: np.frombuffer(columns[name], "<i8") for name in _DIMS}
    fqns, dtypes = (distinct_names(columns[name], name) for name in ("fqns", "dtypes"))
    if type(rows) is not int or set(map(len, arrays.values())) != {rows}:
        raise ValueError("columns of different lengths")
    if set(map(len, dims.values())) != {int(arrays["ndim"].sum(dtype=np.int64))}:
        raise ValueError("dimensions do not match the rows")
    if rows and (arrays["fqn_id"].max() >= len(fqns) or arrays["dtype_id"].max() >= len(dtypes)):
        raise ValueError("a row names a tensor or dtype that is not listed")
    if unknown := set(dtypes) - set(ITEMSIZE):
        raise ValueError(f"unknown dtypes {sorted(unknown)}")
    return ShardTable(fqns, dtypes, arrays | dims)


def distinct_names(value: Any, what: str) -> list[str]:
    """Return a list of names; ValueError where it is none, or one is there twice."""
    if type(value) is not list or not {str}.issuperset(map(type, value)) or not _are_distinct(value):
        raise ValueError(f"{what} is not a list of names, each once")
    return value


def _are_distinct(names: list[str]) -> bool:
    """Return whether no name is there twice: nearly always they ascend, which is found out without hashing them."""
    return all(map(str.__lt__, names, itertools.islice(names, 1, None))) or len(set(names)) == len(names)


def _products(column: np.ndarray, ndim: np.ndarray) -> np.ndarray:
    """Return each row's product over its dimensions, which lie one row after another; 1 for a scalar."""
    found = np.ones(len(ndim), np.int64)
    starts = np.cumsum(ndim, dtype=np.int64) - ndim
    for dim in range(int(ndim.max(initial=0))):
        rows = np.flatnonzero(ndim > dim)
        found[rows] *= column[starts[rows] + dim]
    return found


def chunk_counts(nbytes: np.ndarray) -> np.ndarray:
    """Return how many digests rows of so many bytes have."""
    counts: np.ndarray = -(-nbytes // CHUNK_BYTES)
    return counts


def first_chunks(nbytes: np.ndarray) -> np.ndarray:
    """Return the index of each row's first digest: they lie in the order of the rows."""
    counts = chunk_counts(nbytes)
    starts: np.ndarray = np.cumsum(counts, dtype=np.int64) - counts
    return starts


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the indexes start, start + 1, ... of every range, one range after another."""
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    indexes: np.ndarray = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return indexes


def _first_of_each_box(table: ShardTable) -> np.ndarray:
    """Return the first row of each (tensor, box), ascending.

    Rows with different 64 bits of hash are of different boxes, and nearly always all are; only the others are compared, by
    one key of fixed width each.
    """
    hashes = _hashes(table)
    order = np.argsort(hashes)
    alike = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    if not len(alike):
        return np.arange(len(table))
    doubtful = np.unique(order[np.concatenate((alike, alike + 1))])
    kept = np.ones(len(table), np.bool_)
    kept[doubtful] = False
    kept[doubtful[_first_of_each_key(_keys(table, doubtful))]] = True
    return np.flatnonzero(kept)


def _hashes(table: ShardTable) -> np.ndarray:
    """Return 64 bits of each row's tensor and box, the same for the same ones."""
    found: np.ndarray = table.fqn_id.astype(np.uint64) * _ODD + table.ndim
    for dim in range(int(table.ndim.max(initial=0))):
        rows = np.flatnonzero(table.ndim > dim)
        for column in (table.offsets, table.lengths):
            mixed = (found[rows] ^ column[table.dim_start[rows] + dim].astype(np.uint64)) * _ODD
            found[rows] = mixed ^ (mixed >> np.uint64(29))
    return found


def _keys(table: ShardTable, rows: np.ndarray) -> np.ndarray:
    width = int(table.ndim.max(initial=0))
    boxes = [table.dims(column, rows, width, -1) for column in (table.offsets, table.lengths)]
    return np.column_stack((table.fqn_id[rows].astype(np.int64), table.ndim[rows].astype(np.int64), *boxes))


def _first_of_each_key(keys: np.ndarray) -> np.ndarray:
    """Return the first of each kind of rows, ascending."""
    keys = np.ascontiguousarray(keys)
    found = keys.view(f"V{keys.shape[1] * 8}").ravel().tolist()
    last_first = range(len(found) - 1, -1, -1)
    return np.sort(np.fromiter(dict(zip(reversed(found), last_first, strict=True)).values(), np.int64))
