"""The inputs and outputs of a negotiation: events and actions, as values.

A *question* is an action that is answered by one of the events that it names. Whatever is asked of the root is a
question, for it may fail: an action without an answer cannot.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from flashckpt.core.intent import Intent, NodeMessage, NodeProposal
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId


class NodeSlots(Protocol):
    """What the slots of this node hold at one moment; see `flashckpt.shm.inventory.NodeInventory`."""

    @property
    def least_slots(self) -> int:
        """Slots of the rank that has fewest; 0 without any."""

    def newest_generation(self) -> int:
        """Newest generation that has begun a snapshot here; 0 if none has."""

    def ranks(self, generation: int) -> tuple[int, ...]:
        """Ranks of this node that have begun a snapshot in `generation`, ascending."""

    def world_size(self, generation: int) -> int:
        """Ranks of the worker group of `generation`; 0 if nothing is known of it."""

    def complete(self) -> list[SnapshotId]:
        """Snapshots that every rank of this node holds whole, ascending."""

    def flagged(self) -> list[SnapshotId]:
        """Those of them that are to be persisted, ascending."""

    def is_whole(self, generation: int) -> bool:
        """Whether all ranks of the worker group of `generation` are on this node."""

    def holders(self, identity: SnapshotId) -> Collection[int]:
        """Ranks that hold one snapshot."""

    def may_hold(self, rank: int, identity: SnapshotId) -> bool:
        """Whether a rank holds a snapshot, is writing it, or has yet to reach it."""


class Outcome(enum.Enum):
    """How this node's work on one intent ends."""

    COMMITTED = "committed"
    GIVEN_UP = "given up"
    DEFERRED = "deferred"
    """The slots were given back while storage fails; the intent stays open."""


class Cause(enum.Enum):
    """Why a write or a commit failed."""

    STORAGE = "the storage: it may be retried forever"
    INCOMPLETE = "something is not there yet"
    DAMAGED = "bytes are not those that were written: written again, they may be"
    FINAL = "no attempt can succeed"


# -- events: something happened -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time to do what can be done; what was asked before and not answered is asked again.

    Attributes:
        now_s: Seconds of a clock that never goes back.
        generation: The current generation of the job.
        urgent: Persist the newest common snapshot now, whether it is of a persist step or not.
        received: Messages of other nodes, which the ranks carry: all of them for the leader, the leader's for the
            others. None while no ranks carry anything.
        common: Snapshots that all ranks of the job are known to hold; None where that is not known.
        lacked: Those that some hold and others are known to have lost.
        is_due: Whether enough time has passed since the last persist; else this node only joins others.
    """

    now_s: float
    node: NodeSlots
    generation: Generation
    urgent: bool = False
    received: tuple[NodeMessage, ...] | None = None
    common: tuple[SnapshotId, ...] | None = None
    lacked: tuple[SnapshotId, ...] = ()
    is_due: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    """The root is not to be asked now; `failing`: because storage fails, so that training needs the slots."""

    node: NodeSlots
    urgent: bool = False
    failing: bool = False


@dataclass(frozen=True, slots=True)
class WriteFinished:
    """The indexes of all slots of this node are durable."""

    now_s: float


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The slots of `ranks` are not written; what of theirs was under way has ended."""

    cause: Cause
    problem: str
    ranks: tuple[int, ...]


# -- events: answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """It was done."""


@dataclass(frozen=True, slots=True)
class RootRead:
    """The newest checkpoint of this line of generations; None where there is none."""

    committed: SnapshotId | None


@dataclass(frozen=True, slots=True)
class IntentsRead:
    """Open intents, newest first, and the snapshots whose intents were abandoned."""

    intents: tuple[Intent, ...]
    abandoned: frozenset[SnapshotId] = frozenset()


@dataclass(frozen=True, slots=True)
class ProposalsRead:
    """What all nodes of a generation propose, this one among them.

    Attributes:
        node: This node's slots after that was read; None: as they were before.
    """

    proposals: tuple[NodeProposal, ...]
    node: NodeSlots | None = None


@dataclass(frozen=True, slots=True)
class IndexesRead:
    """The writers whose index is not there."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaseRead:
    """Who commits, at present.

    Attributes:
        number: Of the newest lease; -1 where there is none.
        stamp: When it was renewed, by the clock of the storage: only whether it changes counts.
    """

    number: int = -1
    stamp: float = 0.0
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """This node commits."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Another node took the lease of this number before."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """The slots are pinned."""


@dataclass(frozen=True, slots=True)
class PinLost:
    """One of the slots holds the snapshot no more; none is pinned."""


@dataclass(frozen=True, slots=True)
class CommitFound:
    """Something lies where MANIFEST belongs: a commit, or a tombstone."""


@dataclass(frozen=True, slots=True)
class AbandonmentFound:
    """The intent was abandoned."""


@dataclass(frozen=True, slots=True)
class RollbackFound:
    """Neither, and a generation between its own and the one that runs here began before it."""


@dataclass(frozen=True, slots=True)
class NothingFound:
    """None of these."""


@dataclass(frozen=True, slots=True)
class Committed:
    """MANIFEST exists, and is whole."""


@dataclass(frozen=True, slots=True)
class CommitRuns:
    """It works in the background: asked again, the commit tells its end."""


@dataclass(frozen=True, slots=True)
class TombstoneFound:
    """The checkpoint was given up and swept, or deleted: nobody may commit it any more."""


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """MANIFEST was not written, or cannot be used."""

    cause: Cause
    problem: str


Event = (
    Tick | Paused | WriteFinished | WriteFailed | Done | RootRead | IntentsRead | ProposalsRead | IndexesRead
    | LeaseRead | LeaseTaken | LeaseLost | Pinned | PinLost | CommitFound | AbandonmentFound | RollbackFound
    | NothingFound | Committed | CommitRuns | TombstoneFound | CommitFailed
)  # fmt: skip
STARTING = (Tick, Paused, WriteFinished, WriteFailed)
"""Events that answer nothing: each begins a turn."""


# -- actions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do."""

    answers: ClassVar[tuple[type, ...]] = ()


class Question(Action):
    """Something to do that is answered by an event of one of `answers`."""

    __slots__ = ()
    answers: ClassVar[tuple[type, ...]] = (Done,)


@dataclass(frozen=True, slots=True)
class Unpin(Action):
    """Release the slots of the candidate."""

    identity: SnapshotId


@dataclass(frozen=True, slots=True)
class EndWrite(Action):
    """The work on an intent is over: give its slots back, wait for what is being written."""

    identity: SnapshotId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class StopCommit(Action):
    """Another node commits: what works on it here ends before it creates MANIFEST."""


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Let the ranks carry a message to the other nodes, in the place of the one before."""

    message: NodeMessage


@dataclass(frozen=True, slots=True)
class PinSlots(Question):
    """Take leases on one snapshot of all `ranks`, or of none."""

    answers = (Pinned, PinLost)
    identity: SnapshotId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartWrite(Question):
    """Write the pinned slots of `ranks` in the background. WriteFinished or WriteFailed follows."""

    intent: Intent
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadRoot(Question):
    """Find the newest checkpoint that was not rolled back."""

    answers = (RootRead,)


@dataclass(frozen=True, slots=True)
class ReadIntents(Question):
    """List the decisions of the job."""

    answers = (IntentsRead,)


@dataclass(frozen=True, slots=True)
class ReadProposals(Question):
    """List what the nodes propose; with `of_all` what each of them does, else only the node that leads."""

    answers = (ProposalsRead,)
    generation: int
    of_all: bool = True


@dataclass(frozen=True, slots=True)
class PublishProposal(Question):
    """Publish this node's proposal to the other nodes."""

    generation: int
    proposal: NodeProposal


@dataclass(frozen=True, slots=True)
class CheckFence(Question):
    """Make sure that no newer generation has claimed the root, and that this one has; else stop here."""


@dataclass(frozen=True, slots=True)
class WriteIntent(Question):
    """Decide: this snapshot is persisted next. A decision that is there for it stands."""

    identity: SnapshotId
    writers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseIntent(Question):
    """Remove an intent that nobody waits for."""

    identity: SnapshotId


@dataclass(frozen=True, slots=True)
class AbandonIntent(Question):
    """Mark an intent: nobody commits it, every node unpins."""

    identity: SnapshotId
    reason: str


@dataclass(frozen=True, slots=True)
class ReadIndexes(Question):
    """Find out which of `writers` have no index yet."""

    answers = (IndexesRead,)
    identity: SnapshotId
    writers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadOutcome(Question):
    """Look whether a checkpoint was committed, and if not, whether it must not be any more."""

    answers = (CommitFound, AbandonmentFound, RollbackFound, NothingFound)
    identity: SnapshotId


@dataclass(frozen=True, slots=True)
class ReadCommitLease(Question):
    """Look who is to commit a snapshot."""

    answers = (LeaseRead,)
    identity: SnapshotId


@dataclass(frozen=True, slots=True)
class TakeCommitLease(Question):
    """Become the node that commits, by the lease of this number; one of all that try does."""

    answers = (LeaseTaken, LeaseLost)
    identity: SnapshotId
    number: int


@dataclass(frozen=True, slots=True)
class RenewCommitLease(Question):
    """Show that this node still is the one that commits."""

    identity: SnapshotId
    number: int


@dataclass(frozen=True, slots=True)
class Commit(Question):
    """Verify all indexes and create MANIFEST; one that is there is verified. What takes long is asked again."""

    answers = (Committed, CommitRuns, TombstoneFound, CommitFailed)
    intent: Intent


@dataclass(frozen=True, slots=True)
class ApplyRetention(Question):
    """Delete the checkpoints that the policy does not keep."""


@dataclass(frozen=True, slots=True)
class Sweep(Question):
    """Remove what dead writers left."""

    committed: SnapshotId | None


Turn = Generator[Action, Event, None]
"""The course of one turn: an action comes out, its answer goes in (`Done` for what has none)."""
_Answer = TypeVar("_Answer")


def ask(question: Question, kind: type[_Answer]) -> Generator[Action, Event, _Answer]:
    """Ask a question that has one kind of answer."""
    answer = yield question
    assert isinstance(answer, kind)
    return answer
