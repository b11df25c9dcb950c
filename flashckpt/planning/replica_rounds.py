"""Which snapshot the nodes replicate next, and which one is replicated everywhere: decided from what all nodes report. Pure.

Whoever decides keeps nothing between two decisions, so that another process can do it at any moment: all that counts is in
the reports, and what a report says stays true (a node that cannot take a snapshot to its partners any more never can again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashckpt.core.snapshot_id import SnapshotId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node says of the snapshots of the current generation.

    Attributes:
        held: Ids that all its ranks hold COMPLETE here.
        replicated: Ids that all its partners hold COMPLETE of it, as they have confirmed.
        target: The id that it is sending now; None if it sends none.
    """

    held: tuple[SnapshotId, ...] = ()
    replicated: tuple[SnapshotId, ...] = ()
    target: SnapshotId | None = None

    def can_finish(self, identity: SnapshotId) -> bool:
        """Whether its partners hold a snapshot of it, or can get it."""
        return identity in self.held or identity in self.replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """What all nodes do.

    Attributes:
        target: The id to send; None: nothing, until something newer is there.
        everywhere: Newest id that every partner of every node holds; None before the first.
        unrecoverable: Ids that some partner holds and that can never be everywhere: they protect nothing.
    """

    target: SnapshotId | None = None
    everywhere: SnapshotId | None = None
    unrecoverable: tuple[SnapshotId, ...] = ()


def decide(reports: Sequence[NodeReport | None], *, every: int = 1) -> RoundDecision:
    """Return what follows from the reports of all nodes; None stands for a node that has not reported.

    A snapshot under way stays the target while every node can finish it: otherwise a slow network would never get
    any through. Only where one cannot, the newest one that all hold takes its place.

    Args:
        reports: Of all nodes.
        every: Only steps that are multiples of this are replicated.
    """
    there = [report for report in reports if report is not None]
    if not there or len(there) < len(reports):
        return RoundDecision()
    everywhere = max(set.intersection(*(set(report.replicated) for report in there)), default=None)
    seen = {identity for report in there for identity in report.replicated}
    lost = sorted(i for i in seen if not all(report.can_finish(i) for report in there))
    possible = [
        identity
        for identity in {*there[0].held, *there[0].replicated}
        if identity.step % every == 0
        and (everywhere is None or identity > everywhere)
        and all(report.can_finish(identity) for report in there)
    ]
    under_way = {report.target for report in there} | {i for i in seen if i in possible}
    target = max((i for i in possible if i in under_way), default=None) or max(possible, default=None)
    return RoundDecision(target=target, everywhere=everywhere, unrecoverable=tuple(lost))
