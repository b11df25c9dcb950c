"""The trainer's own hooks: outputs and displays of the reporting rank, profiles, evaluation and samples on all ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from flashckpt.environment import env
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.generate.samples import SampleMaker
from flashckpt.trainer.optim.average import WeightAverage, WeightCopy
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.parallel.distributed import device_name
from flashckpt.trainer.train.hooks import HookedRun, TrainerHooks
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.watch.engine import EngineWatch, Events
from flashckpt.trainer.watch.profiler import PhaseProfile, StepProfiler
from flashckpt.trainer.watch.reporter import Reporter

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.report import RestoreReport

logger = logging.getLogger(__name__)


class Interludes:
    """Evaluates and samples the model of one phase, at the steps that its configuration names.

    Args:
        parallel: The model, as it is in the phase.
        average: Evaluated instead of the weights where `ema.evaluate` says so.
        anchor: Where groups train apart, the weights that they had in common last: what is evaluated and sampled.
    """

    def __init__(
        self,
        config: RunConfig,
        parallel: Parallel,
        average: WeightAverage | None,
        anchor: WeightCopy | None = None,
    ) -> None:
        self._config = config
        self._anchor = anchor
        self._scored = average if config.ema.evaluate else anchor
        self._evaluator = Evaluator(config, parallel) if config.eval.every else None
        self._maker = SampleMaker(config, parallel) if config.samples.every else None

    def after(self, step: int, ckpt: Checkpointer | None, reporter: Reporter | None) -> None:
        """Do what is due after a step. Collective."""
        if self._evaluator is not None and step % self._config.eval.every == 0:
            with self._looking_at(self._scored, ckpt):
                scores = self._evaluator.scores()
            if reporter is not None:
                reporter.scores(step, scores)
        if self._maker is not None and step % self._config.samples.every == 0:
            with self._looking_at(self._anchor, ckpt):
                samples = self._maker.samples()
            if reporter is not None:
                reporter.samples(step, samples)

    @contextlib.contextmanager
    def _looking_at(self, other: WeightCopy | None, ckpt: Checkpointer | None) -> Iterator[None]:
        """Expect no step meanwhile, and have other weights in place of the trained ones, where there are some."""
        with contextlib.ExitStack() as stack:
            if ckpt is not None:
                stack.enter_context(ckpt.paused())
            if other is not None:
                if ckpt is not None:
                    ckpt.fence()  # no snapshot is copying the weights or the others any more
                stack.enter_context(other.as_weights())
            yield


class StudioHooks(TrainerHooks):
    """Reporter, interludes and profiler of a run; each method says when in `TrainerHooks`."""

    def __init__(self, run: HookedRun) -> None:
        super().__init__(run)
        config = run.config
        self._events = Events()
        self._engine = EngineWatch(self._events) if run.parallel.reporter and config.checkpoint.root else None
        self._reporter: Reporter | None = None
        self._interludes: Interludes | None = None
        self._looked_at: RunConfig | None = None
        self._phase, self._parallel = config, run.parallel
        self._profiler, profiled = None, run.profiled
        if profiled.steps is not None:
            self._profiler = StepProfiler(profiled.steps, config.log.folder, env.RANK, run.device)
        self._phases = PhaseProfile(profiled.phases, run.timer, run.device) if profiled.phases else None

    def attach(self, ckpt: Checkpointer) -> None:
        """Have the engine say what it does."""
        if self._engine is not None:
            self._engine.attach(ckpt)

    def restored(self, report: RestoreReport | None) -> None:
        """Take up what was restored, for the next outputs."""
        if self._engine is not None:
            self._engine.began(report)

    def opened(self, config: RunConfig, parallel: Parallel, after: int) -> None:
        """Begin outputs of a phase behind step `after`; later lines are moved away."""
        self._phase, self._parallel = config, parallel
        if parallel.reporter:
            self._open_reporter(config, parallel, after)
        if self._looked_at is None:
            self._prepare_interludes()

    def _open_reporter(self, config: RunConfig, parallel: Parallel, after: int) -> None:
        if self._reporter is not None:
            self._reporter.close()
        device = parallel.device
        is_cuda = device.type == "cuda"
        self._reporter = Reporter(
            config,
            world=parallel.layout.world,
            after=after,
            engine=self._engine,
            events=self._events,
            device=device_name(device),
            device_bytes=functools.partial(torch.cuda.max_memory_allocated, device) if is_cuda else None,
        )
        if self._engine is not None and self._engine.restored:
            self._reporter.note(after, self._engine.restored)

    def _prepare_interludes(self) -> None:
        self._looked_at = self._phase
        self._interludes = Interludes(self._phase, self._parallel, self.run.average, self.run.anchor)

    def before(self, step: int) -> None:
        """Begin a profile where it is due."""
        if self._phases is not None:
            self._phases.before()
        if self._profiler is not None:
            self._profiler.before(step)

    def trained(self, step: int) -> None:
        """End a profile where it is due."""
        if self._profiler is not None:
            self._profiler.after(step)

    def finished(self, record: StepRecord) -> None:
        """Write and show a step."""
        if self._phases is not None and (lines := self._phases.finished(record)) and self._reporter is not None:
            logger.info("%s", "\n".join(lines))
        if self._reporter is not None:
            self._reporter.step(record)

    def started(self, step: int, line: str) -> None:
        """Log how long the start took."""
        if self._reporter is not None:
            self._reporter.started(step, line)

    def spike(self, step: int, loss: float, norm: float, ids: Sequence[int], action: str) -> None:
        """Write a spike with its samples."""
        if self._reporter is not None:
            self._reporter.spike(step, loss, norm, ids, action)

    def between(self, step: int, ckpt: Checkpointer | None) -> None:
        """Evaluate and sample where it is due, with the data of the phase."""
        if self._looked_at is not self._phase:
            self._prepare_interludes()
        assert self._interludes is not None
        self._interludes.after(step, ckpt, self._reporter)

    def close(self) -> None:
        """Close all outputs."""
        if self._phases is not None and not self._phases.is_done and self._reporter is not None:
            logger.warning("--profile-phases: the run ended before all of its steps were measured, nothing is printed")
        if self._reporter is not None:
            self._reporter.close()
