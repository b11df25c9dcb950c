"""Which bytes of a layout are copied when, and from which tensors: made once per structure, never changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress

import numpy as np
import torch

from flashckpt.native.descriptors import kinds_of
from flashckpt.report import guarded
from flashckpt.snapshot.copy import Item, StalePlanError, is_run, run_starts
from flashckpt.snapshot.following import are_free
from flashckpt.snapshot.runs import HostRuns, places_of
from flashckpt.snapshot.segments import RankSegments
from flashckpt.snapshot.witness import Counts, Sampler, VersionCounters
from flashckpt.state.placement import local_of
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import Ints, StateLayout
from flashckpt.state.structure import Captured

Refused = Callable[[Sequence[torch.Tensor]], tuple[str, str] | None]


def is_host(device: torch.device) -> bool:
    """Return whether tensors on a device are copied by their address, and not by its streams."""
    return device.type == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyOrder:
    """The rows of a layout, np.int64 each, by when they are copied.

    Attributes:
        fenced: During the next forward/backward, host memory only; in the order of their offsets.
        device: The same for tensors on an accelerator.
        unfenced, device_unfenced: Before `step()` returns.
        fresh, device_fresh: The same, of tensors that objects return each time.
    """

    fenced: Ints
    device: Ints
    unfenced: Ints
    device_unfenced: Ints
    fresh: Ints
    device_fresh: Ints

    @classmethod
    def of(cls, layout: StateLayout) -> CopyOrder:
        """Sort the rows of a layout."""
        structure, rows = layout.structure, layout.row_tensors
        on_host = np.array([is_host(one.device) for one in structure.box_sets], np.bool_)[structure.sets]
        fresh = np.zeros(len(structure.names), np.bool_)
        if structure.fresh:
            fresh = np.array([name in structure.fresh for name in structure.names], np.bool_)
        host, fenced, again = on_host[rows], structure.fenced[rows], fresh[rows]
        loose = ~fenced & ~again
        copied = np.flatnonzero(fenced & host)
        return cls(
            fenced=copied[np.argsort(layout.table.byte_offset[copied], kind="stable")],
            device=np.flatnonzero(fenced & ~host),
            unfenced=np.flatnonzero(loose & host),
            device_unfenced=np.flatnonzero(loose & ~host),
            fresh=np.flatnonzero(again & host),
            device_fresh=np.flatnonzero(again & ~host),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyPlan:
    """Where every row of a structure goes, and from which tensor.

    Attributes:
        layout: What it was made for.
        order: When each row is copied.
        bound: The tensors that are now where the structure awaited some, in its order.
        refused: Tells what of `bound` has another form than was predicted; asked in the copy thread.
        watched: Local tensors whose version counters prove the fence.
        unfenced: Items copied before `step()` returns.
        unfenced_runs: Those of them that are runs of host memory.
        device_unfenced: The same for tensors on an accelerator.
        fresh, device_fresh: The same, of tensors that objects return each time.
    """

    layout: StateLayout
    order: CopyOrder
    refused: Refused
    bound: Sequence[torch.Tensor] = ()
    watched: Sequence[torch.Tensor]
    unfenced: Sequence[Item] = field(default=())
    unfenced_runs: HostRuns = field(default=HostRuns(()))
    device_unfenced: Sequence[Item] = field(default=())
    fresh: Sequence[Item] = field(default=())
    device_fresh: Sequence[Item] = field(default=())

    @classmethod
    def of(cls, layout: StateLayout, refused: Refused = lambda _: None) -> CopyPlan:
        """Return the plan for a layout.

        Args:
            layout: Of the structure.
            refused: As in the attributes; of the optimizers whose state the structure awaits.
        """
        structure, order = layout.structure, CopyOrder.of(layout)
        held = compress(structure.tensors, structure.fenced.tolist())
        watched = [tensor for tensor in held if tensor is not None]
        if structure.is_sharded:
            watched = list(map(local_of, watched))
        plan = cls(layout=layout, order=order, refused=refused, watched=watched)
        unfenced = plan.items(order.unfenced)
        return replace(
            plan,
            unfenced=unfenced,
            unfenced_runs=HostRuns([item for item in unfenced if item.start >= 0]),
            device_unfenced=plan.items(order.device_unfenced),
            fresh=plan.items(order.fresh),
            device_fresh=plan.items(order.device_fresh),
        )

    def bind(self, tensors: Sequence[torch.Tensor]) -> CopyPlan:
        """Return the plan in which these tensors take the place of the awaited ones, in their order.

        What costs time per tensor is done in the copy thread, by the first snapshot of the new plan.
        """
        locals_ = list(map(local_of, tensors)) if self.layout.structure.is_sharded else tensors
        return replace(self, bound=tensors, watched=[*self.watched, *locals_])

    @property
    def awaits(self) -> bool:
        """Whether nothing can be copied before `bind`."""
        return len(self.layout.structure.awaited) > len(self.bound)

    @cached_property
    def end(self) -> int:
        """Byte behind the last one that a copy writes; checked against the slot before the first copy."""
        table = self.layout.table
        return int((table.byte_offset + table.nbytes).max(initial=0))

    @cached_property
    def uses_device(self) -> bool:
        """Whether some of the state is on an accelerator."""
        order = self.order
        return bool(len(order.device) or len(order.device_unfenced) or len(order.device_fresh))

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """The accelerators that hold fenced tensors."""
        structure, rows = self.layout.structure, self.layout.row_tensors[self.order.device]
        return frozenset(structure.box_sets[number].device for number in set(structure.sets[rows].tolist()))

    @cached_property
    def _at_once(self) -> Ints:
        """int64[2, n]: offset and bytes of the rows that are written in `step()`."""
        table, rows = self.layout.table, np.concatenate([self.order.unfenced, self.order.fresh])
        return np.stack([table.byte_offset[rows], table.nbytes[rows]])

    def may_follow(self, start: int, stop: int) -> bool:
        """Whether all that is written in `step()` lies outside [start, stop) of the slot, and the rest is copied by the host."""
        offset, nbytes = self._at_once
        return not self.uses_device and bool(are_free(offset, nbytes, start, stop).all())

    @cached_property
    def rows_compared(self) -> Ints:
        """First digests of what should change from step to step."""
        table, fenced = self.layout.table, self.layout.structure.fenced[self.layout.row_tensors]
        return table.first_chunk[fenced & (table.nbytes > 0)]

    # -- in the copy thread ------------------------------------------------------------------------------

    @cached_property
    def fenced(self) -> list[Item]:
        """Items copied during the next forward/backward, host memory only, in the order of their offsets.

        Raises:
            StalePlanError: A bound tensor has another form than was predicted.
        """
        return self.items(self.order.fenced)

    @cached_property
    def runs(self) -> HostRuns:
        """Those of `fenced` that are runs of host memory. Raises as `fenced`."""
        return HostRuns([item for item in self.fenced if item.start >= 0])

    @cached_property
    def others(self) -> list[Item]:
        """The rest of `fenced`. Raises as `fenced`."""
        return [item for item in self.fenced if item.start < 0]

    @cached_property
    def digested_later(self) -> Ints:
        """int64[n, 4] as of `places_of`: what is copied without digests, that is all on the host but `runs`. Raises as `fenced`."""
        table, rows = self.layout.table, np.concatenate([self.order.unfenced, self.order.fresh])
        columns = (table.byte_offset[rows], table.nbytes[rows], table.first_chunk[rows], kinds_of(table)[rows])
        return np.concatenate([places_of(self.others), np.column_stack(columns).astype(np.int64, copy=False)])

    @cached_property
    def device(self) -> list[Item]:
        """The same for tensors on an accelerator. Raises as `fenced`."""
        return self.items(self.order.device)

    def items(self, rows: Ints) -> list[Item]:
        """Return rows as items. Raises as `fenced`."""
        owners = self.layout.row_tensors[rows].tolist()
        return self._items(rows, list(map(self._locals.__getitem__, owners))) if owners else []

    def some_items(self, rows: Ints) -> list[Item]:
        """Return a few rows as items, without a look at the others; in the training thread."""
        structure, owners = self.layout.structure, self.layout.row_tensors[rows]
        late = np.flatnonzero(np.isin(structure.awaited, owners)).tolist() if self.bound else []
        found = {int(structure.awaited[place]): self.bound[place] for place in late}
        tensors = [found.get(owner, structure.tensors[owner]) for owner in owners.tolist()]
        here = [tensor is not None for tensor in tensors]
        return self._items(rows[here], [local_of(tensor) for tensor in tensors if tensor is not None])

    def _items(self, rows: Ints, locals_: Sequence[torch.Tensor]) -> list[Item]:
        layout, structure, table = self.layout, self.layout.structure, self.layout.table
        owners = layout.row_tensors[rows].tolist()
        kinds = [structure.box_sets[number] for number in structure.sets[layout.row_tensors[rows]].tolist()]
        starts = self._starts
        boxes = layout.row_boxes[rows].tolist()
        sizes = {id(one): one.form[1].numel() * one.form[0].itemsize for one in kinds}
        columns = zip(
            [structure.names[owner] for owner in owners],
            [layout.boxes[box] for box in boxes],
            locals_,
            table.byte_offset[rows].tolist(),
            table.nbytes[rows].tolist(),
            table.first_chunk[rows].tolist(),
            [starts[box] if is_run(local) else -1 for box, local in zip(boxes, locals_, strict=True)],
            [sizes[id(one)] for one in kinds],
            [one.form[0] for one in kinds],
            [one.form[1] for one in kinds],
            strict=True,
        )
        return list(map(Item._make, columns))

    @cached_property
    def _starts(self) -> list[int]:
        """For each box of the layout the byte where it starts in its local tensor, if that is contiguous; -1 if it is no run."""
        sets = self.layout.structure.box_sets
        return [start for one in sets for start in run_starts(one.boxes, one.form[1], one.form[0].itemsize)]

    @cached_property
    def sampler(self) -> Sampler:
        """Chooses what is read in `step()` to show writes that torch does not count."""
        return Sampler(self.order.fenced, self.order.device, self.some_items)

    @cached_property
    def _locals(self) -> Sequence[torch.Tensor]:
        """The local tensors by their place in the structure; an awaited one is an empty tensor and never copied."""
        structure = self.layout.structure
        nothing = torch.empty(0)
        found = [nothing if tensor is None else local_of(tensor) for tensor in structure.tensors]
        if self.bound:
            self._refuse_other_forms()
            for place, tensor in zip(structure.awaited.tolist(), self.bound, strict=True):
                found[place] = local_of(tensor)
        return found

    def _refuse_other_forms(self) -> None:
        if (other := self.refused(self.bound)) is not None:
            raise StalePlanError(
                "an optimizer made its state in another form than was planned ahead",
                found=other[0],
                expected=other[1],
                state="That snapshot was discarded; the next one is planned again.",
            )

    # -- the fence ---------------------------------------------------------------------------------------

    @cached_property
    def _counters(self) -> VersionCounters:
        return VersionCounters(self.watched)

    def versions(self) -> Counts:
        """Return the version counters of all fenced tensors."""
        return self._counters.read()

    def changed(self, before: Counts) -> list[str]:
        """Return the names of fenced tensors whose counters differ from `before`."""
        places = self._counters.changed(before)
        if not places:
            return []
        structure = self.layout.structure
        columns = zip(structure.names, structure.tensors, structure.fenced.tolist(), strict=True)
        names = [name for name, tensor, fenced in columns if fenced and tensor is not None]
        names += [structure.names[place] for place in structure.awaited.tolist()]
        return [names[place] for place in places]


# -- The copy plan that holds now: made ahead of the first snapshot, bound when state appears, replaced when it
#    fails

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
