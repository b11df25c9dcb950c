"""The choice of the restore point: one pure function of what all ranks published, so that all choose alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashckpt.core import records
from flashckpt.core.generation import Generation
from flashckpt.core.lineage import SlotRecord, by_preference, common, is_rolled_back, partially_held
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, DisagreementError, NoCheckpointError, RootError
from flashckpt.planning.root_view import RootSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What the caller of `restore()` wants.

    Attributes:
        root: Root URL to read from.
        step, generation: Only these, or None for the newest.
        only: A pattern over names, or None.
        strict: Names that no source has are an error.
        fresh: Nothing: begin anew.
    """

    root: str
    step: int | None = None
    generation: int | None = None
    only: str | None = None
    strict: bool = True
    fresh: bool = False

    @property
    def wish(self) -> str:
        """What all ranks must agree on, for people."""
        given = {"step": self.step, "generation": self.generation, "only": self.only}
        words = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"restore({', '.join([*words, *([] if self.strict else ['strict=False']), *(['fresh=True'] if self.fresh else [])])}) from {self.root}"

    @property
    def is_partial(self) -> bool:
        """Whether a new lineage begins with it."""
        return self.only is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one rank publishes: the COMPLETE slots of its node, its node's lineage, its need of memory.

    Attributes:
        node: Name of the node: equal for ranks that share a job directory.
        slots: (rank, generation, step, world size, layout hash, parent) of each COMPLETE slot.
        generation: the generation that the node last knew of, or None.
        restart: Restarts in the life of the rank's agent; above 0 the memory tier is current.
        need_bytes: Bytes of one slot of this rank that are not reserved yet.
        free_bytes: Room on the node before anybody reserves.
        members: (generation, rank) of every rank that last ran on the node, whatever it holds.
        host: Name of the node, for people.
        request: What the rank was asked to restore; one and the same on all.
        committed: Newest checkpoint that the node's daemon knows of on the root, or None.
        damage: Why the node's generation record cannot be read; "" if it can.
    """

    node: str
    slots: tuple[tuple[int, int, int, int, int, SnapshotId | None], ...] = ()
    generation: Generation | None = None
    restart: int = 0
    need_bytes: int = 0
    free_bytes: int = 0
    members: tuple[tuple[int, int], ...] = ()
    host: str = ""
    request: str = ""
    committed: SnapshotId | None = None
    damage: str = ""

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
        ]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Inventory:
        """Return what `pack` packed."""
        node, slots, generation, restart, need, free, members, host, request, committed, damage = packed
        return cls(
            node=node,
            slots=tuple((r, g, s, w, h, _pair(p)) for r, g, s, w, h, p in slots),
            generation=None if generation is None else records.unpack(Generation, generation),
            restart=restart,
            need_bytes=need,
            free_bytes=free,
            members=tuple((g, r) for g, r in members),
            host=host,
            request=request,
            committed=_pair(committed),
            damage=damage,
        )


def _pair(value: Any) -> SnapshotId | None:
    return None if value is None else SnapshotId(int(value[0]), int(value[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One snapshot or checkpoint that may be restored.

    Attributes:
        identity: (generation, step).
        is_common: Every rank of its worker group has it in memory that can be reached.
        on_root: It is committed on the root.
        is_unfinished: Some rank that lives on never completed it; tried only where nothing whole is left.
        holders: (rank that took it, index of its node) of every slot that holds it, by rank.
    """

    identity: SnapshotId
    is_common: bool = False
    on_root: bool = False
    is_unfinished: bool = False
    holders: tuple[tuple[int, int], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is out of reach."""
        return self.is_common or self.on_root


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What may be restored, in the order in which it is tried, and the number of the life that begins.

    Attributes:
        found: The candidates; `core.lineage.by_preference` says which goes first.
        life: Generation number to claim: 1 + the largest seen anywhere.
        lineage: Every generation known, for `is_rolled_back`.
    """

    found: tuple[Candidate, ...]
    life: int
    lineage: tuple[Generation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLocation:
    """One slot that holds a snapshot; its number is its place in a list that all ranks have alike.

    Attributes:
        rank: Global rank that took it.
        node: Index of the node whose memory it lies in.
        host: Name of that node, for people.
        server: Rank that answers for it.
    """

    rank: int
    node: int
    host: str
    server: int


def slot_locations(candidate: Candidate, inventories: Sequence[Inventory]) -> list[SlotLocation]:
    """Return where a candidate lies in memory; the ranks of a node share out its slots. The same on every rank."""
    names = node_names(inventories)
    ranks: list[list[int]] = [[] for _ in names]
    index = {name: k for k, name in enumerate(names)}
    for rank, inventory in enumerate(inventories):
        ranks[index[inventory.node]].append(rank)
    labels = host_names(inventories)
    taken = [0] * len(names)
    found = []
    for rank, node in candidate.holders:
        server = ranks[node][taken[node] % len(ranks[node])]
        taken[node] += 1
        found.append(SlotLocation(rank=rank, node=node, host=labels[node], server=server))
    return found


def host_names(inventories: Sequence[Inventory]) -> list[str]:
    """Return a name for people of every node; where several have one host name, with the node's number."""
    hosts = {i.node: i.host for i in inventories}
    names = [hosts[name] or "node" for name in node_names(inventories)]
    return [name if names.count(name) == 1 else f"{name}#{k}" for k, name in enumerate(names)]


def node_names(inventories: Sequence[Inventory]) -> list[str]:
    """Return every node once, in the order of its lowest rank: what node indices count in."""
    return list(dict.fromkeys(i.node for i in inventories))


def refuse_damage(inventories: Sequence[Inventory], job: str) -> None:
    """Refuse to choose while some node's lineage is unknown: a snapshot that was abandoned could be taken up again.

    Raises:
        DamagedError: There is such a node; names it. On every rank.
    """
    for rank, inventory in enumerate(inventories):
        if inventory.damage:
            raise DamagedError(
                "the record of which run the snapshots in memory belong to cannot be read",
                found=f"{inventory.host or 'the node'} of rank {rank}: {inventory.damage}",
                state="Nothing was restored, and nothing was changed.",
                remedy=f"on that machine: flashckpt forget --job {job} --apply; what is committed on storage is restored then",
            )


def require_same_request(inventories: Sequence[Inventory]) -> None:
    """Check that all ranks were asked for the same.

    Raises:
        DisagreementError: They were not; names the first rank that differs from rank 0, and both wishes. On every rank.
    """
    for rank, inventory in enumerate(inventories):
        if inventory.request != inventories[0].request:
            raise DisagreementError(
                "Ranks were asked to restore different things",
                found=f"rank {rank}: {inventory.request}",
                expected=f"rank 0: {inventories[0].request}",
                state="Nothing was restored.",
                remedy="call restore() with the same arguments, and Checkpointer with the same root, on every rank",
            )


def local_world(inventories: Sequence[Inventory], rank: int) -> list[int]:
    """Return the global ranks that share the node of `rank`, ascending."""
    return [r for r, i in enumerate(inventories) if i.node == inventories[rank].node]


def memory_is_current(inventories: Sequence[Inventory]) -> bool:
    """Tell whether this is a restart under a living agent: then storage holds nothing newer than memory."""
    return any(i.restart > 0 for i in inventories)


def candidates(
    inventories: Sequence[Inventory],
    root: RootSummary,
    *,
    step: int | None = None,
    generation: int | None = None,
) -> Candidates:
    """Return everything that could be restored, newest first; the same on every rank.

    Args:
        inventories: Of all ranks, in rank order.
        root: What the root knows; empty where it was not asked.
        step: Only this step.
        generation: Only this generation.
    """
    nodes = {name: index for index, name in enumerate(node_names(inventories))}
    by_node = {i.node: i for i in reversed(inventories)}  # ranks of one node see the same: the lowest speaks for it
    slots = [
        SlotRecord(rank=r, node=nodes[name], generation=g, step=s, world_size=w, layout_hash=h, parent=p)
        for name, i in by_node.items()
        for r, g, s, w, h, p in i.slots
    ]
    known: dict[int, SnapshotId | None] = {}
    for told in [
        *root.claims,
        *(i.generation for i in by_node.values() if i.generation is not None),
        *(Generation(number=slot.generation, parent=slot.parent) for slot in slots),
    ]:
        known[told.number] = told.parent if told.parent is not None else known.get(told.number)
    lineage = tuple(Generation(number=g, parent=p) for g, p in sorted(known.items()))
    in_memory, on_root = set(common(slots)), set(root.committed)
    part = partially_held(slots, [member for i in by_node.values() for member in i.members])
    wanted = [
        i
        for i in by_preference(in_memory | on_root, part)
        if step in (None, i[1]) and generation in (None, i[0])
    ]  # fmt: skip
    if step is None and generation is None:
        wanted = [i for i in wanted if not is_rolled_back(i, lineage)]
    holders: dict[SnapshotId, set[tuple[int, int]]] = {}
    for slot in slots:
        holders.setdefault(slot.identity, set()).add((slot.rank, slot.node))
    found = tuple(
        Candidate(
            identity=i,
            is_common=i in in_memory,
            on_root=i in on_root,
            is_unfinished=part.get(i, False) and i not in on_root,
            holders=tuple(sorted(holders.get(i, ()))),
        )
        for i in wanted
    )
    highest = max([*known, *(g for g, _ in on_root)], default=0)
    return Candidates(found=found, life=highest + 1, lineage=lineage)


def missing_on_root(inventories: Sequence[Inventory], root: RootSummary, found: Candidates) -> SnapshotId | None:
    """Return the newest checkpoint that some node knows to be committed, where the root holds no checkpoint at all.

    None where the root could not be asked, holds checkpoints (damaged ones too), or none was committed on this line.
    """
    if root.error or not root.is_empty:
        return None
    known = {i.committed for i in inventories if i.committed is not None}
    return max((i for i in known if not is_rolled_back(i, found.lineage)), default=None)


def emptied(root: str, missing: SnapshotId, found: Candidates) -> RootError:
    """Return the error for a root that is empty although checkpoints were committed on it."""
    held = next((c.identity for c in found.found if c.is_whole), None)
    ways = [
        "mount or put back the root",
        "to begin anew: restore(fresh=True), or on every node: flashckpt forget ROOT --apply",
    ]
    if held is not None:
        ways.append("to go on from memory, on every node: flashckpt forget ROOT --keep-memory --apply")
    return RootError(
        f"the root {root} holds no checkpoint, although some of this job were committed on it",
        found="no checkpoint" if held is None else f"no checkpoint; in memory step {held[1]} of generation {held[0]}",
        expected=f"step {missing[1]} of generation {missing[0]}, or a newer one",
        state="Nothing was restored, and what is in memory is as it was.",
        remedy="; ".join(ways),
    )


def no_such_checkpoint(
    step: int | None, generation: int | None, found: Candidates | None, root: str
) -> NoCheckpointError:
    """Return the error for an explicit wish that nothing answers."""
    wish = f"step {step}" if generation is None else f"step {step} of generation {generation}"
    return NoCheckpointError(
        f"no snapshot or checkpoint of {wish} exists",
        found=", ".join(f"step {s} of generation {g}" for g, s in (c.identity for c in found.found[:8]))
        if found
        else "none",
        state="Nothing was restored.",
        remedy=f"flashckpt ls {root}",
    )
