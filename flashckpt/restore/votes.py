"""What the ranks tell each other about one candidate, and what follows for all of them. One collective per vote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from flashckpt import collectives
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DisagreementError, FlashckptError, ObjectStateError, TensorMismatchError

MOST_REASON_CHARS = 300
"""Most characters of an error that are sent to every rank."""
Result = TypeVar("Result")
_OF_THE_PROGRAM = (TensorMismatchError, ObjectStateError)


class CandidateState(IntEnum):
    """What a rank can do about a candidate."""

    REJECTED = 0
    READY = 1
    LACKING = 2
    """Something of it is to be asked of other nodes."""
    MISMATCH = 3
    """It is of another program."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a step failed on this rank: the ranks decide together what becomes of it."""

    error: Exception

    @property
    def reason(self) -> str:
        """The error in one line, as it is sent to other ranks."""
        return str(self.error).replace("\n", "; ")[:MOST_REASON_CHARS]

    @property
    def state(self) -> CandidateState:
        """What the rank votes."""
        is_mismatch = isinstance(self.error, _OF_THE_PROGRAM)
        return CandidateState.MISMATCH if is_mismatch else CandidateState.REJECTED


def attempted(step: Callable[[], Result]) -> Result | Rejection:
    """Return what a step returns, or its error as a value: an exception here would leave other ranks waiting."""
    try:
        return step()
    except (FlashckptError, OSError) as error:
        return Rejection(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One rank's answer on one candidate.

    Attributes:
        id: The candidate: all ranks must try the same one.
        state: What the rank can do about it.
        reason: Why it rejects it; "" if it does not.
        foreign_names: How many names the sources have and this rank has not.
        own_names: How many names this rank has.
        tier_bytes: Bytes that went into its live state, by tier.
    """

    id: SnapshotId
    state: CandidateState
    reason: str = ""
    foreign_names: int = 0
    own_names: int = 0
    tier_bytes: Mapping[str, int] = field(default_factory=dict)

    def pack(self) -> dict[str, Any]:
        """Return it as msgpack types."""
        return asdict(self) | {"id": list(self.id), "state": int(self.state)}

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Vote:
        """Return what `pack` packed."""
        return cls(**packed | {"id": SnapshotId.of(packed["id"]), "state": CandidateState(packed["state"])})


@dataclass(frozen=True, slots=True)
class Ballot:
    """All ranks' votes, in rank order."""

    votes: Sequence[Vote]

    @property
    def is_lacking(self) -> bool:
        """Whether some rank must ask other nodes, and none rejects the candidate."""
        states = {vote.state for vote in self.votes}
        return CandidateState.LACKING in states and CandidateState.REJECTED not in states

    @property
    def rejecting_rank(self) -> int | None:
        """The first rank that rejects the candidate; None where none does."""
        return next((rank for rank, vote in enumerate(self.votes) if vote.state is CandidateState.REJECTED), None)


def hold(vote: Vote, rejection: Rejection | None = None) -> Ballot:
    """Exchange votes. Collective.

    Args:
        vote: This rank's.
        rejection: The error behind it.

    Raises:
        DisagreementError: Another rank tries another candidate; names it. On every rank.
        TensorMismatchError: What some rank has is of another form than the candidate's, or an object does not take its
            state. On every rank: an older candidate might fit by chance, and everything since would be lost.
    """
    is_alone = collectives.is_alone()
    votes = [vote] if is_alone else [Vote.unpack(packed) for packed in collectives.all_gather(vote.pack())]
    for rank, other in enumerate(votes):
        if other.id != votes[0].id:
            raise DisagreementError(
                "ranks disagree on what to restore",
                found=f"rank {rank}: {other.id}",
                expected=f"rank 0: {votes[0].id}",
                state="Nothing was restored.",
                remedy="start the job again; the same versions of the program must run on every node",
            )
    first = next((rank for rank, other in enumerate(votes) if other.state is CandidateState.MISMATCH), None)
    if first is None:
        return Ballot(votes)
    if rejection is not None and isinstance(rejection.error, _OF_THE_PROGRAM):
        raise rejection.error
    raise TensorMismatchError(
        f"snapshot of {vote.id} does not match this program (see rank {first})",
        found=votes[first].reason,
        state="Nothing was restored.",
    )
