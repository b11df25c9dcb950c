"""What the nodes of a job tell each other to persist one snapshot together: proposals, and the decision. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.core.snapshot_id import NOTHING, SnapshotId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProposal:
    """What one node offers while no intent is open.

    Attributes:
        ranks: Ranks whose slots lie on this node; the lowest one names the node.
        pinned: The snapshot it holds pinned, None while it waits for one.
        at_least: It asks all nodes for the first persist step from (generation, step) on: the highest wins.
        complete: All snapshots that every rank of this node holds now.
        urgent: It was asked to persist now: any common snapshot will do, not only one of a persist step.
    """

    ranks: tuple[int, ...]
    world_size: int
    pinned: SnapshotId | None = None
    at_least: SnapshotId = NOTHING
    complete: tuple[SnapshotId, ...] = ()
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage(NodeProposal):
    """What the persister of a node sends to the others through the ranks, while those run.

    Attributes:
        generation: Of the ranks that carry it.
        proposes_in: Generation of the snapshots that it proposes.
        decided: The newest snapshot whose intent this node knows to be open or to have been; the leader's counts.
        waits: Whether this node has something to persist and waits for the others.
    """

    generation: int
    proposes_in: int
    decided: SnapshotId = NOTHING
    waits: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """The leader's decision which snapshot the job persists.

    Attributes:
        writers: Global ranks that write; the commit waits for their indexes.
        leader: Who decided, for people ("node0 pid 1234").
        created_s: Unix seconds.
    """

    generation: int
    step: int
    writers: tuple[int, ...]
    leader: str = ""
    created_s: float = 0.0

    @property
    def identity(self) -> SnapshotId:
        """(generation, step)."""
        return SnapshotId(self.generation, self.step)
