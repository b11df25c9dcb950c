"""The public class: track, restore, step. Names are frozen; docs/engine.md says what each promises."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import Self

from flashckpt import accelerator, collectives, entry_points
from flashckpt.core.settings import Settings, tracking_settings
from flashckpt.environment import env
from flashckpt.errors import ConfigError
from flashckpt.report import RestoreReport, guarded, notice, show_own_errors_plainly
from flashckpt.restore.coordinator import Reader, RestoreCoordinator, RestoreRequest
from flashckpt.restore.executor import collector_paused
from flashckpt.session.coverage import UntrackedOptimizers, coverage
from flashckpt.session.opening import Opening
from flashckpt.session.session import Session
from flashckpt.state.data_sources import PAGE, continuation_of
from flashckpt.state.placement import current_world, trainable
from flashckpt.state.registry import StateRegistry
from flashckpt.storage.factory import check_options, is_process_local, job_id, root_url

_logger = logging.getLogger("flashckpt")
show_own_errors_plainly()


class Checkpointer:
    """Snapshots of training state in host memory, persisted by a daemon, restored after a crash.

    Args:
        root: URL or path of the checkpoint root, e.g. "s3://bucket/run" or "/data/run".
        snapshot_every: Steps between snapshots in memory.
        persist_every: Steps between checkpoints on storage; a snapshot is always taken there. None: only by
            `step(persist=True)`, `wait()` and `flashckpt persist`. Or a time ("30s", "10min", "2h") between two: the newest
            snapshot then; or "continuous": the newest one whenever no write is running.
        keep_last: Checkpoints to keep; None keeps all. Or a time: those that are younger, and the newest.
        keep_every: Also keep every checkpoint whose step is a multiple of this. Or a time: the first one of each such interval.
        job: Job id; by default FLASHCKPT_JOB_ID, the scheduler's id, or a digest of the root.
        slots: Snapshots in memory per rank, 2 to 8, or "auto" for 3 where they fit and else 2.
        storage_options: Passed to the store.
        compression: "off", "auto", "zstd" or "zstd:LEVEL" (1 to 19), of persisted chunks.
        replicate: Partner nodes, 0 to 2, whose memory keeps what no other node holds of this node's snapshots (docs/replicas.md).
        replicate_every: Only snapshots whose step is a multiple of this are replicated.
        replicate_rate: Bytes per second that a node sends to a partner at most; None for no limit.

    What a callback raises is logged with its traceback, counted in `stats["callback_errors"]`, and ends nothing.

    Attributes:
        on_snapshot: Called as f(step) in the copy thread when a snapshot is COMPLETE.
        on_commit: Called as f(generation, step) from `step()` when a checkpoint was committed.
        on_restore: Called as f(report) at the end of `restore()`.
        on_failure: Called as f(error) in the copy thread when a snapshot was discarded.

    Raises:
        ConfigError: An argument is wrong; RootError: the root is of a kind that no daemon could reach.
    """

    on_snapshot: Callable[[int], None] | None = None
    on_commit: Callable[[int, int], None] | None = None
    on_restore: Callable[[RestoreReport], None] | None = None
    on_failure: Callable[[Exception], None] | None = None

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        snapshot_every: int = 5,
        persist_every: int | str | None = 250,
        keep_last: int | str | None = 3,
        keep_every: int | str | None = None,
        job: str | None = None,
        slots: int | str = "auto",
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "off",
        replicate: int = 0,
        replicate_every: int = 1,
        replicate_rate: int | None = None,
    ) -> None:
        self._entered_ns = time.monotonic_ns()
        env.check("rank")
        if env.FLASHCKPT_AFTER_COMMIT and not env.FLASHCKPT_AGENT_DIR:
            entry_points.refuse_wrong_tasks()
        url = root_url(root)
        if is_process_local(url):
            raise ConfigError(
                f"the root {url!r} is private to one process: neither the daemon nor a restarted rank can reach it",
                expected="a path, or a URL of storage that all nodes reach",
                remedy="use a directory, e.g. /tmp/run",
            )
        self._settings = Settings(
            root=url,
            job=job_id(url, job),
            snapshot_every=snapshot_every,
            persist_every=persist_every,
            keep_last=keep_last,
            keep_every=keep_every,
            slots=slots,
            storage_options=storage_options,  # type: ignore[arg-type]  # Settings makes a dict of it
            compression=compression,
            replicate=replicate,
            replicate_every=replicate_every,
            replicate_rate=replicate_rate,
        )
        check_options(url, self._settings.storage_options)
        self._tracked = StateRegistry(current_world())
        self._mesh: Any = None
        self._replicated_over: Any = None
        self._session: Session | None = None
        self._hooks: list[Any] = []
        self._untracked: UntrackedOptimizers | None = None
        self._is_captured = False  # whether an optimizer steps in a graph

    # -- what is tracked ---------------------------------------------------------------------------------

    def track(
        self,
        *,
        rng: bool = False,
        mesh: Any = None,
        replicated_over: Any = None,
        fenced: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        **things: Any,
    ) -> None:
        """Name the objects whose state is taken and restored; may be called several times before `restore()`.

        Args:
            rng: Take the random number generators (torch CPU and CUDA, Python, numpy) of each rank.
            mesh: DeviceMesh of all ranks: names per-rank state by coordinate, and declares that plain tensors
                of one name are equal on all ranks of a pipeline stage.
            replicated_over: "world", a process group or a list of ranks over which plain tensors are equal.
            fenced: Names of things that change only inside the `step()` of a tracked optimizer, or never
                between `ckpt.step()` and `ckpt.fence()`: they are copied beside the next forward/backward.
            exclude: Patterns over names of module state that no snapshot holds and no restore touches, e.g. "base.*" for the
                frozen weights of a LoRA: load them where they come from, before `restore()`. With or without the track name.
            **things: Modules, torch optimizers, lists of them, or objects with state_dict/load_state_dict. An
                object with `flashckpt_replicated = True` has one state for all ranks; one with `flashckpt_optional = True`
                stays as it is where no rank of the snapshot had any under its name.

        Raises:
            ConfigError: A name is taken or reserved, a thing has no state, an optimizer has foreign parameters, a sampler
                is tracked twice (as itself and inside its batch sampler), or what is left out is trained.
            UnsupportedStateError: State that is there already cannot be held: nested too deeply, or in an optimizer
                that wraps another one.
        """
        if self._session is not None:
            raise ConfigError("track() after restore()", remedy="track everything first, then call restore()")
        rng, fenced = tracking_settings(rng, fenced, things)
        self._mesh = mesh if mesh is not None else self._mesh
        self._replicated_over = replicated_over if replicated_over is not None else self._replicated_over
        self._tracked.rng = self._tracked.rng or rng
        self._tracked.exclusion.add(exclude)
        for name, thing in things.items():
            if thing is not None:
                self._tracked.add(name, thing, fenced=name in fenced)
                if name in self._tracked.objects:
                    self._say_how_it_continues(name, thing)
        for optimizer in self._tracked.all_optimizers()[len(self._hooks) :]:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
        if self._tracked.exclusion and self._tracked.modules:
            self._say_what_is_left_out()

    def _say_what_is_left_out(self) -> None:
        left_out, is_first = self._tracked.left_out(), self._tracked.world.rank == 0
        total = sum(tensor.numel() * tensor.element_size() for tensor in left_out.values())
        text = "left out of snapshots: %d tensors, %.1f MB; a restore leaves them as they are"
        notice(_logger, text, len(left_out), total / 1e6, is_shown=is_first)
        for pattern in self._tracked.exclusion.unmatched(left_out) if is_first else ():
            guarded(_logger).warning("exclude=%r matches no parameter or buffer of a tracked module", pattern)

    def _say_how_it_continues(self, name: str, thing: Any) -> None:
        if (found := continuation_of(thing)) is None:
            return
        kind, is_first = type(thing).__qualname__, self._tracked.world.rank == 0
        if found.is_exact:
            notice(_logger, "%s (%s): %s", name, kind, found.words, is_shown=is_first)
        elif is_first:
            guarded(_logger).warning("%s (%s): %s; see %s", name, kind, found.words, PAGE)

    # -- restore -----------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        generation: int | None = None,
        root: str | None = None,
        only: str | None = None,
        strict: bool = True,
        *,
        fresh: bool = False,
    ) -> RestoreReport | None:
        """Restore the newest state that every rank can reach, and begin a new session of the job. Collective.

        Memory is looked at first, then storage; a restart under a running agent that memory covers never
        waits for storage. Call it once, after `track()` and before the first `step()`, on every rank.

        Args:
            step: Exactly this step; later ones are abandoned.
            generation: Only from this generation.
            root: Read from another root (a warm start) instead of what this job has. `restore() or
                restore(root=...)` does so only where this job has nothing yet.
            only: Pattern over names, e.g. "model.*"; what does not match stays as it is. A new lineage begins.
            strict: Names that no source has are an error; otherwise they stay as they are and are reported.
            fresh: Start from scratch, whatever memory and storage hold: everything older is abandoned, as by a restore of a
                step before it. A restart of the ranks under the same dlrun continues the run that began so.

        Returns:
            What was restored and how; None on a fresh start.

        Raises:
            NoCheckpointError: The wanted step exists nowhere.
            ShardGapError: The shards that exist do not cover the state; names the first tensor.
            DamagedError: No intact copy of some bytes is left.
            SharedMemoryError: Too little memory for two snapshots.
            JobInUseError: Another run with this job id is active on this node; names one of its processes.
            RootError: The root cannot be asked, or is empty although checkpoints of this job were committed on it.
            ConfigError: `fresh` together with something to restore.
        """
        if fresh:
            _refuse_beside_fresh(step, generation, root, only)
        url = self._settings.root if root is None else root_url(root)
        wanted = RestoreRequest(root=url, step=step, generation=generation, only=only, strict=strict, fresh=bool(fresh))
        return self._restored(wanted, warm=root is not None)

    def _restored(self, request: RestoreRequest, *, warm: bool) -> RestoreReport | None:
        with trainable(self._tracked.parts()):
            if self._session is not None:
                report: RestoreReport | None = self._warm_start_after(request, given=warm)
            else:
                report = self._begin(request, warm=warm)
        self._untracked = self._untracked or UntrackedOptimizers(self._tracked)
        if report is not None:
            notice(_logger, "%s", report, is_shown=self._tracked.world.rank == 0)
            if self.on_restore is not None:
                self._alive().call("on_restore", self.on_restore, report, may_exit=True)
        return report

    @collector_paused()
    def _warm_start_after(self, request: RestoreRequest, *, given: bool) -> RestoreReport:
        """Fill the state of a job that found no snapshot: `restore() or restore(root=...)`."""
        session = self._alive()
        if not given or session.outcome.report is not None or session.has_stepped:
            raise ConfigError(
                "restore() was called twice",
                expected="one call before the first step(), or restore(root=...) after one that returned None",
            )
        report = self._read(request)
        session.plan_ahead()  # what was restored has changed the structure
        return report

    def _read(self, request: RestoreRequest) -> RestoreReport:
        options = self._settings.storage_options
        return RestoreCoordinator(tracked=self._tracked, directory=None, options=options, request=request).read()

    @collector_paused()  # a plan is made of a few objects per tensor
    def _begin(self, request: RestoreRequest, *, warm: bool) -> RestoreReport | None:
        initialised_ns = time.monotonic_ns()
        self._tracked.world = current_world(self._mesh, self._replicated_over)
        if self._tracked.world.rank == 0:
            notice(_logger, "%s", coverage(self._tracked))
        report = self._read(request) if warm else None
        own = RestoreRequest(root=self._settings.root) if warm else request
        opening = Opening(tracked=self._tracked, settings=self._settings, request=own, begins_fresh=warm)
        with opening.undone_on_error():
            opened = opening.run()
            self._session = Session.start(
                opened,
                callback=lambda name: getattr(self, name),
                entered_ns=self._entered_ns,
                initialised_ns=initialised_ns,
            )
        if report is not None:
            return replace(report, life=opened.outcome.record.number)
        return opened.outcome.report

    # -- the training loop -------------------------------------------------------------------------------

    def step(self, step: int, samples: int | None = None, *, persist: bool = False) -> None:
        """Say that optimizer step `step` is done; take a snapshot if one is due. No collective, no large copy.

        Args:
            step: Number of the step just completed: a whole number above the last one of this run, from 1 on; after
                a restore above the step that was restored. It counts optimizer steps over all epochs.
            samples: Global samples that the step consumed; None lets the tracked sampler say it.
            persist: Persist this step whatever `persist_every` says: the last step of a run, the end of an epoch. The
                same on every rank. Its snapshot is not skipped: where no slot is free the call waits for one.

        Raises:
            ConfigError: `restore()` was not called, or `step` is no such number; nothing was counted or taken.
            SamplerStateError: A tracked sampler did not move, for the second step in a row.
            SharedMemoryError: The memory that was promised could not be reserved.
        """
        self._alive().step(step, samples, persist=persist)
        if self._untracked is not None and self._untracked.others:
            self._untracked.check()
        if self._is_captured:
            self.fence()

    def leave_out(self, first: int, last: int) -> None:
        """Leave out the samples of steps to come, of tracked samplers that can: those at which training went wrong.

        The same on every rank, behind `restore()`, before the next sample is drawn. A line names and counts them, and so does `flashckpt status`;
        all others come once, as ever. dlrun does the same where a failure comes again.

        Args:
            first: A step, counted as before the restore.
            last: The last such step; steps that the restored state has behind it are left alone.

        Raises:
            ConfigError: `last` is before `first`.
        """
        if last < first:
            raise ConfigError(
                "no step is to be left out", found=f"first={first}, last={last}", expected="last at or behind first"
            )
        self._alive().leave_out(first, last)

    def fence(self) -> None:
        """Return when parameters and optimizer state may be changed. Tracked optimizers call it automatically."""
        if self._session is not None:
            self._session.fence()

    def _before_optimizer_step(self, *_: object) -> None:
        if accelerator.is_capturing():
            # a replay calls no hook: from now on what follows step() waits for its copies, on the device
            self._is_captured = True
        elif self._session is not None and not self._session.is_forked:
            self._session.before_optimizer_step()

    @property
    def should_stop(self) -> bool:
        """Whether every rank is to end after the step just done (its snapshot is taken and persisted)."""
        return self._session is not None and self._session.should_stop

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Keep a number for `flashckpt dashboard`, e.g. `ckpt.log("loss", loss)`: in memory, and on the root a minute later.

        A session keeps 64 names and about 1000 points of each, whose steps ascend. Only values of ranks on the first node reach the root.

        Args:
            name: Of the curve; at most 100 characters.
            value: Anything that `float()` takes; a tensor on a device is waited for.
            step: Its step; None for the last one that `step()` was called with.

        Raises:
            ConfigError: `restore()` was not called, or the name or value is none.
        """
        self._alive().log(name, value, step)

    def phases(self, **seconds: float) -> None:
        """Report where the time of a step went, e.g. `ckpt.phases(data=0.02)`: dlrun names ranks that are slow, and in what.

        Args:
            seconds: Of `data`, `forward`, `backward`, `sync`, `clip`, `optimizer` or `log`, added to the sums so far.

        Raises:
            ConfigError: `restore()` was not called, or there is no such phase.
        """
        self._alive().phases(seconds)

    def keep_samples(self, dataset: Any, *, mib: int = 256) -> Any:
        """Return `dataset` for `DataLoader(ckpt.keep_samples(dataset), ...)`: a restart on this node need not prepare the last samples again.

        Those that take a millisecond or more are kept, for any number of ranks, whatever batches are made of them.

        Args:
            dataset: A map-style data set, in `SeededSamples` too; the sampler gets `dataset` itself.
            mib: Of shared memory per rank: room for the steps between two snapshots, and for what workers prepare ahead.
        """
        kind = entry_points.optional("kept-samples")
        began_ns = time.time_ns() - (time.monotonic_ns() - self._entered_ns)
        return kind(dataset, lambda: self._session, began_ns=began_ns, most_bytes=mib << 20) if kind else dataset

    def heartbeat(self) -> None:
        """Report progress of this rank other than steps."""
        self._alive().heartbeat()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Say that no step is to be expected inside the `with` block (evaluation, data preparation)."""
        session = self._alive()
        session.pause(paused=True)
        try:
            yield
        finally:
            session.pause(paused=False)

    def wait(self, timeout: float | None = None) -> None:
        """Return when every persist step so far is committed on storage, or something newer is.

        Where the snapshot of the last one was skipped or discarded, it is taken now: call it between steps. Where
        storage has failed, the daemon tries again at once.

        Args:
            timeout: Seconds; None waits without limit while a daemon runs.

        Raises:
            PersistError: An attempt that began after this call failed, the snapshot was discarded (says why), no daemon
                runs, or the time is over. Training may continue.
        """
        self._alive().wait(timeout)

    def close(self) -> None:
        """Finish the snapshot under way and give the memory up. The daemon removes it when all ranks ended cleanly.

        Called while an exception travels, or after `should_stop`, it keeps everything for the next start.
        """
        for hook in (*self._hooks, *filter(None, [self._untracked])):
            hook.remove()
        self._hooks.clear()
        session, self._session = self._session, None
        if session is None or session.is_forked:
            return
        clean = sys.exc_info()[0] is None and not session.should_stop
        if clean and not session.has_stepped and session.outcome.report is None and self._tracked.world.rank == 0:
            guarded(_logger).warning(
                "close() without one step(): no snapshot was taken; call step(n) after each optimizer step"
            )
        session.close()
        if clean and not session.has_agent:
            with contextlib.suppress(RuntimeError):  # a rank that died meanwhile: then the job did not end cleanly
                collectives.all_gather(True)  # noqa: FBT003 -- one bit: this rank ended cleanly
                session.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def readonly(cls, root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Reader:
        """Return an object with `track()` and `restore()` that reads a root without job, daemon or memory tier."""
        return Reader(root, storage_options)

    # -- views -------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, float]:
        """Counters and seconds of this rank: snapshots, skipped (late, busy), discarded, call_s, fence_s, ..."""
        return dict(self._alive().stats)

    def _alive(self) -> Session:
        if self._session is None:
            raise ConfigError(
                "restore() was not called",
                expected="track(), then restore(), then step() after every optimizer step",
                remedy="call ckpt.restore() once before the loop; on a fresh start it returns None",
            )
        if self._session.is_forked:
            raise ConfigError(
                "this Checkpointer is that of the process from which this one was forked",
                found="a call in a child that has none of its threads, and would write into its snapshots",
                expected="calls in the process that called restore()",
                remedy="leave ckpt alone in forked processes",
            )
        return self._session


def _refuse_beside_fresh(*wanted: object) -> None:
    if any(one is not None for one in wanted):
        raise ConfigError(
            "restore(fresh=True) starts over, so it takes no step, generation, root or only",
            found="fresh=True with step, generation, root or only",
            remedy="for a warm start from another root: restore(fresh=True) or restore(root=...)",
        )
