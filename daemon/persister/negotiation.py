"""Who persists which snapshot, and when it counts: the decisions of one node, as a state machine without I/O.

`Negotiation.step(event)` returns the actions to execute, in order. At most the last of them is a question (`protocol`):
its answer is the next event. Where the answer fails to come, the next `Tick` begins a new turn. There is no clock, no
store and no thread in here: time comes with the events. `coordinator` executes; `tests/scenarios` are transcripts.

Failures, and how each is handled:

* The leader dies before it has decided: the next daemon of its node decides. After its index, or before its commit:
  one other node takes the lease (`persist`) and commits. Everything that is written may be repeated.
* A node is late: its snapshot is not complete yet (it waits), or is overwritten already (it abandons the intent, and all
  unpin). Other writers that never finish: the holder of the lease abandons the intent after `persist.INTENT_PATIENCE_S`,
  and sooner once a newer generation runs.
* There is a tombstone in place of MANIFEST: the snapshot is given up here, and never committed.
* A snapshot was abandoned and all daemons have restarted since: its mark keeps them from deciding on it again.
"""

from __future__ import annotations

from collections.abc import Generator

from flashckpt.core.intent import Intent, NodeMessage, NodeProposal
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.snapshot_id import BEFORE_ALL, MIN_SLOTS, NOTHING, SnapshotId
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.agreement import Search, choose_proposal, next_candidate, of_other_nodes
from flashckpt.daemon.persister.messaging import Messaging, RootLooks, aged
from flashckpt.daemon.persister.persist import ROLLED_BACK, Persist
from flashckpt.daemon.persister.protocol import Action, Event, NodeSlots, Outcome, Tick

SWEEP_EVERY_S = 1800.0
"""Seconds between two sweeps of the root."""


class Negotiation:
    """The decisions of one node.

    Args:
        persist_every: Steps between two persist steps; 1 where that is not known.

    Attributes:
        committed: Newest committed snapshot of this root, as far as known.
        floor: Nothing at or below it is persisted any more.
        persist: The open intent that this node works on.
        candidate: The snapshot that is pinned while no intent is open.
        skipped: Persist steps that were seen complete here and left out, since another was being persisted.
        given_up: Why the last snapshot that was given up was; "" if none was.
        is_due: Whether enough time has passed since the last persist.
    """

    def __init__(self, node_count: int = 1, persist_every: int = 1) -> None:
        self.committed: SnapshotId | None = None
        self.floor = BEFORE_ALL
        self.persist: Persist | None = None
        self.candidate: SnapshotId | None = None
        self.skipped = 0
        self.given_up = ""
        self.is_due = True
        self._node_count, self._persist_every = node_count, persist_every
        self._pinned: tuple[int, ...] = ()  # ranks whose slots of the candidate are held
        self._owed = BEFORE_ALL  # to be persisted, or something newer, though it may be overwritten meanwhile
        self._root_is_read = False
        self._fenced = 0  # the generation whose claim was seen on the root
        self._intents_are_read = False
        self._abandoned: frozenset[SnapshotId] = frozenset()
        self._search = Search()
        self._tried = NOTHING, 0  # the snapshot that was deferred last, and the attempts that failed
        self._seen: set[SnapshotId] = set()
        self._heard: list[NodeProposal] = []
        self._published: NodeProposal | None = None
        self._messaging = Messaging()
        self._announced = NOTHING
        self._looks = RootLooks()
        self._swept_s = float("-inf")
        self._turn: p.Turn | None = None
        self._question: Action | None = None

    def step(self, event: Event) -> list[Action]:
        """Take one event in; return what to do about it, the question last.

        A state changes only once what it rests on was done: an executor that fails in the middle leaves the machine
        as it was before that action. An unexpected answer changes nothing.
        """
        if isinstance(event, p.STARTING):
            self._turn = self._begin(event)
            return self._advance(None)
        if self._question is None or not isinstance(event, self._question.answers):
            return []
        return self._advance(event)

    def undone(self, node: NodeSlots, *, urgent: bool) -> list[SnapshotId]:
        """Return what this node holds and was to persist: the open intent's snapshot, else the newest; [] if none."""
        if self.persist is not None:
            return [self.persist.intent.identity]
        wanted = node.complete() if urgent else self._flagged(node)
        possible = [identity for identity in wanted if self._node_count > 1 or node.is_whole(identity[0])]
        return sorted(identity for identity in possible if identity > self.floor)[-1:]

    @property
    def sought(self) -> SnapshotId | None:
        """The nodes are to meet at the first persist step from this one on, of which this node holds none yet; None: nowhere."""
        is_met = self.persist is not None or self.candidate is not None
        return None if is_met or self._search.target <= self.floor else self._search.target

    # -- one turn -------------------------------------------------------------------------------------------

    def _advance(self, answer: Event | None) -> list[Action]:
        """Continue to the next question, or to the end of the turn."""
        assert self._turn is not None
        actions: list[Action] = []
        self._question = None
        try:
            while self._question is None:
                action = next(self._turn) if answer is None else self._turn.send(answer)
                actions.append(action)
                # what has no answer cannot fail: the turn continues at once
                answer, self._question = p.Done(), action if action.answers else None
        except StopIteration:
            self._turn = None
        return actions

    def _begin(self, event: Event) -> p.Turn:
        match event:
            case Tick():
                return self._tick(event)
            case p.Paused():
                return self._pause(event)
            case p.WriteFinished():
                return self._finished(event)
            case p.WriteFailed():
                return self._write_failed(event)
        raise AssertionError(event)

    def _tick(self, tick: Tick) -> p.Turn:
        self.is_due = tick.is_due
        yield from self._hold(tick.node, urgent=tick.urgent)
        if not self._root_is_read:
            if self.candidate is None and not tick.urgent and not tick.node.newest_generation():
                return
            self.committed = (yield from p.ask(p.ReadRoot(), p.RootRead)).committed
            self.floor = max(self.floor, self.committed or self.floor)
            self._root_is_read = True
        if self.persist is None:
            yield from self._decide(tick)
        if self.persist is not None:
            yield from self._messaging.announce(tick, self.persist.intent.identity)
            writers = len(self.persist.intent.writers)
            outcome = yield from self.persist.advance(tick, lambda: self._looks.may_for_commit(tick.now_s, writers))
            yield from self._end(self.persist, outcome)
        if self.persist is None and tick.now_s - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = tick.now_s  # a failed retention is not retried at once: nothing depends on it
            yield p.Sweep(self.committed)

    def _pause(self, event: p.Paused) -> p.Turn:
        """Hold on to the candidate; if training would have no slot left to write, release all pins instead.

        With two slots a pinned one leaves none: the other holds the newest snapshot. While storage fails the memory
        tier must continue, and the next attempt takes what is newest then.
        """
        persist = self.persist
        if (
            not event.failing
            or not 0 < event.node.least_slots <= MIN_SLOTS
            or (persist and (persist.is_writing or persist.is_committing))
        ):
            yield from self._hold(event.node, urgent=event.urgent)
            return
        pinned = persist.intent.identity if persist is not None else self.candidate
        if pinned is not None:
            self._owed = max(self._owed, pinned)
            self._intents_are_read = False  # an open intent is checked again: it may have to be given up
        if persist is not None:
            self.persist, self._tried = None, (persist.intent.identity, persist.attempts)
            self._root_is_read = False  # a write that failed may be there, and others may commit it
            yield p.EndWrite(persist.intent.identity, Outcome.DEFERRED)
        yield from self._unpin()

    # -- pins: at most one snapshot per node ----------------------------------------------------------------

    def _hold(self, node: NodeSlots, *, urgent: bool) -> p.Turn:
        """Keep the newest candidate pinned if this node has all ranks; this needs no access to the root."""
        flagged = self._flagged(node)
        whole = [one for one in (node.complete() if urgent else flagged) if node.is_whole(one[0])]
        self._seen.update(flagged)
        if self.persist is not None or self._has_others(node):
            return
        if self.candidate is not None and self.candidate not in whole:
            yield from self._unpin()  # rolled back by a restore, or no longer asked for
        best = max(whole, default=None)
        if best is not None and best > self.floor and best != self.candidate:
            yield from self._pin(node, best)

    def _flagged(self, node: NodeSlots) -> list[SnapshotId]:
        """Return what is to be persisted; if that was released and overwritten, the newest snapshot instead."""
        flagged = [identity for identity in self._marked(node) if identity > self.floor]
        if not flagged and self._owed > self.floor:
            flagged = [identity for identity in node.complete() if identity >= self._owed][-1:]
        return flagged

    def _marked(self, node: NodeSlots) -> list[SnapshotId]:
        """Return the snapshots that ranks marked; none before it is time, unless one is pinned or another node asks for it."""
        is_open = self.is_due or self.candidate is not None or any(map(self._is_wanting, self._heard))
        return node.flagged() if is_open else []

    def _pin(self, node: NodeSlots, identity: SnapshotId) -> p.Turn:
        """Hold another candidate; where it has just been overwritten, keep the present one."""
        ranks = tuple(sorted(node.holders(identity)))
        if isinstance((yield p.PinSlots(identity, ranks)), p.Pinned):
            yield from self._unpin()
            self.candidate, self._pinned = identity, ranks

    def _unpin(self) -> p.Turn:
        if self.candidate is not None:
            gone, self.candidate, self._pinned = self.candidate, None, ()
            yield p.Unpin(gone)

    # -- agreement: from proposals to an intent -------------------------------------------------------------

    def _has_others(self, node: NodeSlots) -> bool:
        """Whether the newest generation here has ranks on other nodes."""
        return self._node_count > 1 and not node.is_whole(node.newest_generation())

    def _is_idle(self, tick: Tick) -> bool:
        """Whether neither this node has anything to persist nor another one, as far as it has received."""
        is_wanted = any(map(self._is_wanting, self._heard))
        return not (tick.urgent or is_wanted or self.candidate is not None or self._flagged(tick.node))

    def _is_wanting(self, one: NodeProposal) -> bool:
        return one.urgent or max(one.at_least, one.pinned or NOTHING) > max(self.floor, NOTHING)

    def _decide(self, tick: Tick) -> p.Turn:
        """Adopt the open intent, or open one if this node may and the nodes agree."""
        has_others = self._has_others(tick.node)
        is_idle = self._is_idle(tick)
        received = self._messaging.believed(tick, is_idle=is_idle) if has_others else None
        announced = self._messaging.announced(received or (), floor=self.floor, abandoned=self._abandoned)
        is_quiet = received is not None and announced is None
        look = not self._intents_are_read or (
            has_others and self._looks.may(tick.now_s, is_idle=is_idle, is_quiet=is_quiet)
        )
        if announced is not None and announced != self._announced:
            look, self._announced = True, announced
        if look and received is not None:
            self._looks.last_s = tick.now_s
        if look and (yield from self._adopt(tick)):
            return
        if look and is_quiet and is_idle:
            received = None  # once in a while: of a node whose ranks carry nothing only the root knows
        self._intents_are_read = True  # a node that has all ranks is the only one that opens intents from here on
        if has_others:
            if tick.node.newest_generation():
                yield from self._agree(tick, received, look=look)
        elif self.candidate is not None:
            identity, writers = self.candidate, tuple(range(tick.node.world_size(self.candidate[0])))
            yield from self._open(identity, writers)
            self._start(Intent(generation=identity[0], step=identity[1], writers=writers), self._pinned)

    def _agree(self, tick: Tick, received: tuple[NodeMessage, ...] | None, *, look: bool) -> p.Turn:
        """Pin what the nodes converge on, propose it, and open the intent once they agree and this node leads."""
        node, generation = tick.node, tick.node.newest_generation()
        ranks, world_size = node.ranks(generation), node.world_size(generation)
        if received is not None:
            self._heard = of_other_nodes([one for one in received if one.proposes_in == generation], ranks)
        elif look:
            # the leader reads what all propose, the others what it proposes: a request for each node, not for each pair
            answer = yield from p.ask(p.ReadProposals(generation, of_all=0 in ranks), p.ProposalsRead)
            self._heard = of_other_nodes(answer.proposals, ranks)
            node = answer.node or node  # else what is gone meanwhile would be taken for something that is to come
        alike = [  # of a generation with the same ranks here: others cannot be agreed on in these proposals
            identity
            for identity in node.complete()
            if (node.ranks(identity[0]), node.world_size(identity[0])) == (ranks, world_size)
        ]
        # What others have lost while this node held it with its last free slot, over a restart: nobody takes part in it.
        lacked = [identity for identity in tick.lacked if identity < (tick.generation.parent or NOTHING)]
        # also what others persist in place of a step that one of their ranks skipped or discarded: no rank here has marked it
        asked = {*self._marked(node), *(one.pinned for one in self._heard)}
        flagged = [identity for identity in alike if identity in asked and identity not in lacked]
        self._search, wanted = next_candidate(
            self._search,
            flagged=flagged,
            newest=max(alike, default=SnapshotId(0, -1)),
            floor=self.floor,
            others=self._heard or [NodeProposal(ranks=ranks, world_size=0)],
            common=tick.common,
            spacing=self._persist_every,
            slots=node.least_slots,
        )
        if wanted != self.candidate:
            yield from self._unpin()
            if wanted is not None:
                yield from self._pin(node, wanted)
        mine = NodeProposal(
            ranks=ranks,
            world_size=world_size,
            pinned=self.candidate,
            at_least=self._search.target,
            complete=tuple(alike),
            urgent=tick.urgent,
        )
        is_idle = self._is_idle(tick)
        if received is not None:
            yield from self._messaging.send(tick, mine, waits=not is_idle)
        if look or received is not None:
            yield from self._publish(tick, mine, is_carried=received is not None)
            yield from self._choose(tick, mine)

    def _choose(self, tick: Tick, mine: NodeProposal) -> p.Turn:
        """Decide where all agree and this node leads."""
        nodes = [mine, *self._heard]
        chosen = choose_proposal(nodes, self.floor)
        if chosen is None or min(mine.ranks) != min(min(one.ranks) for one in nodes):
            return
        if chosen[0] in self._abandoned:  # its marked intent is still there: deciding on it again would change nothing
            self.floor = chosen[0]
            return
        yield from self._open(chosen[0], tuple(range(mine.world_size)))
        yield from self._adopt(tick)

    def _publish(self, tick: Tick, mine: NodeProposal, *, is_carried: bool) -> p.Turn:
        """Propose on the root where it is news; if the ranks carry proposals, then no more than that this one is over."""
        is_idle, published = self._is_idle(tick), self._published
        if is_carried or (is_idle and tick.received is not None):
            is_over = is_idle and published is not None and self._is_wanting(published)
            if not is_over:
                return
        if mine != (aged(mine, published) if is_idle else published):
            yield p.PublishProposal(tick.node.newest_generation(), mine)
            self._published = mine

    def _open(self, identity: SnapshotId, writers: tuple[int, ...]) -> p.Turn:
        yield p.CheckFence()
        yield p.WriteIntent(identity, writers)

    def _adopt(self, tick: Tick) -> Generator[Action, Event, bool]:
        """Start or join the newest open intent of the root; True if there is one for this node to wait for."""
        answer = yield from p.ask(p.ReadIntents(), p.IntentsRead)
        self._abandoned = answer.abandoned
        if self.candidate is not None and self.candidate in answer.abandoned:
            self.floor = max(self.floor, self.candidate)
            yield from self._unpin()
        for intent in answer.intents:
            if intent.identity <= self.floor:
                yield p.CloseIntent(intent.identity)
                continue
            # the claim, once; whoever may be fenced since then finds it before a commit, and nothing counts earlier
            if self._fenced != tick.generation.number:
                yield p.CheckFence()  # also before an intent is abandoned: it may be of others, who continued without this node
                self._fenced = tick.generation.number
            if not is_rolled_back(intent.identity, [tick.generation]):
                return (yield from self._join(tick.node, intent))
            yield p.AbandonIntent(intent.identity, ROLLED_BACK)
        return False

    def _join(self, node: NodeSlots, intent: Intent) -> Generator[Action, Event, bool]:
        """Hold this node's slots of an intent and start to write them; False where it had to be abandoned."""
        identity = intent.identity
        # A node that holds nothing of an earlier generation any more answers for the ranks that it runs now: else all
        # would wait for the writers of a machine that was replaced.
        ranks = node.ranks(intent.generation) or node.ranks(node.newest_generation())
        here = {*intent.writers} & {*ranks} if self._node_count > 1 else intent.writers
        missing = (yield from p.ask(p.ReadIndexes(identity, tuple(sorted(here))), p.IndexesRead)).missing
        if identity == self.candidate and {*missing} <= {*self._pinned}:
            self._start(intent, self._pinned)
            return True
        if isinstance((yield p.PinSlots(identity, missing)), p.Pinned):
            if identity != self.candidate:
                yield from self._unpin()
            self._start(intent, missing)
            return True
        lost = [rank for rank in missing if not node.may_hold(rank, identity)]
        if not lost:
            return True  # it is not complete here yet
        yield p.AbandonIntent(identity, f"ranks {lost} no longer hold the snapshot in memory")
        self.floor = max(self.floor, identity)
        return False

    def _start(self, intent: Intent, pinned: tuple[int, ...]) -> None:
        """Work on an intent; the pins of the candidate are its own from here on."""
        self._messaging.decided()
        attempts = self._tried[1] if self._tried[0] == intent.identity else 0  # else what is damaged is tried for ever
        self.persist = Persist(intent=intent, pinned=pinned, left=pinned, attempts=attempts)
        self.candidate, self._pinned = None, ()

    def _write_failed(self, event: p.WriteFailed) -> p.Turn:
        if self.persist is not None:
            yield from self._end(self.persist, (yield from self.persist.write_failed(event)))

    def _finished(self, event: p.WriteFinished) -> p.Turn:
        if self.persist is not None:
            self.persist.write_finished(event)
        yield from ()

    def _end(self, persist: Persist, outcome: Outcome | None) -> p.Turn:
        """Let go of the snapshot of an intent, if the work on it is over; nothing up to it is persisted any more."""
        if outcome is None:
            return
        identity = persist.intent.identity
        self.persist, self._search = None, Search()
        self.floor = max(self.floor, identity)
        is_committed = outcome is Outcome.COMMITTED
        if is_committed:
            self.committed = max(self.committed or identity, identity)
        if persist.problem:
            self.given_up = f"step {identity.step} was given up: {persist.problem}"
        older = {seen for seen in self._seen if seen <= identity}
        self._seen -= older
        self.skipped += len(older - ({identity} if is_committed else set()))
        yield p.EndWrite(identity, outcome)
        if is_committed and persist.leads:
            yield p.CloseIntent(identity)
            yield p.ApplyRetention()
