"""Shards as boxes in a global index space, and where they lie in a data area. Pure: no I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from flashckpt.errors import UnsupportedStateError

# -- An N-d part of a global tensor, and what can be computed of two of them. Pure ---------------------------------

Dims = tuple[int, ...]


class Box(NamedTuple):
    """N-d part of a global tensor, in elements.

    Attributes:
        offsets: First element per dimension, in the index space of the global tensor.
        lengths: Elements per dimension; a zero makes an empty box. `()` for a scalar.
    """

    offsets: Dims
    lengths: Dims

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.lengths)

    @property
    def is_empty(self) -> bool:
        """Whether it has no element."""
        return 0 in self.lengths

    def intersection(self, other: Box) -> Box | None:
        """Return the common box, or None where there is none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True)
        lengths = tuple(min(a + n, b + m) - o for (a, n, b, m), o in zip(ends, offsets, strict=True))
        return None if any(n <= 0 for n in lengths) else Box(offsets, lengths)

    def without(self, part: Box) -> list[Box]:
        """Return the rest of it around `part`, which lies in it: at most 2d boxes, in row-major order of their corners."""
        before: list[Box] = []
        after: list[Box] = []
        rest = self
        for dim, (first, count) in enumerate(zip(*part, strict=True)):
            stop, end = first + count, rest.offsets[dim] + rest.lengths[dim]
            if first > rest.offsets[dim]:
                before.append(rest.cut(dim, rest.offsets[dim], first - rest.offsets[dim]))
            if end > stop:
                after.append(rest.cut(dim, stop, end - stop))
            rest = rest.cut(dim, first, count)
        return before + after[::-1]

    def cut(self, dim: int, first: int, count: int) -> Box:
        """Return it with elements `first` to `first + count` of one dimension."""
        return Box(
            (*self.offsets[:dim], first, *self.offsets[dim + 1 :]),
            (*self.lengths[:dim], count, *self.lengths[dim + 1 :]),
        )

    def flat(self, start: int, stop: int) -> list[Box]:
        """Return the boxes that elements `start` to `stop` of it, counted in row-major order, make: at most 2d - 1."""
        return [
            Box(tuple(map(int.__add__, self.offsets, part.offsets)), part.lengths)
            for part in _flat(self.lengths, start, stop)
        ]


def _flat(lengths: Dims, start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not lengths:
        return [Box((), ())]
    inner = prod(lengths[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)

    def within(index: int, a: int, b: int) -> list[Box]:
        return [Box((index, *at), (1, *n)) for at, n in _flat(lengths[1:], a, b)]

    if first == last:
        return within(first, head, tail)
    boxes = within(first, head, inner) if head else []
    first += head > 0
    if last > first:
        boxes.append(Box((first, *(0 for _ in lengths[1:])), (last - first, *lengths[1:])))
    return boxes + within(last, 0, tail)


ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes per element of every dtype a shard may have, by the name torch prints after `torch.`."""

ALIGN_LARGE = 4096
"""Large shards start on a page: O_DIRECT needs 512 bytes (64 gives EINVAL)."""
ALIGN_SMALL = 64
SMALL_BYTES = 65536
"""Shards up to this size are packed together, larger ones start at ALIGN_LARGE."""


def split_owner(name: str) -> tuple[str, str]:
    """Return (name, coordinate of the rank that it belongs to; "" for all): "w@pp0.tp1" is `w` of `pp0.tp1`.

    Any other "@" is part of the name: "x@rank0.weight" is a weight of a module "x@rank0".
    """
    base, owner = name, ""
    while "@" in base:
        head, _, tail = base.rpartition("@")
        if not all(part and (part[0].isalpha() or part[0] == "_") and part[-1].isdecimal() for part in tail.split(".")):
            break
        base, owner = head, f"{tail}@{owner}" if owner else tail
    return base, owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's N-d box of a global tensor.

    Attributes:
        fqn: Name of the global tensor, equal on all ranks that hold a part of it.
        dtype: A key of ITEMSIZE.
        global_shape: Elements per dimension of the whole tensor; `()` for a 0-d tensor.
        offsets: First element of the box, per dimension.
        lengths: Elements of the box, per dimension; a zero makes an empty box.
        replica: 0 is the copy that is persisted, k the k-th replica of the same box.
    """

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    replica: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise UnsupportedStateError(f"tensor {self.fqn!r} has a dtype that cannot be held", found=self.dtype)
        is_inside = len(self.global_shape) == len(self.offsets) == len(self.lengths)
        for size, first, count in zip(self.global_shape, self.offsets, self.lengths, strict=False):
            is_inside = is_inside and first >= 0 and count >= 0 and first + count <= size
        if not is_inside:
            raise UnsupportedStateError(
                f"shard of {self.fqn!r} does not lie in its tensor",
                found=f"offsets {self.offsets}, lengths {self.lengths}",
                expected=f"a box inside {self.global_shape}",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the local box, row-major and contiguous."""
        return math.prod(self.lengths) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each shard starts in a data area.

    Attributes:
        offsets: np.int64[n], byte offset per shard, in the order given to `place`.
        total: Bytes of the data area, a multiple of ALIGN_LARGE.
    """

    offsets: np.ndarray
    total: int


def round_up(nbytes: int, align: int) -> int:
    """Return the smallest multiple of `align` that is at least `nbytes`."""
    return -(-nbytes // align) * align


def place(shards: Sequence[Shard]) -> Placement:
    """Return where the shards lie: large ones first, each on its own page, then the small ones packed together.

    Deterministic in the order of `shards`; boxes never overlap; empty ones take no room.
    """
    return place_sizes(np.array([shard.nbytes for shard in shards], np.int64))


def place_sizes(nbytes: npt.NDArray[np.int64]) -> Placement:
    """Return what `place` does for shards of so many bytes, np.int64[n]."""
    large = nbytes > SMALL_BYTES
    taken = np.where(large, -(-nbytes // ALIGN_LARGE) * ALIGN_LARGE, -(-nbytes // ALIGN_SMALL) * ALIGN_SMALL)
    pages = int(taken[large].sum())
    offsets = np.where(large, np.cumsum(taken * large), pages + np.cumsum(taken * ~large)) - taken
    return Placement(offsets=offsets, total=round_up(int(taken.sum()), ALIGN_LARGE))


def joined(boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes (offsets, lengths) of one tensor with those that were cut along one dimension put together again.

    Two neighbours, in order of their offsets, become one where they touch in one dimension and agree in the others.
    """
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for box in sorted((tuple(offsets), tuple(lengths)) for offsets, lengths in boxes):
        found.append(box)
        while len(found) > 1 and (both := _both(*found[-2:])) is not None:
            found[-2:] = [both]
    return found


def _both(
    a: tuple[tuple[int, ...], tuple[int, ...]], b: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the box that two boxes make together; None where they make none."""
    (at, n), (at_b, n_b) = a, b
    differing = [dim for dim in range(len(at)) if (at[dim], n[dim]) != (at_b[dim], n_b[dim])]
    if len(differing) != 1 or at[differing[0]] + n[differing[0]] != at_b[differing[0]]:
        return None
    (dim,) = differing
    return at, (*n[:dim], n[dim] + n_b[dim], *n[dim + 1 :])


def layout_hash(shards: Sequence[Shard]) -> int:
    """Return a u64 over names, dtypes, boxes and their order: stable over processes, machines and releases."""
    parts = [hashed_part(shard) for shard in shards]
    kinds = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    numbers = np.array([kinds[part] for part in parts], np.int64)
    return hash_rows([shard.fqn for shard in shards], list(kinds), numbers)


def hashed_part(shard: Shard) -> bytes:
    """Return what `layout_hash` takes of a shard beside its name: equal for all of one dtype, box and replica number."""
    fields = (shard.dtype, shard.global_shape, shard.offsets, shard.lengths, shard.replica)
    return b"".join(map(msgpack.packb, fields))


def hash_rows(fqns: Sequence[str], kinds: Sequence[bytes], numbers: npt.NDArray[np.int64]) -> int:
    """Return `layout_hash` of rows with these names.

    What is hashed is one msgpack array of rows, put together by hand: packing nested lists costs microseconds a row.
    All is joined as text, one character for each byte: a name is ASCII as a rule, and then is its own encoding.

    `numbers`, np.int64[len(fqns)], gives the place of each row's part in `kinds`, which are what `hashed_part`
    returns.
    """
    count, names = len(fqns), fqns
    header: bytes = msgpack.Packer().pack_array_header(count)
    if not count:
        return int(xxhash.xxh3_64_intdigest(header))
    if not all(map(str.isascii, names)):
        names = [name.encode().decode("latin-1") for name in names]
    lengths = np.fromiter(map(len, names), np.int64, count)
    widest = int(lengths.max()) + 1
    # between two names: the end of one row and the head of the next one, one text for each pair that occurs
    codes, which = _coded(numbers[:-1] * widest + lengths[1:], len(kinds) * widest)
    between = [kinds[code // widest] + _row_head(code % widest) for code in codes.tolist()]
    texts = np.array([text.decode("latin-1") for text in between], object)
    pieces = [""] * (2 * count + 1)
    pieces[0] = _row_head(int(lengths[0])).decode("latin-1")
    pieces[1::2] = names
    pieces[2:-1:2] = texts[which].tolist()
    pieces[-1] = kinds[int(numbers[-1])].decode("latin-1")
    return int(xxhash.xxh3_64_intdigest(header + "".join(pieces).encode("latin-1")))


def _coded(codes: npt.NDArray[np.int64], end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the codes that occur, ascending, and the place of each code among them; all are below `end`."""
    if end > 8 * len(codes):
        found, which = np.unique(codes, return_inverse=True)
        return found, which.ravel()
    occurs = np.zeros(end, np.bool_)  # a table instead of a sort: there are few kinds and lengths of names
    occurs[codes] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[codes]


def _row_head(name_bytes: int) -> bytes:
    """Return the msgpack headers of a row of six fields, and of its name."""
    row: bytes = msgpack.packb([""] * 6)[:1]
    text: bytes = msgpack.packb("x" * name_bytes)
    return row + text[: len(text) - name_bytes]
