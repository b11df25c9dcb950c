"""How the nodes of a job agree on the snapshot that is persisted next. Pure functions.

Nodes that choose independently diverge and commit next to nothing. So one *intent* is open at a time: every node
persists exactly that snapshot. While none is open, every node pins a candidate and proposes it; once all have pinned
the same, the leader (the node of the lowest rank) opens the intent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from flashckpt.core.intent import NodeProposal
from flashckpt.core.snapshot_id import MIN_SLOTS, NOTHING, SnapshotId


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
    records = [(proposal, ranks) for proposal in proposals if not (ranks := {*proposal.ranks}) & {*own}]
    holders: dict[int, list[set[int]]] = defaultdict(list)  # by rank: the leader does this in every turn, for all nodes
    for _, ranks in records:
        for rank in ranks:
            holders[rank].append(ranks)

    def is_replaced(ranks: set[int]) -> bool:
        return any(ranks < later for rank in ranks or holders for later in holders[rank])

    return [proposal for proposal, ranks in records if not is_replaced(ranks)]


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
        misses: How often a target was already overwritten here when this node learned of it; 1 also after it skipped one.
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
    common: Collection[SnapshotId] | None = None,
    spacing: int = 1,
    slots: int = MIN_SLOTS + 1,
) -> tuple[Search, SnapshotId | None]:
    """Return how to continue and what to pin now (None: wait).

    A node offers what all ranks are known to hold: so the others can still pin it, and what one of them pins keeps no
    snapshot from becoming common. Where they offer different ones, the newest wins. A node that has overwritten or
    skipped that one answers with what it holds, which the others may hold too if they have a slot for it, and else
    with a target ahead.

    Why they meet, whatever the slots (2 are enough), nodes, steps and times of the root:

    * Who learns of the highest target before its own slots reach it (is not *late*) pins the first persist step from
      there, the same one on every node: slots are looked at with each snapshot, and by `Seeker` while the root is asked.
    * It holds that until it learns of a higher one, and only a node that missed names one. So once nobody is late, all
      hold the same, unless a rank skipped or discarded the very step.
    * A late node names the next persist step, then one half an interval ahead, then more than twice as far each time:
      sooner or later it is farther than the news takes. So a step that one node misses costs no more than an interval.
    * A step that was skipped or discarded makes none of them go farther each time. What its ranks take in its place is
      pinned by whoever still holds it.

    Args:
        search: Result of the last call; a new one after each intent.
        flagged: Complete snapshots on this node that are of persist steps, or that another node has pinned; ascending.
        newest: The newest complete snapshot of any kind.
        floor: Only snapshots above this count (committed or given up).
        others: Proposals of the other nodes.
        common: Those of them, and others, that all ranks are known to hold; None: that is not known.
        spacing: Steps between two persist steps; 1 where that is not known.
        slots: Of the rank that has fewest.
    """
    usable = [identity for identity in flagged if identity > floor]
    heard = max((max(proposal.at_least, proposal.pinned or NOTHING) for proposal in others), default=NOTHING)
    is_late = heard > max(search.target, floor) and heard not in usable and newest >= heard
    if not is_late and heard > max(search.target, floor):
        search = replace(search, target=heard)
    if not is_late and search.target <= floor:
        best = max((identity for identity in usable if common is None or identity in common), default=None)
        return replace(search, target=best or search.target), best
    found = next((identity for identity in usable if identity >= search.target), None)
    is_gone = search.target not in usable and newest >= search.target
    if not is_late and not (is_gone and any(proposal.pinned == search.target for proposal in others)):
        return search, found
    instead = max(usable, default=heard) if is_late else found
    if instead is not None and instead > heard and not search.misses and slots > MIN_SLOTS:
        return Search(target=instead, misses=1), instead  # the others may still hold this, or have yet to reach it
    distance = max(1, spacing * (2 ** min(search.misses, 16) - 1) // 2)
    ahead = SnapshotId(newest.generation, newest.step + distance)
    return Search(target=max(ahead, heard), misses=search.misses + is_late), None
