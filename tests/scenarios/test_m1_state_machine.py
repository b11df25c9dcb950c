"""Invariant M1 by a state machine: what was once common is common until something newer is.

The decisions that ARCHITECTURE.md names under M1 run over ranks that step at their own pace, see
the others' lists late, lose snapshots, are pinned, killed at any moment, restarted with other world sizes
and layouts, and lose nodes; where every rank holds the whole state (replicas), what is left of a snapshot is restored
from. Only shared memory itself is replaced by lists of headers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashckpt.core.lineage import Generation, SlotRecord, by_preference, common, is_rolled_back, partially_held
from flashckpt.core.snapshot_id import NEVER, SnapshotId
from flashckpt.core.superblock import SlotHeader, SlotState
from flashckpt.daemon.persister.retire import superseded
from flashckpt.shm.acks import NOBODY, AckedSnapshots, GroupAcks, choose_slot, combine_acks, merge_acks, node_acks
from flashckpt.shm.control import RankAcks
from flashckpt.shm.inventory import NodeInventory, SlotEntry

Identity = SnapshotId


@dataclass
class Memory:
    """The slots of one segment."""

    rank: int
    layout: int
    headers: list[SlotHeader]
    pinned: set[int] = field(default_factory=set)

    def put(self, slot: int, **changes: Any) -> None:
        old = self.headers[slot]
        self.headers[slot] = replace(old, sequence=old.sequence + 1, **changes)

    @property
    def complete(self) -> list[Identity]:
        return [h.identity for h in self.headers if h.is_complete]


@dataclass
class Rank:
    """One live process: its segment, what it published, and what it last read of the others."""

    rank: int
    memory: Memory
    step: int
    writing: int | None = None
    low_watermark: Identity = NEVER
    published: RankAcks | None = None
    known: AckedSnapshots = field(default_factory=AckedSnapshots)


@dataclass
class Node:
    """A node among several: its record in the store, and what its control page says of the job."""

    record: GroupAcks | None = None
    page: GroupAcks = NOBODY


ACTIONS = ["take", "complete", "discard", "publish", "combine", "aggregate", "distribute", "refresh"]


class M1(RuleBasedStateMachine):
    """Ranks of one job, its memory, its storage, and the newest snapshot that ever was common."""

    @initialize(
        slots=st.integers(2, 3),
        world=st.integers(1, 3),
        late=st.booleans(),
        mirrored=st.booleans(),
        per_node=st.integers(0, 2),
    )
    def start(self, slots: int, world: int, late: bool, mirrored: bool, per_node: int = 0) -> None:
        self.slots, self.late, self.mirrored, self.per_node = slots, late, mirrored, per_node
        self.members: dict[int, int] = {}
        self.memories: dict[tuple[int, int], Memory] = {}
        self.storage: set[Identity] = set()
        self.lives: list[Generation] = []
        self.best: Identity | None = None
        self.settled_after = 0
        self._new_life(world, layout=0, parent=None, from_storage=False)

    # -- what is true ----------------------------------------------------------------------------------

    def records(self) -> list[SlotRecord]:
        return [
            SlotRecord(rank=m.rank, node=m.rank, generation=h.generation, step=h.step, world_size=h.world_size)
            for m in self.memories.values()
            for h in m.headers
            if h.is_complete
        ]

    def part(self) -> dict[Identity, bool]:
        """Snapshots that only some ranks hold and that cover the state all the same, each with whether it is unfinished."""
        members = [(generation, rank) for rank, generation in self.members.items()]
        return partially_held(self.records(), members) if self.mirrored else {}

    def choices(self) -> list[Identity]:
        """What a restart would try now, from memory or storage."""
        order = by_preference({*common(self.records()), *self.storage}, self.part())
        return [identity for identity in order if not is_rolled_back(identity, self.lives)]

    def restorable(self) -> Identity | None:
        """The identity a restart would choose now."""
        return next(iter(self.choices()), None)

    def promised(self) -> Identity | None:
        """The newest that has to stay: what some living rank never completed may go."""
        part = self.part()
        return next((i for i in self.choices() if i in self.storage or not part.get(i, False)), None)

    def _new_life(self, world: int, layout: int, parent: Identity | None, from_storage: bool) -> None:
        self.generation = len(self.lives) + 1
        self.world, self.layout = world, layout
        self.lives.append(Generation(number=self.generation, parent=parent, world_size=world))
        self.members |= dict.fromkeys(range(world), self.generation)
        self.restored = None if from_storage else parent
        self.superseded = parent if from_storage else None
        self.nodes = [Node() for _ in range(-(-world // self.per_node) if self.per_node else 0)]
        self.job = NOBODY
        self.ranks = [
            Rank(rank=r, memory=self._memory(r, layout), step=parent[1] if parent else 0) for r in range(world)
        ]

    def _memory(self, rank: int, layout: int) -> Memory:
        fresh = [SlotHeader() for _ in range(self.slots)]
        return self.memories.setdefault((rank, layout), Memory(rank=rank, layout=layout, headers=fresh))

    def _mine(self, rank: Rank) -> list[Identity]:
        return [i for m in self.memories.values() if m.rank == rank.rank for i in m.complete]

    def _publish(self, rank: Rank) -> None:
        line = [i for i in self._mine(rank) if not is_rolled_back(i, self.lives[-1:])]
        rank.published = RankAcks.of(line, rank.low_watermark)
        rank.low_watermark = rank.published.low_watermark

    def _refresh(self, rank: Rank) -> None:
        if self.nodes:
            rank.known = self._node_of(rank).page.known(self.restored)
        else:
            rank.known = combine_acks([r.published for r in self.ranks], restored=self.restored)

    def _node_of(self, rank: Rank) -> Node:
        return self.nodes[rank.rank // self.per_node]

    def _combine(self, rank: Rank) -> None:
        """The first rank of a node publishes what the node's ranks have."""
        if self.nodes:
            first = rank.rank // self.per_node * self.per_node
            self._node_of(rank).record = node_acks([r.published for r in self.ranks[first : first + self.per_node]])

    def _aggregate(self, rank: Rank) -> None:
        """The first rank of the job publishes what all nodes have, once all of them have something."""
        del rank
        if self.nodes and all(node.record is not None for node in self.nodes):
            self.job = merge_acks(node.record for node in self.nodes if node.record is not None)

    def _distribute(self, rank: Rank) -> None:
        """The first rank of a node writes that into its control page."""
        if self.nodes:
            self._node_of(rank).page = self.job

    # -- training --------------------------------------------------------------------------------------

    @rule(
        actions=st.lists(
            st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)),
            min_size=1,
            max_size=12,
        )
    )
    def train(self, actions: list[tuple[str, int]]) -> None:
        """Ranks go on at their own pace; the invariant is looked at after every single action."""
        for action, pick in actions:
            getattr(self, f"_{action}")(self.ranks[pick % len(self.ranks)])
            self.what_was_common_stays_until_something_newer_is()

    def _take(self, rank: Rank) -> None:
        """A rank comes to a snapshot step (ranks agree on the steps, not on the time)."""
        self._complete(rank)
        rank.step += 1
        memory = rank.memory
        slot = choose_slot(
            memory.headers,
            pinned=memory.pinned,
            common=rank.known.common,
            unrecoverable=rank.known.unrecoverable,
            superseded=self.superseded,
        )
        if slot is None:
            rank.low_watermark = max(rank.low_watermark, SnapshotId(self.generation, rank.step))
            if not self.late:
                self._publish(rank)
            return
        assert slot not in memory.pinned
        memory.put(slot, state=SlotState.WRITING, generation=self.generation, step=rank.step, world_size=self.world)
        rank.writing = slot

    def _complete(self, rank: Rank) -> None:
        if rank.writing is None:
            return
        rank.memory.put(rank.writing, state=SlotState.COMPLETE)
        rank.writing = None
        if not self.late:
            self._publish(rank)

    def _discard(self, rank: Rank) -> None:
        """The fence found a change: this snapshot of this rank never existed."""
        if rank.writing is not None:
            rank.low_watermark = max(rank.low_watermark, rank.memory.headers[rank.writing].identity)
            rank.memory.put(rank.writing, state=SlotState.EMPTY)
            rank.writing = None
            if not self.late:
                self._publish(rank)

    @rule(pick=st.integers(0, 2))
    def swap_layout(self, pick: int) -> None:
        """New state keys: a new segment on every rank, each at its own time."""
        rank = self.ranks[pick % len(self.ranks)]
        if rank.writing is None and rank.memory.layout == self.layout:
            rank.memory = self._memory(rank.rank, self.layout + 1)
            if all(r.memory.layout > self.layout for r in self.ranks):
                self.layout += 1

    # -- daemon ----------------------------------------------------------------------------------------

    @rule(pick=st.integers(0, 2), slot=st.integers(0, 2))
    def pin(self, pick: int, slot: int) -> None:
        memory = self.ranks[pick % len(self.ranks)].memory
        if slot < self.slots and memory.headers[slot].is_complete:
            memory.pinned.add(slot)

    @rule()
    def unpin(self) -> None:
        """The persister is done, or died: its leases end."""
        for memory in self.memories.values():
            memory.pinned.clear()

    @rule(which=st.integers(0, 5))
    def persist(self, which: int) -> None:
        held = common(self.records())
        if held:
            self.storage.add(held[which % len(held)])

    @rule(with_storage=st.booleans())
    def retire(self, with_storage: bool) -> None:
        """The daemon unlinks segments that no live rank uses and that something newer supersedes."""
        held = [
            SlotEntry(path=Path(f"{rank}-{layout}"), slot=slot, rank=rank, header=header)
            for (rank, layout), memory in self.memories.items()
            for slot, header in enumerate(memory.headers)
            if header.sequence
        ]
        committed = max(self.storage, default=None) if with_storage else None
        used = {f"{r.rank}-{r.memory.layout}" for r in self.ranks}
        for one in superseded(NodeInventory(slots=held, lineage=self.lives), self.lives[-1], committed):
            if one.path.name not in used:
                rank, layout = one.path.name.split("-")
                del self.memories[int(rank), int(layout)]

    # -- crashes ---------------------------------------------------------------------------------------

    @rule(world=st.integers(1, 3), swap=st.booleans(), marked=st.sets(st.integers(0, 2)), claims=st.integers(0, 1))
    def crash_and_restart(self, world: int, swap: bool, marked: set[int], claims: int) -> None:
        """All ranks die at whatever they were doing; some lives end before they come to restore."""
        for _ in range(claims):
            self.lives.append(Generation(number=len(self.lives) + 1))
        if world != self.world:
            swap = True  # other boxes per rank
        self.layout = max(m.layout for m in self.memories.values()) if self.memories else 0
        self._restart(self.restorable(), world, self.layout + swap, marked)

    @precondition(lambda self: bool(common(self.records())))
    @rule(which=st.integers(0, 5), marked=st.sets(st.integers(0, 2)))
    def restore_an_older_one(self, which: int, marked: set[int]) -> None:
        """The user asks for an earlier step: everything after it is abandoned."""
        held = [i for i in common(self.records()) if not is_rolled_back(i, self.lives)]
        if held:
            self.best = held[which % len(held)]
            self.layout = max(m.layout for m in self.memories.values())
            self._restart(self.best, self.world, self.layout, marked)

    @rule(lost=st.integers(0, 2), marked=st.sets(st.integers(0, 2)))
    def lose_a_node(self, lost: int, marked: set[int]) -> None:
        self.memories = {key: m for key, m in self.memories.items() if m.rank != lost}
        self.members.pop(lost, None)
        self.best = self.promised()
        self.layout = max((m.layout for m in self.memories.values()), default=0)
        self._restart(self.restorable(), self.world, self.layout, marked)

    def _restart(self, parent: Identity | None, world: int, layout: int, marked: set[int]) -> None:
        from_storage = parent is not None and parent not in {*common(self.records()), *self.part()}
        for memory in self.memories.values():
            memory.pinned.clear()
        self._new_life(world, layout, parent, from_storage)
        for memory in self.memories.values():  # a crash in the middle leaves some ranks unmarked
            for slot, header in enumerate(memory.headers):
                if memory.rank in marked and header.is_complete and is_rolled_back(header.identity, self.lives):
                    memory.put(slot, state=SlotState.EMPTY)

    # -- what must hold --------------------------------------------------------------------------------

    @invariant()
    def what_was_common_stays_until_something_newer_is(self) -> None:
        if not hasattr(self, "best"):
            return
        found = self.promised()
        assert self.best is None or (found is not None and found >= self.best), f"{found} < {self.best}"
        self.best = found

    @rule()
    def settle(self) -> None:
        """Liveness: unpinned ranks in step with each other get a common snapshot within a few steps."""
        for memory in self.memories.values():
            memory.pinned.clear()
            for slot, header in enumerate(memory.headers):
                if header.is_complete and is_rolled_back(header.identity, self.lives):
                    memory.put(slot, state=SlotState.EMPTY)
        last = max(rank.step for rank in self.ranks)
        for rank in self.ranks:
            self._complete(rank)
            rank.step = last
        for _ in range(3):
            for act in (
                self._publish,
                self._combine,
                self._aggregate,
                self._distribute,
                self._refresh,
                self._take,
                self._complete,
            ):
                for rank in self.ranks:
                    act(rank)
        assert self.restorable() == (self.generation, last + 3), f"stuck at {self.restorable()}"


TestM1 = M1.TestCase
TestM1.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_snapshot_that_one_survivor_alone_completed_stays_once_it_was_restored() -> None:
    """Ranks 0 and 1 go on from it; rank 1 comes to new snapshots, rank 0 loses its own: the old one is all there is."""
    machine = M1()
    machine.start(slots=2, world=3, late=False, mirrored=True)
    everybody = [(action, rank) for action in ("take", "complete", "publish") for rank in range(3)]
    machine.train([*everybody, ("refresh", 0), ("take", 0), ("complete", 0)])
    machine.lose_a_node(2, set())
    assert machine.restorable() == (1, 2)
    machine.train([(action, rank) for action in ("publish", "refresh") for rank in range(3)])
    alone = [("take", 1), ("complete", 1), ("publish", 1), ("refresh", 0), ("take", 0), ("discard", 0), ("publish", 0)]
    machine.train(alone * 3)
    assert machine.restorable() == (1, 2)
