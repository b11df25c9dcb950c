"""A rank's batches in the order of the sampler, read ahead by a thread that moves no committed position."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.sampler import ElasticSampler
from flashckpt.trainer.data.windows import Batch, Data


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A batch that was read: of the global batch `whole`, after the sampler's `state`."""

    batch: Batch
    whole: npt.NDArray[np.int64]
    state: dict[str, Any]


class TrainingData:
    """This rank's batches: the sampler chooses the samples, the data set holds their contents.

    A second sampler of the same order runs ahead of the first, in the thread that reads. What it has read counts for
    nothing until the first sampler is in the state in which it was dealt; after a restore, a rollback or a skip it is
    not, and reading begins again at the committed position. An error of the thread is raised by `next()`.

    Args:
        dp_rank: Index of the data-parallel replica.
        global_batch: Samples of one step over all replicas.
        rows: Rows of this rank's batches, those of padding included; 0: as many as its samples.
        seed: Key of the order.
        ahead: Batches that are read before they are needed; 0: none, and no thread.
        pin: Whether batches are put into page-locked memory.
    """

    def __init__(
        self,
        dataset: Data,
        *,
        dp_rank: int,
        dp_size: int,
        global_batch: int,
        seed: int,
        rows: int = 0,
        ahead: int = 0,
        pin: bool = False,
    ) -> None:
        self.dataset = dataset
        self.sampler = ElasticSampler(
            dataset.samples, dp_rank=dp_rank, dp_size=dp_size, seed=seed, global_batch_size=global_batch
        )
        self.sampler.is_weighted = True  # padding has no targets
        self._reader = ElasticSampler(dataset.samples, dp_rank=0, dp_size=1, seed=seed, global_batch_size=global_batch)
        self._mine, self._rows = slice(dp_rank, None, dp_size), rows
        self._ahead, self._pin = ahead, pin
        self._pool: ThreadPoolExecutor | None = None
        self._coming: deque[Future[_Read]] = deque()
        self._last: _Read | None = None

    def next(self) -> Batch:
        """Return the batch after the committed position; the position moves only when a step commits."""
        return self._next().batch

    def global_ids(self) -> list[int]:
        """Return the sample numbers of the whole global batch of which `next()` returns this rank's part."""
        return [int(number) for number in self._next().whole]

    def close(self) -> None:
        """Stop reading; a later `next()` starts again."""
        self._forget()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _next(self) -> _Read:
        state = self.sampler.state_dict()
        if self._last is None or self._last.state != state:
            ids = self.sampler.next_ids()
            self._last = self._taken(state) or self._begin(state)
            assert np.array_equal(self._last.batch.ids, ids), "both samplers have one order"
        return self._last

    def _taken(self, state: dict[str, Any]) -> _Read | None:
        """Return the batch that was read for this state, and let another one be read; None if there is none."""
        if not self._coming or self._pool is None:
            return None
        found = self._coming.popleft().result()
        if found.state != state:
            return None
        self._coming.append(self._pool.submit(self._read))
        return found

    def _begin(self, state: dict[str, Any]) -> _Read:
        self._forget()
        if not self._ahead:
            self._reader.load_state_dict(state)
            return self._read()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._pool.submit(self._reader.load_state_dict, state).result()
        first, *rest = [self._pool.submit(self._read) for _ in range(self._ahead + 1)]
        self._coming.extend(rest)
        return first.result()

    def _read(self) -> _Read:
        state, whole = self._reader.state_dict(), self._reader.next_ids()
        self._reader.commit()
        mine = whole[self._mine]
        # a rank without a sample takes part all the same: every collective needs it
        batch = self.dataset.batch(mine if len(mine) else whole[:1])
        batch = batch.padded(self._rows or len(mine), samples=len(mine))
        return _Read(batch=batch.pinned() if self._pin else batch, whole=whole, state=state)

    def _forget(self) -> None:
        for one in self._coming:
            one.cancel()
        self._coming.clear()
        self._last = None
