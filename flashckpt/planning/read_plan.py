"""Which bytes of which source fill which wanted shard: box intersection over whole tables. Pure, deterministic.

Both sides describe boxes in one global index space (docs/resharding.md), so any layout restores under any other.
Sources are asked in the order they are given, nearest first: what the first one covers is never planned from the
second. All rows of a table are matched at once in numpy; only boxes that overlap or have gaps are cut one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flashckpt.core.shard import ITEMSIZE, Box, Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import ShardGapError
from flashckpt.planning.box_match import Gap, Read, Reads, SourceRow, box_of, match, refuse_other_kind, row_boxes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """All reads that fill the wanted shards, in the order of the wanted shards: one entry per read in each column.

    Attributes:
        wanted: The wanted shards.
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

    Args:
        wanted: As in `plan_reads`.
        gaps: The parts.
        sources: Tables to read from, nearest first.
        without: Rows that may not be used.
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
