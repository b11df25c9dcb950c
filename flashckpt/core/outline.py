"""Which boxes many ranks hold, without a row for each: what ranks have in common once, and of each rank a few numbers. Pure.

Ranks that cut their tensors alike differ in nothing but where their boxes begin, and a box of an equal cut begins at a
multiple of its length. So each rank is a *pattern* (its rows, with a number in place of each such beginning) and the
*coordinates* that these numbers stand for: one for FSDP, two where tensor parallelism is in it, none where nothing is cut.
A layout that is cut unequally has a pattern for each kind of rank. Byte table in docs/format.md, 3.5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from flashckpt.core.schema import check_sizes, mixed_coordinates
from flashckpt.core.shard import ITEMSIZE
from flashckpt.core.shard_table import ShardTable, distinct_names, ranges

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint32]
_KINDS = {"dtype_id": "<u1", "ndim": "<u1"}
_DIMS = {"global_shape": "<i8", "lengths": "<i8", "base": "<i8", "group": "<u4"}
_MOST_BOXES = 1 << 18
"""Boxes that are looked at together: bounds memory to about 20 MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """The rows of a rank, without where their boxes begin.

    Attributes:
        fqns: Names of tensors; patterns of the same names share the list.
        fqn_id, kind: One entry per row: its name, and its kind.
        dtype_id, ndim: One entry per kind.
        global_shape, lengths, base, group: int64[kinds, most dimensions]. A box begins at `base` where `group` is 0, else at
            its length times coordinate `group - 1` of the rank. Behind the last dimension 1, 1, 0 and 0.
    """

    fqns: list[str]
    dtypes: list[str]
    fqn_id: Ints
    kind: Ints
    dtype_id: Ints
    ndim: Ints
    global_shape: Ints
    lengths: Ints
    base: Ints
    group: Ints

    @property
    def groups(self) -> int:
        """How many coordinates a rank of it has."""
        return int(self.group.max(initial=0))

    def starts(self, coordinates: Ints) -> Ints:
        """Return where the box of each kind begins for ranks of these coordinates: int64[ranks, kinds, dimensions]."""
        padded = np.concatenate((np.zeros((len(coordinates), 1), np.int64), coordinates), axis=1)
        found: Ints = self.base + self.lengths * padded[:, self.group]
        return found

    def check(self, coordinates: Ints) -> None:
        """Raise ValueError where a box of ranks of these coordinates does not lie in its tensor."""
        if not len(coordinates) or not len(self.ndim):
            return
        farthest = np.concatenate((np.zeros(1, np.int64), coordinates.max(axis=0, initial=0)))
        with np.errstate(over="ignore"):
            most = self.global_shape // np.maximum(1, self.lengths) - 1  # the last whole box
            inside = np.where(
                self.group > 0, farthest[self.group] <= most, self.base <= self.global_shape - self.lengths
            )
        if coordinates.min(initial=0) < 0 or not inside.all():
            raise ValueError("a box of a pattern is not inside its tensor")


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline:
    """The boxes of some ranks.

    Attributes:
        names: Each list of names that a pattern has, as it was packed.
        packed: (number of its names, the rest of it as it was packed) of each pattern.
        ranks: uint32, ascending, each once.
        pattern: uint32, the pattern of each rank.
        coordinates: int64, those of all ranks one after another.
        suspects: Tensors in which numbers became NaN or infinite.
        by_design: Tensors that are not finite, and not suspect; None where nothing is known of the numbers.
    """

    names: list[bytes]
    packed: list[tuple[int, bytes]]
    ranks: Numbers
    pattern: Numbers
    coordinates: Ints
    suspects: list[str] = field(default_factory=list)
    by_design: list[str] | None = None

    @cached_property
    def patterns(self) -> list[Pattern]:
        """The patterns, checked; ValueError, KeyError or TypeError where one contradicts itself."""
        names = [distinct_names(msgpack.unpackb(one), "names") for one in self.names]
        return [_pattern_from(names[number], msgpack.unpackb(raw)) for number, raw in self.packed]

    @cached_property
    def fqns(self) -> list[str]:
        """All names, in order of first appearance: of the lowest rank first."""
        seen = dict.fromkeys(self.pattern.tolist())
        return list(dict.fromkeys(name for number in seen for name in self.patterns[number].fqns))

    def of_patterns(self) -> Iterator[tuple[Pattern, Ints, Ints]]:
        """Yield each pattern, the places of its ranks in `ranks`, and their coordinates: int64[ranks, groups]."""
        counts = np.array([pattern.groups for pattern in self.patterns], np.int64)[self.pattern]
        first = np.cumsum(counts) - counts
        order = np.argsort(self.pattern, kind="stable")
        ends = np.searchsorted(self.pattern[order], np.arange(len(self.patterns) + 1))
        for number, pattern in enumerate(self.patterns):
            places = order[ends[number] : ends[number + 1]]
            yield pattern, places, self.coordinates[first[places][:, None] + np.arange(pattern.groups)]

    def check(self) -> None:
        """Raise ValueError, KeyError or TypeError where it contradicts itself."""
        if len(self.ranks) != len(self.pattern) or (np.diff(self.ranks.astype(np.int64)) <= 0).any():
            raise ValueError("the ranks of an outline are not ascending")
        wanted = int(np.array([0, *(pattern.groups for pattern in self.patterns)], np.int64)[self.pattern + 1].sum())
        if len(self.coordinates) != wanted:
            raise ValueError(f"{len(self.coordinates)} coordinates where {wanted} belong")
        for pattern, _, coordinates in self.of_patterns():
            pattern.check(coordinates)

    # -- questions ------------------------------------------------------------------------------------------

    def is_tiling(self) -> bool:
        """Return whether the boxes of each tensor are all of it, and no two share an element.

        Kinds are few, so that a box is looked at for each kind and rank, not for each row: see `cut_tensors_with_gaps`.
        """
        ids = {name: number for number, name in enumerate(self.fqns)}
        sums, wholes = np.zeros((2, len(ids)), np.uint64)
        dtypes = np.full(len(ids), -1, np.int64)
        numbers: dict[str, int] = {}
        for pattern, _, coordinates in self.of_patterns():
            if not len(pattern.kind) or not len(coordinates):
                continue
            rows = _numbers_of(pattern.fqns, ids)[pattern.fqn_id]
            kinds = np.array([numbers.setdefault(name, len(numbers)) for name in pattern.dtypes], np.int64)
            for known, new in ((wholes, _wholes(pattern)), (dtypes, kinds[pattern.dtype_id] * 256 + pattern.ndim)):
                fresh = dtypes[rows] < 0
                known[rows[fresh]] = new[pattern.kind][fresh]
                if (known[rows] != new[pattern.kind]).any():
                    return False
            np.add.at(sums, rows, _sums(pattern, coordinates)[pattern.kind])
        return bool((dtypes >= 0).all() and (sums == wholes).all())

    @cached_property
    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of each tensor, in the order of `fqns`."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for number in dict.fromkeys(self.pattern.tolist()):
            pattern = self.patterns[number]
            shapes = [tuple(one[:ndim]) for one, ndim in zip(pattern.global_shape.tolist(), pattern.ndim, strict=True)]
            known = list(zip(map(pattern.dtypes.__getitem__, pattern.dtype_id.tolist()), shapes, strict=True))
            rows = zip(map(pattern.fqns.__getitem__, pattern.fqn_id), map(known.__getitem__, pattern.kind), strict=True)
            found = dict(rows) | found
        return {name: found[name] for name in self.fqns if name in found}

    @property
    def rows(self) -> int:
        """How many boxes all ranks have."""
        lengths = np.array([len(pattern.kind) for pattern in self.patterns], np.int64)
        return int(lengths[self.pattern].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(ITEMSIZE[dtype] * prod(shape) for dtype, shape in self.kinds.values())

    def without_boxes(self, fqns: Collection[str]) -> ShardTable:
        """Return a row for each of these tensors, of its name, dtype and shape, that holds nothing and lies nowhere."""
        dtypes, shapes = list(zip(*map(self.kinds.__getitem__, fqns), strict=True)) or ((), ())
        zeros = [(0,) * len(shape) for shape in shapes]
        nowhere = np.full(len(shapes), -1, np.int32)
        return ShardTable.from_boxes(list(fqns), dtypes, shapes, zeros, zeros, object_ids=nowhere)

    def holders(self, wanted: ShardTable) -> Ints:
        """Return the ranks that hold an element of some row of `wanted`, ascending."""
        hit = np.zeros(len(self.ranks), np.bool_)
        places: dict[int, Ints] = {}
        for pattern, at, coordinates in self.of_patterns():
            if id(pattern.fqns) not in places:
                places[id(pattern.fqns)] = _numbers_of(pattern.fqns, wanted.ids)
            for limits in _limits(pattern, places[id(pattern.fqns)][pattern.fqn_id], wanted):
                meets = np.ones(len(at), np.bool_)
                for group, first, last in limits.reshape(-1, 3).tolist():
                    if group:
                        column = coordinates[:, group - 1]
                        meets &= (column >= first) & (column <= last)
                hit[at[meets]] = True
        return self.ranks[hit].astype(np.int64)


def outline_of(parts: Sequence[tuple[int, ShardTable]]) -> Outline:
    """Return the outline of the tables of some ranks, by rank."""
    found = [(rank, *_pattern_of(table)) for rank, table in sorted(parts, key=lambda part: part[0])]
    names = {raw: number for number, raw in enumerate(dict.fromkeys(raw for _, raw, _, _ in found))}
    patterns = {key: number for number, key in enumerate(dict.fromkeys((names[n], p) for _, n, p, _ in found))}
    return Outline(
        names=list(names),
        packed=list(patterns),
        ranks=np.array([rank for rank, *_ in found], np.uint32),
        pattern=np.array([patterns[names[n], p] for _, n, p, _ in found], np.uint32),
        coordinates=np.concatenate([np.zeros(0, np.int64), *(coordinates for *_, coordinates in found)]),
    )


def merge_outlines(parts: Sequence[Outline]) -> Outline:
    """Return one outline of all ranks; of a rank that is in several the first one counts."""
    names: dict[bytes, int] = {}
    patterns: dict[tuple[int, bytes], int] = {}
    columns: list[tuple[Numbers, Numbers, Ints]] = []
    for part in parts:
        lists = [names.setdefault(raw, len(names)) for raw in part.names]
        numbers = [patterns.setdefault((lists[n], raw), len(patterns)) for n, raw in part.packed]
        columns.append((part.ranks, np.array(numbers, np.uint32)[part.pattern], part.coordinates))
    ranks, pattern, coordinates = (np.concatenate(column) for column in zip(*columns, strict=True))
    whole = Outline(names=list(names), packed=list(patterns), ranks=ranks, pattern=pattern, coordinates=coordinates)
    counts = np.array([one.groups for one in whole.patterns], np.int64)[pattern]
    _, kept = np.unique(ranks, return_index=True)
    known = [part.by_design for part in parts if part.by_design is not None]
    return Outline(
        names=whole.names,
        packed=whole.packed,
        ranks=ranks[kept],
        pattern=pattern[kept],
        coordinates=coordinates[ranges((np.cumsum(counts) - counts)[kept], counts[kept])],
        suspects=sorted({name for part in parts for name in part.suspects}),
        by_design=sorted({name for names in known for name in names}) if known else None,
    )


# -- as bytes ------------------------------------------------------------------------------------------------------


def encode_outline(outline: Outline) -> dict[str, Any]:
    """Return it as msgpack types."""
    packed: dict[str, Any] = {
        "names": outline.names,
        "patterns": [list(one) for one in outline.packed],
        "ranks": np.ascontiguousarray(outline.ranks, "<u4").tobytes(),
        "pattern": np.ascontiguousarray(outline.pattern, "<u4").tobytes(),
        "coordinates": np.ascontiguousarray(outline.coordinates, "<i8").tobytes(),
    }
    packed |= {"suspects": outline.suspects} if outline.suspects else {}
    return packed | ({} if outline.by_design is None else {"by_design": outline.by_design})


def decode_outline(packed: Any) -> Outline:
    """Return what `encode_outline` gave; ValueError, TypeError or KeyError where it contradicts itself.

    Its patterns are not looked at: `check` does that, once for all that are the same.
    """
    names, patterns = packed["names"], packed["patterns"]
    if not _are(names, bytes) or not _are(patterns, list):
        raise TypeError("an outline with names or patterns that are none")
    if any(len(one) != 2 or type(one[0]) is not int or type(one[1]) is not bytes for one in patterns):
        raise TypeError("an outline with a pattern that is none")
    if any(not 0 <= number < len(names) for number, _ in patterns):
        raise ValueError("a pattern of names that there are not")
    by_design = packed.get("by_design")
    found = Outline(
        names=names,
        packed=[(number, raw) for number, raw in patterns],
        ranks=np.frombuffer(packed["ranks"], "<u4"),
        pattern=np.frombuffer(packed["pattern"], "<u4"),
        coordinates=np.frombuffer(packed["coordinates"], "<i8"),
        suspects=distinct_names(packed.get("suspects", []), "suspects"),
        by_design=None if by_design is None else distinct_names(by_design, "by_design"),
    )
    if len(found.ranks) != len(found.pattern) or found.pattern.max(initial=0) >= max(1, len(patterns)):
        raise ValueError("a rank has a pattern that there is not")
    return found


def _are(value: Any, kind: type) -> bool:
    return type(value) is list and {kind}.issuperset(map(type, value))


def _pattern_of(table: ShardTable) -> tuple[bytes, bytes, Ints]:
    """Return the names of a table, its pattern, and its coordinates."""
    width, rows = int(table.ndim.max(initial=0)), np.arange(len(table))
    shape, at, length = (table.dims(c, rows, width, 0) for c in (table.global_shape, table.offsets, table.lengths))
    size = np.maximum(1, length)
    is_cut = (at > 0) & (length > 0) & (at % size == 0)
    found, first, which = np.unique((at // size)[is_cut], return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(found), np.int64)
    number[order] = np.arange(1, len(found) + 1)
    group = np.zeros_like(at)
    group[is_cut] = number[which.ravel()]
    base = np.where(is_cut, 0, at)
    keys = np.column_stack((table.dtype_id.astype(np.int64), table.ndim.astype(np.int64), shape, length, base, group))
    kinds, kind = np.unique(keys, axis=0, return_inverse=True) if len(keys) else (keys, rows)
    held = np.arange(width) < kinds[:, 1:2]
    blocks = [kinds[:, 2 + k * width : 2 + (k + 1) * width][held] for k in range(len(_DIMS))]
    columns = dict(zip(_DIMS, blocks, strict=True)) | {"dtype_id": kinds[:, 0], "ndim": kinds[:, 1]}
    packed = {name: np.ascontiguousarray(columns[name], form).tobytes() for name, form in (_KINDS | _DIMS).items()}
    by_row = {"fqn_id": table.fqn_id, "kind": kind.ravel()}
    packed |= {name: np.ascontiguousarray(column, "<u4").tobytes() for name, column in by_row.items()}
    return msgpack.packb(table.fqns), msgpack.packb({"dtypes": table.dtypes, **packed}), found[order]


def _pattern_from(fqns: list[str], packed: Any) -> Pattern:
    dtypes = distinct_names(packed["dtypes"], "dtypes")
    rows = {name: np.frombuffer(packed[name], "<u4").astype(np.int64) for name in ("fqn_id", "kind")}
    kinds = {name: np.frombuffer(packed[name], form).astype(np.int64) for name, form in _KINDS.items()}
    flat = {name: np.frombuffer(packed[name], form).astype(np.int64) for name, form in _DIMS.items()}
    ndim, total = kinds["ndim"], int(kinds["ndim"].sum())
    if len(rows["kind"]) != len(rows["fqn_id"]) or len(ndim) != len(kinds["dtype_id"]):
        raise ValueError("columns of a pattern of different lengths")
    if any(len(column) != total for column in flat.values()):
        raise ValueError("dimensions of a pattern do not match its kinds")
    if rows["fqn_id"].max(initial=-1) >= len(fqns) or rows["kind"].max(initial=-1) >= len(ndim):
        raise ValueError("a row of a pattern names what there is not")
    if kinds["dtype_id"].max(initial=-1) >= len(dtypes) or not set(dtypes) <= set(ITEMSIZE):
        raise ValueError("a kind of a pattern has an unknown dtype")
    if min(flat[name].min(initial=0) for name in ("global_shape", "lengths", "base")) < 0:
        raise ValueError("a box with a negative number")
    if flat["group"].max(initial=0) > total or (flat["lengths"][flat["group"] > 0] == 0).any():
        raise ValueError("a pattern with more coordinates than dimensions, or an empty box with one")
    held = np.arange(int(ndim.max(initial=0))) < ndim[:, None]
    wide = {name: np.full(held.shape, name in ("global_shape", "lengths"), np.int64) for name in flat}
    for name, column in flat.items():
        wide[name][held] = column
    pattern = Pattern(fqns=fqns, dtypes=dtypes, **rows, **kinds, **wide)
    sizes = np.array([ITEMSIZE[name] for name in dtypes], np.int64)[kinds["dtype_id"]]
    with np.errstate(over="ignore"):
        check_sizes(pattern.global_shape.prod(axis=1, dtype=np.float64), sizes, "a tensor")
    return pattern


# -- arithmetic of boxes -------------------------------------------------------------------------------------------


def _numbers_of(fqns: Sequence[str], ids: dict[str, int]) -> Ints:
    return np.fromiter((ids.get(name, -1) for name in fqns), np.int64, len(fqns))


def _mixed(values: Ints) -> npt.NDArray[np.uint64]:
    return mixed_coordinates(values, np.broadcast_to(np.arange(values.shape[-1]), values.shape))


def _wholes(pattern: Pattern) -> npt.NDArray[np.uint64]:
    """Return 64 bits of all of a tensor, for each kind."""
    held = np.arange(pattern.global_shape.shape[1]) < pattern.ndim[:, None]
    found = np.where(held, _mixed(pattern.global_shape) - _mixed(0 * pattern.global_shape), np.uint64(1))
    whole: npt.NDArray[np.uint64] = found.prod(axis=1, dtype=np.uint64)
    return whole


def _sums(pattern: Pattern, coordinates: Ints) -> npt.NDArray[np.uint64]:
    """Return for each kind the sum of the 64 bits of its boxes, over all ranks."""
    held = np.arange(pattern.lengths.shape[1]) < pattern.ndim[:, None]
    found = np.zeros(len(pattern.ndim), np.uint64)
    step = max(1, _MOST_BOXES // max(1, pattern.lengths.size))
    for first in range(0, len(coordinates), step):
        starts = pattern.starts(coordinates[first : first + step])
        boxes = np.where(held, _mixed(starts + pattern.lengths) - _mixed(starts), np.uint64(1))
        found += boxes.prod(axis=2, dtype=np.uint64).sum(axis=0, dtype=np.uint64)
    return found


def _limits(pattern: Pattern, tensors: Ints, wanted: ShardTable) -> Ints:
    """Return which coordinates a rank must have to meet some row of `wanted`: (group, first, last) of each dimension, by line.

    Args:
        pattern: Of the ranks.
        tensors: Which tensor of `wanted` each row of the pattern is of; -1 for none.
        wanted: The boxes.
    """
    order, starts = wanted.rows_by_tensor
    rows = np.flatnonzero(tensors >= 0)
    counts = starts[tensors[rows] + 1] - starts[tensors[rows]]
    kind, other = pattern.kind[np.repeat(rows, counts)], order[ranges(starts[tensors[rows]], counts)]
    fits = (pattern.ndim[kind] == wanted.ndim[other]) & (wanted.nbytes[other] > 0)
    kind, other = kind[fits], other[fits]
    width = pattern.lengths.shape[1]
    low = wanted.dims(wanted.offsets, other, width, 0)
    high = low + wanted.dims(wanted.lengths, other, width, 1)
    base, length, group = pattern.base[kind], pattern.lengths[kind], pattern.group[kind]
    meets = (group > 0) | ((base < high) & (base + length > low))
    kept = meets.all(axis=1)
    size = np.maximum(1, length)
    is_cut = group > 0
    lines = np.stack((group, np.where(is_cut, low // size, 0), np.where(is_cut, (high - 1) // size, 0)), axis=2)[kept]
    found: Ints = np.unique(lines.reshape(len(lines), 3 * width), axis=0) if width else lines.reshape(len(lines), 0)[:1]
    return found
