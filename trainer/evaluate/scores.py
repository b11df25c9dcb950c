"""Loss, perplexity and bits per byte on the held-out files of each channel.

Evaluation reads neither the training sampler nor the random state: a run with it has the same trace
as a run without it, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.train.step import TrainStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One channel: `loss` in nats per token, perplexity per token, bits per byte of the text.

    `bytes_per_token` is that of the held-out text; nan where the text is not known (token files).
    """

    loss: float
    bytes_per_token: float = 1.0

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte; comparable over tokenizers."""
        return self.loss / math.log(2) / self.bytes_per_token


class Evaluator:
    """Scores the held-out split with the model as it is.

    Args:
        config: The run; `eval.batches` global batches are read per channel, always the same samples.
        parallel: This rank's parts.

    Raises:
        DataError: the corpus has no held-out sample.
    """

    def __init__(self, config: RunConfig, parallel: Parallel) -> None:
        self._parallel, self._batch, self._batches = parallel, config.train.global_batch, config.eval.batches
        self._data = open_data(config, "held")
        self._step = TrainStep(parallel, self._data.channels, loss_parallel_on=config.parallel.loss_parallel)

    def scores(self) -> dict[str, Score]:
        """Return the score of each channel, the same on every rank. Collective."""
        with self._quiet():
            return {
                name: Score(loss=self._channel(number), bytes_per_token=self._data.bytes_per_token(number))
                for number, name in enumerate(self._data.channels)
            }

    def _channel(self, number: int) -> float:
        ids = np.resize(self._data.channel_ids(number, self._batch * self._batches), self._batch * self._batches)
        losses = [self._one(ids[i : i + self._batch], number) for i in range(0, len(ids), self._batch)]
        return sum(losses) / len(losses)

    def _one(self, ids: npt.NDArray[np.int64], number: int) -> float:
        mine = ids[self._parallel.dp_rank :: self._parallel.layout.dp]
        return self._step.evaluate(self._data.batch(mine))[self._data.channels[number]]

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        device = self._parallel.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for part in self._parallel.parts:
                part.eval()
            try:
                yield
            finally:
                for part in self._parallel.parts:
                    part.train()
