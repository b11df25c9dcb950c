"""Negotiations of several nodes over a root that is a few dictionaries: executed action by action, in any order.

A node does what `flashckpt.daemon.persister.coordinator` does, without storage, shared memory and threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flashckpt.core.intent import Intent, NodeMessage, NodeProposal
from flashckpt.core.lineage import Generation, is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.superblock import SlotHeader, SlotState
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.negotiation import Negotiation
from flashckpt.daemon.persister.protocol import Action, Cause, Event, Outcome
from flashckpt.shm.inventory import NodeInventory, SlotEntry


class FencedError(Exception):
    """A newer generation has claimed the root."""


class UnreachableError(Exception):
    """The root does not answer."""


@dataclass
class Root:
    """What lies on the root; it refuses what must never be written."""

    intents: dict[SnapshotId, Intent] = field(default_factory=dict)
    marks: set[SnapshotId] = field(default_factory=set)
    proposals: dict[tuple[int, int], NodeProposal] = field(default_factory=dict)
    indexes: dict[SnapshotId, set[int]] = field(default_factory=lambda: defaultdict(set))
    committed: set[SnapshotId] = field(default_factory=set)
    tombstones: set[SnapshotId] = field(default_factory=set)
    claims: dict[int, Generation] = field(default_factory=dict)
    leases: dict[SnapshotId, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    decided: dict[SnapshotId, tuple[int, ...]] = field(default_factory=dict)
    carried: dict[int, NodeMessage] = field(
        default_factory=dict
    )  # by the ranks, not on the root: by the lowest of a node

    def decide(self, intent: Intent) -> bool:
        """As `put_intent`."""
        if intent.identity in self.intents:
            return False
        self.intents[intent.identity] = intent
        writers = self.decided.setdefault(intent.identity, intent.writers)
        assert writers == intent.writers, f"two decisions for {intent.identity}"
        return True

    def commit(self, intent: Intent) -> Event:
        """As `writer.commit`."""
        identity = intent.identity
        if identity in self.tombstones:
            return p.TombstoneFound()
        if identity not in self.committed:
            missing = set(intent.writers) - self.indexes[identity]
            if missing:
                return p.CommitFailed(Cause.INCOMPLETE, "an index is missing")
            self.committed.add(identity)
        self.check()
        return p.Committed()

    def bury(self, identity: SnapshotId) -> None:
        """As retention (a committed checkpoint) or the sweep (one that was given up) does."""
        self.committed.discard(identity)
        self.tombstones.add(identity)
        self.indexes.pop(identity, None)

    def check(self) -> None:
        """What always holds."""
        assert not self.committed & self.tombstones, "a checkpoint that was deleted is back"
        for identity in self.committed:
            writers = self.decided[identity]
            assert self.indexes[identity] >= set(writers), f"{identity} lacks an index of {writers}"


@dataclass
class Node:
    """One node: slots that training overwrites, and a persister that may die and start again.

    Attributes:
        root: Shared by all nodes.
        name: For people.
        ranks: Of this node.
        world_size: Of the job.
        nodes: Nodes of the job.
        slots: Per rank.
        machine: None while no persister lives.
        pending: Actions that are not executed yet.
        writing: What is being written in the background.
        result: How it ended, which the persister has not heard of.
        reachable: Whether the root answers this node.
        carries: Whether its ranks carry messages, at once; one that was carried before stays where it is.
        sent: What its ranks are to carry.
        fails: What the next commit of this node fails with.
        lasts: Whether a commit of this node works in the background, and has not ended.
    """

    root: Root
    name: str
    ranks: tuple[int, ...]
    world_size: int
    nodes: int
    slots: int = 3
    generation: Generation = field(default_factory=lambda: Generation(number=1))
    machine: Negotiation | None = None
    pending: deque[Action] = field(default_factory=deque)
    writing: p.StartWrite | None = None
    result: p.WriteFinished | p.WriteFailed | None = None
    pinned: set[SnapshotId] = field(default_factory=set)
    reachable: bool = True
    carries: bool = False
    sent: NodeMessage | None = None
    fails: Cause | None = None
    lasts: bool = False
    runs: SnapshotId | None = None
    effects: list[str] = field(default_factory=list)
    _headers: dict[int, list[SlotHeader]] = field(default_factory=dict)
    _sequence: int = 0

    # -- training -------------------------------------------------------------------------------------------

    def take(self, step: int, *, persist: bool = False, ranks: Iterable[int] | None = None) -> bool:
        """Every rank (or some) takes a snapshot into its oldest slot that is not pinned; whether all could."""
        self._sequence += 1
        done = True
        for rank in self.ranks if ranks is None else ranks:
            headers = self._headers.setdefault(rank, [SlotHeader() for _ in range(self.slots)])
            free = [k for k, header in enumerate(headers) if header.identity not in self.pinned or not header.sequence]
            if not free:
                done = False
                continue
            slot = min(free, key=lambda k: headers[k].sequence)
            headers[slot] = SlotHeader(
                sequence=self._sequence, generation=self.generation.number, step=step, state=SlotState.COMPLETE,
                world_size=self.world_size, rank=rank, persist=persist, parent=self.generation.parent,
            )  # fmt: skip
        return done

    def lose_memory(self) -> None:
        """The machine is replaced: nothing that was in memory is there."""
        self._headers.clear()

    def inventory(self) -> NodeInventory:
        """What the persister sees."""
        slots = [
            SlotEntry(path=Path(f"r{rank}"), slot=k, rank=rank, header=header)
            for rank, headers in self._headers.items()
            for k, header in enumerate(headers)
            if header.sequence
        ]
        return NodeInventory(slots=slots, lineage=[self.generation], least_slots=self.slots if slots else 0)

    # -- the persister --------------------------------------------------------------------------------------

    def start(self) -> None:
        """A persister starts, knowing nothing."""
        self.die()
        self.machine = Negotiation(self.nodes)

    def die(self) -> None:
        """It is killed: its leases end, what it was writing is never finished."""
        self.machine, self.writing, self.result, self.runs = None, None, None, None
        self.pending.clear()
        self.pinned.clear()

    def feed(self, event: Event) -> None:
        """An event comes to the persister."""
        if self.machine is not None:
            self.pending = deque(self.machine.step(event))

    def tick(self, now_s: float, *, urgent: bool = False) -> None:
        """Begin a turn; how a write ended comes first."""
        assert not self.pending, "the turn before it is not over"
        self.hear()
        self.run()
        node, received = self.inventory(), self.received()
        self.feed(p.Tick(now_s=now_s, node=node, generation=self.generation, urgent=urgent, received=received))

    def received(self) -> tuple[NodeMessage, ...] | None:
        """What the ranks have carried here: all to the leader, the leader's to the others."""
        if not self.carries:
            return None
        if self.sent is not None and self.sent.generation == self.generation.number:
            self.root.carried[self.ranks[0]] = self.sent
        carried = self.root.carried
        found = sorted(carried.items()) if 0 in self.ranks else [(0, carried[0])] if 0 in carried else []
        return tuple(one for _, one in found if one.generation == self.generation.number)

    def advance(self) -> Action:
        """Execute the next action; what fails ends the turn, as an error raised to the loop does."""
        action = self.pending.popleft()
        try:
            answer = self._execute(action)
        except (FencedError, UnreachableError) as error:
            self.effects.append(type(error).__name__.removesuffix("Error").lower())
            self.pending.clear()
            return action
        if answer is not None:
            self.feed(answer)
        return action

    def run(self) -> None:
        """Execute until the turn is over."""
        while self.pending:
            self.advance()

    def hear(self) -> None:
        """The persister learns how its write ended."""
        result, self.result = self.result, None
        if result is not None:
            self.feed(result)

    def finish(self, now_s: float) -> None:
        """What is being written becomes durable; the persister has yet to hear of it."""
        if self.writing is not None:
            intent, ranks = self.writing.intent, self.writing.ranks
            self.writing = None
            self.root.indexes[intent.identity] |= set(ranks)
            self.result = p.WriteFinished(now_s)

    def fail(self, cause: Cause) -> None:
        """What is being written fails."""
        if self.writing is not None:
            ranks, self.writing = self.writing.ranks, None
            self.result = p.WriteFailed(cause, cause.name.lower(), ranks)

    # -- execution ------------------------------------------------------------------------------------------

    def _execute(self, action: Action) -> Event | None:
        match action:
            case p.PinSlots(identity, ranks):
                return self._pin(identity, ranks)
            case p.Unpin(identity):
                self.pinned.discard(identity)
                self._did(f"unpin {_id(identity)}")
                return None
            case p.StopCommit():
                self.runs = None
                self._did("stop commit")
                return None
            case p.EndWrite(identity, outcome):
                self.writing = self.result = self.runs = None
                self.pinned.discard(identity)
                self._did(f"end {_id(identity)} {outcome.value}")
                assert outcome is not Outcome.COMMITTED or identity in self.root.committed | self.root.tombstones
                return None
            case p.Send(message):
                self.sent = message
                self.received()
                decided = f" decided {_id(message.decided)}" if message.decided[1] else ""
                self._did(f"send {_proposal(message)}{decided}")
                return None
        if not self.reachable:
            raise UnreachableError
        return self._look(action) or self._write(action)

    def _pin(self, identity: SnapshotId, ranks: tuple[int, ...]) -> Event:
        holding = {r for r, headers in self._headers.items() for h in headers if h.sequence and h.identity == identity}
        if not set(ranks) <= holding:
            self._did(f"miss {_id(identity)}")
            return p.PinLost()
        self.pinned.add(identity)
        self._did(f"pin {_id(identity)}")
        assert len(self.pinned) <= 2, "a candidate is held until the next one is, and no more"
        return p.Pinned()

    def _look(self, action: Action) -> Event | None:
        root = self.root
        match action:
            case p.ReadRoot():
                known = [one for one in root.committed if not is_rolled_back(one, [self.generation])]
                return p.RootRead(max(known, default=None))
            case p.ReadIntents():
                open_ones = [one for key, one in root.intents.items() if key not in root.marks]
                ordered = sorted(open_ones, key=lambda one: one.identity, reverse=True)
                return p.IntentsRead(tuple(ordered), frozenset(root.marks & root.intents.keys()))
            case p.ReadProposals(generation, of_all):
                found = [one for (g, _), one in sorted(root.proposals.items()) if g == generation]
                return p.ProposalsRead(tuple(found if of_all else found[:1]))
            case p.ReadIndexes(identity, writers):
                return p.IndexesRead(tuple(rank for rank in writers if rank not in root.indexes[identity]))
            case p.ReadOutcome(identity):
                if identity in root.committed | root.tombstones:
                    return p.CommitFound()
                if identity in root.marks:
                    return p.AbandonmentFound()
                return p.RollbackFound() if is_rolled_back(identity, root.claims.values()) else p.NothingFound()
            case p.ReadCommitLease(identity):
                held = root.leases[identity]
                holder, renewals = held[-1] if held else ("", 0)
                return p.LeaseRead(len(held) - 1, renewals, holder == self.name)
        return None

    def _write(self, action: Action) -> Event:
        root = self.root
        match action:
            case p.StartWrite(intent, ranks):
                self.writing = action
                self._did(f"write {_id(intent.identity)} [{' '.join(map(str, ranks))}]")
            case p.CheckFence():
                if max(root.claims, default=0) > self.generation.number:
                    raise FencedError
                root.claims[self.generation.number] = self.generation
            case p.PublishProposal(generation, proposal):
                root.proposals[generation, min(proposal.ranks)] = proposal
                self._did(f"propose {_proposal(proposal)}")
            case p.WriteIntent(identity, writers):
                new = root.decide(Intent(generation=identity[0], step=identity[1], writers=writers))
                self._did(f"decide {_id(identity)}" + ("" if new else " (stands)"))
            case p.CloseIntent(identity):
                root.intents.pop(identity, None)
                root.marks.discard(identity)
                self._did(f"close {_id(identity)}")
            case p.AbandonIntent(identity, _):
                root.marks.add(identity)
                self._did(f"abandon {_id(identity)}")
            case p.TakeCommitLease(identity, number):
                if len(root.leases[identity]) != number:
                    self._did(f"lose lease {number}")
                    return p.LeaseLost()
                root.leases[identity].append((self.name, 0))
                self._did(f"lease {number}")
                return p.LeaseTaken()
            case p.RenewCommitLease(identity, number):
                holder, renewals = root.leases[identity][number]
                assert holder == self.name, "the lease of another node is never renewed"
                root.leases[identity][number] = holder, renewals + 1
            case p.Commit(intent):
                return self._commit(intent)
            case p.ApplyRetention():
                self._did("retain")
            case p.Sweep(_):
                self._did("sweep")
            case _:
                raise AssertionError(action)
        return p.Done()

    def _commit(self, intent: Intent) -> Event:
        there = intent.identity in self.root.committed
        if self.lasts and not there:
            if self.runs is None:
                self._did(f"commit {_id(intent.identity)} (runs)")
            self.runs = intent.identity
            return p.CommitRuns()
        self.runs = None
        failure, self.fails = self.fails, None
        answer = p.CommitFailed(failure, failure.name.lower()) if failure is not None else self.root.commit(intent)
        note = {p.TombstoneFound: " (tombstone)", p.CommitFailed: " (fails)"}.get(
            type(answer), " (there)" if there else ""
        )
        self._did(f"commit {_id(intent.identity)}{note}")
        return answer

    def _did(self, what: str) -> None:
        self.effects.append(what)


def _id(identity: SnapshotId) -> str:
    return f"{identity[0]}/{identity[1]}"


def _proposal(proposal: NodeProposal) -> str:
    if proposal.pinned is not None:
        text = _id(proposal.pinned)
    else:
        text = f"from {_id(proposal.at_least)}" if proposal.at_least[1] else "nothing"
    return text + (" urgently" if proposal.urgent else "")
