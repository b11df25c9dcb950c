"""The sources of a run as one mixture of windows, and the choice between it and the corpus of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.sampler import Mixture
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.prepared import check_prepared, read_index, read_prepared
from flashckpt.trainer.data.token_windows import Windows, open_windows, refuse_outside, too_short
from flashckpt.trainer.data.windows import NO_TARGET, Batch, Data, TokenDataset


class MixedDataset:
    """One split of `[[data.sources]]`: sample ids count through the sources one after another.

    Attributes:
        rows: What they are read through.

    Raises:
        DataError: the data is not prepared, damaged, or shorter than one window.
    """

    def __init__(self, config: RunConfig, split: str, *, is_sets: bool = False) -> None:
        name = "eval.sets" if is_sets else "data"
        self._data, self._index = config.data, read_prepared(config.data, name=name)
        self._vocab = config.model.vocab
        sources: dict[str, tuple[Any, int]] = {}
        self._numbers: list[int] = []  # of the sources that have a window
        for number, source in enumerate(config.data.sources):
            windows = open_windows(config.data, self._index, number, split, config.train.seq_len, rest=is_sets)
            if len(windows):
                sources[f"{number} {source.channel}"] = (windows, source.weight if split == "train" else 1)
                self._numbers.append(number)
            elif split == "train" or is_sets:
                raise too_short(number, config.train.seq_len, split, "eval.sets" if is_sets else "data.sources")
        if not sources:
            raise too_short(0, config.train.seq_len, split)
        self.samples = Mixture(sources)
        self.rows: Any = self.samples
        self.channels = list(dict.fromkeys(config.data.sources[number].channel for number in self._numbers))
        self._channel_of = [self.channels.index(config.data.sources[number].channel) for number in self._numbers]
        self._ends = np.cumsum(self.samples.lengths)
        self._text_bytes: list[Windows | None] = [  # in the order of the mixture, for what is scored
            open_windows(config.data, self._index, number, split, config.train.seq_len, ending="len", rest=is_sets)
            if split == "held" and config.data.sources[number].has_text
            else None
            for number in self._numbers
        ]

    def batch(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """Return the samples with these numbers."""
        numbers = np.asarray(ids, dtype=np.int64)
        rows = [self.rows[int(number)] for number in numbers]
        tokens = np.stack([row for row, _ in rows])
        documents = np.stack([row for _, row in rows])
        refuse_outside(tokens, self._vocab, f"samples {', '.join(map(str, numbers[:8]))}")
        without = documents[:, 1:] < 0
        if self._data.document_mask:  # the first token of a document does not follow from the end of another
            without |= documents[:, 1:] != documents[:, :-1]
        channel = np.array(self._channel_of)[np.searchsorted(self._ends, numbers, side="right")]
        targets = np.concatenate([np.where(without, NO_TARGET, tokens[:, 1:]), channel[:, None]], axis=1)
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            targets=torch.from_numpy(targets),
            ids=numbers,
            documents=torch.from_numpy(documents[:, :-1].copy()) if self._data.document_mask else None,
        )

    def channel_ids(self, channel: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` sample numbers spread evenly over one channel (fewer if it has fewer)."""
        spans = [
            np.arange(end - length, end, dtype=np.int64)
            for end, length, mine in zip(self._ends, self.samples.lengths, self._channel_of, strict=True)
            if mine == channel
        ]
        ids = np.concatenate(spans)
        count = min(count, len(ids))
        return ids[np.arange(count) * (len(ids) // count)]

    def text_bytes(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """See `Data`; None if a sample is of a source of tokens, or of the training split."""
        rows = []
        for number in np.asarray(ids, dtype=np.int64):
            source = int(np.searchsorted(self._ends, number, side="right"))
            windows = self._text_bytes[source]
            if windows is None:
                return None
            first = int(self._ends[source]) - self.samples.lengths[source]
            rows.append(windows[int(number) - first][0][1:] - 1)
        return np.stack(rows)


def open_data(config: RunConfig, split: str) -> Data:
    """Return one split of a run's data.

    Raises:
        DataError: nothing is prepared, or there is not one window.
        ConfigError: the model has fewer tokens than bytes are.
    """
    if config.data.sources:
        return MixedDataset(config, split)
    check_prepared(config)
    return TokenDataset(config.data.folder, split, config.train.seq_len)


def channels_of(config: RunConfig) -> list[str]:
    """Return the channels that a run trains on, whether or not anything of them is held out."""
    if config.data.sources:
        return list(dict.fromkeys(source.channel for source in config.data.sources))
    sets = read_index(config.data.folder)["sets"].values()
    return list(dict.fromkeys(entry["channel"] for entry in sets if entry["split"] == "train"))
