"""Lines of text and JSON by random access: an index of line starts, built once beside the data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashckpt.errors import DataError
from flashckpt.sampler.datasets import index_file
from flashckpt.sampler.datasets.contents import HEAD_BYTES, refuse_no_text
from flashckpt.sampler.datasets.index_file import Array
from flashckpt.sampler.datasets.remote_file import RemoteFile, is_remote

INDEX_SUFFIX = ".fckidx"
_KIND = "lines"


def build_line_index(
    url: str | os.PathLike[str],
    index: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Scan a text file once and write the index of its lines; return its path (default: beside the data)."""
    place = os.fspath(index) if index is not None else os.fspath(url) + INDEX_SUFFIX
    blob = RemoteFile(url, storage_options=storage_options)
    index_file.write(place, index_file.encode(_KIND, _facts(blob), {"starts": _starts(blob)}), storage_options)
    return place


class TextLines:
    """The lines of a text file, without their line ends, as a map-style data set.

    Args:
        url: A path or fsspec URL; UTF-8, lines end with a newline (the last one need not).
        index: Path of the index; default: beside the data. A missing one is built for local files.
        storage_options: For fsspec.
        block_bytes: See `RemoteFile`.
        cache_blocks: See `RemoteFile`.

    Raises:
        DataError: the file is missing or empty, or the index is missing, damaged or of other data.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        index: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        block_bytes: int = 1 << 20,
        cache_blocks: int = 16,
    ) -> None:
        self._blob = RemoteFile(
            url, storage_options=storage_options, block_bytes=block_bytes, cache_blocks=cache_blocks
        )
        facts = _facts(self._blob)
        refuse_no_text(self._blob.url, self._blob.read(0, min(HEAD_BYTES, self._blob.nbytes)))
        self.fingerprint = f"lines:{facts['data']}"
        self._starts = self._index(os.fspath(index) if index is not None else None, facts, storage_options)
        if len(self._starts) < 2:
            raise DataError(f"{self._blob.url} holds no lines", found=f"{self._blob.nbytes} bytes", expected="text")

    def _index(self, place: str | None, facts: Mapping[str, Any], options: Mapping[str, Any] | None) -> Array:
        url = self._blob.url
        where = place or url + INDEX_SUFFIX
        remote = is_remote(where)
        if not remote and not os.path.exists(where):  # noqa: PTH110 - a URL with file: is handled by Blob
            if is_remote(url):
                raise DataError(
                    f"{url} has no index", found=f"nothing at {where}", expected="an index of its lines",
                    remedy="build it once: flashckpt.sampler.build_line_index(url, index)",
                )  # fmt: skip
            starts = _starts(self._blob)
            try:
                index_file.write(where, index_file.encode(_KIND, facts, {"starts": starts}))
            except OSError:
                pass  # a read-only data folder: the file is scanned again next time
            return starts
        found, arrays = index_file.read(where, _KIND, options if remote else None)
        index_file.check_facts(where, found, facts)
        return arrays["starts"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, line: int) -> Any:
        return self.text(line)

    def text(self, line: int) -> str:
        """Return line `line` (from 0) without its line end."""
        if not 0 <= line < len(self):
            raise IndexError(f"line {line} of {len(self)}")
        start, stop = int(self._starts[line]), int(self._starts[line + 1])
        try:
            return self._blob.read(start, stop).decode("utf-8" if start else "utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise self._damaged(line, str(error), "UTF-8") from error

    def _damaged(self, line: int, found: str, expected: str) -> DataError:
        return DataError(
            f"line {line + 1} of {self._blob.url} is damaged",
            found=f"{found} (the line starts at byte {int(self._starts[line])})",
            expected=expected,
            remedy="repair the file and delete its index",
        )


class JsonLines(TextLines):
    """The values of a JSON Lines file; see `TextLines` for the arguments.

    Args:
        *args: See `TextLines`.
        key: Return this member of each object instead of the whole.
        **options: See `TextLines`.
    """

    def __init__(self, *args: Any, key: str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._key = key

    def __getitem__(self, line: int) -> Any:
        text = self.text(line)
        try:
            value = json.loads(text)
            return value if self._key is None else value[self._key]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            expected = "JSON" if self._key is None else f"a JSON object with {self._key!r}"
            raise self._damaged(line, f"{type(error).__name__}: {error}", expected) from error


def _facts(blob: RemoteFile) -> dict[str, Any]:
    return {"data": blob.identity()}


def _starts(blob: RemoteFile) -> Array:
    starts = [np.zeros(1, np.int64)]
    for offset, data in blob.chunks():
        starts.append(np.flatnonzero(np.frombuffer(data, np.uint8) == 10).astype(np.int64) + offset + 1)
    ends = np.concatenate(starts)
    return ends if ends[-1] == blob.nbytes else np.append(ends, blob.nbytes)
