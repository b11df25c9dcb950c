"""Reads prepared tokens: windows of `seq_len` tokens from memory-mapped files, numbered over all channels.

Sample i of a corpus is the same window on every rank, in every layout and in every epoch; which
samples a step trains is the sampler's business.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor

from flashckpt.errors import DataError
from flashckpt.trainer.data.prepared import read_index

NO_TARGET = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        tokens: int64 (B, seq_len). Rows from len(ids) on are padding: no sample, and no targets.
        targets: int64 (B, seq_len + 1): the next tokens, and in the last column the channel number
            (one tensor, so that a pipeline cuts both into the same micro-batches).
            A token without target has -100.
        ids: Sample numbers, int64 (N,) with N <= B.
        documents: Which document each token is of, int64 (B, seq_len), where tokens see only their own.
    """

    tokens: Tensor
    targets: Tensor
    ids: npt.NDArray[np.int64]
    documents: Tensor | None = None

    def padded(self, rows: int, *, samples: int) -> Batch:
        """Return a batch of `rows` rows, of which the first `samples` are those of this one; the others weigh nothing."""
        if rows == samples == len(self.tokens):
            return self
        more = (0, 0, 0, rows - samples)
        targets = F.pad(self.targets[:samples, :-1], more, value=NO_TARGET)
        channels = F.pad(self.targets[:samples, -1:], more)  # every row has one
        documents = None if self.documents is None else F.pad(self.documents[:samples], more)
        return Batch(
            tokens=F.pad(self.tokens[:samples], more),
            targets=torch.cat([targets, channels], 1),
            ids=self.ids[:samples],
            documents=documents,
        )

    def pinned(self) -> Batch:
        """Return the same in page-locked memory, from which a copy to a GPU runs beside it."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return replace(self, tokens=self.tokens.pin_memory(), targets=self.targets.pin_memory(), documents=documents)


class Data(Protocol):
    """One split of a run's data: numbered samples, each of one channel."""

    channels: list[str]

    @property
    def samples(self) -> Any:
        """What a sampler deals: something with a length and a fingerprint, or a Mixture."""

    def batch(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """Return the samples with these numbers."""

    def channel_ids(self, channel: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` sample numbers spread evenly over one channel (fewer if it has fewer)."""

    def text_bytes(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return bytes of text of each target of these samples, int64 (B, seq_len); -1: no text; None: not known."""


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
                remedy="add text to data.source, lower train.seq_len, or lower data.holdout_every",
            )

    @property
    def samples(self) -> TokenDataset:
        """See `Data`."""
        return self

    def text_bytes(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return 1 for each byte, and -1 for the zero byte that ends a file."""
        return np.where(self.batch(ids).targets[:, :-1].numpy() == 0, -1, 1)

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


def ids_digest(ids: Sequence[int]) -> str:
    """Return 16 hex digits of a list of sample numbers, in order."""
    return hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def _fingerprint(index: dict[str, Any], split: str, seq_len: int) -> str:
    text = json.dumps([index["fingerprint"], split, seq_len])
    return hashlib.sha256(text.encode()).hexdigest()
