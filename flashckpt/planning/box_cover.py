"""Which rows cover a box, cut out of it one by one: the general case, for the few boxes no shortcut fits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.core.shard import Box

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
