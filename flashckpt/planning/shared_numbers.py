"""Which generation counts where several have one number: of those that began without the root, out of each other's reach. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flashckpt.core.lineage import Generation, mark_of
from flashckpt.planning.inventory import Inventory, marks_of

_NO_MARK = -1
_LONGEST_LINE = 64


def counting_marks(
    nodes: Collection[Inventory], claims: Sequence[Generation], committed: Collection[int]
) -> dict[int, int]:
    """Return the mark of the generation that counts, for each number that memory knows.

    One that is claimed on the root does, unless nothing came of the claim: alone, it must never hide a snapshot. Else, of
    several, one of a node that ran until now, then the one that came farthest. None does that others have overtaken.

    Args:
        nodes: What they hold.
        claims: Of the root.
        committed: Numbers of generations of which the root holds a checkpoint.
    """
    claimed = {one.number: mark_of(one.token) for one in claims}
    used = {one.number for one in claims if one.parent is not None} | {*committed}
    found = {}
    for number, marks in marks_of(nodes).items():
        ours = claimed.get(number, 0)
        if ours and (ours in marks or number in used):
            found[number] = ours
        else:
            found[number] = max(marks) if len(marks) == 1 else _farthest(nodes, number, max(marks))
    counting = {number: mark for number, mark in claimed.items() if number in used or found.get(number) == mark}
    for one in (i.generation for i in nodes if i.generation is not None):
        if one.is_overtaken(counting) and counting.get(one.number) != mark_of(one.token) == found[one.number]:
            found[one.number] = _NO_MARK
    return found


def _farthest(nodes: Collection[Inventory], number: int, other: int) -> int:
    """Return the mark of what a node holds of a generation that ran until now, or came farthest; `other` where none holds any."""
    held = [
        (i.restart > 0, one.step, one.mark) for i in nodes for one in i.slots if one.generation == number and one.mark
    ]
    return max(held)[-1] if held else other


def line_behind(nodes: Iterable[Inventory], number: int, marks: Mapping[int, int]) -> tuple[int, ...]:
    """Return the line of the generation that begins behind one with this number."""
    records = (i.generation for i in nodes if i.generation is not None)
    before = next((one for one in records if one.number == number and counts(one, marks)), None)
    return () if before is None or before.claimed else (mark_of(before.token), *before.line)[:_LONGEST_LINE]


def counts(one: Generation, marks: Mapping[int, int]) -> bool:
    """Return whether a generation is the one that counts of those with its number."""
    return mark_of(one.token) in (0, marks.get(one.number))
