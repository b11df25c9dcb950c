"""Reads prepared tokens: windows of `seq_len` tokens from memory-mapped files, numbered over all channels.

Sample i of a corpus is the same window on every rank, in every layout and in every epoch; which
samples a step trains is the sampler's business.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flashckpt.errors import DataError
from flashckpt.sampler import ElasticSampler
from flashckpt.trainer.data.corpus import read_index


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        tokens: int64 (B, seq_len).
        targets: int64 (B, seq_len + 1): the next tokens, and in the last column the channel number
            (one tensor, so that a pipeline cuts both into the same micro-batches).
        ids: Sample numbers, int64 (B,).
    """

    tokens: Tensor
    targets: Tensor
    ids: npt.NDArray[np.int64]


class TokenDataset:
    """Windows of one split of a prepared corpus.

    Args:
        folder: What `prepare_corpus` wrote.
        split: "train" or "held".
        seq_len: Tokens of a sample; one more is read for the last target.

    Raises:
        DataError: nothing is prepared there, or it is shorter than one window.
    """

    def __init__(self, folder: str | os.PathLike[str], split: str, seq_len: int) -> None:
        index = read_index(folder)
        self.seq_len = seq_len
        self._sets: list[npt.NDArray[np.uint8]] = []
        self.channels: list[str] = []
        counts = [0]
        for name, entry in sorted(index["sets"].items()):
            windows = (entry["tokens"] - 1) // seq_len
            if entry["split"] == split and windows > 0:
                self._sets.append(np.memmap(Path(folder) / name, dtype=np.uint8, mode="r"))
                self.channels.append(entry["channel"])
                counts.append(counts[-1] + windows)
        self.starts = np.array(counts, dtype=np.int64)
        self.fingerprint = _fingerprint(index, split, seq_len)
        if not self._sets:
            raise DataError(
                f"the {split} split of the corpus in {folder} has no sample",
                found=f"no channel with {seq_len + 1} tokens",
                expected=f"at least {seq_len + 1} bytes of text",
                remedy="add text to data.source, or lower train.seq_len",
            )

    def __len__(self) -> int:
        """Number of samples."""
        return int(self.starts[-1])

    def batch(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """Return the samples with these numbers."""
        numbers = np.asarray(ids, dtype=np.int64)
        channel = np.searchsorted(self.starts, numbers, side="right") - 1
        rows = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for row, (number, source) in enumerate(zip(numbers, channel, strict=True)):
            start = int(number - self.starts[source]) * self.seq_len
            rows[row] = self._sets[source][start : start + self.seq_len + 1]
        targets = np.concatenate([rows[:, 1:], channel[:, None]], axis=1)
        return Batch(tokens=torch.from_numpy(rows[:, :-1].copy()), targets=torch.from_numpy(targets), ids=numbers)

    def channel_ids(self, channel: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` sample numbers spread evenly over one channel (fewer if it has fewer)."""
        first, last = int(self.starts[channel]), int(self.starts[channel + 1])
        count = min(count, last - first)
        return first + np.arange(count, dtype=np.int64) * ((last - first) // count)


class TrainingData:
    """This rank's batches: the sampler chooses the samples, the data set holds their contents.

    Args:
        dataset: The training split.
        dp_rank: Index of the data-parallel replica.
        dp_size: Number of replicas.
        global_batch: Samples of one step over all replicas.
        seed: Key of the order.
    """

    def __init__(self, dataset: TokenDataset, *, dp_rank: int, dp_size: int, global_batch: int, seed: int) -> None:
        self.dataset = dataset
        self.sampler = ElasticSampler(
            dataset, dp_rank=dp_rank, dp_size=dp_size, seed=seed, global_batch_size=global_batch
        )
        self._whole = ElasticSampler(dataset, dp_rank=0, dp_size=1, seed=seed, global_batch_size=global_batch)

    def next(self) -> Batch:
        """Return the batch after the committed position; the position moves only when a step commits."""
        return self.dataset.batch(self.sampler.next_ids())

    def position_after_next(self) -> int:
        """Return the stream position after the batch that `next()` returns."""
        self._whole.load_state_dict(self.sampler.state_dict())
        self._whole.commit()
        return self._whole.position

    def global_ids(self) -> list[int]:
        """Return the sample numbers of the whole global batch of which `next()` returns this rank's part."""
        self._whole.load_state_dict(self.sampler.state_dict())
        return [int(number) for number in self._whole.next_ids()]


def ids_digest(ids: Sequence[int]) -> str:
    """Return 16 hex digits of a list of sample numbers, in order."""
    return hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def _fingerprint(index: dict[str, Any], split: str, seq_len: int) -> str:
    text = json.dumps([index["fingerprint"], split, seq_len])
    return hashlib.sha256(text.encode()).hexdigest()
