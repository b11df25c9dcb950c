"""What nodes remember between two decisions on replicas: each node for itself, and the one that decides. Pure but for that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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
class TargetMark:
    """What was sent last, by the decisions that were taken or given.

    Attributes:
        mark: The newest target. Replicas between the one that is kept and this one may be overwritten, and never count again.
        is_over: Nor does that target: some node can neither send it nor has sent it, or need not hold it any more.
    """

    mark: SnapshotId | None = None
    is_over: bool = False

    def follow(self, target: SnapshotId | None, kept: SnapshotId | None) -> None:
        """Take the target of a decision, and the newest id that is kept with it."""
        if target is not None and (self.mark is None or target > self.mark):
            self.mark, self.is_over = target, False
        elif target is None and self.mark is not None and (kept is None or self.mark > kept):
            self.is_over = True

    def counting(self, report: NodeReport) -> NodeReport:
        """Return a report without what does not count any more: partners may have overwritten it."""
        mark, is_over = self.mark, self.is_over
        if mark is None:
            return report
        counts = partial(filter, lambda identity: identity > mark or (identity == mark and not is_over))
        return replace(
            report,
            held=tuple(counts(report.held)),
            replicated=tuple(counts(report.replicated)),
            reached=None if report.reached is None else tuple(counts(report.reached)),
        )


@dataclass
class RoundMemory(TargetMark):
    """What one node remembers: nothing that is kept gives way to anything older.

    Attributes:
        generation: Number of the current one.
        everywhere: Newest id that was everywhere, or that the generation was restored from in memory.
        kept: Newest id of which no replica may be overwritten.
        is_presumed: Both are presumed, since this process has heard of no decision yet: the first who knows is believed.
        decision: The last one.
    """

    generation: int = 0
    everywhere: SnapshotId | None = None
    kept: SnapshotId | None = None
    is_presumed: bool = True
    decision: RoundDecision = field(default_factory=RoundDecision)

    @classmethod
    def begin(cls, generation: int, restored: SnapshotId | None, before: RoundMemory) -> RoundMemory:
        """Return that of the start of a generation.

        Args:
            generation: Its number.
            restored: What it was restored from in memory.
            before: That of the generation before, a new one where this process did not take part in it: where what was restored is
                newer than what was everywhere, no partner may have it, and what was everywhere stays.
        """
        earlier = before.everywhere
        kept = earlier if earlier is not None and restored is not None and earlier < restored else restored
        return cls(generation=generation, everywhere=kept, kept=kept, is_presumed=before.is_presumed)

    @property
    def known(self) -> SnapshotId | None:
        """What is kept, for others to believe; None while it is presumed."""
        return None if self.is_presumed else self.kept

    def adopt(self, decision: RoundDecision) -> None:
        """Take a decision: to be called before anything that follows from it is sent or pinned."""
        if decision.waits:
            return
        if self.is_presumed and decision.kept is not None:
            self.everywhere = self.kept = decision.kept  # that was everywhere, or what was is no newer
            self.is_presumed = False
        self.everywhere = newest([self.everywhere, decision.everywhere])
        self.kept = newest([self.kept, decision.kept])
        self.follow(decision.target, self.kept)
        self.decision = decision

    def pinned(self) -> set[SnapshotId]:
        """Return the ids that stay in the slots of this node: what this node reports to have replicated may be everywhere."""
        is_needed = self.mark is not None and not self.is_over and (self.kept is None or self.mark > self.kept)
        return {identity for identity in (self.mark if is_needed else None, self.kept) if identity is not None}

    def report(
        self,
        held: Sequence[SnapshotId],
        partners: Sequence[PartnerView],
        committed: SnapshotId | None = None,
        *,
        pinned: Collection[SnapshotId],
    ) -> NodeReport | None:
        """Return what this node says; None until its partners have said what they hold.

        Args:
            held: Ids of this generation that all its ranks hold.
            pinned: Those of them that no rank can overwrite now. Partners that hold another one, from before this process
                began, are not enough: it would be everywhere, and gone here before this node hears of that.
            partners: All of them.
            committed: Newest id of this generation that is on storage.
        """
        left = [partner for partner in partners if not partner.is_passed_over]
        if any(partner.holds is None for partner in left):
            return None
        is_out = len(left) < len(partners)
        return self.counting(
            NodeReport(
                held=tuple(held),
                replicated=self._kept_by_all(partners, pinned),
                target=self.decision.target,
                everywhere=None if self.is_presumed else self.everywhere,
                kept=self.known,
                committed=committed,
                passed_over=tuple(sorted(partner.node for partner in partners if partner.is_passed_over)),
                reached=self._kept_by_all(left, pinned) if is_out and left else None,
            )
        )

    def _kept_by_all(self, partners: Sequence[PartnerView], pinned: Collection[SnapshotId]) -> tuple[SnapshotId, ...]:
        if not partners:
            return ()
        found = self.pinned().intersection(pinned, *(partner.holds or () for partner in partners))
        return tuple(sorted(identity for identity in found if identity.generation == self.generation))


@dataclass
class DecidingMemory(TargetMark):
    """What the node that decides remembers: not all have heard of its last decision, and reports on their way are older.

    Attributes:
        every: Only steps that are multiples of this are replicated.
        last: The last decision, with the newest that were everywhere and kept; at first with what was restored in memory.
        is_begun: It has decided before, and nobody else has since.
    """

    every: int = 1
    last: RoundDecision = field(default_factory=RoundDecision)
    is_begun: bool = False

    def decide(self, reports: Sequence[NodeReport | None], silent: Collection[int]) -> RoundDecision:
        """Return the decision that follows from the reports of all nodes, as `replica_rounds.decide`."""
        left = [None if report is None else self.counting(report) for report in reports]
        if silent and not self.is_begun:
            # who is silent may have decided before, and that something is everywhere: at most as new as what is held by now
            held = [identity for report in left if report is not None for identity in report.held]
            self.last = replace(self.last, everywhere=newest([self.last.everywhere, *held]))
        decision = decide(left, every=max(1, self.every), silent=silent, before=self.last)
        if decision.waits:
            return decision
        self.is_begun = True
        everywhere = newest([self.last.everywhere, decision.everywhere])
        self.last = replace(decision, everywhere=everywhere, kept=newest([self.last.kept, decision.kept]))
        # a node that hears of no target lets go of the one before, whatever it reported until then
        self.follow(decision.target, self.last.kept)
        return decision
