"""Randomness that depends only on the sample: augmentation that survives any restart and resize.

Generators inside loader workers cannot be recorded: the workers run ahead of training by an unknown number of
samples, and each resumed run has new ones. So the randomness of a sample is made a function of (seed, epoch,
index), independent of which process prepares it and when. The epoch is encoded in the index: the sampler deals keys,
`(epoch + 1) * length + index`, plain integers that reach persistent workers like any index.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from flashckpt.errors import DataError
from flashckpt.sampler.order.state import whole


class SeededSamples(Dataset[Any]):
    """A map-style data set whose every sample is prepared under generators seeded from (seed, epoch, index).

    Wrap the data set whose `__getitem__` augments, and give the wrapper to the sampler and to the loader. The
    default generators of torch (CPU), Python and numpy are seeded before each sample and restored after it, so
    a sample that is prepared in the main process does not disturb dropout. Generators owned by a transform
    are not touched. A `__getitems__` of the data set is called with one index at a time.

    Args:
        dataset: A map-style data set or a `Mixture`.
        seed: Another seed gives another augmentation of every sample.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, whole("seed", seed)
        self._length = len(dataset)

    @property
    def fingerprint(self) -> Any:
        """The fingerprint of the wrapped data set."""
        return getattr(self.dataset, "fingerprint", None) or getattr(self.dataset, "_fingerprint", None)

    def __len__(self) -> int:
        return self._length

    def sample(self, index: int, epoch: int = 0) -> Any:
        """Return one sample as it is trained in `epoch`."""
        with _own_generators():
            return self._prepare(epoch, index)

    def __getitem__(self, key: int) -> Any:
        epoch, index = self._parts(key)
        with _own_generators():
            return self._prepare(epoch, index)

    def __getitems__(self, keys: Sequence[int]) -> list[Any]:
        parts = [self._parts(key) for key in keys]
        with _own_generators():
            return [self._prepare(epoch, index) for epoch, index in parts]

    def _parts(self, key: int) -> tuple[int, int]:
        rounds, index = divmod(int(key), self._length)
        if rounds < 1:
            raise DataError(
                "the epoch of a sample is unknown",
                found=f"index {key} of {self._length}, from a sampler that deals plain indices",
                expected="keys of an ElasticSampler over the same SeededSamples",
                remedy="ElasticSampler(samples, ...), DataLoader(samples, sampler=...); to look at one: sample(index)",
            )
        return rounds - 1, index

    def _prepare(self, epoch: int, index: int) -> Any:
        text = f"{self.seed}:{epoch}:{index}".encode()
        words = np.frombuffer(hashlib.blake2b(text, digest_size=24).digest(), "<u8")
        torch.default_generator.manual_seed(int(words[0] >> 1))  # the CPU's only: a worker must not initialise a device
        random.seed(int(words[1]))
        np.random.seed(words[2:].view("<u4"))  # noqa: NPY002 -- the global generator is what users' code draws from
        if callable(together := getattr(self.dataset, "__getitems__", None)):
            return together([index])[0]
        return self.dataset[index]


@contextlib.contextmanager
def _own_generators() -> Iterator[None]:
    """Restore the state of the default generators."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 -- see above
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002 -- see above
