"""How the nodes of a job agree on the snapshot that is persisted next. Pure functions.

Nodes that choose independently diverge and commit next to nothing. So one *intent* is open at a time: every node
persists exactly that snapshot. While none is open, every node pins a candidate and proposes it; once all have pinned
the same, the leader (the node of the lowest rank) opens the intent.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from flashckpt.core.intent import NodeProposal
from flashckpt.core.snapshot_id import NOTHING, SnapshotId


def covers_world(proposals: Collection[NodeProposal]) -> bool:
    """Return whether the nodes together hold every rank of one world."""
    worlds = {proposal.world_size for proposal in proposals}
    ranks = {rank for proposal in proposals for rank in proposal.ranks}
    if len(worlds) != 1 or len(ranks) != max(worlds):  # the size first: a damaged, huge one must not be iterated over
        return False
    return ranks == set(range(len(ranks)))


def of_other_nodes(proposals: Collection[NodeProposal], own: Collection[int]) -> list[NodeProposal]:
    """Return the records in force: one per node, without this node's own.

    A record is named by the lowest rank its node had when it wrote it. A daemon that started before all ranks
    of its node had a segment leaves an older one under another name: its ranks are within a later record's.
    """
    foreign = [proposal for proposal in proposals if not {*proposal.ranks} & {*own}]
    return [proposal for proposal in foreign if not any({*proposal.ranks} < {*other.ranks} for other in foreign)]


def choose_proposal(proposals: Collection[NodeProposal], floor: SnapshotId = NOTHING) -> tuple[SnapshotId, str] | None:
    """Return the snapshot to open an intent for and the reason, or None while the nodes do not agree yet.

    With an urgent request the newest snapshot that all nodes hold is chosen; else all must have pinned the
    same. Nothing at or below `floor` (committed or given up) is chosen again.
    """
    if not covers_world(proposals):
        return None
    if any(proposal.urgent for proposal in proposals):
        shared = set.intersection(*({*proposal.complete} for proposal in proposals))
        best = max(shared, default=floor)
        return (best, "request") if best > floor else None
    pinned = {proposal.pinned for proposal in proposals}
    (only,) = pinned if len(pinned) == 1 else (None,)
    return None if only is None or only <= floor else (only, "policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How one node searches for a snapshot that all nodes can pin.

    Args:
        target: It proposes the first persist step from this one; the highest target of all nodes wins.
        misses: How often a target was already overwritten here when this node learned of it.
    """

    target: SnapshotId = NOTHING
    misses: int = 0


def next_candidate(
    search: Search,
    *,
    flagged: Sequence[SnapshotId],
    newest: SnapshotId,
    floor: SnapshotId,
    others: Collection[NodeProposal],
    spacing: int = 1,
) -> tuple[Search, SnapshotId | None]:
    """Return how to continue and what to pin now (None: wait).

    A target that this node learns of before reaching it is safe: the first persist step from there is
    the same one on every node. If it has already overwritten the target, or had no slot for it while it
    held another candidate, it answers with what it holds instead, and from the second miss with a target
    in the future, twice as far each time (a doubling search), until all nodes learn of it in time.

    Args:
        search: Result of the last call; a new one after each intent.
        flagged: Complete snapshots of persist steps on this node, ascending.
        newest: The newest complete snapshot of any kind.
        floor: Only snapshots above this count (committed or given up).
        others: Proposals of the other nodes.
        spacing: Steps between two persist steps, as far as known.
    """
    usable = [identity for identity in flagged if identity > floor]
    if not others:
        best = max(usable, default=None)
        return replace(search, target=best or search.target), best
    heard = max(max(proposal.at_least, proposal.pinned or NOTHING) for proposal in others)
    if heard > max(search.target, floor):
        if heard not in usable and newest >= heard:
            best = max(usable, default=heard)
            if not search.misses and best > heard:  # the others may still hold ours, or have yet to reach it
                return Search(target=best, misses=1), best
            ahead = SnapshotId(newest.generation, newest.step + spacing * 2 ** min(search.misses, 16))
            return Search(target=max(ahead, heard), misses=search.misses + 1), None
        search = replace(search, target=heard)
    if search.target <= floor:
        best = max(usable, default=None)
        return replace(search, target=best or search.target), best
    found = next((identity for identity in usable if identity >= search.target), None)
    if found is not None and found != search.target and any(one.pinned == search.target for one in others):
        # the others hold what this node skipped for want of a slot: at first they may reach what it has instead
        ahead = SnapshotId(found.generation, found.step + spacing * 2 ** min(search.misses, 16))
        is_first = not search.misses
        search, found = (
            Search(target=found if is_first else ahead, misses=search.misses + 1),
            found if is_first else None,
        )
    return search, found


def spacing(flagged: Sequence[SnapshotId]) -> int:
    """Return the most steps between two snapshots that are to be persisted, at least 1."""
    steps = [step for _, step in flagged]
    return max((b - a for a, b in itertools.pairwise(steps)), default=1) or 1
