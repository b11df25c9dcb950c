"""The copy plan that holds now: made ahead of the first snapshot, bound when state appears, replaced when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flashckpt.logs import guarded
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.segments import RankSegments
from flashckpt.state.captured import Captured
from flashckpt.state.registry import StateRegistry

_log = guarded(logging.getLogger("flashckpt"))


class CurrentPlan:
    """Keeps the plan of one rank, and the memory that it needs.

    Args:
        tracked: What is planned.
        memory: Where snapshots go.
        slots: The user's number of slots, or None.
        job: Job id.
        on_new_memory: Called when other memory is being reserved.
        on_new_plan: Called when the state has another structure, or the plan failed.

    Attributes:
        plan: None before the first one.
    """

    def __init__(
        self,
        tracked: StateRegistry,
        memory: RankSegments,
        *,
        slots: int | None,
        job: str,
        on_new_memory: Callable[[], None],
        on_new_plan: Callable[[], None],
    ) -> None:
        self._tracked, self._memory, self._slots, self._job = tracked, memory, slots, job
        self._on_new_memory, self._on_new_plan = on_new_memory, on_new_plan
        self.plan: CopyPlan | None = None
        self._failed: CopyPlan | None = None

    def look_ahead(self, plan: CopyPlan | None = None) -> None:
        """Plan what the first snapshot will consist of, optimizer state that does not exist yet included.

        A restore may have brought state that nobody could foresee when memory was reserved: then other memory is
        reserved from now on, so that it is there when the first snapshot is due.

        Args:
            plan: Made of the structure built last, where there is one.
        """
        if plan is None:
            _, captured = self._tracked.settled(ahead=True)
            plan = CopyPlan.of(self._tracked.layout(), self._tracked.ahead.refused)
        else:
            captured = self._tracked.capture()
        self.plan = plan
        if self._make_room(plan, captured):
            self._memory.wait_if_small()

    def bind(self) -> bool:
        """Let state that was planned ahead take its place in the plan, once it exists; whether it did now."""
        if self.plan is None or not self.plan.awaits or (appeared := self._tracked.appeared()) is None:
            return False
        self.plan = self.plan.bind(appeared)
        return True

    def failed(self, plan: CopyPlan) -> None:
        """Take note, in the copy thread, that a plan does not fit the live tensors or its slot."""
        self._failed = plan

    def of(self, captured: Captured) -> tuple[CopyPlan, Captured]:
        """Return the plan for the state as it is, and what was read with it; another one only if the structure changed."""
        plan = self.plan
        # `planned` is another object when a restore or track() built a structure beside this plan; `forms` are of
        # tensors that objects give out; the guard (`holds`) sees held tensors, and costs most, so it comes last
        if (
            plan is not None
            and plan is not self._failed
            and plan.layout.structure is self._tracked.planned
            and captured.forms == plan.layout.structure.forms
            and (self.bind() or self._tracked.holds())
        ):
            assert self.plan is not None
            return self.plan, captured
        self._on_new_plan()
        _, captured = self._tracked.settled()
        plan = self.plan = CopyPlan.of(self._tracked.layout())
        self._make_room(plan, captured)
        return plan, captured

    def _make_room(self, plan: CopyPlan, captured: Captured) -> bool:
        """Begin to reserve other memory, beside training, if the plan, or what it still expects, does not fit; whether it was."""
        need = plan.layout.need(len(repr(captured.values)))
        if self._memory.fits(need):
            return False
        _log.info("the state has another structure now: %d tensors, a new segment", len(plan.layout.structure.names))
        # lists of tensors grow step by step: room for the next ones, not a segment for each
        growing = sum(item.nbytes for item in (*plan.fresh, *plan.device_fresh))
        self._memory.replace(need.with_room(growing), slots=self._slots, job=self._job)
        self._on_new_memory()
        return True
