"""One candidate, all ranks together: the steps of `candidate`, with a vote behind each that any rank can fail at."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flashckpt import collectives
from flashckpt.collectives import HostGroup
from flashckpt.errors import FlashckptError, ShardGapError
from flashckpt.planning.inventory import Inventory, host_names, node_names
from flashckpt.planning.peer_index import PeerQuery
from flashckpt.report import RestoreReport
from flashckpt.restore import votes
from flashckpt.restore.candidate import Attempt, Prepared, fill, lacks_values, prepare, queries, require_covered
from flashckpt.restore.candidate_sources import (
    CandidateSources,
    Checkpoint,
    open_memory,
    open_storage,
    pin_served,
    slots_served_by,
)
from flashckpt.restore.peers import PeerExchange, Peers
from flashckpt.restore.shared_reads import SharedReads
from flashckpt.restore.sources import Source, StorageSource
from flashckpt.restore.votes import Ballot, CandidateState, Rejection, Vote, attempted, hold

TIERS = ("memory", "peer", "storage")


class Rejected(NamedTuple):
    """Why all ranks gave a candidate up.

    Attributes:
        here: One sentence for this rank's log: its own error, or what the first rank that failed said.
        everywhere: The same sentence on every rank.
        error: What to raise where nothing else can be restored.
    """

    here: str
    everywhere: str
    error: FlashckptError


class _Lacking(NamedTuple):
    """Other nodes are to be asked for what these sources do not have."""

    sources: CandidateSources


@dataclass(frozen=True, kw_only=True, eq=False)
class _Exchange:
    """The other nodes' memory of one candidate. Every method is a collective."""

    group: HostGroup
    peers: Peers

    @classmethod
    def join(
        cls, attempt: Attempt, segments: Sequence[Path], sources: CandidateSources, stack: contextlib.ExitStack
    ) -> _Exchange:
        """Pin what this rank answers for, and join the other ranks."""
        group = HostGroup()
        stack.callback(group.close)
        served = slots_served_by(attempt.locations, attempt.node, attempt.rank)
        held = pin_served(segments, attempt.candidate, served, sources.memory, stack)
        return cls(group=group, peers=Peers(group, attempt.locations, held, rank=attempt.rank, node=attempt.node))

    def ask(self, attempt: Attempt, sources: CandidateSources, *, replace_own: bool) -> Prepared | Rejection:
        """Ask for what this node lacks; answer the others; plan over what there is then.

        Args:
            attempt: The candidate.
            sources: Of this node, and the root.
            replace_own: Something here turned out damaged: ask for everything, to have another copy of whatever it is.
        """
        sources = sources.with_peers(())
        failure: Rejection | None = None
        for has_asked in (False, True):  # a second time for tensors whose names came with the first answer
            wanted: list[PeerQuery] = []
            if failure is None:
                asked = attempted(_Asking(attempt, sources, has_asked=has_asked, replace_own=replace_own))
                failure, wanted = (asked, []) if isinstance(asked, Rejection) else (None, asked)
            if not self.group.total(len(wanted)):
                break
            found = self.peers.find(wanted)
            sources = sources.with_peers(found if failure is None else ())
        return failure if failure is not None else attempted(lambda: _covered(attempt, sources))


@dataclass(frozen=True)
class _Asking:
    """What this rank lacks; see `_Exchange.ask`."""

    attempt: Attempt
    sources: CandidateSources
    has_asked: bool
    replace_own: bool

    def __call__(self) -> list[PeerQuery]:
        sources = self.sources
        near: list[Source] = [*sources.memory, *sources.peers]
        planned = replace(sources, memory=()) if self.replace_own else sources
        prepared = prepare(self.attempt, planned, exact=True, named_by=near)
        return queries(self.attempt, prepared, has_asked=self.has_asked)


def restore_candidate(
    attempt: Attempt,
    segments: Sequence[Path],
    checkpoint: Checkpoint | None,
    inventories: Sequence[Inventory],
    stack: contextlib.ExitStack,
) -> RestoreReport | Rejected:
    """Fill live state from one candidate, if every rank can. Collective: two votes, more where nodes exchange.

    `stack` closes everything that is opened.

    Raises:
        DisagreementError: Another rank tries another candidate.
        TensorMismatchError: It is of another program.
        UnexpectedStateError: It has state that no rank has. All of them on every rank.
    """
    opened = attempted(lambda: _open(attempt, segments, checkpoint, stack))
    begun = opened if isinstance(opened, Rejection) else attempted(lambda: _begin(attempt, opened))
    ballot = _vote_on_plan(attempt, begun)
    exchange: _Exchange | None = None
    if ballot.is_lacking:
        assert isinstance(opened, CandidateSources)  # a rank without them has rejected the candidate
        exchange = _Exchange.join(attempt, segments, opened, stack)
        begun = exchange.ask(attempt, opened, replace_own=False)
        ballot = _vote_on_plan(attempt, begun)
    if ballot.rejecting_rank is not None:
        return _rejected(attempt, begun, ballot)
    assert isinstance(opened, CandidateSources)
    assert isinstance(begun, Prepared)
    prepared = _without_unexpected(attempt, begun, ballot)
    remote: PeerExchange | SharedReads | None = None
    if exchange is not None:
        remote = PeerExchange(exchange.peers, prepared.sources.all)
    elif checkpoint is not None:
        remote = SharedReads.join(prepared.plan, prepared.sources.all, attempt.rank, stack)
    filled, ballot = _fill_and_vote(attempt, prepared, remote)
    if ballot.rejecting_rank is not None and len({location.node for location in attempt.locations}) > 1:
        attempt = attempt.read_again()
        exchange = _Exchange.join(attempt, segments, opened, stack)
        filled, ballot = _fill_again(attempt, exchange, opened, filled, prepared.left_behind)
    if ballot.rejecting_rank is not None or isinstance(filled, Rejection):
        return _rejected(attempt, filled, ballot)
    manifest_bytes = 0 if checkpoint is None else checkpoint.nbytes
    return replace(filled, nodes=_by_node(inventories, ballot), manifest_bytes=manifest_bytes)


def _open(
    attempt: Attempt, segments: Sequence[Path], checkpoint: Checkpoint | None, stack: contextlib.ExitStack
) -> CandidateSources:
    """Open this node's slots and the checkpoint."""
    with attempt.phases("open"):
        wanted = attempt.candidate
        memory = open_memory(segments, wanted.identity, attempt.rank, stack, own=attempt.own, mark=wanted.mark)
        storage: list[StorageSource] = []
        if checkpoint is not None:
            try:
                storage.append(open_storage(checkpoint, attempt.tracked.world.suffix, stack))
            except (FlashckptError, OSError):
                if not attempt.locations and not memory:  # memory may do without the root
                    raise
        return CandidateSources(memory=tuple(memory), storage=tuple(storage))


def _begin(attempt: Attempt, sources: CandidateSources) -> Prepared | _Lacking:
    """Plan over what this node can reach alone."""
    if not attempt.may_ask:
        return _covered(attempt, sources)
    prepared = prepare(attempt, sources, exact=True, named_by=sources.memory)
    if queries(attempt, prepared, has_asked=False) or lacks_values(attempt, prepared):
        return _Lacking(sources)
    return require_covered(attempt, prepared)  # all of it lies here, under its own name


def _covered(attempt: Attempt, sources: CandidateSources) -> Prepared:
    """Plan over sources that must be enough.

    Raises:
        ShardGapError: They are not.
    """
    is_whole = attempt.candidate.is_common or bool(sources.storage)
    return require_covered(attempt, prepare(attempt, sources, exact=not is_whole, named_by=sources.all))


def _vote_on_plan(attempt: Attempt, answer: Prepared | _Lacking | Rejection) -> Ballot:
    """Tell all ranks whether this one can be filled. Collective; raises as `hold`."""
    id_ = attempt.candidate.identity
    if isinstance(answer, Rejection):
        return hold(Vote(id=id_, state=answer.state, reason=answer.reason), answer)
    if isinstance(answer, _Lacking):
        return hold(Vote(id=id_, state=CandidateState.LACKING))
    names = answer.comparison
    return hold(Vote(id=id_, state=CandidateState.READY, foreign_names=len(names.foreign), own_names=names.count))


def _fill_and_vote(
    attempt: Attempt, prepared: Prepared, remote: PeerExchange | SharedReads | None
) -> tuple[RestoreReport | Rejection, Ballot]:
    """Fill live state; return this rank's report and every rank's vote. Collective."""
    filled = attempted(lambda: fill(attempt, prepared, remote))
    if remote is not None:
        remote.drain()
    id_ = attempt.candidate.identity
    if isinstance(filled, Rejection):
        return filled, hold(Vote(id=id_, state=filled.state, reason=filled.reason), filled)
    return filled, hold(Vote(id=id_, state=CandidateState.READY, tier_bytes=dict(filled.tier_bytes)))


def _fill_again(
    attempt: Attempt,
    exchange: _Exchange,
    sources: CandidateSources,
    failed: RestoreReport | Rejection,
    left_behind: Sequence[str],
) -> tuple[RestoreReport | Rejection, Ballot]:
    """Fill once more with what other nodes have, as `_fill_and_vote`. Collective.

    Args:
        attempt: The candidate, and live state as it is now.
        exchange: The other nodes.
        sources: Of this node, and the root.
        failed: What became of it on this rank: what turned out damaged here is asked for, all of it.
        left_behind: Names that no rank has.
    """
    again = exchange.ask(attempt, sources, replace_own=isinstance(failed, Rejection))
    ballot = _vote_on_plan(attempt, again)
    if ballot.rejecting_rank is not None or isinstance(again, Rejection):
        return again if isinstance(again, Rejection) else failed, ballot
    prepared = replace(again, left_behind=left_behind)
    return _fill_and_vote(attempt, prepared, PeerExchange(exchange.peers, prepared.sources.all))


def _without_unexpected(attempt: Attempt, prepared: Prepared, ballot: Ballot) -> Prepared:
    """Find what no rank has of the candidate. Collective where some rank does not have all that it knows of.

    Raises:
        UnexpectedStateError: There is some, and it was not allowed. On every rank; an older candidate is not tried:
            it is the program that is another one.
    """
    if not any(vote.foreign_names for vote in ballot.votes):
        return prepared
    names = prepared.comparison
    left_behind = votes.names_nowhere(names.foreign, names.own, counts=[vote.own_names for vote in ballot.votes])
    if attempt.is_strict:
        everywhere = collectives.all_gather([len(left_behind), left_behind[:5]])
        examples = sorted({name for _, some in everywhere for name in some})
        votes.refuse_unexpected(examples, max(count for count, _ in everywhere), str(attempt.candidate.identity))
    return replace(prepared, left_behind=left_behind)


def _rejected(attempt: Attempt, answer: object, ballot: Ballot) -> Rejected:
    """Return why the candidate was given up: this rank's own error, and what the first failing rank said."""
    rank = ballot.rejecting_rank
    assert rank is not None
    what, reason = f"{attempt.candidate.identity} is not restored", ballot.votes[rank].reason
    everywhere = f"{what}: rank {rank}: {reason}"
    own = answer.error if isinstance(answer, Rejection) else None
    error = own if isinstance(own, FlashckptError) else ShardGapError(f"{what}: rank {rank}", found=reason)
    return Rejected(here=everywhere if own is None else f"{what}: {own}", everywhere=everywhere, error=error)


def _by_node(inventories: Sequence[Inventory], ballot: Ballot) -> dict[str, dict[str, int]]:
    """Return the bytes per tier that the ranks of each node restored."""
    labels, index = host_names(inventories), {name: k for k, name in enumerate(node_names(inventories))}
    found: dict[str, dict[str, int]] = {label: {} for label in labels}
    for inventory, vote in zip(inventories, ballot.votes, strict=False):
        tiers = found[labels[index[inventory.node]]]
        for tier in TIERS:
            if nbytes := vote.tier_bytes.get(tier, 0):
                tiers[tier] = tiers.get(tier, 0) + nbytes
    return found
