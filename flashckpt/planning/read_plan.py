"""What sources have under which names, and which bytes of which source fill which wanted shard: over whole tables. Pure, deterministic.

Both sides describe boxes in one global index space (docs/resharding.md), so any layout restores under any other.
Sources are asked in the order they are given, nearest first: what the first one covers is never planned from the
second. All rows of a table are matched at once in numpy; only boxes that overlap or have gaps are cut one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.manifest import Manifest
from flashckpt.core.records import chunk_count
from flashckpt.core.schema import mixed_coordinates
from flashckpt.core.shard import ITEMSIZE, Box, Shard, split_owner
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import ShardGapError
from flashckpt.planning.box_match import Gap, Read, Reads, SourceRow, box_of, match, refuse_other_kind, row_boxes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """All reads that fill the wanted shards, in the order of the wanted shards: one entry per read in each column.

    Attributes:
        sources: The tables that are read from.
        target, source, row: int64[n], as in `Read`.
        offsets, lengths: int64[n, most dimensions], the boxes; behind a box's last dimension 0 and 1.
        gaps: Parts of wanted shards that are in no source.
    """

    wanted: ShardTable
    sources: Sequence[ShardTable]
    target: Ints
    source: Ints
    row: Ints
    offsets: Ints
    lengths: Ints
    gaps: tuple[Gap, ...] = ()

    def __len__(self) -> int:
        return len(self.target)

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each read."""
        sizes = np.array([ITEMSIZE[dtype] for dtype in self.wanted.dtypes], np.int64)
        if not len(self):
            return np.zeros(0, np.int64)
        counts: Ints = self.lengths.prod(axis=1) * sizes[self.wanted.dtype_id[self.target]]
        return counts

    @property
    def needed_bytes(self) -> int:
        """Bytes of the wanted shards."""
        return int(self.wanted.nbytes.sum())

    def nbytes_of(self, source: int) -> int:
        """Return the bytes that come from source `source`."""
        return int(self.nbytes[self.source == source].sum())

    def box(self, read: int) -> Box:
        """Return the box of one read."""
        ndim = int(self.wanted.ndim[self.target[read]])
        return Box(tuple(self.offsets[read, :ndim].tolist()), tuple(self.lengths[read, :ndim].tolist()))

    @cached_property
    def reads(self) -> list[Read]:
        """The reads one by one, for a look at a small plan."""
        columns = zip(self.target.tolist(), self.source.tolist(), self.row.tolist(), strict=True)
        return [Read(*one, self.box(read)) for read, one in enumerate(columns)]

    def require_complete(self, names: Sequence[str] = ()) -> None:
        """Check that nothing is missing.

        Args:
            names: What to call each source ("rank 3", "step 1200 (ranks 0-7)").

        Raises:
            ShardGapError: There are gaps; names the first tensor, the first missing index and the sources present.
        """
        if self.gaps:
            target = self.gaps[0].target
            left = [gap.box for gap in self.gaps if gap.target == target]
            raise _gap_error(self.wanted.shard(target), left, self.sources, names)


def plan_reads(
    wanted: Sequence[Shard] | ShardTable, sources: Sequence[ShardTable], *, names: Sequence[str] = ()
) -> ReadPlan:
    """Return the reads that fill `wanted` from shards that were written under any other layout.

    Args:
        wanted: The boxes this rank needs. Empty boxes need nothing.
        sources: Tables to read from, nearest first. Boxes within one may overlap (replicas).
        names: What to call each source in an error.

    Returns:
        The plan; `gaps` says what is in no source. The same arguments give the same plan in every process.

    Raises:
        TensorMismatchError: A source has a tensor of the name with another dtype or global shape.
    """
    table = wanted if isinstance(wanted, ShardTable) else as_table(wanted)
    parts: list[Reads] = []
    left = np.flatnonzero(table.nbytes > 0)
    gaps: list[Gap] = []
    for source, held in enumerate(sources):
        if not len(left) and not gaps:
            break
        found = match(table, left, held, name=_name(source, names))
        gaps, cut = _cut_out(table, [*gaps, *found.partial], source, held, names=names)
        parts += [found.reads.of(source), *cut]
        left = found.left
    whole = [Gap(target, box_of(table, target)) for target in left.tolist()]
    gaps = sorted([*gaps, *whole], key=lambda gap: gap.target)
    return _assembled(table, sources, parts, gaps)


def plan_gaps(
    wanted: ShardTable,
    gaps: Sequence[Gap],
    sources: Sequence[ShardTable],
    *,
    without: Collection[SourceRow] = (),
) -> ReadPlan:
    """Return the reads that fill parts of wanted shards: for what turned out to be unusable where it was planned from.

    `sources` come nearest first; rows in `without` may not be used.
    """
    parts: list[Reads] = []
    rest = [gap for gap in gaps if not gap.box.is_empty]
    for source, held in enumerate(sources):
        rest, cut = _cut_out(wanted, rest, source, held, without=without)
        parts += cut
    return _assembled(wanted, sources, parts, rest)


def as_table(wanted: Sequence[Shard]) -> ShardTable:
    """Return wanted shards as the table that a plan is made for; they lie nowhere."""
    return ShardTable.from_shards(wanted, np.zeros(len(wanted), np.int64))


def coverage(wanted: Sequence[Shard], sources: Sequence[ShardTable]) -> tuple[list[int], int]:
    """Return the bytes of `wanted` that each source would give, nearest first, and the bytes that are in none."""
    plan = plan_reads(wanted, sources)
    given = [plan.nbytes_of(source) for source in range(len(sources))]
    return given, plan.needed_bytes - sum(given)


def _cut_out(
    wanted: ShardTable,
    gaps: Sequence[Gap],
    source: int,
    held: ShardTable,
    *,
    names: Sequence[str] = (),
    without: Collection[SourceRow] = (),
) -> tuple[list[Gap], list[Reads]]:
    """Cut what one source has out of gaps, box by box; return (what is left, the reads)."""
    left: list[Gap] = []
    found: list[Read] = []
    for gap in gaps:
        fqn = wanted.fqn(gap.target)
        rows = [row for row in held.rows(fqn) if not without or SourceRow(source, row) not in without]
        if not rows:
            left.append(gap)
            continue
        refuse_other_kind(wanted.shard(gap.target), held.shard(rows[0]), _name(source, names))
        given, rest = cover([gap.box], row_boxes(held, rows, gap.box))
        found += [Read(gap.target, source, row, box) for row, box in given]
        left += [Gap(gap.target, box) for box in rest]
    return left, [Reads.of_single(found, most_dims(wanted))] if found else []


def _assembled(
    wanted: ShardTable, sources: Sequence[ShardTable], parts: Sequence[Reads], gaps: Sequence[Gap]
) -> ReadPlan:
    whole = Reads.joined(parts, most_dims(wanted))
    order = np.argsort(whole.target, kind="stable")
    return ReadPlan(
        wanted=wanted,
        sources=sources,
        target=whole.target[order],
        source=whole.source[order],
        row=whole.row[order],
        offsets=whole.offsets[order],
        lengths=whole.lengths[order],
        gaps=tuple(gaps),
    )


def most_dims(table: ShardTable) -> int:
    """Return the most dimensions that a row has."""
    return int(table.ndim.max(initial=0))


def _name(source: int, names: Sequence[str]) -> str:
    return names[source] if source < len(names) else f"source {source}"


def _gap_error(shard: Shard, left: Sequence[Box], sources: Sequence[ShardTable], names: Sequence[str]) -> ShardGapError:
    missing = sum(box.elements for box in left)
    index = min(box.offsets for box in left)
    present = [_name(k, names) for k, table in enumerate(sources) if len(table.rows(shard.fqn))]
    holders = ", ".join(present) if present else "no source"
    others = f" (sources present: {', '.join(_name(k, names) for k in range(len(sources))) or 'none'})"
    return ShardGapError(
        f"part of {shard.fqn!r} is in no shard that can be reached",
        found=f"{missing} of {shard.nbytes // ITEMSIZE[shard.dtype]} elements of this rank's shard are missing, first "
        f"index {list(index)}; parts of it are in {holders}{others}",
        expected=f"offsets {list(shard.offsets)}, lengths {list(shard.lengths)} of shape {list(shard.global_shape)}",
        state="Nothing was changed by this tensor.",
        remedy="restore an older step (flashckpt ls ROOT), or leave the tensor out with restore(only=...)",
    )


# -- Which rows cover a box, cut out of it one by one: the general case, for the few boxes no shortcut fits. Pure --

RowBox = tuple[int, Box]
"""A row of a table and the part of a box that is taken from it."""


def cover(left: list[Box], rows: Sequence[RowBox]) -> tuple[list[RowBox], list[Box]]:
    """Return what each row gives of the boxes in `left`, rows in the order given, and the boxes that are still left.

    Args:
        left: Boxes to be covered, none overlapping another.
        rows: Each row with its box. A row that is all of a box goes before the others.
    """
    found: list[RowBox] = []
    exact = [one for one in rows if one[1] in left]
    if exact and len(left) == 1:
        return exact[:1], []
    for row, box in [*exact, *rows]:
        if not left:
            break
        rest: list[Box] = []
        for whole in left:
            part = whole.intersection(box)
            if part is None:
                rest.append(whole)
            else:
                found.append((row, part))
                rest += whole.without(part)
        left = rest
    return found, left


# -- The names that a set of sources has, with aliases and the state of other ranks --------------------------------


Form = tuple[str, str]
"""How a tensor of optimizer state lies beside its parameter: see `state/optimizer_entries`."""
USUAL: Form = ("", "")


class Kind(NamedTuple):
    """What all rows of a tensor have in common."""

    dtype: str
    global_shape: tuple[int, ...]


class SourceNames:
    """The names of tensors in some manifests.

    Attributes:
        aliases: Other names of tensors -> the name that each goes by.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._manifests = manifests
        self.aliases: dict[str, str] = {}
        for manifest in manifests:
            self.aliases |= manifest.aliases

    @cached_property
    def index(self) -> dict[str, int]:
        """Name -> place of the first manifest that has it."""
        found: dict[str, int] = {}
        for place in reversed(range(len(self._manifests))):  # the first one is entered last, and stays
            found |= dict.fromkeys(self._manifests[place].table.fqns, place)
        return found

    def find(self, fqn: str, *, exact: bool = False) -> str | None:
        """Return the name in the sources that `fqn` is to be read from, or None.

        What belongs to one rank alone comes from another rank's only where not `exact`.
        """
        if fqn in self.index:
            return fqn
        if (other := self.aliases.get(fqn)) in self.index:
            return other
        base, _ = split_owner(fqn)
        if base in self.index:
            return base
        others = None if exact else self.of_ranks.get(base)
        return min(others) if others else None

    @cached_property
    def of_ranks(self) -> dict[str, list[str]]:
        """Name without coordinate -> the names of that tensor that belong to one rank alone."""
        found: dict[str, list[str]] = {}
        if "@" not in "\0".join(self.index):  # nearly always, and one search says so
            return found
        for fqn in self.index:
            base, owner = split_owner(fqn)
            if owner:
                found.setdefault(base, []).append(fqn)
        return found

    def are_equal(self, alias: str, fqn: str) -> bool:
        """Return whether one live tensor can stand for both: no two tensors in the sources, or two of the same bytes.

        A tied weight is one tensor where all of the model is one process' own, and two on two pipeline stages.
        """
        if alias not in self.index or fqn not in self.index:
            return True
        return self._contents(alias) == self._contents(fqn)

    def _contents(self, fqn: str) -> dict[tuple[Any, ...], bytes]:
        """Return the digests of each box of a tensor."""
        found = {}
        for manifest in self._manifests:
            table = manifest.table
            for row in table.rows(fqn):
                shard, first = table.shard(row), int(table.first_chunk[row])
                digests = manifest.digests[first : first + chunk_count(int(table.nbytes[row]))]
                found[shard.dtype, shard.offsets, shard.lengths] = digests.tobytes()
        return found

    def form(self, fqn: str) -> Form:
        """Return how a tensor of optimizer state lies beside its parameter."""
        return self.forms.get(split_owner(fqn)[0], USUAL) if self.forms else USUAL

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The recorded forms of optimizer state, by name; what has the usual one is not among them."""
        found: dict[str, Form] = {}
        for manifest in self._manifests:
            for key, value in manifest.values.items():
                label, _, rest = split_owner(key)[0].partition(".")
                if rest == "forms" and isinstance(value, dict):
                    for name, (kind, device) in value.items():
                        found.setdefault(f"{label}.{name}", (kind, device))
        return found

    def kinds(self, fqns: Sequence[str]) -> list[Kind]:
        """Return dtype and global shape of known tensors."""
        if not fqns:
            return []
        _, kinds = self._kinds
        return [kinds[number] for number in self.kind_numbers(fqns).tolist()]

    def kind_numbers(self, fqns: Sequence[str]) -> Ints:
        """Return a number for the kind of each of these known tensors: equal for those of equal kinds."""
        tables, _ = self._kinds
        if len(tables) == 1:
            ((ids, numbers),) = tables
            return numbers[np.fromiter(map(ids.__getitem__, fqns), np.int64, len(fqns))]
        found = [tables[self.index[fqn]] for fqn in fqns]
        return np.array([numbers[ids[fqn]] for fqn, (ids, numbers) in zip(fqns, found, strict=True)], np.int64)

    @cached_property
    def _kinds(self) -> tuple[list[tuple[dict[str, int], Ints]], list[Kind]]:
        """Per manifest the places of the names in its table and the numbers of their kinds; and the kinds."""
        known: dict[Kind, int] = {}
        tables = []
        for manifest in self._manifests:
            which, kinds = _kinds(manifest.table)
            numbers = np.array([known.setdefault(kind, len(known)) for kind in kinds], np.int64)
            tables.append((manifest.table.ids, numbers[which]))
        return tables, list(known)

    def shard(self, fqn: str) -> Shard:
        """Return any row of `fqn`: its dtype and global shape."""
        table = self._manifests[self.index[fqn]].table
        return table.shard(table.rows(fqn)[0])


def _kinds(table: ShardTable) -> tuple[Ints, list[Kind]]:
    """Return the kind of each tensor (as a place in the list), and the kinds that there are: a handful."""
    order, starts = table.rows_by_tensor
    first = order[starts[:-1]]
    shapes = table.dims(table.global_shape, first, int(table.ndim.max(initial=0)), 0)
    keys = np.column_stack((table.dtype_id[first].astype(np.int64), table.ndim[first].astype(np.int64), shapes))
    mixed = mixed_coordinates(keys, np.broadcast_to(np.arange(keys.shape[1]), keys.shape)).sum(axis=1)
    _, examples, which = np.unique(mixed, return_index=True, return_inverse=True)
    shards = [table.shard(int(first[k])) for k in examples]
    return which.ravel(), [Kind(shard.dtype, shard.global_shape) for shard in shards]
