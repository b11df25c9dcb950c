"""The training loop. Its order is what makes a resume exact.

1. next batch: after the committed position of the sampler, which only a finished step moves
2. forward and backward; loss, channel losses and gradient norm in one collective
3. guard, clip by value, clip by norm, optimizer step or skip; the rate is a function of the step
4. the step is finished: `Checkpointer.step` commits the position and takes the snapshot
5. trace, evaluation, stop request
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flashckpt import entry_points
from flashckpt.environment import env
from flashckpt.errors import RESUME_EXIT_CODE, FlashckptError
from flashckpt.report import RestoreReport
from flashckpt.sampler.datasets import reaching
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.data.prepared import check_prepared
from flashckpt.trainer.data.windows import ids_digest
from flashckpt.trainer.optim.average import OuterOptimizer, WeightAverage
from flashckpt.trainer.optim.builders import apply_settings, build_optimizers, set_rate, settings_of
from flashckpt.trainer.parallel.apply import MicroBatch, build_parallel
from flashckpt.trainer.parallel.distributed import check_root, is_first_start, note_restore, process_group
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.train.anomaly import Guard
from flashckpt.trainer.train.hooks import HookedRun, hooks_of
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.optim import clamp_gradients, clip_gradients, no_way_back, report_nonfinite
from flashckpt.trainer.train.phased_data import PhasedData
from flashckpt.trainer.train.phases import Phase, check_layouts, phase_at, phases_of, rate_jump
from flashckpt.trainer.train.profile_range import NOTHING, Profiled
from flashckpt.trainer.train.record import RunRecord, SpikeError, say_once
from flashckpt.trainer.train.starting import (
    announce,
    announce_phase,
    begin_if_new,
    checkpointer,
    explain,
    has_other_groups,
    seed_rng,
    training_data,
    waiting_for_data,
)
from flashckpt.trainer.train.step import Totals, TrainStep
from flashckpt.trainer.train.step_phases import FenceClock, PhaseTimer, StartClock

if TYPE_CHECKING:
    from flashckpt import Checkpointer

logger = logging.getLogger(__name__)


class Trainer:
    """One rank of one run.

    Args:
        layout: What `resolve_layout` gave for it.
        clock: Measures the start; None begins here.
        profiled: What is measured of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        device: torch.device,
        *,
        clock: StartClock | None = None,
        profiled: Profiled = NOTHING,
    ) -> None:
        config = on_device(config, device.type)
        self.config, self.layout = config, layout
        self.clock, self.timer, self.fences = clock or StartClock(), PhaseTimer(), FenceClock()
        self.phases = phases_of(config)
        self.phase = self.phases[0]
        self.parallel = build_parallel(config, layout, device)
        self.optimizers = build_optimizers(config.optim, self.parallel.parts, tied=config.model.tied_embeddings)
        self._settings = settings_of(self.optimizers)
        self.average = WeightAverage(config.ema, self.parallel.bare_parts()) if config.ema.decay else None
        self.outer: OuterOptimizer | None = None
        if config.parallel.sync_every:
            self.outer = OuterOptimizer(config.parallel, self.parallel, last=config.train.steps)
        data = functools.partial(training_data, parallel=self.parallel, layout=layout)
        self.data = PhasedData(self.phases, data, in_shares=config.parallel.groups > 0)
        self.apart: Any = None
        if self.outer is not None and config.parallel.groups:
            self.apart = entry_points.load(entry_points.EXTRAS, "separate-runs")(config, self.outer, self.data, device)
        self.train_step = self._step_of(config)
        self.guard = Guard(config.guard)
        self.record = RunRecord(config)
        anchor = None if self.outer is None else self.outer.anchor
        own: dict[str, Any] = {"average": self.average, "anchor": anchor, "profiled": profiled, "timer": self.timer}
        self.hooks = hooks_of(HookedRun(config=config, parallel=self.parallel, **own))
        self.ckpt: Checkpointer | None = None
        self.done = 0
        self._rolled_back_to = self._bad_at = -1
        self._accepted = self._overflowed = self._has_weights = self._owes_persist = False
        seed_rng(config, self.parallel)

    def _step_of(self, config: RunConfig) -> TrainStep:
        return TrainStep(
            self.parallel,
            self.data.dataset.channels,
            settings=config.parallel,
            has_losses=config.train.loss_chunk > 0,
            phases=self.timer,
        )

    def _enter(self, phase: Phase) -> None:
        """Continue with a phase: its data, its lengths, its number of micro-batches. Parameters stay where they are."""
        config = phase.config
        if phase.number != self.data.phase.number:  # else a restore has brought the data there
            self.data.enter(phase)
        for part in self.parallel.bare_parts():
            part.use_positions(config.model, config.train.seq_len)  # type: ignore[operator]  # a Transformer
        layout = resolve_layout(config, self.layout.world)
        self.parallel = replace(self.parallel, layout=layout, micro_batch=MicroBatch.of(config, layout))
        self.train_step = self._step_of(config)
        self.phase, self.record.phase = phase, phase.config
        announce_phase(phase)

    def initialise(self) -> None:
        """Fill the weights, unless they are: a restore overwrites all of them, so it comes first."""
        if self._has_weights:
            return
        if self.config.init.from_:
            entry_points.load(entry_points.EXTRAS, "hub-weights")(self.config, self.parallel.bare_parts())
        else:
            self.parallel.fill(self.config)
        for copied in (self.average, self.outer):
            if copied is not None:
                copied.begin()
        self._has_weights = True

    def run(self) -> int:
        """Train to the last step; return the exit code (0, or 75: start me again)."""
        self.clock.reach("build")
        announce(self.config, self.layout, self.parallel)
        reaching.waiting = functools.partial(waiting_for_data, lambda: self.ckpt)  # a group waits in its restore, too
        try:
            self._restore()
            self.clock.reach("restore" if self.done else "weights")
            began = f"restored step {self.done}" if self.done else "cold"
            if self.done >= self.config.train.steps:
                say_once(
                    logging.WARNING, f"step {self.done} of {self.config.train.steps} is already trained: nothing to do"
                )
            self._open_outputs()
            code = self._train(began)
        finally:
            reaching.waiting = contextlib.nullcontext
            self.data.close()
            self.hooks.close()
        if self.ckpt is not None:
            self.ckpt.wait()
            self.ckpt.close()
        return code

    def _open_outputs(self) -> None:
        self.hooks.opened(self.phase.config, self.parallel, self.done)

    def _train(self, began: str) -> int:
        while self.done < self.config.train.steps and not (self.apart is not None and self.apart.is_over):
            self.hooks.before(self.done + 1)
            try:
                record = self.one_step()
            except SpikeError as spike:
                self._roll_back(spike)
                continue
            self.hooks.trained(self.done)
            with self.timer.beside("log"):
                self.hooks.finished(record)
                if self.ckpt is not None:
                    self.ckpt.phases(**{name: spent for name, spent in record.phases.items() if name != "snapshot"})
                if self.ckpt is not None and self.parallel.reporter:
                    self.ckpt.log("loss", record.loss)
                    self.ckpt.log("seconds per step", record.seconds)
            if line := self.clock.finish(began):
                self.hooks.started(record.step, line)
            if self.ckpt is not None and self.ckpt.should_stop:
                return RESUME_EXIT_CODE
            self.hooks.between(self.done, self.ckpt)
        return 0

    def _roll_back(self, spike: SpikeError) -> None:
        """Restore the newest clean snapshot, and leave out the samples between it and the spike if they are to blame. Collective."""
        assert self.ckpt is not None
        budget = self.guard.budget()
        self.ckpt.close()  # while `spike` is being handled: close() then keeps the snapshots
        if self._restore() is None and not spike.blames_samples:
            raise no_way_back(spike.step, self.config.checkpoint.snapshot_every)
        self.guard.keep_budget(budget)
        self._rolled_back_to = self.done
        say_once(logging.WARNING, f"step {spike.step}: rolled back to step {self.done}")
        if spike.blames_samples:
            self.ckpt.leave_out(self.done + 1, spike.step)
        self._bad_at = spike.step
        self._open_outputs()

    def _fence(self) -> None:
        """Wait until no snapshot is copying the weights or their average any more."""
        if self.ckpt is not None:
            self.ckpt.fence()

    def one_step(self) -> StepRecord:
        """Train one step and return its record. Collective.

        Raises:
            SpikeError: the loss or the gradient norm spiked, or the state is bad, and the run is to be rolled back.
            DivergedError: the guard gave up.
        """
        self.timer.start()
        step = self.done + 1
        self._enter_phase_of(step)
        batch = self.data.next()
        self.timer.reach("data")
        samples = ids_digest(self.data.global_ids()) if self.parallel.reporter else ""
        self.train_step.scale = self.record.scaler.scale
        self.timer.reach("log")
        totals = self.train_step.backward(batch)
        rate = self.phase.rate(step)
        self._accepted = self._update(totals, step, rate)
        self.done = step = self._synchronised(step)
        self.record.tokens += self.phase.config.train.global_batch * self.phase.config.train.seq_len
        self.timer.reach("log")
        stall_ms = self._commit(step)
        self.timer.reach("snapshot")
        phases = self.timer.seconds()
        return StepRecord(
            step=step,
            loss=totals.loss,
            norm=totals.norm,
            rate=rate,
            tokens=self.record.tokens,
            samples=samples,
            channels=totals.channels,
            skipped=not self._accepted,
            seconds=sum(phases.values()),
            stall_ms=stall_ms,
            phases=phases,
            experts=totals.experts,
        )

    def _enter_phase_of(self, step: int) -> None:
        phase = phase_at(self.phases, step)
        if phase.number != self.phase.number:
            self._enter(phase)
            self.guard.forget()  # other data, other losses
            self._open_outputs()  # with the sizes of the phase

    def _update(self, totals: Totals, step: int, rate: float) -> bool:
        """Step the optimizer unless this batch is skipped, then what follows the weights; return whether it stepped."""
        # no intervention of the guard: the factor is found by overflows, and is kept with the weights as they are
        self._overflowed = self.record.scaler.overflowed(totals.loss, totals.norm)
        accepted = not self._overflowed and self._judge(totals, step) and self._apply(totals, rate)
        if self.average is not None and self.average.is_due(step):
            self._fence()
            self.average.update()
        return accepted

    def _synchronised(self, step: int) -> int:
        """Synchronise groups that train apart, if that is due; return the step that is reached."""
        if self.outer is not None and self.outer.is_due(step):
            self._fence()
            step = self.outer.step(step) if self.apart is None else self.apart.synchronise(step)
            self.timer.reach("sync")
        return step

    def _judge(self, totals: Totals, step: int) -> bool:
        """Return whether the optimizer may step; every rank holds the same totals and makes the same decision."""
        settings_changed, self.record.settings_changed = self.record.settings_changed, False
        if not (math.isfinite(totals.loss) and math.isfinite(totals.norm)):
            is_state = report_nonfinite(self.parallel, self.train_step.own_losses(), step)
            if is_state and self.ckpt is not None and self.done != self._rolled_back_to:  # no step repairs it
                self.guard.count_rollback(totals.loss, totals.norm, step=step)
                raise SpikeError(step, blames_samples=step == self._bad_at and self.apart is None)
        if not self.guard.admit(totals.loss, totals.norm, step=step):
            return False
        if not (self.guard.is_spike(totals.loss) or self.guard.is_norm_spike(totals.norm)):
            return True
        if settings_changed:  # no setting of this process has moved the weights yet: they were restored like this
            say_once(
                logging.WARNING, f"step {step}: loss {totals.loss:.4f} is the level that was restored, not a spike"
            )
            self.guard.forget()
            return True
        action = self.config.guard.on_spike
        if action == "rollback" and self.done == self._rolled_back_to:
            action = "skip"  # this is the state that it would go back to
        if self.parallel.reporter:
            self.hooks.spike(step, totals.loss, totals.norm, self.data.global_ids(), action)
        if action == "rollback":
            self.guard.count_rollback(totals.loss, totals.norm, step=step)
            raise SpikeError(step)
        if action == "skip":
            self.guard.skip_spike(totals.loss, totals.norm)
        return action == "warn"

    def _apply(self, totals: Totals, rate: float) -> bool:
        by_value, by_norm = self.config.optim.clip_value, self.config.optim.clip_norm
        clamp_gradients(self.parallel, by_value)
        norm = self.train_step.norm() if by_value > 0 and by_norm > 0 else totals.group_norm
        clip_gradients(self.parallel, norm, by_norm)
        self.timer.reach("clip")
        set_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
        self.train_step.experts.balance(totals.experts, self.config.model.router_bias_rate)
        self.timer.reach("optimizer")
        self.guard.record(totals.loss, totals.norm)
        return True

    def _commit(self, step: int) -> float:
        is_last = step == self.config.train.steps
        if self.ckpt is None or not (self._accepted or self._overflowed or is_last):
            self.data.sampler.commit()
            if self.ckpt is not None:  # every snapshot is of an accepted step: a skipped one pushes no checkpoint out
                self.ckpt.fence()  # in place of the optimizer's: the snapshot before becomes complete
                self.ckpt.heartbeat()
                self._owes_persist |= self.config.checkpoint.is_persist(step)
            return 0.0
        began = time.perf_counter()
        persist, self._owes_persist = is_last or self._owes_persist, False
        self.ckpt.step(step, persist=persist)  # commits the sampler's position, then records it with everything else
        stall_ms = (time.perf_counter() - began) * 1e3
        return stall_ms + self.fences.ms(self.ckpt)

    def _restore(self) -> RestoreReport | None:
        report = self._restore_state() if self.config.checkpoint.root else None
        self.initialise()
        if self.apart is not None:
            self.done = self.apart.begin(self.done)
        return report

    def _restore_state(self) -> RestoreReport | None:
        average = None if self.average is None else self.average.modules
        state = {"optimizer": self.optimizers, "sampler": self.data.sampler, "run": self.record, "guard": self.guard}
        state["groups"] = None if self.apart is None else self.apart.meeting
        self.ckpt = checkpointer(self.config, self.parallel, self.outer, **state, ema=average)
        self.data.keep(self.ckpt.keep_samples)
        self.fences.begin()
        self.hooks.attach(self.ckpt)
        try:
            is_regrouped = self.outer is not None and has_other_groups(self.config, self.parallel.device)
            report = self.ckpt.restore(strict=not is_regrouped)
        except FlashckptError as error:
            explain(self.config, error)
            raise
        self.hooks.restored(report)
        if report is not None:
            self.done = report.step
            self._has_weights = True
            if self.outer is not None and begin_if_new(self.outer, self.parallel, report.missing):
                logger.warning("group %d is new: it begins with the weights synchronised last", self.parallel.group)
            apply_settings(self.optimizers, self._settings)
            if self.data.phase is not self.phase:
                self._enter(self.data.phase)
            if self.record.before is not None and (jump := rate_jump(self.record.before, self.config, self.done)):
                say_once(logging.WARNING, jump)
            note_restore(self.config.log.folder, report)
        return report


def prepare(config: RunConfig, world: int) -> Layout:
    """Check everything that can be checked before a process group exists, and prepare the corpus.

    Raises:
        LayoutError: the layout does not divide.
        DataError: the corpus is missing or empty.
    """
    layout = resolve_layout(config, world)
    check_layouts(config, world)
    if config.data.sources:
        check_prepared(config)
    else:
        prepare_corpus = entry_points.load(entry_points.EXTRAS, "corpus")
        prepare_corpus(config.data.folder, config.data.source, config.data.holdout_every)
    for phase in phases_of(config):
        open_data(phase.config, "train")
    return layout


def train(config: RunConfig, profiled: Profiled = NOTHING) -> int:
    """Train this rank of a run to its end and return the exit code.

    Raises:
        RootError: the checkpoint root cannot be written, and the job has not trained yet.
    """
    clock = StartClock()
    layout = prepare(config, env.WORLD_SIZE)
    clock.reach("data")
    with process_group(config) as device:
        clock.reach("process group")
        if config.checkpoint.root and is_first_start(device):
            check_root(config.checkpoint.root, config.checkpoint.storage_options)
        return Trainer(config, layout, device, clock=clock, profiled=profiled).run()
