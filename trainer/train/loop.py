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
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.errors import RESUME_EXIT_CODE, ConfigError, FlashckptError, SamplerStateError
from flashckpt.trainer.changes import compare, other_data, recorded_values, refuse_changes
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.corpus import prepare_corpus
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.data.prepared import check_prepared
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.data.windows import ids_digest
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.generate.samples import SampleMaker
from flashckpt.trainer.model.initial import name_seed
from flashckpt.trainer.parallel.apply import build_parallel
from flashckpt.trainer.parallel.distributed import check_root, note_restore, process_group
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.rate import learning_rate, rate_jump
from flashckpt.trainer.train.anomaly import Guard
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.optim import build_optimizers, clamp_gradients, clip_gradients, set_rate
from flashckpt.trainer.train.reporter import Reporter
from flashckpt.trainer.train.step import Totals, TrainStep
from flashckpt.trainer.watch.engine import EngineWatch
from flashckpt.trainer.watch.events import Events

if TYPE_CHECKING:
    from flashckpt import Checkpointer

logger = logging.getLogger(__name__)


def _say_once(level: int, text: str) -> None:
    """Log on rank 0 what all ranks know."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, "%s", text)


class RunRecord:
    """The resolved configuration and the token count, recorded with every snapshot and compared on resume."""

    flashckpt_replicated = True

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.tokens = 0
        self.before: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"config": recorded_values(self.config), "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the recorded values; reject a run that cannot continue them.

        Raises:
            ConfigError: a dimension of the model, the sequence length or the seed differs.
        """
        self.before, self.tokens = dict(state["config"]), int(state["tokens"])
        changes = compare(self.before, self.config)
        refuse_changes(changes)
        for change in changes:
            level = logging.WARNING if change.severity == "warning" else logging.INFO
            _say_once(level, f"{change.key} changed since the checkpoint: {change.before!r} -> {change.now!r}")


class SpikeError(Exception):
    """The loss spiked at `step` and the run is to be rolled back; `end` is the stream position after the batch."""

    def __init__(self, step: int, end: int) -> None:
        super().__init__(f"loss spike at step {step}")
        self.step, self.end = step, end


class Trainer:
    """One rank of one run.

    Args:
        config: The run.
        layout: What `resolve_layout` gave for it.
        device: This rank's device.
    """

    def __init__(self, config: RunConfig, layout: Layout, device: torch.device) -> None:
        self.config, self.layout = config, layout
        dataset = open_data(config, "train")
        self.parallel = build_parallel(config, layout, device)
        self.optimizers = build_optimizers(config.optim, self.parallel.parts, tied=config.model.tied_embeddings)
        self.data = TrainingData(
            dataset,
            dp_rank=self.parallel.dp_rank,
            dp_size=layout.dp,
            global_batch=config.train.global_batch,
            seed=config.train.seed,
            ahead=config.data.read_ahead,
            pin=device.type == "cuda",
        )
        self.train_step = TrainStep(self.parallel, dataset.channels, loss_parallel_on=config.parallel.loss_parallel)
        self.guard = Guard(config.guard)
        self.record = RunRecord(config)
        self.reporter: Reporter | None = None
        self.events = Events()
        self.watch = EngineWatch(self.events) if self.parallel.reporter and config.checkpoint.root else None
        self.ckpt: Checkpointer | None = None
        self.done = 0
        self._has_weights = False
        self._seed_rng()

    def _seed_rng(self) -> None:
        # Without sequence parallelism the tensor-parallel ranks hold the same activations: same dropout.
        tp = self.parallel.coordinate("tp") if self.config.parallel.sequence_parallel else 0
        name = f"rng:{self.parallel.coordinate('pp')}:{self.parallel.dp_rank}:{tp}"
        torch.manual_seed(name_seed(self.config.train.seed, name))

    def initialise(self) -> None:
        """Fill the weights, unless they are: a restore overwrites all of them, so it comes first."""
        if self._has_weights:
            return
        if self.config.init.from_:
            from flashckpt.trainer.hub.start import load_first_weights

            load_first_weights(self.config, self.parallel.bare_parts())
        else:
            self.parallel.fill(self.config)
        self._has_weights = True

    def run(self) -> int:
        """Train to the last step; return the exit code (0, or 75: start me again)."""
        self._announce()
        self._restore()
        if self.done >= self.config.train.steps:
            _say_once(
                logging.WARNING, f"step {self.done} of {self.config.train.steps} is already trained: nothing to do"
            )
        self._open_reporter()
        try:
            code = self._train()
        finally:
            self.data.close()
            if self.reporter is not None:
                self.reporter.close()
        if self.ckpt is not None:
            self.ckpt.wait()
            self.ckpt.close()
        return code

    def _announce(self) -> None:
        train = self.config.train
        where = f"{train.precision} on {self.parallel.device.type}, {self.config.parallel.data_parallel}"
        _say_once(logging.INFO, f"{self.layout.describe()}; {where}")
        if not self.config.checkpoint.root:
            _say_once(logging.WARNING, "no checkpoints are made: checkpoint.root is empty, [checkpoint] has no effect")

    def _open_reporter(self) -> None:
        if self.reporter is not None:
            self.reporter.close()
        if self.parallel.reporter:
            device = self.parallel.device
            is_cuda = device.type == "cuda"
            self.reporter = Reporter(
                self.config,
                world=self.layout.world,
                after=self.done,
                engine=self.watch,
                events=self.events,
                device=torch.cuda.get_device_name(device) if is_cuda else "",
                device_bytes=functools.partial(torch.cuda.max_memory_allocated, device) if is_cuda else None,
            )
            if self.watch is not None and self.watch.restored:
                self.reporter.note(self.done, self.watch.restored)

    def _train(self) -> int:
        evaluator = Evaluator(self.config, self.parallel) if self.config.eval.every else None
        maker = SampleMaker(self.config, self.parallel) if self.config.samples.every else None
        while self.done < self.config.train.steps:
            try:
                record = self.one_step()
            except SpikeError as spike:
                self._roll_back(spike)
                continue
            if self.reporter is not None:
                self.reporter.step(record)
            if self.ckpt is not None and self.ckpt.should_stop:
                return RESUME_EXIT_CODE
            if evaluator is not None and self.done % self.config.eval.every == 0:
                self._evaluate(evaluator)
            if maker is not None and self.done % self.config.samples.every == 0:
                self._sample(maker)
        return 0

    def _roll_back(self, spike: SpikeError) -> None:
        """Restore the newest snapshot in memory, and skip the samples between it and the spike. Collective."""
        assert self.ckpt is not None
        rollbacks = self.guard.rollbacks
        self.ckpt.close()  # while `spike` is being handled: close() then keeps the snapshots
        self._restore()
        self.guard.rollbacks = rollbacks
        sampler = self.data.sampler
        if sampler.position < spike.end:
            sampler.skip(sampler.position, spike.end)
        self._open_reporter()
        logger.warning(
            "step %d: rolled back to step %d, %d samples are skipped",
            spike.step,
            self.done,
            spike.end - sampler.position,
        )

    def _evaluate(self, evaluator: Evaluator) -> None:
        with contextlib.nullcontext() if self.ckpt is None else self.ckpt.paused():
            scores = evaluator.scores()
        if self.reporter is not None:
            self.reporter.scores(self.done, scores)

    def _sample(self, maker: SampleMaker) -> None:
        with contextlib.nullcontext() if self.ckpt is None else self.ckpt.paused():
            samples = maker.samples()
        if self.reporter is not None:
            self.reporter.samples(self.done, samples)

    def one_step(self) -> StepRecord:
        """Train one step and return its record. Collective.

        Raises:
            SpikeError: the loss spiked and the run is to be rolled back; nothing was changed.
            DivergedError: the guard gave up.
        """
        began = time.perf_counter()
        step = self.done + 1
        batch = self.data.next()
        samples = ids_digest(self.data.global_ids()) if self.parallel.reporter else ""
        totals = self.train_step.backward(batch)
        rate = learning_rate(self.config.optim, step, self.config.train.steps)
        accepted = self._judge(totals, step) and self._apply(totals, rate)
        self.done = step
        self.record.tokens += self._batch_tokens()
        stall_ms = self._commit(step)
        return StepRecord(
            step=step,
            loss=totals.loss,
            norm=totals.norm,
            rate=rate,
            tokens=self.record.tokens,
            samples=samples,
            channels=totals.channels,
            skipped=not accepted,
            seconds=time.perf_counter() - began,
            stall_ms=stall_ms,
        )

    def _judge(self, totals: Totals, step: int) -> bool:
        """Return whether the optimizer may step; every rank holds the same totals and makes the same decision."""
        if not self.guard.admit(totals.loss, totals.norm, step=step):
            return False
        if not self.guard.is_spike(totals.loss):
            return True
        action = self.config.guard.on_spike
        if self.reporter is not None:
            self.reporter.spike(step, totals.loss, totals.norm, self.data.global_ids(), action)
        if action == "rollback":
            self.guard.count_rollback(step=step, loss=totals.loss)
            raise SpikeError(step, self.data.position_after_next())
        return action == "warn"

    def _apply(self, totals: Totals, rate: float) -> bool:
        by_value, by_norm = self.config.optim.clip_value, self.config.optim.clip_norm
        clamp_gradients(self.parallel, by_value)
        norm = self.train_step.norm() if by_value > 0 and by_norm > 0 else totals.norm
        clip_gradients(self.parallel, norm, by_norm)
        set_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
        self.guard.record(totals.loss)
        return True

    def _commit(self, step: int) -> float:
        if self.ckpt is None:
            self.data.sampler.commit()
            return 0.0
        began = time.perf_counter()
        self.ckpt.step(step)  # commits the sampler's position, then records it with everything else
        stall_ms = (time.perf_counter() - began) * 1e3
        return stall_ms if self.watch is None else stall_ms + self.watch.fence_ms(self.ckpt)

    def _restore(self) -> None:
        if self.config.checkpoint.root:
            self._restore_state()
        self.initialise()

    def _restore_state(self) -> None:
        self.ckpt = self._checkpointer()
        if self.watch is not None:
            self.watch.attach(self.ckpt)
        try:
            report = self.ckpt.restore()
        except FlashckptError as error:
            self._explain(error)
            raise
        if self.watch is not None:
            self.watch.began(report)
        if report is not None:
            self.done = report.step
            self._has_weights = True
            if self.record.before is not None and (jump := rate_jump(self.record.before, self.config, self.done)):
                _say_once(logging.WARNING, jump)
            note_restore(self.config.log.folder, report)

    def _explain(self, error: FlashckptError) -> None:
        """Raise ConfigError or DataError instead of `error` if a changed setting or other data is the reason."""
        from flashckpt.trainer.train.recorded_config import recorded_config

        settings = self.config.checkpoint
        before = recorded_config(settings.root, settings.job or None, settings.storage_options)
        if before is not None:
            try:
                refuse_changes(compare(before, self.config))
            except ConfigError as clearer:
                raise clearer from error
            if isinstance(error, SamplerStateError):
                raise other_data(error) from error

    def _checkpointer(self) -> Checkpointer:
        from flashckpt import Checkpointer

        settings = self.config.checkpoint
        ckpt = Checkpointer(
            settings.root,
            snapshot_every=settings.snapshot_every,
            persist_every=settings.persist_every,
            keep_last=settings.keep_last,
            job=settings.job or None,
            storage_options=settings.storage_options,
        )
        ckpt.track(
            model=self.parallel.parts,
            optimizer=self.optimizers,
            sampler=self.data.sampler,
            rng=True,
            run=self.record,
            guard=self.guard,
            mesh=self.parallel.mesh,
        )
        return ckpt

    def _batch_tokens(self) -> int:
        return self.config.train.global_batch * self.config.train.seq_len


def prepare(config: RunConfig, world: int) -> Layout:
    """Check everything that can be checked before a process group exists, and prepare the corpus.

    Raises:
        LayoutError: the layout does not divide.
        DataError: the corpus is missing or empty.
        RootError: the checkpoint root cannot be written.
    """
    layout = resolve_layout(config, world)
    if config.data.sources:
        check_prepared(config)
    else:
        prepare_corpus(config.data.folder, config.data.source, config.data.holdout_every)
    open_data(config, "train")
    if config.checkpoint.root:
        check_root(config.checkpoint.root, config.checkpoint.storage_options)
    return layout


def train(config: RunConfig) -> int:
    """Train this rank of a run to its end and return the exit code."""
    layout = prepare(config, int(os.environ.get("WORLD_SIZE", "1")))
    with process_group(config) as device:
        return Trainer(config, layout, device).run()
