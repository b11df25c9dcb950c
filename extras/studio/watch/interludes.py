"""What looks at the model between two steps: evaluation and samples. No snapshot is expected meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.generate.samples import SampleMaker
from flashckpt.trainer.optim.average import WeightAverage, WeightCopy
from flashckpt.trainer.parallel.apply import Parallel

if TYPE_CHECKING:
    from flashckpt import Checkpointer
    from flashckpt.trainer.watch.reporter import Reporter


class Interludes:
    """Evaluates and samples the model of one phase, at the steps that its configuration names.

    Args:
        config: Of the phase.
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
