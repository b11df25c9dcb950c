"""An N-d part of a global tensor, and what can be computed of two of them. Pure."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

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
