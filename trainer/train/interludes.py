"""What looks at the model between two steps: evaluation and samples. No snapshot is expected meanwhile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.generate.samples import SampleMaker
from flashckpt.trainer.optim.average import WeightAverage
from flashckpt.trainer.parallel.apply import Parallel

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.trainer.evaluate.results import Scores
    from flashckpt.trainer.train.reporter import Reporter


class Interludes:
    """Evaluates and samples the model of one phase, at the steps that its configuration names.

    Args:
        config: Of the phase.
        parallel: The model, as it is in the phase.
        average: Evaluated instead of the weights where `ema.evaluate` says so.
    """

    def __init__(self, config: RunConfig, parallel: Parallel, average: WeightAverage | None) -> None:
        self._config = config
        self._average = average if config.ema.evaluate else None
        self._evaluator = Evaluator(config, parallel) if config.eval.every else None
        self._maker = SampleMaker(config, parallel) if config.samples.every else None

    def after(self, step: int, ckpt: Checkpointer | None, reporter: Reporter | None) -> None:
        """Do what is due after a step. Collective."""
        if self._evaluator is not None and step % self._config.eval.every == 0:
            with contextlib.nullcontext() if ckpt is None else ckpt.paused():
                scores = self._scores(self._evaluator, ckpt)
            if reporter is not None:
                reporter.scores(step, scores)
        if self._maker is not None and step % self._config.samples.every == 0:
            with contextlib.nullcontext() if ckpt is None else ckpt.paused():
                samples = self._maker.samples()
            if reporter is not None:
                reporter.samples(step, samples)

    def _scores(self, evaluator: Evaluator, ckpt: Checkpointer | None) -> Scores:
        if self._average is None:
            return evaluator.scores()
        if ckpt is not None:
            ckpt.fence()  # no snapshot is copying the weights or their average any more
        with self._average.as_weights():
            return evaluator.scores()
