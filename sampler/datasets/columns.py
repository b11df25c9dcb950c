"""Rows of Parquet and Arrow files, read by row group (pyarrow; extra `data`).

A row group is read whole and kept in a small cache: use order="block" with the data set's `block_size`,
so that consecutive samples are close to each other in the file.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.datasets.reaching import reach
from flashckpt.sampler.datasets.remote_file import RemoteFile, is_remote, local_path


class RowGroups:
    """The common part of Parquet and Arrow: rows by (file, group), groups read whole and cached.

    Args:
        urls: One path or fsspec URL, or several; their rows follow each other.
        columns: Columns to read; default: all.
        cache_groups: Row groups kept in memory per process.
        storage_options: For fsspec.

    Raises:
        DataError: a file is missing, damaged or truncated, or has no rows.
        ConfigError: pyarrow is not installed.
    """

    kind = ""

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        cache_groups: int = 4,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        several = [urls] if isinstance(urls, (str, os.PathLike)) else urls
        self.urls = [os.fspath(url) for url in several]
        self._columns = list(columns) if columns is not None else None
        self._cache_groups, self._options = cache_groups, dict(storage_options or {})
        self._forget()
        self._groups = [(file, group) for file in range(len(self.urls)) for group in range(self._count(file))]
        sizes = [self._rows(file, group) for file, group in self._groups]
        self._ends = np.cumsum(sizes, dtype=np.int64).tolist()
        if not self._ends or not self._ends[-1]:
            raise DataError(f"{self.urls} hold no rows", found="0 rows", expected="1 or more")
        self.block_size = int(max(sizes))
        identities = [
            RemoteFile(url, storage_options=self._options if is_remote(url) else None).identity() for url in self.urls
        ]
        self.fingerprint = f"{self.kind}:{self._columns}:{identities}"
        self._forget()  # nothing stays open across a fork

    def _forget(self) -> None:
        self._process = os.getpid()
        self._files: dict[int, Any] = {}
        self._tables: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without open files and cached groups: a loader sends its data set to workers."""
        return {name: value for name, value in self.__dict__.items() if name not in {"_files", "_tables", "_process"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = bisect_right(self._ends, row)
        inside = row - (self._ends[number - 1] if number else 0)
        table = self._table(number)
        file = self._groups[number][0]
        return dict(self._guarded(file, lambda: table.slice(inside, 1).to_pylist()[0]))  # text may be no UTF-8

    def _table(self, number: int) -> Any:
        if self._process != os.getpid():
            self._forget()
        if number in self._tables:
            self._tables.move_to_end(number)
            return self._tables[number]
        file, group = self._groups[number]
        table = self._guarded(file, lambda: self._read(self._open(file), group))
        while len(self._tables) >= self._cache_groups:
            self._tables.popitem(last=False)
        self._tables[number] = table
        return table

    def _open(self, file: int) -> Any:
        if file not in self._files:
            self._files[file] = self._guarded(file, lambda: self._reader(self._source(self.urls[file])))
        return self._files[file]

    def _source(self, url: str) -> Any:
        if not is_remote(url):
            return str(local_path(url))
        import fsspec

        filesystem = fsspec.filesystem(urlsplit(url).scheme, **self._options)
        return filesystem.open(url, "rb", cache_type="none")  # pyarrow asks for the ranges it needs

    def _guarded(self, file: int, work: Any) -> Any:
        def guarded() -> Any:
            try:
                return work()
            except ModuleNotFoundError as error:
                raise ConfigError(
                    "pyarrow is needed for Parquet and Arrow files",
                    found=str(error),
                    remedy="pip install 'flashckpt[data]'",
                ) from error

        url = self.urls[file]
        return reach(url, guarded, f"a whole {self.kind} file", forget=lambda: self._files.pop(file, None))

    def _count(self, file: int) -> int:
        names = self._guarded(file, lambda: self._names(self._open(file)))
        lacking = [name for name in self._columns or () if name not in names and name.split(".")[0] not in names]
        if lacking:  # pyarrow would leave them out
            raise DataError(
                f"{self.urls[file]} has no column {lacking[0]!r}",
                found=f"columns {', '.join(names)}",
                expected=", ".join(self._columns or ()),
                remedy="correct columns",
            )
        return int(self._guarded(file, lambda: self._group_count(self._open(file))))

    def _rows(self, file: int, group: int) -> int:
        return int(self._guarded(file, lambda: self._group_rows(self._open(file), group)))

    # -- what differs between the formats

    def _reader(self, source: Any) -> Any:
        raise NotImplementedError

    def _names(self, reader: Any) -> list[str]:
        raise NotImplementedError

    def _group_count(self, reader: Any) -> int:
        raise NotImplementedError

    def _group_rows(self, reader: Any, group: int) -> int:
        raise NotImplementedError

    def _read(self, reader: Any, group: int) -> Any:
        raise NotImplementedError


class ParquetRows(RowGroups):
    """Rows of Parquet files as dicts; see `RowGroups` for the arguments."""

    kind = "parquet"

    def _reader(self, source: Any) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)

    def _names(self, reader: Any) -> list[str]:
        return list(reader.schema_arrow.names)

    def _group_count(self, reader: Any) -> int:
        return int(reader.metadata.num_row_groups)

    def _group_rows(self, reader: Any, group: int) -> int:
        return int(reader.metadata.row_group(group).num_rows)

    def _read(self, reader: Any, group: int) -> Any:
        return reader.read_row_group(group, columns=self._columns)


class ArrowRows(RowGroups):
    """Rows of Arrow IPC files (the random-access file format, also known as Feather v2) as dicts.

    Row counts are not in the file's footer, so opening reads each record batch once: free for local
    files, which are mapped, a full read for URLs (prefer Parquet there). See `RowGroups` for the arguments.
    """

    kind = "arrow"

    def _reader(self, source: Any) -> Any:
        import pyarrow as pa

        return pa.ipc.open_file(pa.memory_map(source) if isinstance(source, str) else source)

    def _names(self, reader: Any) -> list[str]:
        return list(reader.schema.names)

    def _group_count(self, reader: Any) -> int:
        return int(reader.num_record_batches)

    def _group_rows(self, reader: Any, group: int) -> int:
        return int(reader.get_batch(group).num_rows)

    def _read(self, reader: Any, group: int) -> Any:
        batch = reader.get_batch(group)
        return batch if self._columns is None else batch.select(self._columns)
