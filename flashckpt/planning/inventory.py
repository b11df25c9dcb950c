"""What each rank publishes before a restore: the snapshots of its node, its lineage, its need of memory. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashckpt.core import records
from flashckpt.core.lineage import Generation
from flashckpt.core.records import mark_of
from flashckpt.core.snapshot_id import SnapshotId


class HeldSlot(NamedTuple):
    """One COMPLETE slot.

    Attributes:
        rank: Global rank that took it.
        parent: What its generation was restored from.
        suspect: Above 0 where numbers in it became non-finite; 2: in what no other rank holds.
        mark: Of its generation's token (`core.digest.mark_of`).
    """

    rank: int
    generation: int
    step: int
    world_size: int
    layout_hash: int
    parent: SnapshotId | None
    suspect: int = 0
    mark: int = 0


class Member(NamedTuple):
    """A rank of a worker group."""

    generation: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one rank publishes: the COMPLETE slots of its node, its node's lineage, its need of memory.

    Attributes:
        node: Name of the node: equal for ranks that share a job directory.
        slots: Each COMPLETE slot; where several ranks of a node publish, only the lowest one's are unpacked.
        generation: What the node's generation record says, or None.
        restart: Restarts so far under the rank's agent; above 0 the memory tier is current, below 0 it was until the
            job ran without this node.
        need_bytes: Bytes of one slot of this rank that are not reserved yet.
        free_bytes: Room on the node before anybody reserves.
        members: Every rank that last ran on the node, whatever it holds.
        host: Name of the node, for people.
        request: What the rank was asked to restore; one and the same on all.
        committed: Newest checkpoint that the node's daemon knows of on the root, or None.
        damage: Why the node's generation record cannot be read; "" if it can.
        back: How far back the agent asks to go after the same failure: 0 to the newest state, from 1 on to one older than
            the last generation began with, from 2 on to a checkpoint.
        bad: The steps in one of which numbers on this node became bad first: that state is to be from before them where
            there is one. (0, 0): not known.
        leave_out: The first and the last step whose samples are left out after the restore, since the job fails there
            again and again; (0, 0): none.
        restore_step: The step that the agent was asked to go back to, by all of them; -1: none.
        has_claimed: A start on this node died where it claims its generation: only the root may know of that.
    """

    node: str
    slots: tuple[HeldSlot, ...] = ()
    generation: Generation | None = None
    restart: int = 0
    need_bytes: int = 0
    free_bytes: int = 0
    members: tuple[Member, ...] = ()
    host: str = ""
    request: str = ""
    committed: SnapshotId | None = None
    damage: str = ""
    back: int = 0
    bad: tuple[int, int] = (0, 0)
    leave_out: tuple[int, int] = (0, 0)
    restore_step: int = -1
    has_claimed: bool = False

    def pack(self) -> list[Any]:
        """Return it as msgpack types."""
        sizes = [self.restart, self.need_bytes, self.free_bytes]
        return [
            self.node,
            list(self.slots),
            None if self.generation is None else records.pack(self.generation),
            *sizes,
            list(self.members),
            self.host,
            self.request,
            self.committed,
            self.damage,
            self.back,
            self.bad,
            self.leave_out,
            self.restore_step,
            self.has_claimed,
        ]

    @classmethod
    def unpack(cls, packed: list[Any], *, with_slots: bool = True) -> Inventory:
        """Return what `pack` packed."""
        node, slots, generation, restart, need, free, members, host, request, committed, damage, *far = packed
        return cls(
            node=node,
            slots=tuple(
                HeldSlot(r, g, s, w, h, _snapshot_id(p), *more)
                for r, g, s, w, h, p, *more in (slots if with_slots else ())
            ),
            generation=None if generation is None else records.unpack(Generation, generation),
            restart=restart,
            need_bytes=need,
            free_bytes=free,
            members=tuple(itertools.starmap(Member, members)),
            host=host,
            request=request,
            committed=_snapshot_id(committed),
            damage=damage,
            back=far[0],
            bad=(far[1][0], far[1][1]),
            leave_out=(far[2][0], far[2][1]),
            restore_step=far[3],
            has_claimed=far[4],
        )


def unpack_all(packed: Sequence[list[Any]]) -> list[Inventory]:
    """Return what all ranks packed, by rank: of a node's slots, which all of its ranks have listed, the first list."""
    firsts = {one[0]: rank for rank, one in reversed(list(enumerate(packed)))}
    return [Inventory.unpack(one, with_slots=firsts[one[0]] == rank) for rank, one in enumerate(packed)]


def left_out(inventories: Sequence[Inventory]) -> tuple[int, int]:
    """Return the first and the last step whose samples are left out: as an agent asks, or in place of one step those to blame."""
    asked = [i.leave_out for i in inventories if i.leave_out[1]] or [(0, 0)]
    first, last = min(asked)[0], max([last for _, last in asked])
    return (bad_steps(inventories) or (first, last)) if first else (first, last)


def bad_steps(inventories: Sequence[Inventory]) -> tuple[int, int] | None:
    """Return the steps in one of which numbers became bad first, on whatever node; None where none knows of any."""
    return min([i.bad for i in inventories if i.bad[1]], key=lambda steps: steps[1], default=None)


def _snapshot_id(value: Any) -> SnapshotId | None:
    return None if value is None else SnapshotId(int(value[0]), int(value[1]))


def host_names(inventories: Sequence[Inventory]) -> list[str]:
    """Return a name for people of every node; where several have one host name, with the node's number."""
    hosts = {i.node: i.host for i in inventories}
    names = [hosts[name] or "node" for name in node_names(inventories)]
    return [name if names.count(name) == 1 else f"{name}#{k}" for k, name in enumerate(names)]


def node_names(inventories: Sequence[Inventory]) -> list[str]:
    """Return every node once, in the order of its lowest rank: what node indices count in."""
    return list(dict.fromkeys([i.node for i in inventories]))


def local_world(inventories: Sequence[Inventory], rank: int) -> list[int]:
    """Return the global ranks that share the node of `rank`, ascending."""
    return [r for r, i in enumerate(inventories) if i.node == inventories[rank].node]


def is_restart(inventories: Sequence[Inventory]) -> bool:
    """Tell whether this is a restart under a running agent."""
    return any(i.restart for i in inventories)


def memory_is_current(inventories: Sequence[Inventory]) -> bool:
    """Tell whether a node took part in the generation before: then storage holds nothing newer than all memory of it did.

    Not where nodes hold two generations of one number: which of them counts, a claim on the root tells; nor where a start
    may have left its claim there.
    """
    if any(i.has_claimed for i in inventories):
        return False
    return any(i.restart > 0 for i in inventories) and all(len(marks) == 1 for marks in marks_of(inventories).values())


def marks_of(inventories: Iterable[Inventory]) -> dict[int, set[int]]:
    """Return number -> marks of every generation that memory knows by its token."""
    marks: dict[int, set[int]] = defaultdict(set)
    for one in inventories:
        for held in one.slots:
            marks[held.generation].add(held.mark)
        if one.generation is not None:
            marks[one.generation.number].add(mark_of(one.generation.token))
    return {number: found - {0} for number, found in marks.items() if found != {0}}


# -- Which generation counts where several have one number: of those that began without the root, out of each other's
#    reach. Pure

_NO_MARK = -1
_LONGEST_LINE = 64


def counting_marks(
    nodes: Collection[Inventory], claims: Sequence[Generation], committed: Collection[int]
) -> dict[int, int]:
    """Return the mark of the generation that counts, for each number that memory knows.

    One that is claimed on the root does, unless nothing came of the claim: alone, it must never hide a snapshot. Else, of
    several, one of a node that ran until now, then the one that came farthest. None does that others have overtaken.
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
    records = [i.generation for i in nodes if i.generation is not None and i.generation.number == number]
    before = [one for one in records if counts(one, marks)]
    return (mark_of(before[0].token), *before[0].line)[:_LONGEST_LINE] if before and not before[0].claimed else ()


def counts(one: Generation, marks: Mapping[int, int]) -> bool:
    """Return whether a generation is the one that counts of those with its number."""
    return mark_of(one.token) in (0, marks.get(one.number))
