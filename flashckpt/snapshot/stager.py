"""Snapshots under way: copies handed to a thread, checked against the fence, made COMPLETE off the training thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.core.snapshot_id import SnapshotRequest
from flashckpt.errors import FenceError, FlashckptError, SharedMemoryError
from flashckpt.faults import crash_point
from flashckpt.native.descriptors import FIGURES, figures_of_rows
from flashckpt.report import guarded
from flashckpt.shm.segment import SlotWriter
from flashckpt.snapshot.copy import (
    Buffer,
    SlotOverflowError,
    StalePlanError,
    check_slot,
    copy_item,
)
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.device import DeviceCopier
from flashckpt.snapshot.following import Following
from flashckpt.snapshot.runs import (
    CoreTime,
    Crowding,
    Offer,
    digest_arrivals,
    digest_in_slot,
    digest_threads,
    places_of,
)
from flashckpt.snapshot.witness import Counts, NumbersWatch, Witness, counter_path
from flashckpt.state.structure import Captured, ValuesRead

_log = guarded(logging.getLogger("flashckpt"))
UNCOUNTED = "a write that torch does not count (through .data or numpy, or by averaged weights that were swapped in)"


@dataclass(eq=False)
class Snapshot:
    """One snapshot under way.

    Attributes:
        request: What it is of.
        plan: Where its bytes go.
        values: Non-tensor state.
        copied: Set when nothing more is read from live tensors (on an accelerator: when all copies are queued).
        done: Set when it is COMPLETE or was discarded.
        error: Why it was discarded, or None.
        witness: What was read in `step()`, to show writes that torch does not count.
        optimizer_steps: How often a tracked optimizer had stepped when it was taken.
        digests: Of its chunks, once they are copied.
        batches: Of copies under way on an accelerator.
        offer: What the training thread takes part in at the fence.
        is_copied_here: Whether the training thread has copied it, in `hand_over`.
        found_full: Whether from now on the training thread copies, as no core was free for this copy.
        figures: Of its chunks, like `digests`.
        suspects: Parameters and optimizer state in it that became non-finite.
        grown: As of `NumbersWatch`.
        sizes: Norm and largest magnitude of all that is finite in parameters and optimizer state, where it is persisted.
        nonfinite: Name of one that is not finite and always was, once in a run; "" else.
        following: Where it is written behind the persist of the snapshot before it in its slot; None where the slot is free.
        started_s, copied_s, done_s: `time.perf_counter()` of the phases.
    """

    request: SnapshotRequest
    plan: CopyPlan
    writer: SlotWriter
    buffer: Buffer
    values: ValuesRead
    versions: Counts
    marks: Any = None
    witness: Witness | None = None
    optimizer_steps: int = 0
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    started_s: float = 0.0
    copied_s: float = 0.0
    done_s: float = 0.0
    cpu_s: float = 0.0
    checked: bool = False
    digests: np.ndarray | None = None
    figures: np.ndarray | None = None
    batches: Any = ()
    is_copied_here: bool = False
    found_full: bool = False
    suspects: Sequence[str] = ()
    grown: tuple[str, float, float] | None = None
    sizes: tuple[float, float] = (0.0, 0.0)
    nonfinite: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    offer: Offer = field(default_factory=Offer)
    following: Following | None = None

    @property
    def needs_other_plan(self) -> bool:
        """Whether it failed for a reason that its plan has in it: what is live, or what its slot holds, is otherwise.

        A manifest that has outgrown its area needs another segment, as state of another form does.
        """
        return isinstance(self.error, (StalePlanError, SlotOverflowError, SharedMemoryError))

    def check(self) -> None:
        """Compare the version counters and the samples once: before the training thread may mutate, after the last read."""
        with self.lock:
            if self.checked:
                return
            self.checked = True
            try:
                if names := self.plan.changed(self.versions):
                    self.error = fence_error(names, self.request.id.step)
                elif self.witness is not None and (names := self.witness.changed(self.buffer)):
                    self.error = fence_error(names, self.request.id.step, found=UNCOUNTED)
            except Exception as error:  # noqa: BLE001 -- of this snapshot alone: the fence asks too, in the training thread
                self.error = error


def fence_error(
    names: Sequence[str], step: int, *, found: str = "a write outside the step() of a tracked optimizer"
) -> FenceError:
    """Return the error for tensors that were changed while they were copied."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return FenceError(
        f"{names[0]!r}{more} was changed while the snapshot of step {step} was copied",
        found=found,
        expected="no write to parameters or optimizer state between ckpt.step() and the next optimizer.step()",
        state="That snapshot was discarded; the one before it is intact and training continues.",
        remedy="call ckpt.fence() before the write, or move it before ckpt.step()",
    )


class Stager:
    """The copy thread of one rank and the snapshot it is working on.

    Args:
        on_complete: Called in the copy thread with each COMPLETE snapshot, before `done` is set.
        on_failure: Called in the copy thread with each discarded snapshot and its error.
        by_design: As of `NumbersWatch`.
    """

    def __init__(
        self,
        on_complete: Callable[[Snapshot], None],
        on_failure: Callable[[Snapshot, Exception], None],
        *,
        by_design: Collection[str] | None = None,
    ) -> None:
        self._on_complete, self._on_failure = on_complete, on_failure
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._crowding, self._by_design = Crowding(), by_design
        self._prepared: Snapshot | None = None
        self.current: Snapshot | None = None

    @cached_property
    def _numbers(self) -> NumbersWatch:
        return NumbersWatch(self._by_design)

    @cached_property
    def _lanes(self) -> DeviceCopier:
        """The side streams, where some tensor lies on a device."""
        return DeviceCopier()

    def ready(self) -> None:
        """Start the thread, and find out where version counters lie, so that the first snapshot need not."""
        if self._thread is None:
            counter_path()
            self._thread = threading.Thread(target=self._run, name="flashckpt-copy", daemon=True)
            self._thread.start()

    def prepare(
        self,
        plan: CopyPlan,
        writer: SlotWriter,
        captured: Captured,
        request: SnapshotRequest,
        *,
        optimizer_steps: int = 0,
    ) -> Snapshot:
        """Copy what is not fenced, note the versions of the rest: no planning, no allocation that grows with the state.

        The copy thread begins with `hand_over`, or where somebody waits for this snapshot. A plan that does not fit the slot, or the live tensors, discards this snapshot and no other.
        """
        started = time.perf_counter()
        buffer = Buffer(writer.data)
        try:
            snapshot = Snapshot(request, plan, writer, buffer, captured.read, [], started_s=started)
            if writer.follows:
                snapshot.following = Following(writer.still_read)
            try:
                check_slot(plan.end, len(writer.data), request.id.step)
                plan.unfenced_runs.copy(buffer)
                for item in plan.unfenced:
                    if item.start < 0:
                        copy_item(item, buffer)
                for item in plan.fresh:
                    copy_item(item, buffer, captured.tensors[item.fqn])
            except Exception as error:  # noqa: BLE001 -- out of memory too ends this snapshot, not training
                snapshot.error = error
                self._end(snapshot, 0.0)
                return snapshot
            snapshot.versions = plan.versions()
            snapshot.witness = plan.sampler.take()
            snapshot.optimizer_steps = optimizer_steps
            if plan.uses_device:
                fresh = [(item, captured.tensors[item.fqn]) for item in plan.device_fresh]
                blocks = snapshot.witness.on_device if snapshot.witness is not None else ()
                snapshot.marks = self._lanes.mark(plan.devices, plan.device_unfenced, fresh, blocks)
        except BaseException:
            buffer.close()
            writer.discard()
            raise
        self.current = self._prepared = snapshot
        return snapshot

    def hand_over(self) -> None:
        """Let the copy thread begin with what was prepared, if anything was; copy it here where no core is free for that."""
        snapshot = self._prepared
        if snapshot is None:
            return
        self.ready()
        try:
            plan = snapshot.plan
            is_free = snapshot.following is None and not plan.uses_device
            if is_free and self._crowding.next_here(plan.end, len(plan.order.fenced)):
                self._copy_here(snapshot)
        finally:  # Ctrl-C too: what is not handed over is never done, and the end of the job waits for it
            self._queue.put(snapshot)
            self._prepared = None

    def _copy_here(self, snapshot: Snapshot) -> None:
        started = time.thread_time()
        snapshot.is_copied_here = True
        try:
            self._copy(snapshot)
        except Exception as error:  # noqa: BLE001 -- as in the copy thread, which discards it
            snapshot.error = error
        except BaseException:
            snapshot.error = InterruptedError("the program was interrupted while it was copied")
            raise
        finally:
            snapshot.cpu_s = time.thread_time() - started

    def fence(self) -> None:
        """Return when live state may be changed: copies are done, or on an accelerator ordered before what follows."""
        self.hand_over()
        snapshot = self.current
        if snapshot is None:
            return
        if not snapshot.copied.is_set():
            if snapshot.following is not None:
                snapshot.following.hurry()
            snapshot.offer.join()
            snapshot.copied.wait()
        if snapshot.plan.uses_device:
            snapshot.check()
            self._lanes.fence()

    def finish(self) -> None:
        """Return when the snapshot under way is COMPLETE or discarded."""
        self.fence()
        if self.current is not None:
            self.current.done.wait()
            self.current = None

    def close(self) -> None:
        """Finish and end the thread."""
        self.finish()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    # -- copy thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            started = time.thread_time()
            try:
                if not snapshot.is_copied_here:
                    # those of a device are never copied in step(), and small ones are over before it matters
                    plan = snapshot.plan
                    counts = not plan.uses_device and Crowding.counts(plan.end, len(plan.order.fenced))
                    before = CoreTime.now() if counts else None
                    self._copy(snapshot)
                    if counts:
                        snapshot.found_full = self._crowding.saw(before, CoreTime.now(), plan.end)
                if snapshot.error is None:
                    self._conclude(snapshot)
            except Exception as error:  # noqa: BLE001 -- training continues whatever happens to one snapshot
                snapshot.error = error
                with contextlib.suppress(Exception):  # of a device that failed; the error of the snapshot says more
                    self._lanes.wait()  # nothing may still be on its way into a slot that is given up
            self._end(snapshot, snapshot.cpu_s + snapshot.offer.joined_cpu_s + time.thread_time() - started)

    def _copy(self, snapshot: Snapshot) -> None:
        """Read live tensors, in whichever thread; nothing is read any more when `copied` is set."""
        plan, buffer = snapshot.plan, snapshot.buffer
        plan.unfenced_runs.check_forms()
        plan.runs.check_forms()
        snapshot.digests = digests = np.zeros(plan.layout.table.chunks, np.uint64)
        snapshot.figures = figures = np.zeros(len(digests), FIGURES)
        if plan.uses_device:
            snapshot.batches = self._lanes.enqueue(
                plan.device,
                buffer,
                snapshot.marks,
                arrived=lambda items: digest_in_slot(places_of(items), buffer, digests, figures),
            )
        plan.runs.copy_and_digest(buffer, digests, snapshot.offer, figures=figures, following=snapshot.following)
        for item in plan.others:
            copy_item(item, buffer)
            crash_point("slot.during-copy")
        if not plan.uses_device:
            snapshot.check()
        snapshot.copied_s = time.perf_counter()
        snapshot.copied.set()
        snapshot.offer.end()  # a fence that came first waits for it: nothing to take part in may come any more

    def _conclude(self, snapshot: Snapshot) -> None:
        """Digest what lies in the slot only, and make the snapshot COMPLETE."""
        plan, buffer, digests = snapshot.plan, snapshot.buffer, snapshot.digests
        assert digests is not None
        digest_in_slot(plan.digested_later, buffer, digests, snapshot.figures)
        if plan.uses_device:
            arrivals = self._lanes.arrivals(snapshot.batches, buffer)
            snapshot.cpu_s += digest_arrivals(arrivals, buffer, digests, snapshot.figures, threads=digest_threads())
            if names := self._lanes.changed(snapshot.marks, buffer):
                raise fence_error(names, snapshot.request.id.step, found=UNCOUNTED)
        snapshot.check()
        if snapshot.error is None:
            self._commit(snapshot, digests)

    def _commit(self, snapshot: Snapshot, digests: np.ndarray) -> None:
        layout = snapshot.plan.layout
        assert snapshot.figures is not None
        figures = self._numbers.look(layout, figures_of_rows(layout.table, snapshot.figures))
        values = snapshot.values.packed()
        manifest = Manifest.of(snapshot.request, table=layout.table, digests=digests, values=values, figures=figures)
        snapshot.suspects, snapshot.nonfinite = manifest.suspects, self._numbers.report()
        snapshot.grown = self._numbers.grown
        if snapshot.request.persist:
            snapshot.sizes = figures.sizes(layout.structure.fenced[layout.row_tensors])
        encoded = encode_manifest(manifest, table_bytes=layout.table_bytes)
        snapshot.buffer.close()
        snapshot.writer.commit(encoded, data_bytes=layout.total, suspect=bool(snapshot.suspects) + self._numbers.is_own)
        snapshot.done_s = time.perf_counter()

    def _end(self, snapshot: Snapshot, cpu_s: float) -> None:
        snapshot.cpu_s, snapshot.marks = cpu_s, None
        with snapshot.lock:  # the fence may be about to look at it
            snapshot.checked = True
            snapshot.buffer.close()
        try:
            if snapshot.error is None:
                self._on_complete(snapshot)
            else:
                self._discard(snapshot)
                self._on_failure(snapshot, snapshot.error)
        except Exception:  # noqa: BLE001 -- a user's callback must not end the copy thread
            _log.exception("the snapshot of step %d: a callback failed", snapshot.request.id.step)
        finally:
            snapshot.offer.end()
            snapshot.copied.set()
            snapshot.done.set()

    @staticmethod
    def _discard(snapshot: Snapshot) -> None:
        try:
            snapshot.writer.discard()
        except (OSError, ValueError, FlashckptError) as error:
            _log.warning("the slot of step %d could not be set EMPTY: %s", snapshot.request.id.step, error)


class StaleWatch:
    """Warns when three snapshots in a row are equal although the optimizer stepped between them."""

    def __init__(self) -> None:
        self._before: Snapshot | None = None
        self._equal = 0

    def look(self, snapshot: Snapshot) -> bool:
        """Take note of a COMPLETE snapshot; True if a warning is due."""
        before, self._before = self._before, snapshot
        if before is None or before.plan is not snapshot.plan or not len(snapshot.plan.rows_compared):
            self._equal = 0
            return False
        assert before.digests is not None
        assert snapshot.digests is not None
        if snapshot.optimizer_steps == before.optimizer_steps:
            return False
        rows = snapshot.plan.rows_compared
        self._equal = self._equal + 1 if np.array_equal(before.digests[rows], snapshot.digests[rows]) else 0
        return self._equal == 2
