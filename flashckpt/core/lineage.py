"""Which snapshots every rank holds, which one is newest, and which were abandoned. Pure.

Restoring (g, s) abandons every (g' <= g, step > s), and whole generations between g and the new one. A
generation's record names its parent, the identity it was restored from. None (a fresh start, or a generation that
ended before it had restored) abandons nothing: a claim alone must never hide a snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from flashckpt.core.snapshot_id import SnapshotId

# -- One generation: from one start of the worker group to its end. Pure -------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One generation of the worker group; where only its lineage is known, the number and the parent.

    Attributes:
        number: Which one; 1 is the first.
        token: Random text of the claimer: tells two claims of one number apart, and "mine" after a lost answer.
        parent: The snapshot it was restored from; None on a fresh start, or where it ended before it had restored.
        claimed: Whether the number is claimed on the root; if not, the persister does so before it persists.
        created_s: Time of the claim, unix seconds.
        line: Marks of the generations before it, nearest first, back to the last that was known to be claimed.
    """

    number: int = field(metadata={"key": "generation"})
    token: str = ""
    parent: SnapshotId | None = None
    world_size: int = 1
    claimed: bool = False
    created_s: float = 0.0
    line: tuple[int, ...] = ()

    def is_overtaken(self, claimed: Mapping[int, int]) -> bool:
        """Return whether a number of its line was claimed by others: they continued without it.

        Args:
            claimed: Number -> mark of claims on the root.
        """
        return any(mark and claimed.get(self.number - at, mark) != mark for at, mark in enumerate(self.line, start=1))


BEGINNING = SnapshotId(0, 0)
"""Parent of a generation that started over on purpose: it abandons everything before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One COMPLETE slot as its node publishes it.

    Attributes:
        rank: Global rank that took it.
        parent: What its generation was restored from.
        suspect: Above 0 where numbers in it became non-finite.
        mark: Of its generation's token; 0 where an earlier release wrote it.
    """

    rank: int
    node: int
    generation: int
    step: int
    world_size: int
    layout_hash: int = 0
    parent: SnapshotId | None = None
    suspect: int = 0
    mark: int = 0

    @property
    def identity(self) -> SnapshotId:
        """(generation, step)."""
        return SnapshotId(self.generation, self.step)


def common(records: Iterable[SlotRecord], world_size: int | None = None) -> list[SnapshotId]:
    """Return the identities that every rank of their worker group holds, newest first.

    Args:
        records: COMPLETE slots of all nodes; several of one rank (replicas) count once.
        world_size: Only identities taken by a worker group of this size; any if None.
    """
    ranks: dict[tuple[SnapshotId, int], set[int]] = defaultdict(set)
    for record in records:
        ranks[record.identity, record.world_size].add(record.rank)
    found = {
        identity
        for (identity, size), held in ranks.items()
        if size > 0 and _holds_all(held, size) and (world_size is None or size == world_size)
    }
    return sorted(found, reverse=True)


def partially_held(records: Iterable[SlotRecord], members: Iterable[tuple[int, int]]) -> dict[SnapshotId, bool]:
    """Return the identities that only some ranks of their worker group hold, each with whether it is unfinished.

    Unfinished: the memory of every rank of that generation can be reached, so some rank that still runs never completed
    it. Otherwise ranks are lost with their nodes, and what the others hold may be the newest there is.
    Slots that disagree on the size or the parent of their worker group are of no one snapshot, and are left out.

    Args:
        records: COMPLETE slots of all nodes.
        members: (generation, rank) of ranks that ran on a node that can be reached, whatever they hold.
    """
    present: dict[int, set[int]] = defaultdict(set)
    for generation, rank in members:
        present[generation].add(rank)
    held: dict[SnapshotId, set[int]] = defaultdict(set)
    kinds: dict[SnapshotId, set[tuple[int, SnapshotId | None]]] = defaultdict(set)
    for record in records:
        present[record.generation].add(record.rank)
        held[record.identity].add(record.rank)
        kinds[record.identity].add((record.world_size, record.parent))
    found = {}
    for identity, ranks in held.items():
        ((size, _), *others) = kinds[identity]
        if not others and not _holds_all(ranks, size):
            found[identity] = _holds_all(present[identity[0]], size)
    return found


def _holds_all(ranks: set[int], size: int) -> bool:
    """Return whether `ranks` are all of a world; the number first, for a wrong size must not be counted up to."""
    return len(ranks) >= size and ranks >= set(range(size))


def by_preference(whole: Collection[SnapshotId], part: Mapping[SnapshotId, bool]) -> list[SnapshotId]:
    """Return identities in the order in which they are tried: newest first, unfinished ones behind the next whole one.

    An unfinished snapshot lacks what belongs to one rank alone (its random numbers), and by M1 a whole one lies at
    most a few snapshots before it: that one continues bit for bit.

    Args:
        whole: Held by all ranks of their group, or committed on storage.
        part: Others, as `partially_held` returns them.
    """
    order: list[SnapshotId] = []
    unfinished: list[SnapshotId] = []
    for identity in sorted({*whole, *part}, reverse=True):
        if identity not in whole and part[identity]:
            unfinished.append(identity)
            continue
        order.append(identity)
        if identity in whole:
            order += unfinished
            unfinished = []
    return order + unfinished


def is_rolled_back(identity: SnapshotId, generations: Iterable[Generation]) -> bool:
    """Return whether a later generation was restored from before `identity`."""
    generation, step = identity
    for record in generations:
        if record.number <= generation or record.parent is None:
            continue
        parent_generation, parent_step = record.parent
        if parent_generation < generation:  # restored from before this generation: all of it was abandoned
            return True
        if step > parent_step:
            return True
    return False
