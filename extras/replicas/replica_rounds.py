"""Which snapshot the nodes replicate next, and which one no replica of may be overwritten: decided from what all nodes report. Pure.

Whoever decides keeps nothing between two decisions, so that another process can do it at any moment: all that counts is in
the reports, and what a report says stays true (a node that cannot take a snapshot to its partners any more never can again).

A node that cannot be reached is passed over, by all alike, and what that may cost is bounded by one rule: the newest snapshot that
is everywhere stays until something newer is everywhere or on storage. docs/decisions/replica-rounds-without-a-node.md says why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from flashckpt.core.snapshot_id import SnapshotId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node says of the snapshots of the current generation.

    Attributes:
        held: Ids that all its ranks hold COMPLETE here.
        replicated: Ids that all its partners hold COMPLETE of it, as they have confirmed.
        target: The id that it is sending now; None if it sends none.
        everywhere: Newest id that it knows to have been everywhere, or that the generation was restored from in memory.
        kept: Newest id that it knows no replica of may be overwritten; that one, or what took its place.
        committed: Newest id of this generation that it knows to be on storage.
        passed_over: Partners that have taken nothing from it for too long.
        reached: Ids that its other partners hold, where some are passed over; None where no other is left.
    """

    held: tuple[SnapshotId, ...] = ()
    replicated: tuple[SnapshotId, ...] = ()
    target: SnapshotId | None = None
    everywhere: SnapshotId | None = None
    kept: SnapshotId | None = None
    committed: SnapshotId | None = None
    passed_over: tuple[int, ...] = ()
    reached: tuple[SnapshotId, ...] | None = None

    @property
    def arrived(self) -> tuple[SnapshotId, ...]:
        """Ids that all its partners hold but for those that are passed over; where no other is left, what it would send them.

        What is kept counts there, too: else it would be sent and not sent in turn.
        """
        if not self.passed_over:
            return self.replicated
        if self.reached is None:
            return tuple(one for one in self.held if one in (self.target, self.kept))
        return self.reached

    @property
    def sent(self) -> set[SnapshotId]:
        """Ids that partners hold."""
        return {*self.replicated, *(self.reached or ())}

    def can_finish(self, identity: SnapshotId) -> bool:
        """Whether its partners hold a snapshot of it, or can get it."""
        return identity in self.held or identity in self.replicated or identity in self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """What all nodes do.

    Attributes:
        target: The id to send; None: nothing, until something newer is there.
        everywhere: Newest id that every partner of every node holds; None before the first, or while a node is silent.
        kept: The id of which nothing may be overwritten: the newest one everywhere, until something newer takes its place.
        without: Nodes that are passed over.
        waits: Nothing follows yet: not all have reported to a node that has just begun to decide. Nobody takes it.
    """

    target: SnapshotId | None = None
    everywhere: SnapshotId | None = None
    kept: SnapshotId | None = None
    without: tuple[int, ...] = ()
    waits: bool = False


def decide(
    reports: Sequence[NodeReport | None],
    *,
    every: int = 1,
    silent: Collection[int] = frozenset(),
    before: RoundDecision | None = None,
) -> RoundDecision:
    """Return what follows from the reports of all nodes; None stands for a node that has not reported.

    A snapshot under way stays the target while every node can finish it: otherwise a slow network would never get
    any through. Only where one cannot, the newest one that all hold takes its place.

    While nodes are passed over, the target moves on with what arrives at the others. It takes the place of what was everywhere only
    once that is on storage as well: no partner has all of it, and a silent node's own part may be overwritten at any time.
    What is in doubt, because it has arrived from all that report and the silent ones may have been heard by another node, stays too.

    Args:
        reports: Of all nodes.
        every: Only steps that are multiples of this are replicated.
        silent: Nodes that have not reported for too long; what they reported before is not in `reports`.
        before: What the same process decided last.
    """
    there = [report for report in reports if report is not None]
    if not there or any(report is None and node not in silent for node, report in enumerate(reports)):
        return RoundDecision(waits=True)
    before = before or RoundDecision()
    without = sorted({*silent, *(node for report in there for node in report.passed_over)})
    kept = newest([before.kept, *(report.kept for report in there)])
    # what is older than that may be overwritten already
    replicated = newest(i for i in _in_all(one.replicated for one in there) if kept is None or i >= kept)
    everywhere, doubt = (None, replicated) if silent else (replicated, None)
    arrived = newest(_in_all(report.arrived for report in there))
    floor = newest([before.everywhere, everywhere, doubt, *(report.everywhere for report in there)])
    kept = newest([everywhere, kept])
    if without and _is_on_storage(there, floor):
        kept = newest([kept, arrived])
    elif doubt is not None and doubt != kept:
        return RoundDecision(target=doubt, kept=kept, without=tuple(without))
    target = _target(there, every, arrived, kept)
    if target is None and without and arrived is not None and arrived != kept:
        target = arrived  # has arrived, and is kept where it comes from until something newer is sent
    return RoundDecision(target=target, everywhere=everywhere, kept=kept, without=tuple(without))


def _target(
    there: Sequence[NodeReport], every: int, arrived: SnapshotId | None, kept: SnapshotId | None
) -> SnapshotId | None:
    """Return what all are to send: what is under way, else the newest one; None where nothing is newer than what has arrived."""
    possible = [
        identity
        for identity in {*there[0].held, *there[0].replicated, *there[0].arrived}
        if identity.step % every == 0
        and (arrived is None or identity > arrived)
        and (kept is None or identity >= kept)
        and all(report.can_finish(identity) for report in there)
    ]
    sent = {report.target for report in there} | {identity for report in there for identity in report.sent}
    return newest(i for i in possible if i in sent) or newest(possible)


def _is_on_storage(there: Sequence[NodeReport], identity: SnapshotId | None) -> bool:
    """Return whether nothing is lost with a snapshot: something as new is on storage, or there was none."""
    committed = newest(report.committed for report in there)
    return identity is None or (committed is not None and committed >= identity)


def _in_all(found: Iterable[Iterable[SnapshotId]]) -> set[SnapshotId]:
    return set.intersection(*map(set, found))


def newest(found: Iterable[SnapshotId | None]) -> SnapshotId | None:
    """Return the newest id; None where there is none."""
    return max((identity for identity in found if identity is not None), default=None)
