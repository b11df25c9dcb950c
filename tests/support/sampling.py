"""All replicas of a run in one process: samplers, loaders that run ahead, and the order of an unbroken run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flashckpt.sampler import (
    BlockPermutation,
    ElasticSampler,
    Permutation,
)
from flashckpt.sampler.order.dealing import samples_of


def world(dataset: Any, dp_size: int, global_batch: int | None, **options: Any) -> list[ElasticSampler]:
    return [
        ElasticSampler(dataset, dp_rank=rank, dp_size=dp_size, global_batch_size=global_batch, **options)
        for rank in range(dp_size)
    ]


class Job:
    """All replicas of one run: prefetching loaders, a training loop, and what it has trained."""

    def __init__(self, samplers: list[ElasticSampler]) -> None:
        self.samplers = samplers
        self.queues: list[list[int]] = [[] for _ in samplers]
        self.iterators: list[Iterator[int]] | None = None

    def prefetch(self, each: int) -> None:
        """Pull samples ahead of training, as loader workers do."""
        if self.iterators is None:
            self.iterators = [iter(sampler) for sampler in self.samplers]
        for queue, iterator in zip(self.queues, self.iterators, strict=True):
            while len(queue) < each and (sample := next(iterator, None)) is not None:
                queue.append(sample)

    def step(self) -> list[int]:
        """Train one global batch and commit it; return its samples in global order."""
        size, ranks = self.samplers[0].global_batch_size or 0, len(self.samplers)
        if self.samplers[0].tail == "short":
            size = min(size, self.samplers[0].tail_counts().remaining)
        own = [samples_of(size, rank, ranks) for rank in range(ranks)]
        rows = own if self.samplers[0].tail == "short" else [-(-size // ranks)] * ranks
        self.prefetch(max(rows))
        if not any(self.queues):  # the epoch is over: the loop begins the next one
            self.iterators = None
            self.prefetch(max(rows))
        batches = [queue[:count] for queue, count in zip(self.queues, rows, strict=True)]
        self.queues = [queue[count:] for queue, count in zip(self.queues, rows, strict=True)]
        merged = [batches[k % ranks][k // ranks] for k in range(sum(map(min, own, map(len, batches))))]
        padding = {sample for batch, count in zip(batches, own, strict=True) for sample in batch[count:]}
        assert padding <= set(merged), "padding is of the same batch"
        for sampler in self.samplers:
            sampler.commit()
        return merged

    def state(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return dict(json.loads(json.dumps(states[0])))


def unbroken(n: int, seed: int, count: int, order: str = "global") -> list[int]:
    """The stream as one process sees it, from the permutation alone."""
    kinds = {"global": Permutation, "block": BlockPermutation}
    epochs = [list(kinds[order](n, seed, e)) if order in kinds else list(range(n)) for e in range(count // n + 1)]
    return [sample for epoch in epochs for sample in epoch][:count]
