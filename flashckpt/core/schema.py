"""What a manifest consists of besides its tables: its first bytes, rows that agree with each other, and their figures. Pure.

One check of the rows serves slot, index and MANIFEST. A digest proves that the bytes are those that were written, not that
they make sense: every reader relies on a row having as many bytes as its box, sharing none with another, having its digests.

The summary of a MANIFEST answers what a listing asks without the whole of it, which may have 100 MB. It proves itself, not
what follows: whoever uses a checkpoint reads its MANIFEST whole and verifies that digest.

Figures are optional: a manifest of an earlier release has none, and an earlier release leaves them out.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgpack
import numpy as np
import numpy.typing as npt

from flashckpt.core.records import digest, pack, unpack
from flashckpt.core.shard import ITEMSIZE
from flashckpt.core.shard_table import ShardTable, chunk_counts, first_chunks
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FormatVersionError

Ints = npt.NDArray[np.int64]
_MOST_BYTES = 1 << 62
"""Sums of two byte counts below this do not overflow."""


def check_objects(objects: Sequence[str]) -> None:
    """Raise ValueError unless every pack name is a plain name inside its folder, each once."""
    for name in objects:
        if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 255:
            raise ValueError(f"{name!r:.80} is not a pack name")
    if len(set(objects)) != len(objects):
        raise ValueError("two packs of one name")


def check_rows(table: ShardTable, *, objects: int, digests: int, is_slot: bool) -> None:
    """Raise ValueError where the rows contradict themselves, each other, or the rest of the manifest.

    Args:
        table: Its columns have the lengths that they should have.
        objects: Number of packs.
        digests: Number of digests.
        is_slot: Rows are in the data area of a slot, which is not an object.
    """
    if not len(table):
        if digests:
            raise ValueError(f"{digests} digests for no rows")
        return
    _check_boxes(table)
    if table.byte_offset.min() < 0 or table.byte_offset.max() > _MOST_BYTES:
        raise ValueError("a row is outside every object")
    wanted = int(chunk_counts(table.nbytes).sum())
    if digests != wanted or not np.array_equal(table.first_chunk, first_chunks(table.nbytes)):
        raise ValueError(f"{digests} digests for {wanted} chunks, or not in the order of the rows")
    held = table.nbytes > 0
    last = 0 if is_slot else objects - 1
    if held.any() and (table.object_id[held].min() < 0 or table.object_id[held].max() > last):
        raise ValueError(f"a row is in pack {table.object_id[held].max()} of {objects}")
    _check_ranges(table.object_id[held], table.byte_offset[held], table.nbytes[held])


def _check_boxes(table: ShardTable) -> None:
    for column in (table.global_shape, table.offsets, table.lengths):
        if column.size and column.min() < 0:
            raise ValueError("a box with a negative number")
    outside = table.offsets > table.global_shape - table.lengths
    if outside.any():
        raise ValueError(f"a box of {_name_at(table, outside)!r} is not inside its tensor")
    sizes = np.array([ITEMSIZE[name] for name in table.dtypes], np.int64)[table.dtype_id]
    for column, what in ((table.global_shape, "a tensor"), (table.lengths, "a box")):
        check_sizes(products(column, table, np.float64), sizes, what)
    wrong = products(table.lengths, table) * sizes != table.nbytes
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"a box of {table.fqn(row)!r} has another size than its {int(table.nbytes[row])} bytes")


def check_sizes(counts: npt.NDArray[np.float64], sizes: Ints, what: str) -> None:
    """Raise ValueError where so many elements of so many bytes are more than there can be."""
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite count is too large; infinite times 0 is 0 bytes
        too_large = counts * sizes >= _MOST_BYTES
    if too_large.any():
        raise ValueError(f"{what} of more bytes than there are")


def _check_ranges(objects: npt.NDArray[np.int32], starts: Ints, nbytes: Ints) -> None:
    """Raise ValueError where two ranges of one object share a byte."""
    if not ((objects[1:] > objects[:-1]) | ((objects[1:] == objects[:-1]) & (starts[1:] > starts[:-1]))).all():
        order = np.lexsort((starts, objects))
        objects, starts, nbytes = objects[order], starts[order], nbytes[order]
    overlaps = (starts[1:] < starts[:-1] + nbytes[:-1]) & (objects[1:] == objects[:-1])
    if overlaps.any():
        at = int(np.flatnonzero(overlaps)[0])
        raise ValueError(f"two rows share bytes from {int(starts[at + 1])} of pack {int(objects[at])} on")


def _name_at(table: ShardTable, bad: npt.NDArray[np.bool_]) -> str:
    """Return the tensor of the row that the first bad dimension belongs to."""
    return table.fqn(int(np.searchsorted(table.dim_start, np.flatnonzero(bad)[0], side="right")) - 1)


def products(column: npt.NDArray[Any], table: ShardTable, kind: type = np.int64) -> npt.NDArray[Any]:
    """Return each row's product over its dimensions (1 for a scalar), computed in `kind`."""
    found: npt.NDArray[Any] = np.ones(len(table), kind)
    starts = table.dim_start[:-1]
    for dim in range(int(table.ndim.max(initial=0))):
        rows = np.flatnonzero(table.ndim > dim)
        found[rows] *= column[starts[rows] + dim]
    return found


# -- coverage --------------------------------------------------------------------------------------------


def cut_tensors_with_gaps(table: ShardTable) -> list[int]:
    """Return the tensors (places in `table.fqns`) whose boxes do not cover them, ascending; each dimension is visited once.

    A tensor is covered if one box is all of it. For the others the boxes tile it if, over all boxes, the products
    of hash(end) - hash(start) add up to that of the whole: one pass without sorting. If they do not add up, boxes
    overlap or leave a gap, and are compared one by one.
    """
    if not len(table):
        return []
    local, whole = products(table.lengths, table), products(table.global_shape, table)
    done = np.zeros(len(table.fqns), np.bool_)
    done[table.fqn_id[local == whole]] = True
    rows = np.flatnonzero(~done[table.fqn_id])
    if not rows.size:
        return []
    dims = np.arange(table.dim_start[-1]) - np.repeat(table.dim_start[:-1], table.ndim)
    boxes = products(
        mixed_coordinates(table.offsets + table.lengths, dims) - mixed_coordinates(table.offsets, dims),
        table,
        np.uint64,
    )
    wholes = products(mixed_coordinates(table.global_shape, dims) - mixed_coordinates(0 * dims, dims), table, np.uint64)
    rows = rows[np.argsort(table.fqn_id[rows], kind="stable")]
    ids = table.fqn_id[rows]
    firsts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    doubtful = np.flatnonzero(np.add.reduceat(boxes[rows], firsts) != wholes[rows[firsts]])
    ends = np.append(firsts[1:], len(rows))
    return [int(ids[firsts[at]]) for at in doubtful if not _is_covered(table, rows[firsts[at] : ends[at]])]


def mixed_coordinates(values: Ints, dims: Ints) -> npt.NDArray[np.uint64]:
    """Return well-mixed 64 bits of each coordinate in its dimension (splitmix64)."""
    mixed = values.astype(np.uint64) + (dims.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


def _is_covered(table: ShardTable, rows: Ints) -> bool:
    """Return whether these boxes of one tensor cover it; they may overlap."""
    shapes = {tuple(table.global_shape[table.dim_start[row] : table.dim_start[row + 1]].tolist()) for row in rows}
    if len(shapes) > 1:
        return False
    (shape,) = shapes
    at = table.dim_start[rows][:, None] + np.arange(len(shape))
    starts, lengths = table.offsets[at], table.lengths[at]
    kept = (lengths > 0).all(axis=1)
    return _covered(starts[kept], (starts + lengths)[kept], shape)


def _covered(starts: Ints, ends: Ints, shape: tuple[int, ...]) -> bool:
    """Cut the space where a box begins or ends, and recurse into each slab without its first dimension."""
    if 0 in shape:
        return True
    if not len(starts) or not shape:
        return bool(len(starts))
    if len(shape) == 1:
        order = np.argsort(starts[:, 0])
        begins, reached = starts[order, 0], np.maximum.accumulate(ends[order, 0])
        return bool(begins[0] == 0 and (begins[1:] <= reached[:-1]).all() and reached[-1] == shape[0])
    cuts = np.unique(np.concatenate((starts[:, 0], ends[:, 0])))
    if cuts[0] != 0 or cuts[-1] != shape[0]:
        return False
    for low, high in itertools.pairwise(cuts):
        inside = (starts[:, 0] <= low) & (ends[:, 0] >= high)
        if not _covered(starts[inside, 1:], ends[inside, 1:], shape[1:]):
            return False
    return True


# -- The first bytes of a manifest: its frame, and in a MANIFEST a summary with its own digest ---------------------


MAGIC = b"FCKMANIF"
MAJOR, MAJOR_WITH_RANGES, MAJOR_WITH_INDEXES = 1, 2, 3
MINOR, MINOR_WITH_SUMMARY = 0, 1
HEADER = struct.Struct("<8sHHIQQ")  # magic, major, minor, zero, body bytes, digest of the 24 bytes before and the body
PREFIX = struct.Struct("<8sHHIQ")
HEAD_BYTES = 4096
"""Bytes that hold frame and summary whatever is in them: a job id has at most 256."""
KEY = "summary"
_DIGEST = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestHeader:
    """What a MANIFEST says of itself at its start.

    Attributes:
        parent: (generation, step) its generation was restored from.
        writers: How many ranks wrote packs or values.
        nbytes: Bytes of tensors, each counted once.
        suspects: Tensors with numbers that are not finite, and were before; not there where it is 0.
    """

    job: str
    generation: int
    step: int
    parent: SnapshotId | None
    world_size: int
    writers: int
    tensors: int
    nbytes: int
    suspects: int = 0


def encode_manifest_header(summary: ManifestHeader) -> bytes:
    """Return the value of the first key of a MANIFEST: u64 digest and msgpack map."""
    packed: bytes = msgpack.packb(pack(summary, leave_out=() if summary.suspects else ("suspects",)))
    return _DIGEST.pack(digest(packed)) + packed


def read_frame(raw: memoryview, majors: Sequence[int] = (MAJOR, MAJOR_WITH_RANGES)) -> tuple[int, int]:
    """Return (bytes of the body, digest) that a manifest's frame names.

    Raises:
        DamagedError: Not a manifest.
        FormatVersionError: Written by another major version.
    """
    if len(raw) < HEADER.size or raw[:8] != MAGIC:
        damaged(f"{len(raw)} bytes starting {bytes(raw[:8])!r}", f"at least {HEADER.size} bytes starting {MAGIC!r}")
    _, major, minor, _, body_bytes, expected = HEADER.unpack_from(raw)
    if major not in majors:
        raise FormatVersionError(
            "a manifest was written in a format this program does not read",
            found=f"format version {major}.{minor}",
            expected=f"format version {' or '.join(f'{one}.x' for one in majors)}",
            state="Nothing was restored.",
            remedy="use the flashckpt release that wrote it, or a newer one",
        )
    return body_bytes, expected


def decode_manifest_header(start: Any, object_bytes: int) -> ManifestHeader | None:
    """Return the summary in the first HEAD_BYTES of a MANIFEST; None where it has none (format 1.0).

    `object_bytes` is compared with what the frame names.

    Raises:
        DamagedError: Not a MANIFEST, truncated, or the summary's digest does not hold.
        FormatVersionError: Written by another major version.
    """
    raw = memoryview(start).cast("B")
    body_bytes, _ = read_frame(raw, (MAJOR, MAJOR_WITH_RANGES, MAJOR_WITH_INDEXES))
    if object_bytes != HEADER.size + body_bytes:
        damaged(f"{object_bytes} bytes", f"{HEADER.size + body_bytes} bytes")
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(raw[HEADER.size :])
    try:
        if not unpacker.read_map_header() or unpacker.unpack() != KEY:
            return None
        packed = unpacker.unpack()
        (expected,) = _DIGEST.unpack_from(packed)
        if (found := digest(packed[_DIGEST.size :])) != expected:
            damaged(f"digest {found:016x} of its summary", f"digest {expected:016x}")
        return _summary_from(msgpack.unpackb(packed[_DIGEST.size :]))
    except DamagedError:
        raise
    except (msgpack.UnpackException, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
        broken_schema(error)


def _summary_from(fields: Any) -> ManifestHeader:
    if type(fields) is not dict:
        raise TypeError("the summary is not a map")
    return unpack(ManifestHeader, fields, partial=True)


def damaged(found: str, expected: str) -> NoReturn:
    """Raise the error of a manifest that is not what was written."""
    raise DamagedError("a manifest is damaged", found=found, expected=expected, state="Nothing was restored.")


def broken_schema(error: Exception) -> NoReturn:
    """Raise the error of a manifest whose digest holds and whose contents cannot be."""
    raise DamagedError(
        "a manifest does not follow its schema",
        found=f"{type(error).__name__}: {str(error)[:200]}",
        state="Nothing was restored.",
    ) from error


# -- What the numbers of a snapshot are, per row: magnitude, norm, and whether they became non-finite --------------


Floats = npt.NDArray[np.float32]


class TensorFigures(NamedTuple):
    """One entry per row of a table.

    Attributes:
        largest: The largest magnitude; infinity where some number is not finite, -1 where nothing is known.
        norm: The square root of the sum of squares.
        suspect: Whether it holds numbers that are not finite, and a tensor of that name did not before.
    """

    largest: Floats
    norm: Floats
    suspect: npt.NDArray[np.bool_]

    @classmethod
    def unknown(cls, rows: int) -> TensorFigures:
        """Return those of rows of which nothing is known."""
        return cls(np.full(rows, -1, np.float32), np.zeros(rows, np.float32), np.zeros(rows, np.bool_))

    def sizes(self, wanted: Any = True) -> tuple[float, float]:
        """Return the norm and the largest magnitude of all wanted rows of which both are known and finite; 0 where none is."""
        at = (self.largest >= 0) & np.isfinite(self.largest) & np.isfinite(self.norm) & wanted
        squares = np.square(self.norm[at], dtype=np.float64).sum()
        return float(np.sqrt(squares)), float(self.largest[at].max(initial=0.0))

    def take(self, rows: Any) -> TensorFigures:
        """Return those of some rows."""
        at = np.asarray(rows, np.int64)
        return TensorFigures(self.largest[at], self.norm[at], self.suspect[at])

    def packed(self) -> dict[str, Any]:
        """Return them as msgpack types."""
        return {
            "largest": np.ascontiguousarray(self.largest, "<f4").tobytes(),
            "norm": np.ascontiguousarray(self.norm, "<f4").tobytes(),
            "suspect": np.flatnonzero(self.suspect).tolist(),
        }


def figures_from(packed: dict[Any, Any], rows: int) -> TensorFigures:
    """Return what `TensorFigures.packed` gave; ValueError, TypeError or KeyError where it does not fit so many rows."""
    largest, norm = np.frombuffer(packed["largest"], "<f4"), np.frombuffer(packed["norm"], "<f4")
    suspect = np.zeros(rows, np.bool_)
    if not len(largest) == len(norm) == rows:
        raise ValueError(f"figures of {len(largest)} and {len(norm)} rows for {rows}")
    listed = packed["suspect"]
    if type(listed) is not list or not all(type(row) is int and 0 <= row < rows for row in listed):
        raise ValueError("a suspect row is not one of the table")
    suspect[listed] = True
    return TensorFigures(largest, norm, suspect)


def stacked(parts: Sequence[tuple[TensorFigures | None, int]]) -> TensorFigures | None:
    """Return those of several tables one after another, each with its number of rows; None where no table has any."""
    if all(figures is None for figures, _ in parts):
        return None
    found = [TensorFigures.unknown(rows) if figures is None else figures for figures, rows in parts]
    return TensorFigures(*(np.concatenate(column) for column in zip(*found, strict=True)))
