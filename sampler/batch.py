"""Micro-batches of an elastic sampler, for `DataLoader(batch_sampler=...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from flashckpt.errors import LayoutError
from flashckpt.sampler.iterator import ElasticIterator
from flashckpt.sampler.order.dealing import micro_batches_of, samples_of
from flashckpt.sampler.order.state import whole
from flashckpt.sampler.sampler import ElasticSampler


class ElasticBatchIterator(Iterator[list[int]]):
    """Micro-batches of one iteration.

    Args:
        iterator: Over the rows of this replica in the epoch.
        micro: Most rows of a micro-batch.
        replicas: Number of replicas; 0: nothing is padded.
    """

    def __init__(self, iterator: ElasticIterator, micro: int, replicas: int) -> None:
        self._iterator, self._micro, self._replicas = iterator, micro, replicas

    def __iter__(self) -> ElasticBatchIterator:
        return self

    def __next__(self) -> list[int]:
        walk = self._iterator.walk
        size, left = walk.left_of_batch()
        rows = self._micro
        if self._replicas and size:
            _, rows = micro_batches_of(size, self._replicas, self._micro)
        batch = walk.next_batch(min(rows, left) or rows)  # a micro-batch is of one global batch
        if not batch:
            raise StopIteration
        return batch + batch[-1:] * (rows - len(batch)) if self._replicas else batch

    def state_dict(self) -> dict[str, Any]:
        """See `Walk.state_dict`."""
        return self._iterator.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `Walk.load_state_dict`."""
        self._iterator.load_state_dict(state_dict)


class ElasticBatchSampler(Sampler[list[int]]):
    """Cut a replica's samples into micro-batches; the sampler keeps state and position.

    Where a global batch does not divide, all replicas have the same number of micro-batches with equally many rows:
    what a replica has no sample for is filled with samples of the batch, which `weights` gives the weight 0.

    Args:
        sampler: The elastic sampler. If it has no global batch size, it gets
            batch_size * accumulation * dp_size.
        batch_size: Most rows of one micro-batch of one replica.
        accumulation: Micro-batches per optimizer step; by default as many as the global batch needs.

    Raises:
        LayoutError: the global batch needs another number of micro-batches than `accumulation`.
    """

    flashckpt_replicated = True

    def __init__(self, sampler: ElasticSampler, batch_size: int, accumulation: int | None = None) -> None:
        batch_size, accumulation = whole("batch_size", batch_size), whole("accumulation", accumulation)
        self.sampler, self.batch_size = sampler, batch_size
        if sampler.global_batch_size is None:
            sampler.set_global_batch_size(batch_size * sampler.dp_size * (accumulation or 1))
        for size in sampler.global_batch_sizes:
            needed, _ = micro_batches_of(size, sampler.dp_size, batch_size)
            if accumulation not in {None, needed}:
                raise LayoutError(
                    "accumulation does not fit the global batch",
                    found=f"accumulation {accumulation}; global batch of {size} samples, micro-batch {batch_size}, "
                    f"{sampler.dp_size} replicas",
                    expected=f"{needed} micro-batches for each replica",
                    remedy="leave accumulation out: it follows from the other three",
                )

    @property
    def accumulation(self) -> int:
        """Micro-batches of the next optimizer step."""
        return micro_batches_of(self.sampler.global_batch_size or 1, self.sampler.dp_size, self.batch_size)[0]

    @property
    def weights(self) -> Tensor:
        """The weight of each row of the next step, float32 (accumulation, rows); see `ElasticSampler.weights`."""
        return self.sampler.weights_in(self.batch_size)

    def __iter__(self) -> ElasticBatchIterator:
        replicas = 0 if self.sampler.tail == "short" else self.sampler.dp_size
        return ElasticBatchIterator(iter(self.sampler), self.batch_size, replicas)

    def __len__(self) -> int:
        """Micro-batches of this replica in one epoch."""
        sampler, size = self.sampler, self.sampler.global_batch_size or 1
        if sampler.tail == "short":
            batches, rest = divmod(sampler.length, size)
            own, last = (samples_of(each, sampler.dp_rank, sampler.dp_size) for each in (size, rest))
            return batches * -(-own // self.batch_size) + -(-last // self.batch_size)
        return len(sampler) // -(-size // sampler.dp_size) * self.accumulation

    @property
    def was_drawn_from(self) -> bool:
        """See `ElasticSampler`."""
        return self.sampler.was_drawn_from

    @property
    def ahead(self) -> int:
        """See `ElasticSampler.ahead`."""
        return self.sampler.ahead

    def epochs(self, stop: int) -> Iterator[int]:
        """See `ElasticSampler.epochs`."""
        return self.sampler.epochs(stop)

    def set_epoch(self, epoch: int) -> None:
        """See `ElasticSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def commit(self, samples: int | None = None) -> None:
        """See `ElasticSampler.commit`."""
        self.sampler.commit(samples)

    @property
    def flashckpt_progress(self) -> tuple[int, int | None]:
        """See `ElasticSampler.flashckpt_progress`."""
        return self.sampler.flashckpt_progress

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the sampler's state."""
        self.sampler.load_state_dict(state_dict)
