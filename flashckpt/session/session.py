"""One session: what a rank has open from `restore()` to `close()`."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flashckpt.core.settings import next_step
from flashckpt.core.snapshot_id import SnapshotId, SnapshotRequest
from flashckpt.errors import ConfigError, UnsupportedStateError
from flashckpt.planning.inventory import left_out
from flashckpt.report import guarded
from flashckpt.session.durability import CommitWatch, Skips, Waiting, Wanted
from flashckpt.session.opening import Callback, NodePlace, OpenedJob
from flashckpt.session.stop_signals import DeferredSignals
from flashckpt.shm.agent_folder import agent_folder, note_suspect
from flashckpt.shm.control import CLOSED, PHASES
from flashckpt.shm.job_directory import LEFT_OUT
from flashckpt.shm.logged_values import MOST_NAME, LoggedValue, append
from flashckpt.snapshot.copy_plan import CopyPlan, CurrentPlan
from flashckpt.snapshot.following import StillPersistedError
from flashckpt.snapshot.stager import Snapshot, Stager, StaleWatch
from flashckpt.state import samplers
from flashckpt.state.samplers import Commits

_log = guarded(logging.getLogger("flashckpt"))
_POLL_S = 0.002
FORGET = 20
"""Good snapshots, behind a bad one or a restore, after which a failure is no longer traced to that."""
SIZES = "job/norm of rank 0", "job/largest number of rank 0"
"""Curves of what is persisted."""


class Session:
    """What `Checkpointer` delegates to between restore and close; `Session.start` makes one.

    Attributes:
        directory: Of the job on this node.
        outcome: Of the restore that it began with.
        mates: Global ranks of this node, ascending; the first one writes the node's records.
        stats: Counters and seconds, for people and benchmarks.
    """

    def __init__(self, opened: OpenedJob, place: NodePlace, callback: Callback) -> None:
        self.tracked, self.directory, self.memory = opened.tracked, opened.directory, opened.memory
        self.outcome, self.mates = opened.outcome, opened.mates
        self.stats: defaultdict[str, float] = defaultdict(float)
        self._settings, self._callback = opened.settings, callback
        self._pid, self._lease, self._relay, self._owner = os.getpid(), place.lease, place.relay, place.owner
        self._control, self._row, self._watermark = place.control, place.row, place.watermark
        world, generation = self.tracked.world, self.outcome.record.number
        # where the daemon persists by time, or talks to other nodes, each snapshot matters to it; else those of persist steps
        self._always_wakes = self._settings.for_persister()["persist_s"] > 0 or world.size > len(self.mates)
        self._signals: DeferredSignals | None = None
        if self.has_agent:
            index = self.mates.index(world.rank)
            self._signals = DeferredSignals(place.control, place.row, self.directory.control_path, index)
        self._commits = Commits(is_alone=world.size == 1) if self.tracked.objects else None
        self._skips = Skips(generation)
        self._wanted, self._stale, self._is_full_logged = Wanted(generation), StaleWatch(), False
        self._stager = Stager(self._completed, self._failed, by_design=self.tracked.by_design)
        self._plans = CurrentPlan(
            self.tracked,
            self.memory,
            slots=self._settings.slot_count,
            job=self._settings.job,
            on_new_memory=self._skips.reopened,
            on_new_plan=self._count_plan,
        )
        self._last_step, self._stepped_at, self._optimizer_steps = self._row.step, 0, 0
        self._pauses, self._pause_lock = 0, threading.Lock()
        self._left_s: float | None = None
        self._window_s = 0.0
        self._has_taken, self._refused = self.outcome.report is not None, set[str]()
        self._is_removed = self._is_suspect = False
        self._noted = FORGET
        self._clean, self._left_out = self._last_step, ""
        self._note_restored()
        first, last = left_out(self.outcome.inventories)
        if self.outcome.report is not None:
            self.leave_out(first, last)
        self._committed = CommitWatch(
            self.directory,
            on_commit=lambda *id_: self._call("on_commit", *id_, may_exit=True),
            on_failure=lambda error: self._call("on_failure", error),
        )

    @classmethod
    def start(cls, opened: OpenedJob, *, callback: Callback, entered_ns: int, initialised_ns: int) -> Session:
        """Announce the job on this node, start the daemon where no agent does, and plan the first snapshot.

        Args:
            opened: The job after its restore.
            callback: Returns the user's callback of a name, or None.
            entered_ns: `time.monotonic_ns()` when the program came to its checkpointer.
            initialised_ns: The same when it came to restore.
        """
        place = NodePlace.take(opened, entered_ns=entered_ns, initialised_ns=initialised_ns)
        session = cls(opened, place, callback)
        atexit.register(session._at_exit)
        if session._signals is not None:
            session._signals.install()
        try:
            session._stager.ready()
            session.plan_ahead(opened.plan)
            if opened.settings.is_due(session._last_step + 1):
                session.memory.use()  # else behind the first step, which training is waiting for
        except BaseException:
            session.close()
            raise
        return session

    @property
    def has_stepped(self) -> bool:
        """Whether `step()` was called in this session."""
        return bool(self._row.first_step)

    @property
    def has_agent(self) -> bool:
        """Whether dlrun watches over this rank and its daemon."""
        return agent_folder() is not None

    def leave_out(self, first: int, last: int) -> None:
        """As `Checkpointer.leave_out`."""
        text = samplers.leave_out(self.tracked.objects, self._last_step, first, last) if last > self._last_step else ""
        if text and self.tracked.world.rank == 0:
            _log.warning("%s", text)
        self._left_out = "; ".join(filter(None, (self._left_out, text)))

    # -- step --------------------------------------------------------------------------------------------

    def step(self, step: object, samples: int | None, *, persist: bool = False) -> None:
        """As `Checkpointer.step`."""
        began = time.perf_counter()
        number = next_step(step, last=self._last_step)
        if self._commits is not None:
            self._commits.commit(self.tracked.objects, samples, number)
        try:
            self._step(number, began, is_wanted=persist or self._control.stop_after == number)
        finally:  # last: from here on the copy thread wants the GIL, and would get it wherever this thread reads a file
            self._left_s = time.perf_counter()
            self._stager.hand_over()

    def _step(self, step: int, began: float, *, is_wanted: bool) -> None:
        self._last_step, self._stepped_at = step, self._optimizer_steps
        row, now = self._row, time.monotonic_ns()
        row.step, row.heartbeat_ns = step, now
        if not row.first_step:
            row.first_step = now
            samplers.step_is_done()
        is_due = is_wanted or self._settings.is_due(step)
        self.memory.use()
        if is_wanted or self._settings.is_persist(step):
            self._wanted.owe(step)
        if not is_due and not self._skips.is_retry(step, unrecoverable=self._unrecoverable):
            self._plans.bind()
            return
        self._came_to_fence(began)
        self._stager.finish()
        self.stats["finish_s"] += time.perf_counter() - began
        self._skips.tried(step, is_due=is_due)
        if not self._take(step, window_s=0.0 if is_wanted else self._window_s):
            self._await_slot(step) if is_wanted else self._skip(step)
        self._committed.look()
        self.stats["call_s"] += time.perf_counter() - began
        row.stall_ns = int((self.stats["call_s"] + self.stats["fence_s"]) * 1e9)

    def _unrecoverable(self) -> Collection[SnapshotId]:
        """Ids that some rank missed."""
        return self._watermark.known().unrecoverable

    def _await_slot(self, step: int) -> None:
        """Take the snapshot of a step that must be persisted, however long it takes: the next one may never come."""
        _log.info("step %d is to be persisted: waiting for memory to keep it in", step)
        while not self._take(step):
            self.heartbeat()
            time.sleep(_POLL_S)

    def _take(self, step: int, *, window_s: float = 0.0) -> bool:
        """Begin a snapshot of the present state; False, at once, where no slot can be written now, or within `window_s`."""
        self.tracked.unread.clear()  # training is on its way: what a source says now is where it is
        try:
            plan, captured = self._plans.of(self.tracked.capture())
        except UnsupportedStateError as error:
            if not self._has_taken:  # as at the start: nothing of this run could ever be kept
                raise
            self._discard(step, error)
            return True
        if not self.memory.has_slot:
            return False
        record = self.outcome.record
        request = SnapshotRequest(
            id=SnapshotId(record.number, step),
            job=self._settings.job,
            rank=self.tracked.world.rank,
            world_size=self.tracked.world.size,
            coordinates=self.tracked.world.coordinates,
            parent=record.parent,
            persist=self._wanted.owed is not None,
            token=record.token,
        )
        known = self._watermark.known()
        self._skips.saw(known.common)
        writer = self.memory.begin(
            request, known=known, superseded=self.outcome.superseded, follows=plan.may_follow, window_s=window_s
        )
        if writer is None:
            return False
        if request.persist:
            self._wanted.begun(request.id)
        self._stager.prepare(plan, writer, captured, request, optimizer_steps=self._optimizer_steps)
        self._skips.taken(step)
        self._row.snapshots += 1
        self._has_taken = True
        return True

    def _discard(self, step: int, error: UnsupportedStateError) -> None:
        """Continue without the snapshot of a step at which some state has become what no snapshot can hold."""
        id_, is_owed = SnapshotId(self.outcome.record.number, step), self._wanted.owed is not None
        self.stats["discarded"] += 1
        self._wanted.discarded(id_, error, persist=is_owed)
        self._watermark.publish(self.memory.complete(), low_watermark=id_)
        if str(error) not in self._refused:
            self._refused.add(str(error))
            _log.error("[step %d] no snapshot, and none as long as this is so: %s", step, error)
        self._call("on_failure", error)

    def plan_ahead(self, plan: CopyPlan | None = None) -> None:
        """Plan what the first snapshot will consist of; `plan` is of the structure built last, where there is one."""
        self._plans.look_ahead(plan)
        if self.tracked.objects or self.tracked.rng:
            samplers.put_back(self.tracked.objects)

    def _skip(self, step: int) -> None:
        late = not self.memory.has_slot
        self._count_skip("late" if late else "busy")
        why = "its memory is still being reserved" if late else "every slot holds a snapshot that is still needed"
        self._skips.skipped(step, why)
        # published: ranks that lost different snapshots would keep each other's slots for ever
        self._watermark.publish(self.memory.complete(), low_watermark=SnapshotId(self.outcome.record.number, step))

    def _count_skip(self, why: str) -> None:
        self.stats["skipped"] += 1
        self.stats[why] += 1

    def _count_plan(self) -> None:
        self.stats["plans"] += 1

    # -- copy thread -------------------------------------------------------------------------------------

    def _completed(self, snapshot: Snapshot) -> None:
        self._watermark.publish(self.memory.complete())
        self._watermark.known()  # kept by it: `step()` will ask
        self._wake_daemon(wakes=snapshot.request.persist or self._always_wakes or not self.stats["snapshots"])
        self.stats["snapshots"] += 1
        self.stats["copy_s"] += snapshot.copied_s - snapshot.started_s
        self.stats["complete_s"] += snapshot.done_s - snapshot.started_s
        self.stats["copy_cpu_s"] += snapshot.cpu_s
        self._note_where(snapshot)
        self._note_numbers(snapshot)
        if self._stale.look(snapshot):
            _log.warning(
                "three snapshots up to step %d are identical although the optimizer stepped: is the tracked model the one "
                "being trained?",
                snapshot.request.id.step,
            )
        self._call("on_snapshot", snapshot.request.id.step)

    def _note_numbers(self, snapshot: Snapshot) -> None:
        """Say once what is not finite, and which tensor became so in which step of which rank."""
        step, rank = snapshot.request.id.step, snapshot.request.rank
        if snapshot.nonfinite:
            _log.warning(
                "%r holds NaN or infinity in the first snapshot, of step %d: it is taken to be so by design",
                snapshot.nonfinite,
                step,
            )
        self.stats["suspect"] += bool(snapshot.suspects)
        if snapshot.suspects and not self._is_suspect:
            _log.error(
                "[gen %d | rank %d | step %d] numbers became NaN or infinite in %r%s: this snapshot and later ones like it "
                "are suspect, and a restart prefers an older one (flashckpt ls shows them)",
                snapshot.request.id.generation, rank, step, snapshot.suspects[0],
                f" and {more} more" if (more := len(snapshot.suspects) - 1) else "",
            )  # fmt: skip
        self._tell_agent(step, is_bad=bool(snapshot.suspects) or snapshot.grown is not None)
        self._is_suspect = bool(snapshot.suspects)
        if self._left_out and rank == self.mates[0]:  # from here on a restart knows of it too
            self.directory.note(f"behind step {step - 1}: {self._left_out}", LEFT_OUT)
        self._left_out = ""
        for name, value in zip(SIZES, snapshot.sizes, strict=True) if rank == 0 and snapshot.request.persist else ():
            append(self.directory.path, LoggedValue(snapshot.request.id.generation, step, name, value))
        if snapshot.grown is not None:
            self.stats["grown"] += 1
            _log.warning(
                "[gen %d | rank %d | step %d] the largest number of %r grew from %.3g to %.3g since the snapshot before: a spike,"
                " or a bit that flipped; restore(step=N) goes back", snapshot.request.id.generation, rank, step, *snapshot.grown,
            )  # fmt: skip

    def _tell_agent(self, step: int, *, is_bad: bool) -> None:
        """Let the agent know the steps in which numbers became bad, and when they have been good again for a while."""
        has_begun, has_ended = is_bad and not self._is_suspect, self._noted == 1 and not is_bad
        if (has_begun or has_ended) and (agent := agent_folder()) is not None:
            note_suspect(agent, *((self._clean + 1, step) if has_begun else (0, 0)))
        self._noted = FORGET if is_bad else max(0, self._noted - 1)
        self._clean = self._clean if is_bad else step

    def _note_where(self, snapshot: Snapshot) -> None:
        """Count what the training thread copied, and log once that it does."""
        self.stats["copied_in_step"] += snapshot.is_copied_here
        self.stats["joined_bytes"] += snapshot.offer.joined_bytes
        if snapshot.found_full and not self._is_full_logged:
            self._is_full_logged = True
            _log.warning(
                "no idle core: from step %d on snapshots are copied inside ckpt.step(), which costs training less, "
                "until a core is idle again",
                snapshot.request.id.step,
            )

    def _wake_daemon(self, *, wakes: bool) -> None:
        try:
            self.directory.notify(self.tracked.world.rank, wakes=wakes)
        except FileNotFoundError:
            if not self._is_removed:
                _log.error(
                    "another process removed this job's shared memory (%s): training continues, but its snapshots "
                    "do not survive a crash, which falls back to the last checkpoint; restart the job to have them again",
                    self.directory.path,
                )
            self._is_removed = True

    def _failed(self, snapshot: Snapshot, error: Exception) -> None:
        if snapshot.needs_other_plan:
            self._plans.failed(snapshot.plan)
        request = snapshot.request
        self._wanted.discarded(request.id, error, persist=request.persist)
        self._watermark.publish(self.memory.complete(), low_watermark=request.id)
        if isinstance(error, StillPersistedError):  # not a failure: with two slots there is no other place
            self._count_skip("busy")
            return
        self.stats["discarded"] += 1
        _log.error(
            "[gen %d | rank %d | step %d] snapshot discarded: %s",
            request.id.generation, request.rank, request.id.step, error,
        )  # fmt: skip
        self._call("on_failure", error)

    # -- everything else ---------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        """Called by the hook of every tracked optimizer."""
        self._optimizer_steps += 1
        self.fence()

    def fence(self) -> None:
        """As `Checkpointer.fence`."""
        began = time.perf_counter()
        self._came_to_fence(began)
        self._stager.fence()
        self.stats["fence_s"] += time.perf_counter() - began

    def _came_to_fence(self, now_s: float) -> None:
        """Note how long training lets a copy take: from the end of `step()` to the first fence."""
        if self._left_s is not None:
            self._window_s, self._left_s = now_s - self._left_s, None

    @property
    def should_stop(self) -> bool:
        """As `Checkpointer.should_stop`."""
        after = self._control.stop_after
        return after >= 0 and self._row.step >= after

    def log(self, name: object, value: Any, step: int | None) -> None:
        """As `Checkpointer.log`."""
        number = self._row.step if step is None else step
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            raise ConfigError("a name of log() cannot be used", found=repr(name)[:MOST_NAME], expected="a short str")
        try:
            plain = value.detach() if hasattr(value, "detach") else value  # a loss requires a gradient, as torch warns
            logged = LoggedValue(self.outcome.record.number, int(number), name, float(plain))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"log({name!r}) takes a number", found=repr(value)[:MOST_NAME]) from error
        self.stats["log_dropped"] += not append(self.directory.path, logged)

    def phases(self, seconds: Mapping[str, float]) -> None:
        """As `Checkpointer.phases`."""
        if unknown := seconds.keys() - PHASES[:-1]:
            expected = f"{', '.join(PHASES[:-1])}; what step() takes is counted without it"
            raise ConfigError("a phase of phases() is not known", found=", ".join(sorted(unknown)), expected=expected)
        for phase, spent_s in seconds.items():
            self._row.spent(phase, spent_s)

    def heartbeat(self) -> None:
        """As `Checkpointer.heartbeat`."""
        self._row.heartbeat_ns = time.monotonic_ns()

    def pause(self, *, paused: bool) -> None:
        """Begin or end a time without steps; times of several threads may overlap."""
        with self._pause_lock:
            self._pauses += 1 if paused else -1
            self._row.paused = int(self._pauses > 0)
        self.heartbeat()

    def wait(self, timeout: float | None) -> None:
        """As `Checkpointer.wait`."""
        self._stager.finish()
        Waiting(
            wanted=self._wanted,
            directory=self.directory,
            timeout_s=timeout,
            present=SnapshotId(self.outcome.record.number, self._last_step),
            take=self._make_up,
            known=self._watermark.known,
            holds=self._holds,
            alive=self.heartbeat,
            by_time=self._settings.for_persister()["persist_s"] > 0,
        ).run()
        self._committed.look()

    def _make_up(self) -> str:
        """Begin the snapshot of the last step that could not be taken then; return why it never can be, or ""."""
        if self._optimizer_steps != self._stepped_at:
            return (
                f"the snapshot to be persisted at step {self._wanted.owed or self._last_step} was not taken, and the "
                "state is not that of a whole step now: call wait() right after ckpt.step()"
            )
        if self._take(self._last_step):
            self._stager.finish()
        return ""

    def _note_restored(self) -> None:
        report, segment = self.outcome.report, self.memory.segment
        headers = segment.headers() if segment is not None else ()
        marked = report is not None and any(
            h.persist and h.identity == (report.generation, report.step) for h in headers
        )
        self._wanted.began_with(report, settings=self._settings, marked=marked)

    def _holds(self, wanted: SnapshotId) -> bool:
        segment = self.memory.segment
        return segment is not None and any(h.is_complete and h.identity == wanted for h in segment.headers())

    def _call(self, name: str, *arguments: Any, may_exit: bool = False) -> None:
        if (function := self._callback(name)) is not None:
            self.call(name, function, *arguments, may_exit=may_exit)

    def call(self, name: str, function: Callable[..., object], *arguments: Any, may_exit: bool) -> None:
        """Call one of the user's callbacks: an exception in it is logged and counted, and never ends training.

        Args:
            name: The callback's name, for the log.
            function: The callback.
            arguments: Passed to it.
            may_exit: Let SystemExit and KeyboardInterrupt propagate: in the training thread they are intended. The copy
                thread must survive them, since training waits for it.
        """
        try:
            function(*arguments)
        except BaseException as error:
            if may_exit and not isinstance(error, Exception):
                raise
            self.stats["callback_errors"] += 1
            _log.exception("the callback %s failed; training continues", name)

    def close(self) -> None:
        """Finish the snapshot under way and let go of everything; files stay."""
        atexit.unregister(self._at_exit)
        if self._signals is not None:
            self._signals.restore()
        self._stager.close()
        if self._relay is not None:
            self._relay.close()
        if self._owner is not None:
            self._owner.close(confirm=self._wanted.taken is not None)
        self.pause(paused=True)  # no step is to be expected any more
        self._row.paused = CLOSED
        self.memory.release()
        self._lease.close()

    def _at_exit(self) -> None:
        """End the threads before the interpreter takes their memory away."""
        if not self.is_forked:
            self.close()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one of the session: threads, memory and job are not its own."""
        return os.getpid() != self._pid

    def end(self) -> None:
        """Tell the daemon that the job ended cleanly (first rank of the node; dlrun does it where it runs)."""
        if self.mates[0] == self.tracked.world.rank:
            self.directory.request("ended")
