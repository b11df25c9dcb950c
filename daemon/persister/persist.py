"""From an intent to its commit: what one node does for the snapshot of an intent. No I/O, like `negotiation`.

It may be tried again as often as it takes: packs are written again, an index that is there is kept, MANIFEST is created
once. The slots are held until the snapshot is committed or given up.

The node that holds the commit lease commits. Only the holder looks for the other writers' indexes, so that waiting for a
commit costs a node one small listing, whatever the number of nodes. A lease is a number that goes up: the next one is taken
by one conditional write, which one of all nodes wins. No two clocks are compared: a lease has expired for a node that has
not seen it change for long enough. MANIFEST is created once whoever tries, so a holder that was only slow does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from flashckpt.core.intent import Intent
from flashckpt.core.lineage import is_rolled_back
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.protocol import Action, Event, NodeSlots, Outcome, Tick

INTENT_PATIENCE_S = 600.0
"""Seconds that the node that commits waits for the writers of others before it gives an intent up."""
EARLIER_PATIENCE_S = 60.0
"""The same once a newer generation runs: writers may have gone with their machine, and newer snapshots wait to be persisted.
And where somebody has removed what this node wrote: others will not write theirs again."""
ATTEMPTS = 4
"""Times that damaged data is written again before the snapshot is given up."""
LEASE_S = 5.0
"""Seconds without a change after which the lease of another node has expired."""
LEASE_WRITERS = 2500
"""Writers up to which that is long enough: a commit of more takes longer without a renewal, and is waited for as much longer."""
RENEWALS = 3
"""Renewals of a lease in the time in which it would expire."""
ROLLED_BACK = "its lineage was rolled back by a restore"

_Work = Generator[Action, Event, Outcome | None]
"""Some work on the intent, and how it ends; None: it is not over."""


@dataclass
class CommitLease:
    """What this node knows of the lease of one snapshot.

    Attributes:
        expires_s: Seconds without a change after which it is another node's turn.
        since_s: When `seen` was seen first, by this node's clock.
        seen: The lease as it was last read; at first none.
        held: Number of the lease that this node holds; None where it holds none.
        renewed_s: When it was taken or renewed.
    """

    identity: SnapshotId
    expires_s: float
    since_s: float
    seen: p.LeaseRead = field(default_factory=p.LeaseRead)
    held: int | None = None
    renewed_s: float = 0.0

    def hold(self, now_s: float, *, leads: bool) -> Generator[Action, Event, bool]:
        """Return whether this node is to commit: it holds the lease, or could take it now.

        Args:
            now_s: Seconds of a clock that never goes back.
            leads: Whether this is the node that commits unless it is late: it waits for nobody to take the first lease.
        """
        if self.held is not None and now_s - self.renewed_s < self.expires_s / RENEWALS:
            return True
        seen = yield from p.ask(p.ReadCommitLease(self.identity), p.LeaseRead)
        if seen.is_own:
            yield p.RenewCommitLease(self.identity, seen.number)
            return self._has(seen.number, now_s)
        self.held = None
        if seen != self.seen:
            self.seen, self.since_s = seen, now_s
        is_free = leads and seen.number < 0
        if not is_free and now_s - self.since_s < self.expires_s:
            return False
        answer = yield p.TakeCommitLease(self.identity, seen.number + 1)
        return isinstance(answer, p.LeaseTaken) and self._has(seen.number + 1, now_s)

    def _has(self, number: int, now_s: float) -> bool:
        self.held, self.renewed_s = number, now_s
        return True


def lease_of(identity: SnapshotId, writers: int, written_s: float) -> CommitLease:
    """Return the lease of a snapshot before anything is known of it."""
    return CommitLease(identity, LEASE_S * max(1.0, writers / LEASE_WRITERS), written_s)


@dataclass
class Persist:
    """This node's work on one intent.

    Attributes:
        pinned: Ranks whose slots are held; may lack those whose index is there already.
        left: Those of them that are still to be written.
        is_committing: Whether a commit works in the background here.
        is_there: Whether it only looks at what was found in the place of MANIFEST.
        written_s: When the last index of this node became durable; None before.
        has_waited: Whether the other writers were not done when this node was.
        attempts: Failures that were not the storage's.
        leads: Whether this is the node of the lowest writer, as last seen.
        lease: Who commits; None before this node has written, and where all writers are its own.
        problem: Why the snapshot was given up, where it was for a failure; "" before.
    """

    intent: Intent
    pinned: tuple[int, ...]
    left: tuple[int, ...]
    is_writing: bool = False
    is_committing: bool = False
    is_there: bool = False
    written_s: float | None = None
    has_waited: bool = False
    attempts: int = 0
    leads: bool = True
    lease: CommitLease | None = None
    problem: str = ""

    def advance(self, tick: Tick, may_look: Callable[[], bool]) -> _Work:
        """Write, then wait for the other writers, then commit where that is this node's turn."""
        if self.written_s is None:
            if not self.is_writing:
                yield p.StartWrite(self.intent, self.left)
                self.is_writing = True
        elif self.is_committing:
            return (yield from self._continue(tick.now_s))
        elif not self.has_waited or may_look():
            return (yield from self._look(tick))
        return None

    def _look(self, tick: Tick) -> _Work:
        """Find out what has become of the snapshot, and commit it where that is this node's turn."""
        identity = self.intent.identity
        yield p.CheckFence()
        is_over = is_rolled_back(identity, [tick.generation])
        self._see(tick.node)
        found = p.RollbackFound() if is_over else (yield p.ReadOutcome(identity))
        if isinstance(found, p.RollbackFound):
            yield p.AbandonIntent(identity, ROLLED_BACK)
        if isinstance(found, p.AbandonmentFound | p.RollbackFound):
            return Outcome.GIVEN_UP
        is_there = isinstance(found, p.CommitFound)
        patience_s = INTENT_PATIENCE_S if tick.generation.number == identity.generation else EARLIER_PATIENCE_S
        if is_there or (yield from self._may_commit(tick.now_s, patience_s)):
            self.is_there = is_there
            return (yield from self._commit())
        return None

    def _continue(self, now_s: float) -> _Work:
        """Renew the lease while the commit works, however long it takes; where another node has it, the work here ends."""
        if self.lease is None or self.is_there or (yield from self.lease.hold(now_s, leads=self.leads)):
            return (yield from self._commit())
        self.is_committing, self.has_waited = False, True
        yield p.StopCommit()
        return None

    def write_finished(self, event: p.WriteFinished) -> None:
        """All slots of this node are written."""
        self.is_writing, self.left, self.written_s = False, (), event.now_s

    def write_failed(self, event: p.WriteFailed) -> _Work:
        """Some are not; what the storage refused is written again with the next turn."""
        self.is_writing, self.left = False, event.ranks
        if event.cause is p.Cause.STORAGE:
            return None
        return (yield from self._failed(event.cause, event.problem))

    def _may_commit(self, now_s: float, patience_s: float) -> Generator[Action, Event, bool]:
        """Whether it is this node's turn and every writer's index is there; its patience ends some day."""
        assert self.written_s is not None
        if self.lease is not None and not (yield from self.lease.hold(now_s, leads=self.leads)):
            self.has_waited = True
            return False
        indexes = yield from p.ask(p.ReadIndexes(self.intent.identity, self.intent.writers), p.IndexesRead)
        if not indexes.missing:
            return True
        self.has_waited = True
        if not {*self.pinned}.isdisjoint(indexes.missing):  # what was written here is there no more, or a listing lags
            patience_s = EARLIER_PATIENCE_S
        if now_s - self.written_s > patience_s:
            yield p.AbandonIntent(self.intent.identity, "other writers did not finish")
        return False

    def _see(self, node: NodeSlots) -> None:
        """Take in which ranks are here; a node that was restarted and holds nothing yet counts as it did."""
        here = set(node.ranks(self.intent.generation))
        self.leads = not here or min(here) == min(self.intent.writers)
        if self.lease is None and self.written_s is not None and not here.issuperset(self.intent.writers):
            self.lease = lease_of(self.intent.identity, len(self.intent.writers), self.written_s)

    def _commit(self) -> _Work:
        answer = yield p.Commit(self.intent)
        self.is_committing = isinstance(answer, p.CommitRuns)
        if self.is_committing:
            return None
        if isinstance(answer, p.CommitFailed):
            if answer.cause is p.Cause.DAMAGED and not self.is_there:  # what was durable is not: write ours again
                self.left, self.written_s = self.pinned, None
            return (yield from self._failed(answer.cause, answer.problem))
        return Outcome.GIVEN_UP if isinstance(answer, p.TombstoneFound) else Outcome.COMMITTED

    def _failed(self, cause: p.Cause, problem: str) -> _Work:
        """Give the snapshot up where another attempt cannot help."""
        self.attempts += 1
        if cause is not p.Cause.FINAL and self.attempts < ATTEMPTS:
            return None
        yield p.AbandonIntent(self.intent.identity, problem)
        self.problem = problem
        return Outcome.GIVEN_UP
