"""Windows of tokens that know their documents, for every kind of source, read by the sampler's readers. Torch-free.

A window is `window` + 1 tokens, of which all but the last are inputs and all but the first are targets, and the number of
the document of each, counted inside the window; -1 is padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.datasets import index_file
from flashckpt.sampler.datasets.packing import PackedWindows
from flashckpt.sampler.datasets.tokens import MegatronFile, TokenFile
from flashckpt.trainer.config.data import DataConfig, SourceConfig
from flashckpt.trainer.data.files import has_pattern, matching_files

KIND = "documents"
"""Kind of the index files that `data prepare` writes beside tokens."""
Ints = npt.NDArray[np.int64]
Window = tuple[Ints, Ints]
"""Tokens and document numbers, both int64 of shape (window + 1,)."""


class Windows(Protocol):
    """A map-style data set of windows with a fingerprint."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> Window: ...


class Shards:
    """Prepared tokens of one source and split: shards one after another.

    Args:
        folder: What `prepare` wrote.
        records: Of the source's parts.
        split: "train" or "held".
        dtype: As in the index.
        ending: "bin": tokens; "len", of "held": the bytes of text of each, plus one, in place of it.

    Raises:
        DataError: a shard is missing or damaged.
    """

    def __init__(
        self, folder: str, records: Sequence[dict[str, Any]], split: str, dtype: str, ending: str = "bin"
    ) -> None:
        used = [record for record in records if record[split]["tokens"]]
        names = [str(Path(folder) / f"{record['name']}.{split}") for record in used]
        kind = {"<u2": "uint16", "<u4": "uint32"}[dtype if ending == "bin" else "<u4"]
        self._files = [TokenFile(f"{name}.{ending}", window=1, dtype=kind, extra=0) for name in names]
        self._first = np.concatenate([[0], np.cumsum([file.tokens for file in self._files])]).astype(np.int64)
        self.tokens = int(self._first[-1])
        lengths = [
            _lengths(f"{name}.idx", {key: record[split][key] for key in ("tokens", "sha256")})
            for name, record in zip(names, used, strict=True)
        ]
        self.lengths: Ints = np.concatenate([np.zeros(0, np.int64), *lengths])
        self.starts: Ints = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.fingerprint = f"shards:{[record[split]['sha256'] for record in used]}"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> Ints:
        return self.slice(int(self.starts[document]), int(self.starts[document + 1]))

    def slice(self, first: int, last: int) -> Ints:
        """Return the tokens [first, last) as int64, over the ends of shards."""
        pieces = []
        number = int(np.searchsorted(self._first, first, side="right")) - 1
        while first < last:
            base, end = int(self._first[number]), min(last, int(self._first[number + 1]))
            pieces.append(self._files[number].slice(first - base, end - base))
            first, number = end, number + 1
        return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]


def _lengths(name: str, facts: dict[str, Any]) -> Ints:
    """Return the lengths of the documents of a shard; DataError where its index is of other tokens."""
    found, arrays = index_file.read(name, KIND)
    lengths = arrays["lengths"].astype(np.int64)
    index_file.check_facts(name, {**found, "tokens": int(lengths.sum())}, facts)
    return lengths


class StreamWindows:
    """Windows over documents one after another, each token predicted once.

    Args:
        window: Inputs of a sample.
        rest: Whether the tokens that are left in the end make a window, filled up with padding; else they are left out.
    """

    def __init__(self, shards: Shards, window: int, *, rest: bool = False) -> None:
        self._shards, self._window = shards, window
        windows = max(0, shards.tokens - 1) / window
        self._length = math.ceil(windows) if rest else math.floor(windows)
        self.fingerprint = f"stream:{window}:{shards.fingerprint}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> Window:
        first = sample * self._window
        last = min(first + self._window + 1, self._shards.tokens)
        documents = np.searchsorted(self._shards.starts, np.arange(first, last), side="right")
        padding = (0, self._window + 1 - (last - first))
        tokens = np.pad(self._shards.slice(first, last), padding)
        return tokens, np.pad((documents - documents[0]).astype(np.int64), padding, constant_values=-1)


class FilledWindows:
    """Windows of whole documents, best fit first; documents longer than a window are cut."""

    def __init__(self, documents: Any, window: int) -> None:
        self._packed = PackedWindows(documents, window=window + 1)
        self.fingerprint = self._packed.fingerprint

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, sample: int) -> Window:
        found = self._packed[sample]
        return found["tokens"], found["document"].astype(np.int64)


class FileWindows:
    """Windows of a flat token file; a document ends with the token `end`."""

    def __init__(self, source: SourceConfig, url: str, window: int) -> None:
        self._file = TokenFile(url, window=window, dtype=source.dtype, storage_options=source.storage_options)
        self._end = source.end
        self.fingerprint = self._file.fingerprint

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, sample: int) -> Window:
        tokens = self._file[sample]
        ended = np.cumsum(tokens == self._end, dtype=np.int64)
        return tokens, np.concatenate([[0], ended[:-1]])


class MegatronWindows:
    """Windows over the documents of a Megatron data set."""

    def __init__(self, source: SourceConfig, prefix: str, window: int) -> None:
        self._file = MegatronFile(prefix, window=window, storage_options=source.storage_options)
        self.fingerprint = self._file.fingerprint

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, sample: int) -> Window:
        tokens = self._file[sample]
        documents = np.zeros(len(tokens), np.int64)
        np.add.at(documents, self._file.document_starts(sample), 1)
        return tokens, np.cumsum(documents)


class Joined:
    """Several data sets of windows, one after another."""

    def __init__(self, parts: Sequence[Windows]) -> None:
        self._parts = list(parts)
        self._first = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.fingerprint = "+".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, sample: int) -> Window:
        number = int(np.searchsorted(self._first, sample, side="right")) - 1
        return self._parts[number][sample - int(self._first[number])]


class SplitWindows:
    """Every n-th window, or all the others: how token files are split, which have no documents to choose by."""

    def __init__(self, windows: Windows, every: int, *, split: str) -> None:
        self._windows, self._every, self._is_held = windows, every, split == "held"
        self.fingerprint = f"{split}:{every}:{windows.fingerprint}"

    def __len__(self) -> int:
        held = len(self._windows) // self._every
        return held if self._is_held else len(self._windows) - held

    def __getitem__(self, sample: int) -> Window:
        block, rest = divmod(sample, 1 if self._is_held else self._every - 1)
        return self._windows[block * self._every + (self._every - 1 if self._is_held else rest)]


def open_windows(
    data: DataConfig,
    index: dict[str, Any] | None,
    number: int,
    split: str,
    window: int,
    *,
    ending: str = "bin",
    rest: bool = False,
) -> Windows:
    """Return the windows of source `number` in one split; there may be none in "held".

    `ending` and `rest` are as of `Shards` and `StreamWindows`.

    Raises:
        DataError: a file is missing or damaged, or holds no window.
    """
    source = data.sources[number]
    if source.has_text:
        assert index is not None
        shards = Shards(data.folder, index["sources"][number], split, index["dtype"], ending)
        return FilledWindows(shards, window) if data.packing == "best-fit" else StreamWindows(shards, window, rest=rest)
    files = [_file_windows(data, source, url, window) for url in token_files(source)]
    return SplitWindows(Joined(files), data.holdout_every, split=split)


def token_files(source: SourceConfig) -> list[str]:
    """Return the files (of "megatron": prefixes) of a source of tokens, those of a pattern sorted.

    Raises:
        DataError: a pattern matches nothing.
    """
    ending = ".idx" if source.kind == "megatron" else ""
    found: list[str] = []
    for url in source.urls:
        if has_pattern(url):
            names = matching_files(f"{url.removesuffix(ending)}{ending}", source.storage_options)
            found += [name.removesuffix(ending) for name in names]
        else:
            found.append(url)
    return found


def check_token_files(source: SourceConfig, window: int, vocab: int) -> None:
    """Open every file of a source of tokens, and look at both ends.

    Raises:
        DataError: one is missing, damaged, or shorter than a window.
        ConfigError: a token at an end is none of `vocab`.
    """
    for url in token_files(source):
        if source.kind == "tokens":
            windows = FileWindows(source, url, window)
            ends = [windows[sample][0] for sample in {0, len(windows) - 1}]
        else:
            file = MegatronFile(url, storage_options=source.storage_options)
            ends = [file[sample] for sample in {0, len(file) - 1}]
        for tokens in ends:
            refuse_outside(tokens, vocab, url)


def refuse_outside(tokens: Ints, vocab: int, where: str) -> None:
    """Raise ConfigError if one of the tokens is none of the model's."""
    if tokens.size and (tokens.max() >= vocab or tokens.min() < 0):
        token = int(tokens.max() if tokens.max() >= vocab else tokens.min())
        raise ConfigError(
            "a token is outside the vocabulary of the model",
            found=f"token {token} in {where}",
            expected=f"0 to {vocab - 1} (model.vocab)",
            remedy="name the tokens of this model in data.sources, and their dtype",
        )


def _file_windows(data: DataConfig, source: SourceConfig, url: str, window: int) -> Windows:
    if source.kind == "tokens":
        return FileWindows(source, url, window)
    if data.packing == "best-fit":
        return FilledWindows(MegatronFile(url, storage_options=source.storage_options), window)
    return MegatronWindows(source, url, window)


def too_short(number: int, seq_len: int, split: str = "train", name: str = "data.sources") -> DataError:
    """Return the error for a source that has no window."""
    return DataError(
        f"{name}[{number}] has no sample in the {split} split",
        found=f"fewer than {seq_len + 1} tokens",
        expected=f"at least {seq_len + 1}",
        remedy="add text, lower train.seq_len, or change data.holdout_every",
    )
