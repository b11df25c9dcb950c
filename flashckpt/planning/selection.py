"""The choice of the restore point: one pure function of what all ranks published, so that all choose alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashckpt.core.lineage import (
    BEGINNING,
    Generation,
    SlotRecord,
    by_preference,
    common,
    is_rolled_back,
    partially_held,
)
from flashckpt.core.records import pack, unpack
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, DisagreementError, FlashckptError, NoCheckpointError, RootError, StoreError
from flashckpt.planning.inventory import (
    Inventory,
    bad_steps,
    counting_marks,
    counts,
    host_names,
    line_behind,
    marks_of,
    node_names,
)

# -- What a root holds of a job's checkpoints, as far as the choice of a restore point needs it --------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSummary:
    """Committed checkpoints and claims.

    Attributes:
        committed: Ids of valid checkpoints, newest first.
        prefixes: The folder of each below the root.
        claims: Generations claimed on the root, with what they were restored from.
        suspects: Those of `committed` in which numbers became non-finite.
        error: Why the root could not be read; "" if it was.
        may_pass: Whether it may be readable a moment later.
        is_empty: It holds no trace of a checkpoint, not even of a damaged or unfinished one.
    """

    committed: tuple[SnapshotId, ...] = ()
    prefixes: tuple[str, ...] = ()
    claims: tuple[Generation, ...] = ()
    error: str = ""
    is_empty: bool = False
    may_pass: bool = False
    suspects: tuple[SnapshotId, ...] = ()

    def pack(self) -> list[Any]:
        """Return it as msgpack types."""
        return [
            list(self.committed),
            list(self.prefixes),
            [pack(one) for one in self.claims],
            self.error,
            self.is_empty,
            self.may_pass,
            list(self.suspects),
        ]

    @classmethod
    def unpack(cls, packed: list[Any]) -> RootSummary:
        """Return what `pack` packed."""
        committed, prefixes, claims, error, is_empty, may_pass, suspects = packed
        return cls(
            committed=tuple(map(SnapshotId.of, committed)),
            prefixes=tuple(prefixes),
            claims=tuple(unpack(Generation, one) for one in claims),
            error=error,
            is_empty=is_empty,
            may_pass=may_pass,
            suspects=tuple(map(SnapshotId.of, suspects)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What the caller of `restore()` wants.

    Attributes:
        step, generation: Only these, or None for the newest.
        only: A pattern over names, or None.
        strict: Names that no source has are an error.
    """

    root: str
    step: int | None = None
    generation: int | None = None
    only: str | None = None
    strict: bool = True
    fresh: bool = False

    @property
    def text(self) -> str:
        """What all ranks must agree on, as people read it."""
        given = {"step": self.step, "generation": self.generation, "only": self.only}
        words = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        words += ["strict=False"] * (not self.strict) + ["fresh=True"] * self.fresh
        return f"restore({', '.join(words)}) from {self.root}"

    @property
    def is_open(self) -> bool:
        """Whether it leaves to others which state of this job is restored."""
        return self.step is None and self.generation is None and self.only is None and not self.fresh

    @property
    def is_partial(self) -> bool:
        """Whether a new lineage begins with it."""
        return self.only is not None


class Holder(NamedTuple):
    """A slot that holds a snapshot: the rank that took it, and the index of its node."""

    rank: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One snapshot or checkpoint that may be restored.

    Attributes:
        identity: (generation, step).
        is_common: Every rank of its worker group has it in memory that can be reached.
        on_root: It is committed on the root.
        is_unfinished: Some surviving rank never completed it; tried only where nothing whole is left.
        holders: Every slot that holds it, by rank.
        is_suspect: Numbers in it became non-finite, on some rank: tried behind all that are not so.
        mark: Of its generation's token in memory; 0 where that is not known: any.
    """

    identity: SnapshotId
    is_common: bool = False
    on_root: bool = False
    is_unfinished: bool = False
    holders: tuple[Holder, ...] = ()
    is_suspect: bool = False
    mark: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is out of reach."""
        return self.is_common or self.on_root


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What may be restored, in the order in which it is tried, and the number of the generation that begins.

    Attributes:
        found: The candidates; `inventory.by_preference` says which goes first.
        next_generation: Number to claim: 1 + the largest seen anywhere.
        lineage: Every generation known, for `is_rolled_back`.
        lost: Number and mark of generations in memory whose number belongs to another one: nothing of theirs counts.
        line: Of the generation that begins, where it is not claimed now.
        reached: The newest state that may be on the root, though memory has lost it or never had it.
    """

    found: tuple[Candidate, ...]
    next_generation: int
    lineage: tuple[Generation, ...]
    lost: frozenset[tuple[int, int]] = frozenset()
    line: tuple[int, ...] = ()
    reached: SnapshotId = BEGINNING

    def is_behind(self, candidate: Candidate) -> bool:
        """Tell whether the root may hold something newer than a candidate."""
        return candidate.identity < self.reached


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


def select(
    inventories: Sequence[Inventory],
    root: RootSummary,
    *,
    step: int | None = None,
    generation: int | None = None,
) -> Candidates:
    """Return everything that could be restored, newest first, what is suspect last; the same on every rank.

    `inventories` are in rank order; `root` is empty where it was not asked.
    """
    nodes = {name: index for index, name in enumerate(node_names(inventories))}
    by_node = {i.node: i for i in reversed(inventories)}  # ranks of one node see the same: the lowest speaks for it
    records = [SlotRecord(node=nodes[name], **held._asdict()) for name, i in by_node.items() for held in i.slots]
    marks = counting_marks(by_node.values(), root.claims, {one.generation for one in root.committed})
    records = [one for one in records if one.mark in (0, marks.get(one.generation))]
    lineage = _lineage(by_node.values(), root, records, marks)
    in_memory, on_root = set(common(records)), set(root.committed)
    part = partially_held(records, [member for i in by_node.values() for member in i.members])
    wanted = [
        i
        for i in by_preference(in_memory | on_root, part)
        if step in (None, i.step) and generation in (None, i.generation)
    ]  # fmt: skip
    if step is None and generation is None:
        wanted = [i for i in wanted if not is_rolled_back(i, lineage)]
        wanted = _further_back(wanted, on_root, lineage, inventories)
    holders: dict[SnapshotId, set[Holder]] = {}
    for record in records:
        holders.setdefault(record.identity, set()).add(Holder(record.rank, record.node))
    suspects = {*root.suspects, *(record.identity for record in records if record.suspect)}
    found = tuple(
        Candidate(
            identity=i,
            is_common=i in in_memory,
            on_root=i in on_root,
            is_unfinished=part.get(i, False) and i not in on_root,
            holders=tuple(sorted(holders.get(i, ()))),
            is_suspect=i in suspects,
            mark=marks.get(i.generation, 0),
        )
        for i in sorted(wanted, key=suspects.__contains__)
    )
    highest = max([*[g.number for g in lineage], *[i.generation for i in on_root]], default=0)
    seen = marks_of(by_node.values()).items()
    lost = frozenset((number, mark) for number, found_ in seen for mark in found_ - {marks[number]})
    line = line_behind(by_node.values(), highest, marks)
    reached = _reached(by_node.values(), lineage, holders)
    return Candidates(found=found, next_generation=highest + 1, lineage=lineage, lost=lost, line=line, reached=reached)


def _reached(
    nodes: Collection[Inventory], lineage: Sequence[Generation], holders: Mapping[SnapshotId, set[Holder]]
) -> SnapshotId:
    """Return the newest state that may be on the root: what the last generation began with, what persisters know of.

    Where a rank of it is lost, too, what all others hold: it may have been committed, and replicas may be older.
    """
    known = {i.committed for i in nodes if i.committed is not None}
    number, size = max([(one.number, one.world_size) for i in nodes if (one := i.generation)], default=(0, 0))
    there = {one.rank for i in nodes for one in i.members if one.generation == number}
    if len(there) < size:
        known |= {i for i, held in holders.items() if i.generation == number and there <= {one.rank for one in held}}
    began = (lineage[-1].parent if lineage else None) or BEGINNING
    return max([began, *[i for i in known if not is_rolled_back(i, lineage)]])


def _further_back(
    wanted: list[SnapshotId],
    on_root: set[SnapshotId],
    lineage: Sequence[Generation],
    inventories: Sequence[Inventory],
) -> list[SnapshotId]:
    """Return `wanted` with what is older than the state that the last generation began with in front: from the second time on checkpoints.

    Of these those from before numbers became bad, where there are any. What is not older stays behind them: a job whose older states
    turn out to be incomplete continues from there, not from its beginning.
    """
    back = max([i.back for i in inventories], default=0)
    before, _ = bad_steps(inventories) or (0, 0)
    began = next((one.parent for one in reversed(lineage) if one.parent is not None), None)
    if not back or began is None:
        return wanted
    older = [i for i in wanted if i < began]
    clean = [i for i in older if i.step < before] or older
    first = [i for i in clean if back > 1 and i in on_root] or clean
    return list(dict.fromkeys([*first, *older, *wanted]))


def _lineage(
    nodes: Iterable[Inventory], root: RootSummary, records: Sequence[SlotRecord], marks: Mapping[int, int]
) -> tuple[Generation, ...]:
    """Return every generation that anybody knows of, with its parent where somebody knows that."""
    parents: dict[int, SnapshotId | None] = {}
    for one in [
        *root.claims,
        *[one for i in nodes if (one := i.generation) is not None and counts(one, marks)],
        *[Generation(number=r.generation, parent=r.parent) for r in records],
    ]:
        parents[one.number] = one.parent if one.parent is not None else parents.get(one.number)
    return tuple([Generation(number=g, parent=p) for g, p in sorted(parents.items())])


# -- What a restore refuses before it chooses anything, the same on every rank. Pure -------------------------------


def refuse_damage(inventories: Sequence[Inventory], job: str) -> None:
    """Refuse to choose while some node's lineage is unknown: a snapshot that was rolled back could be chosen again.

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
        DisagreementError: They were not; names the first rank that differs from rank 0, and both requests. On every rank.
    """
    for rank, inventory in enumerate(inventories):
        if inventory.request != inventories[0].request:
            raise DisagreementError(
                "ranks were asked to restore different things",
                found=f"rank {rank}: {inventory.request}",
                expected=f"rank 0: {inventories[0].request}",
                state="Nothing was restored.",
                remedy="call restore() with the same arguments, and Checkpointer with the same root, on every rank",
            )


def missing_on_root(inventories: Sequence[Inventory], root: RootSummary, found: Candidates) -> SnapshotId | None:
    """Return the newest checkpoint that some node knows to be committed, where the root holds no checkpoint at all.

    None where the root could not be asked, holds checkpoints (damaged ones too), or none was committed on this line.
    """
    if root.error or not root.is_empty:
        return None
    committed = {i.committed for i in inventories if i.committed is not None}
    return max((i for i in committed if not is_rolled_back(i, found.lineage)), default=None)


def emptied(root: str, missing: SnapshotId, found: Candidates) -> RootError:
    """Return the error for a root that is empty although checkpoints were committed on it."""
    held = next((c.identity for c in found.found if c.is_whole), None)
    ways = [
        "mount or put back the root",
        "to start fresh: restore(fresh=True), or on every node: flashckpt forget ROOT --apply",
    ]
    if held is not None:
        ways.append("to continue from memory, on every node: flashckpt forget ROOT --keep-memory --apply")
    return RootError(
        f"the root {root} holds no checkpoint, although some of this job were committed on it",
        found="no checkpoint" if held is None else f"no checkpoint; in memory {held}",
        expected=f"{missing}, or a newer one",
        state="Nothing was restored; snapshots in memory are untouched.",
        remedy="; ".join(ways),
    )


def no_such_checkpoint(
    step: int | None, generation: int | None, found: Candidates | None, root: str
) -> NoCheckpointError:
    """Return the error for an explicit request that nothing answers."""
    wanted = f"step {step}" if generation is None else f"step {step} of generation {generation}"
    return NoCheckpointError(
        f"no snapshot or checkpoint of {wanted} exists",
        found=", ".join(str(c.identity) for c in found.found[:8]) if found else "none",
        state="Nothing was restored.",
        remedy=f"flashckpt ls {root}",
    )


def unreachable(root: str, view: RootSummary, why: str) -> FlashckptError:
    """Return the error for a root that must be asked and cannot be: a permanent one, unless that may pass."""
    kind: type[FlashckptError] = StoreError if view.may_pass else RootError
    lines = [" ".join(line.split()) for line in view.error.splitlines()]
    known = next(
        (line.removeprefix("to do: ") for line in lines if line.startswith("to do: ")), "make the root reachable"
    )
    return kind(
        f"the root {root} cannot be asked for checkpoints, {why}",
        found="; ".join(lines[:2]),
        state="Nothing was restored: a fresh start could repeat a run that is already on storage.",
        remedy=f"{known}; or start with another root",
    )
