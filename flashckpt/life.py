"""One life of the worker group on one rank: from `restore()` to `close()`."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flashckpt.errors import DamagedError, PersistError
from flashckpt.memory.control import Control, ControlRow
from flashckpt.memory.job import DaemonStatus, JobConfig, JobDirectory
from flashckpt.memory.watermark import Watermark
from flashckpt.restore.restoring import Outcome
from flashckpt.settings import Settings
from flashckpt.staging import rank_memory as memory
from flashckpt.staging.staging import Identity, Plan, Snapshot, Stager, StaleWatch
from flashckpt.tracking.samplers import Commits
from flashckpt.tracking.tracked import Captured, Tracked

_log = logging.getLogger("flashckpt")
RESERVE_WAIT_S = 2.0
"""How long the ordinary snapshots of a life wait, all together, for memory that is still being reserved; then they are skipped."""
SLOT_WAIT_S = 30.0
"""How long a persist step waits for a slot that may be overwritten."""
_POLL_S = 0.002


@dataclass(eq=False, kw_only=True)
class Life:
    """What `Checkpointer` delegates to between restore and close.

    Attributes:
        mates: Global ranks of this node, ascending; the first one writes the node's records.
        stats: Counters and seconds, for people and benchmarks.
    """

    tracked: Tracked
    directory: JobDirectory
    memory: memory.RankMemory
    settings: Settings
    outcome: Outcome
    mates: Sequence[int]
    on_snapshot: Callable[[int], None]
    on_failure: Callable[[Exception], None]
    on_commit: Callable[[int, int], None]
    stats: dict[str, float] = field(default_factory=dict)

    def begin(self, config: JobConfig, *, entered_ns: int, initialised_ns: int) -> None:
        """Announce the job on this node, start the daemon where no agent does, and take the control row."""
        world, record = self.tracked.world, self.outcome.record
        self._lease, self._pid = self.directory.hold_live(), os.getpid()
        atexit.register(self._at_exit)
        if self._is_first:
            self.directory.request_path("ended").unlink(missing_ok=True)
            self.directory.write_config(config)
            self._announce()
        control = self._control = Control.open(self.directory.control_path, rows=len(self.mates))
        self._local_rank = self.mates.index(world.rank)
        row = self._row = control.row(self._local_rank)
        row.clear()
        row.rank, row.pid, row.world_size = world.rank, os.getpid(), world.size
        row.generation = record.generation
        row.entered, row.initialised = entered_ns, initialised_ns
        row.restored_step = self.outcome.report.step if self.outcome.report else -1
        row.step = max(row.restored_step, 0)
        row.restored = row.heartbeat_ns = time.monotonic_ns()
        row.restore_started = initialised_ns
        self._watermark = Watermark(
            control=control,
            local_rank=self._local_rank,
            rank=world.rank,
            world_size=world.size,
            local_world_size=len(self.mates),
            generation=record.generation,
            store=_c10d_store() if world.size > len(self.mates) else None,
            restored=record.parent if self.outcome.superseded is None else None,
            parent=record.parent,
        )
        self._watermark.publish(self.memory.complete())
        self._stager = Stager(self._completed, self._failed)
        self._stager.ready()
        self._commits, self._patience_s = Commits(), RESERVE_WAIT_S
        self._stale, self._optimizer_steps = StaleWatch(), 0
        self._plan: Plan | None = None
        self._persisted: tuple[int, int] | None = None
        self._committed: tuple[int, int] | None = None

    @property
    def has_stepped(self) -> bool:
        """Whether `step()` was called in this life."""
        return bool(self._row.first_step)

    @property
    def _is_first(self) -> bool:
        return self.mates[0] == self.tracked.world.rank

    @property
    def has_agent(self) -> bool:
        """Whether dlrun watches over this rank and its daemon."""
        return bool(os.environ.get("FLASHCKPT_AGENT_DIR"))

    def _announce(self) -> None:
        if not self.has_agent:
            self.directory.ensure_daemon()
            return
        path = Path(os.environ["FLASHCKPT_AGENT_DIR"]) / "job"
        temporary = path.with_name(f".job.{os.getpid()}")
        temporary.write_text(str(self.directory.path))
        temporary.replace(path)

    # -- step --------------------------------------------------------------------------------------------

    def step(self, step: int, samples: int | None) -> None:
        """As `Checkpointer.step`."""
        began = time.perf_counter()
        self._commits.commit(self.tracked.objects, samples, step)
        row, now = self._row, time.monotonic_ns()
        row.step, row.heartbeat_ns = step, now
        if not row.first_step:
            row.first_step = now
        stopping = self._control.stop_after == step
        if not (stopping or self.settings.is_due(step)):
            self._take_in()
            return
        self._stager.finish()
        self._count("finish_s", time.perf_counter() - began)
        self._take(step, persist=stopping or self.settings.is_persist(step))
        self._watch_commits()
        self._count("call_s", time.perf_counter() - began)

    def _take(self, step: int, *, persist: bool) -> None:
        captured = self.tracked.capture()
        plan, captured = self._current_plan(captured)
        if not self._has_memory(persist=persist):
            self._skip(step, "its memory is still being reserved")
            return
        record = self.outcome.record
        identity = Identity(
            job=self.settings.job,
            generation=record.generation,
            step=step,
            parent=record.parent,
            world_size=self.tracked.world.size,
            rank=self.tracked.world.rank,
            coordinates=self.tracked.world.coordinates,
            persist=persist,
        )
        writer = self._writer(identity)
        if writer is None:
            self._skip(step, "every slot holds a snapshot that is still needed")
            return
        self._stager.start(plan, writer, captured, identity, optimizer_steps=self._optimizer_steps)
        if persist:
            self._persisted = (record.generation, step)

    def _has_memory(self, *, persist: bool) -> bool:
        began = time.perf_counter()
        found = self.memory.wait_first(None if persist else self._patience_s)
        self._patience_s = max(0.0, self._patience_s - (time.perf_counter() - began))
        return found

    def _writer(self, identity: Identity) -> Any:
        end = time.monotonic() + (SLOT_WAIT_S if identity.persist else 0.0)
        while True:
            writer = self.memory.begin(
                generation=identity.generation,
                step=identity.step,
                world_size=identity.world_size,
                persist=identity.persist,
                parent=identity.parent,
                known=self._watermark.known(),
                superseded=self.outcome.superseded,
            )
            if writer is not None or time.monotonic() >= end:
                return writer
            time.sleep(_POLL_S)

    def plan_ahead(self, plan: Plan | None = None) -> None:
        """Plan what the first snapshot will consist of, optimizer state that does not exist yet included.

        A restore may have brought state that nobody could foresee when memory was reserved: then other memory is
        reserved from now on, so that it is there when the first snapshot is due.

        Args:
            plan: Made of the structure built last, where there is one.
        """
        captured = None
        if plan is None:
            structure, captured = self.tracked.settled(ahead=True)
            plan = Plan(structure, self.tracked.ahead.stand_ins)
        self._plan = plan
        self._make_room(plan, captured if captured is not None else self.tracked.capture())

    def _take_in(self) -> bool:
        """Let state that was planned ahead take its place in the plan, once it exists; whether it did now."""
        if self._plan is None or not self._plan.awaits or (appeared := self.tracked.appeared()) is None:
            return False
        self._plan.take_in(appeared)
        return True

    def _current_plan(self, captured: Captured) -> tuple[Plan, Captured]:
        """Return the plan for the state as it is; made anew only if its structure changed."""
        plan = self._plan
        is_current = plan is not None and not plan.is_stale and plan.structure is self.tracked.planned
        is_current = is_current and plan is not None and captured.forms == plan.structure.forms
        if plan is not None and is_current and (self._take_in() or self.tracked.holds()):
            return plan, captured
        self._count("plans", 1)
        structure, captured = self.tracked.settled()
        plan = self._plan = Plan(structure)
        self._make_room(plan, captured)
        return plan, captured

    def _make_room(self, plan: Plan, captured: Captured) -> None:
        """Reserve other memory if the plan, or what it still expects, does not fit into the segment."""
        structure, value_bytes = plan.structure, len(repr(captured.values))
        need = plan.need(value_bytes)
        if structure.forecast:
            need = memory.need_of(structure.reserved(), value_bytes=value_bytes)
        if self.memory.fits(need):
            return
        _log.info("the state has another structure now: %d tensors, a new segment", len(structure.rows))
        growing = sum(item.nbytes for item in plan.fresh)  # lists of tensors grow step by step: not a segment for each
        self.memory.replace(need.with_room(growing), slots=self.settings.slot_count, job=self.settings.job)

    def _skip(self, step: int, why: str) -> None:
        self._count("skipped", 1)
        # said to the others: ranks that lost different snapshots would keep each other's slots for ever
        self._watermark.publish(self.memory.complete(), passed=(self.outcome.record.generation, step))
        _log.warning("no snapshot of step %d: %s", step, why)

    def _count(self, name: str, value: float) -> None:
        self.stats[name] = self.stats.get(name, 0.0) + value

    # -- copy thread -------------------------------------------------------------------------------------

    def _completed(self, snapshot: Snapshot) -> None:
        self._watermark.publish(self.memory.complete())
        self.directory.notify(self.tracked.world.rank)
        self._count("snapshots", 1)
        self._count("copy_s", snapshot.copied_s - snapshot.started_s)
        self._count("complete_s", snapshot.done_s - snapshot.started_s)
        self._count("copy_cpu_s", snapshot.cpu_s)
        if self._stale.look(snapshot):
            _log.warning(
                "three snapshots up to step %d hold equal parameters and optimizer state although the optimizer "
                "stepped: is the model that trains the one that is tracked?",
                snapshot.identity.step,
            )
        self.on_snapshot(snapshot.identity.step)

    def _failed(self, snapshot: Snapshot, error: Exception) -> None:
        self._count("discarded", 1)
        identity = (snapshot.identity.generation, snapshot.identity.step)
        self._watermark.publish(self.memory.complete(), passed=identity)
        _log.error(
            "[gen %d | rank %d | step %d] snapshot discarded: %s",
            snapshot.identity.generation, snapshot.identity.rank, snapshot.identity.step, error,
        )  # fmt: skip
        self.on_failure(error)

    # -- everything else ---------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        """Called by the hook of every tracked optimizer."""
        self._optimizer_steps += 1
        self.fence()

    def fence(self) -> None:
        """As `Checkpointer.fence`."""
        began = time.perf_counter()
        self._stager.fence()
        self._count("fence_s", time.perf_counter() - began)

    @property
    def should_stop(self) -> bool:
        """As `Checkpointer.should_stop`."""
        after = self._control.stop_after
        return after >= 0 and self._row.step >= after

    def heartbeat(self) -> None:
        """As `Checkpointer.heartbeat`."""
        self._row.heartbeat_ns = time.monotonic_ns()

    def pause(self, *, paused: bool) -> None:
        """Begin or end a time without steps."""
        self._row.paused = int(paused)
        self.heartbeat()

    def _status(self) -> DaemonStatus | None:
        try:
            return self.directory.read_status()
        except DamagedError:
            return None

    def _watch_commits(self) -> None:
        status = self._status()
        if status is not None and status.committed not in (None, self._committed):
            assert status.committed is not None
            self._committed = status.committed
            self.on_commit(*status.committed)

    def wait(self, timeout: float | None) -> None:
        """As `Checkpointer.wait`."""
        self._stager.finish()
        wanted, end = self._persisted, None if timeout is None else time.monotonic() + timeout
        if wanted is None:
            return
        without_daemon, asked = 0, False
        while True:
            self.heartbeat()  # slow storage is no hang
            status = self._status()
            if status is not None and status.committed is not None and status.committed >= wanted:
                self._watch_commits()
                return
            if status is not None and status.error:
                raise self._not_durable(wanted, status.error)
            if not asked and not self._holds(wanted):  # overwritten before the daemon saw it: it would wait for ever
                self.directory.request("persist-now")
                asked = True
            without_daemon = 0 if self.directory.daemon_alive() else without_daemon + 1
            if without_daemon > 15 / _POLL_S / 10:
                raise self._not_durable(wanted, "no daemon of this job lives on this node")
            if end is not None and time.monotonic() > end:
                raise self._not_durable(wanted, f"not committed after {timeout} s")
            time.sleep(_POLL_S * 10)

    def _holds(self, wanted: tuple[int, int]) -> bool:
        segment = self.memory.segment
        return segment is not None and any(h.is_complete and h.identity == wanted for h in segment.headers())

    def _not_durable(self, wanted: tuple[int, int], found: str) -> PersistError:
        return PersistError(
            f"step {wanted[1]} of generation {wanted[0]} is not on storage",
            found=found,
            state="Its snapshot is in host memory; training may go on.",
            remedy=f"look at the storage and at {self.directory.path}/daemon.log",
        )

    def close(self) -> None:
        """Finish the snapshot under way and let go of everything; files stay."""
        atexit.unregister(self._at_exit)
        self._stager.close()
        self.pause(paused=True)  # no step is to be expected any more
        self.memory.release()
        self._lease.close()

    def _at_exit(self) -> None:
        """End the threads before the interpreter takes their memory away; a forked child has none of them."""
        if os.getpid() == self._pid:
            self.close()

    def end(self) -> None:
        """Tell the daemon that the job ended cleanly (first rank of the node; dlrun does it where it runs)."""
        if self._is_first:
            self.directory.request("ended")


def _c10d_store() -> Any:
    """Return the store behind the default process group: how nodes tell each other what they hold."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 -- there is no public way to the store


__all__ = ["ControlRow", "Life"]
