"""Sequence packing from an offline index: documents of uneven length in windows of equal length.

First-fit packing during training is state that a resume would have to restore. Here the packing is computed
once, by a deterministic best fit over all lengths, and stored; a packed sample is then a pure function of
its number, and the sampler deals packed samples like any others.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError
from flashckpt.sampler.datasets import index_file
from flashckpt.sampler.datasets.index_file import Array

_KIND = "packing"


def pack(lengths: npt.ArrayLike, window: int) -> dict[str, Array]:
    """Return a packing of documents into windows: best fit, longest piece first.

    Documents longer than the window are cut into pieces, documents of length 0 are omitted. No token is
    dropped or repeated.

    Args:
        lengths: Tokens of each document, shape (documents,).
        window: Tokens of a window.

    Returns:
        "document", "start" and "length" of each piece (int64), window by window in the order of documents,
        and "bins": where each window's pieces begin, shape (windows + 1,).
    """
    counts = np.asarray(lengths, np.int64)
    if window < 1 or counts.ndim != 1 or (len(counts) and counts.min() < 0):
        raise ConfigError("documents cannot be packed", found=f"window {window}", expected="a window of 1 or more")
    per_document = -(-counts // window)
    document = np.repeat(np.arange(len(counts)), per_document)
    ordinal = np.arange(len(document)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    start = ordinal * window
    length = np.minimum(counts[document] - start, window)
    bins = _best_fit(length, window)
    order = np.lexsort((start, document, bins))
    edges = np.searchsorted(bins[order], np.arange(int(bins.max()) + 2 if len(bins) else 1))
    return {
        "document": document[order].astype(np.int64),
        "start": start[order].astype(np.int64),
        "length": length[order].astype(np.int64),
        "bins": edges.astype(np.int64),
    }


def _best_fit(length: Array, window: int) -> Array:
    """Return the bin of each piece; bins are numbered by their first document."""
    bins = np.zeros(len(length), np.int64)
    open_bins: dict[int, list[int]] = {}  # free space -> bins with that much
    rooms: list[int] = []  # the keys of open_bins, sorted
    count = 0
    for piece in np.argsort(-length, kind="stable").tolist():
        need = int(length[piece])
        place = bisect_left(rooms, need)
        if place == len(rooms):
            number, room = count, window
            count += 1
        else:
            room = rooms[place]
            number = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[place]
        bins[piece] = number
        if room > need:
            if room - need not in open_bins:
                insort(rooms, room - need)
            open_bins.setdefault(room - need, []).append(number)
    first = np.full(count, len(length))
    np.minimum.at(first, bins, np.arange(len(length)))
    renumbered = np.empty(count, np.int64)
    renumbered[np.argsort(first, kind="stable")] = np.arange(count)
    return renumbered[bins]


def build_packing(
    lengths: npt.ArrayLike,
    window: int,
    index: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Pack documents and write the index; return its path."""
    place = os.fspath(index)
    index_file.write(place, index_file.encode(_KIND, _facts(lengths, window), pack(lengths, window)), storage_options)
    return place


class PackedWindows:
    """Windows of packed documents as a map-style data set.

    A sample is a dict of "tokens" (int64[window], padded) and "document" (int32[window]: 0, 1, ... for the
    documents of the window, -1 on padding), from which attention masks and position ids follow.

    Args:
        documents: Token arrays by number, e.g. `MegatronFile(prefix)` without a window.
        lengths: Tokens of each document; default: `documents.lengths`.
        window: Tokens of a sample.
        index: Where `build_packing` put the index; None packs in memory (about 2 us per document).
        pad: Token to fill windows up with.
        storage_options: For fsspec, for the index.

    Raises:
        DataError: the index is damaged or belongs to other documents or another window.
    """

    def __init__(
        self,
        documents: Any,
        *,
        window: int,
        lengths: npt.ArrayLike | None = None,
        index: str | os.PathLike[str] | None = None,
        pad: int = 0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        sizes = documents.lengths if lengths is None else lengths
        facts = _facts(sizes, window)
        if index is None:
            arrays = pack(sizes, window)
        else:
            place = os.fspath(index)
            found, arrays = index_file.read(place, _KIND, storage_options)
            index_file.check_facts(place, found, facts)
        self._documents, self.window, self._pad = documents, window, pad
        self._document, self._start = arrays["document"], arrays["start"]
        self._length, self._bins = arrays["length"], arrays["bins"]
        self.tokens = int(self._length.sum())
        self.fingerprint = f"packed:{window}:{facts['lengths']}:{getattr(documents, 'fingerprint', '')}"

    def __len__(self) -> int:
        return len(self._bins) - 1

    def __getitem__(self, sample: int) -> dict[str, Array]:
        if not 0 <= sample < len(self):
            raise IndexError(f"window {sample} of {len(self)}")
        tokens = np.full(self.window, self._pad, np.int64)
        document = np.full(self.window, -1, np.int32)
        place = 0
        for number, piece in enumerate(range(int(self._bins[sample]), int(self._bins[sample + 1]))):
            start, length = int(self._start[piece]), int(self._length[piece])
            tokens[place : place + length] = self._documents[int(self._document[piece])][start : start + length]
            document[place : place + length] = number
            place += length
        return {"tokens": tokens, "document": document}

    @property
    def fill(self) -> float:
        """Share of the positions of all windows that hold a token."""
        return self.tokens / (len(self) * self.window) if len(self) else 0.0


def _facts(lengths: npt.ArrayLike, window: int) -> dict[str, Any]:
    sizes = np.ascontiguousarray(lengths, dtype="<i8")
    digest = hashlib.blake2b(sizes.tobytes(), digest_size=8).hexdigest()
    return {"window": window, "documents": len(sizes), "lengths": digest}
