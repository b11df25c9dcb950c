"""Which ranks want the same bytes of a checkpoint: what one of them can read and send on to the others. Pure, numpy only.

Ranks that hold the same boxes plan the same pieces. Each piece has one rank that hears who wants it, as names have in
`peer_index`, so that no rank hears of more than its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashckpt.core.records import digest
from flashckpt.planning.pieces import Job, Pieces, merge_pieces

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Members = tuple[int, ...]
"""Ranks, ascending."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """One range of an object, wanted by several ranks; the same on each of them but for `job`.

    Attributes:
        members: Who wants it; the first one reads it, and the others get it along a tree (`neighbours`).
        start, stop: Bytes of the object.
        job: What this rank does with it.
    """

    members: Members
    name: str
    start: int
    stop: int
    job: Job

    def neighbours(self, rank: int) -> tuple[int | None, list[int]]:
        """Return from whom a member gets it (None: it reads it itself), and whom it sends it on to."""
        at = self.members.index(rank)
        children = [self.members[k] for k in (2 * at + 1, 2 * at + 2) if k < len(self.members)]
        return (self.members[(at - 1) // 2] if at else None), children


def keys_of(pieces: Pieces, objects: Sequence[str]) -> Keys:
    """Return a key for each piece: equal on all ranks for the same bytes of the same object."""
    names = np.array([digest(name.encode()) for name in objects], np.uint64)
    found = names[pieces.object_id] if len(objects) else np.zeros(len(pieces), np.uint64)
    for column in (pieces.place, pieces.stop - pieces.start):
        found = _mixed(found ^ column.astype(np.uint64))
    return found


def _mixed(values: Keys) -> Keys:
    """Mix bits as splitmix64 does; overflow is meant."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def members_of(asked: Sequence[Keys]) -> tuple[list[Ints], list[Members]]:
    """Return per rank, and each of its keys, the number of the set of ranks that want it; and the sets. Number 0 is nobody else."""
    sets: dict[Members, int] = {(): 0}
    ranks = np.repeat(np.arange(len(asked)), [len(keys) for keys in asked])
    every = np.concatenate([*asked, np.zeros(0, np.uint64)])
    order = np.lexsort((ranks, every))
    starts = np.flatnonzero(np.append(True, every[order][1:] != every[order][:-1])) if len(every) else np.zeros(0, int)
    numbers = np.zeros(len(every), np.int64)
    for which in np.split(order, starts[1:]) if len(every) else ():
        members = tuple(dict.fromkeys(ranks[which].tolist()))
        if len(members) > 1:
            numbers[which] = sets.setdefault(members, len(sets))
    return np.split(numbers, np.cumsum([len(keys) for keys in asked])[:-1]), list(sets)


def shared_jobs(pieces: Pieces, numbers: Ints, sets: Sequence[Members], objects: Sequence[str]) -> list[Shared]:
    """Return what is shared, in an order in which all ranks can go through it without waiting for each other in a circle.

    The members of a set take turns as readers.
    """
    found = []
    for members, number in sorted((members, number) for number, members in enumerate(sets) if members):
        extents = []
        for job in merge_pieces(pieces.take(np.flatnonzero(numbers == number))):
            p, at = job.pieces, job.rows
            stop = int((p.place[at] + p.stop[at] - p.start[at]).max())
            extents.append((objects[int(p.object_id[job.first])], int(p.place[job.first]), stop, job))
        for turn, (name, start, stop, job) in enumerate(sorted(extents, key=lambda one: one[:3])):
            first = turn % len(members)
            order = members[first:] + members[:first]
            found.append(Shared(members=order, name=name, start=start, stop=stop, job=job))
    return found


class SendingPace:
    """Whether sending on is worth it, from what the readers of one set report: the same on all its members.

    To send a byte on must take less time than reading what every member would read more of without it.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._reports: dict[int, Sequence[int]] = {}

    def hear(self, reader: int, report: Sequence[int]) -> None:
        """Take in the newest report: nanoseconds of reading, bytes read, nanoseconds of receiving, bytes received."""
        self._reports[reader] = report

    def is_worth_it(self) -> bool:
        """Whether to continue; True as long as too little is known."""
        read_ns, read, away_ns, away = map(sum, zip(*self._reports.values(), strict=True)) if self._reports else [0] * 4
        if not read or not away:
            return True
        return away_ns / away < read_ns / read * (1 - 1 / self._members)
