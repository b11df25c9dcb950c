"""What nodes remember between two decisions on replicas: each node for itself, and the one that decides. Pure but for that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.replicate.replica_rounds import NodeReport, RoundDecision, decide, newest


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerView:
    """What a node knows of one partner.

    Attributes:
        node: The partner.
        holds: Ids that it holds COMPLETE of all ranks of this node; None before it was asked.
        is_passed_over: It has taken nothing for too long.
    """

    node: int
    holds: Collection[SnapshotId] | None = None
    is_passed_over: bool = False


@dataclass
class RoundMemory:
    """What one node remembers: nothing that is kept gives way to anything older.

    Attributes:
        generation: Number of the current one.
        everywhere: Newest id that was everywhere, or that the generation was restored from in memory.
        kept: Newest id of which no replica may be overwritten.
        mark: The newest target. Replicas between the one that is kept and this one may be overwritten, and never count again.
        is_over: Nor does that target: some node can neither send it nor has sent it.
        decision: The last one.
    """

    generation: int = 0
    everywhere: SnapshotId | None = None
    kept: SnapshotId | None = None
    mark: SnapshotId | None = None
    is_over: bool = False
    decision: RoundDecision = field(default_factory=RoundDecision)

    @classmethod
    def begin(cls, generation: int, restored: SnapshotId | None, before: RoundMemory | None = None) -> RoundMemory:
        """Return that of the start of a generation.

        Args:
            generation: Its number.
            restored: What it was restored from in memory.
            before: That of the generation before, where this process remembers it: where what was restored is newer than what
                was everywhere, no partner may have it, and what was everywhere stays.
        """
        earlier = before.everywhere if before is not None else None
        kept = earlier if earlier is not None and restored is not None and earlier < restored else restored
        return cls(generation=generation, everywhere=kept, kept=kept)

    def adopt(self, decision: RoundDecision) -> None:
        """Take a decision: to be called before anything that follows from it is sent or pinned."""
        if decision == RoundDecision():  # not all have reported to a node that has just begun to decide
            return
        self.everywhere = newest([self.everywhere, decision.everywhere])
        self.kept = newest([self.kept, decision.kept])
        if decision.target is not None and (self.mark is None or decision.target > self.mark):
            self.mark, self.is_over = decision.target, False
        elif decision.target is None and self.mark is not None and (self.kept is None or self.mark > self.kept):
            self.is_over = True
        self.decision = decision

    def pinned(self) -> set[SnapshotId]:
        """Return the ids that stay in the slots of this node: what this node reports to have replicated may be everywhere."""
        is_needed = self.mark is not None and not self.is_over and (self.kept is None or self.mark > self.kept)
        return {identity for identity in (self.mark if is_needed else None, self.kept) if identity is not None}

    def report(
        self, held: Sequence[SnapshotId], partners: Sequence[PartnerView], committed: SnapshotId | None = None
    ) -> NodeReport | None:
        """Return what this node says; None until its partners have said what they hold.

        Args:
            held: Ids of this generation that all its ranks hold.
            partners: All of them.
            committed: Newest id of this generation that is on storage.
        """
        left = [partner for partner in partners if not partner.is_passed_over]
        if any(partner.holds is None for partner in left):
            return None
        is_out = len(left) < len(partners)
        report = NodeReport(
            held=tuple(held),
            replicated=self._held_by_all(partners),
            target=self.decision.target,
            everywhere=self.everywhere,
            kept=self.kept,
            committed=committed,
            passed_over=tuple(sorted(partner.node for partner in partners if partner.is_passed_over)),
            reached=self._held_by_all(left) if is_out and left else None,
        )
        found = _from(self.mark, report)
        return _less(self.mark, found) if self.is_over and self.mark is not None else found

    def _held_by_all(self, partners: Sequence[PartnerView]) -> tuple[SnapshotId, ...]:
        if not partners:
            return ()
        found = set.intersection(*(set(partner.holds or ()) for partner in partners))
        return tuple(sorted(identity for identity in found if identity.generation == self.generation))


@dataclass
class DecidingMemory:
    """What the node that decides remembers: not all have heard of its last decision, and reports on their way are older.

    Attributes:
        every: Only steps that are multiples of this are replicated.
        mark: The newest target that it decided on.
        last: The last decision, with the newest that were everywhere and kept.
    """

    every: int = 1
    mark: SnapshotId | None = None
    last: RoundDecision = field(default_factory=RoundDecision)

    def decide(self, reports: Sequence[NodeReport | None], silent: Collection[int]) -> RoundDecision:
        """Return the decision that follows from the reports of all nodes, as `replica_rounds.decide`."""
        left = [None if report is None else _from(self.mark, report) for report in reports]
        decision = decide(left, every=max(1, self.every), silent=silent, before=self.last)
        self.mark = newest([self.mark, decision.target])
        everywhere = newest([self.last.everywhere, decision.everywhere])
        self.last = replace(decision, everywhere=everywhere, kept=newest([self.last.kept, decision.kept]))
        return decision


def _from(mark: SnapshotId | None, report: NodeReport) -> NodeReport:
    """Return a report without what is older than a target: partners may have overwritten it."""
    return report if mark is None else _only(report, lambda identity: identity >= mark)


def _less(given_up: SnapshotId, report: NodeReport) -> NodeReport:
    return _only(report, lambda identity: identity != given_up)


def _only(report: NodeReport, counts: Callable[[SnapshotId], bool]) -> NodeReport:
    return replace(
        report,
        held=tuple(filter(counts, report.held)),
        replicated=tuple(filter(counts, report.replicated)),
        reached=None if report.reached is None else tuple(filter(counts, report.reached)),
    )
