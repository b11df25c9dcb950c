"""Micro-batches of an elastic sampler, for `DataLoader(batch_sampler=...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from flashckpt.errors import LayoutError
from flashckpt.sampler.iterator import ElasticIterator
from flashckpt.sampler.sampler import ElasticSampler


class ElasticBatchIterator(Iterator[list[int]]):
    """Micro-batches of one iteration.

    Args:
        iterator: Over the samples of this replica in the epoch.
        size: Samples of a micro-batch.
    """

    def __init__(self, iterator: ElasticIterator, size: int) -> None:
        self._iterator, self._size = iterator, size

    def __iter__(self) -> ElasticBatchIterator:
        return self

    def __next__(self) -> list[int]:
        batch = self._iterator.walk.next_batch(self._size)
        if not batch:
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """See `Walk.state_dict`."""
        return self._iterator.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `Walk.load_state_dict`."""
        self._iterator.load_state_dict(state_dict)


class ElasticBatchSampler(Sampler[list[int]]):
    """Cut a replica's samples into micro-batches; the sampler keeps state and position.

    Args:
        sampler: The elastic sampler. If it has no global batch size, it gets
            batch_size * accumulation * dp_size.
        batch_size: Samples of one micro-batch of one replica.
        accumulation: Micro-batches per optimizer step.

    Raises:
        LayoutError: the global batch is not a multiple of batch_size * dp_size.
    """

    flashckpt_replicated = True

    def __init__(self, sampler: ElasticSampler, batch_size: int, accumulation: int | None = None) -> None:
        self.sampler, self.batch_size = sampler, batch_size
        step = batch_size * sampler.dp_size
        if sampler.global_batch_size is None:
            sampler.set_global_batch_size(step * (accumulation or 1))
        for size in sampler.global_batch_sizes:
            if size % step == 0 and accumulation in {None, size // step}:
                continue
            raise LayoutError(
                "the global batch does not divide into micro-batches",
                found=f"global batch of {size} samples; micro-batch {batch_size}, accumulation {accumulation}, "
                f"{sampler.dp_size} replicas",
                expected="global batch = micro-batch * accumulation * replicas",
            )

    @property
    def accumulation(self) -> int:
        """Micro-batches of the next optimizer step."""
        return (self.sampler.global_batch_size or 0) // (self.batch_size * self.sampler.dp_size)

    def __iter__(self) -> ElasticBatchIterator:
        return ElasticBatchIterator(iter(self.sampler), self.batch_size)

    def __len__(self) -> int:
        """Micro-batches of this replica in one epoch."""
        return (len(self.sampler) + self.batch_size - 1) // self.batch_size

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
