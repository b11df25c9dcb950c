"""Documents of the sources that are text, in parts: a part is what one resumable unit of the preparation reads. Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.datasets.contents import HEAD_BYTES, decoded, refuse_no_text, refuse_other
from flashckpt.sampler.datasets.reaching import may_pass, reach
from flashckpt.sampler.datasets.remote_file import RemoteFile, is_remote, local_path
from flashckpt.trainer.config.data import SourceConfig
from flashckpt.trainer.data.files import file_system, full_name, matching_files
from flashckpt.trainer.prepare.corpus import stdlib_texts

SPLIT_BYTES = 64 << 20
"""JSON Lines are split about here, and text files are joined up to a quarter of it."""
_BLOCK = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    """What is read in one piece: files [text], a byte range [jsonl], a row group [parquet], a file [datasets].

    Attributes:
        first, last: The range inside the only file; 0 and 0 for whole files.
        identities: Size and digest of both ends of each file: a changed file is another part.
    """

    source: SourceConfig = field(repr=False)
    urls: tuple[str, ...]
    first: int = 0
    last: int = 0
    identities: tuple[str, ...] = ()

    @property
    def facts(self) -> list[Any]:
        """What its documents depend on, apart from the tokenizer; without the place of the files."""
        facts = [self.source.kind, self.source.key, self.first, self.last, list(self.identities)]
        return [*facts, "utf-8"] if self.source.kind == "text" else facts  # earlier releases replaced what is no UTF-8


def parts_of(source: SourceConfig, *, split_bytes: int = SPLIT_BYTES) -> list[TextPart]:
    """Return the parts of a source, in order.

    Raises:
        DataError: no file matches, or a file cannot be read.
        ConfigError: a library that the kind needs is not installed.
    """
    if source.kind == "stdlib":
        return [_stdlib_part(source, name) for name in source.urls]
    if source.kind == "datasets":
        urls = [found for url in source.urls for found in _arrow_files(source, url)]
    else:
        urls = [found for url in source.urls for found in matching_files(url, source.storage_options)]
    if source.kind == "text":
        return _joined(source, urls, split_bytes // 4)
    return [part for url in urls for part in _SPLITTERS[source.kind](source, url, split_bytes)]


def documents_of(part: TextPart) -> Iterator[str]:
    """Return the texts of a part, empty ones included.

    Raises:
        DataError: a file is missing or damaged, or a line or row has no text under `key`.
        StoreError: a file could not be reached for a while.
    """
    return (text for _, text in placed_documents(part))


def placed_documents(part: TextPart) -> Iterator[tuple[str, str]]:
    """Yield where each text is and the text, as `documents_of` does."""
    return _READERS[part.source.kind](part)


def _arrow_files(source: SourceConfig, url: str) -> list[str]:
    """Return the files of a Hugging Face data set on disk."""
    filesystem, path = file_system(url, source.storage_options)

    def listed() -> list[str]:
        try:
            return [one["filename"] for one in json.loads(filesystem.cat_file(f"{path}/state.json"))["_data_files"]]
        except (FileNotFoundError, NotADirectoryError) as error:
            if may_pass(error):
                raise
            raise DataError(
                f"{path} is no data set on disk",
                found="no state.json"
                + (", but dataset_dict.json" if filesystem.exists(f"{path}/dataset_dict.json") else ""),
                expected="the folder of one split, as save_to_disk wrote it",
                remedy="name the folder of the split in data.sources.urls",
            ) from error

    names = reach(f"{path}/state.json", listed)
    return [full_name(filesystem, url, f"{path}/{name}") for name in names]


def _blob(source: SourceConfig, url: str) -> RemoteFile:
    return RemoteFile(url, storage_options=source.storage_options if is_remote(url) else None, block_bytes=_BLOCK)


def _looked_at(source: SourceConfig, url: str) -> RemoteFile:
    """Return a file of a source; DataError if it begins like one of another kind."""
    blob = _blob(source, url)
    head = blob.read(0, min(HEAD_BYTES, blob.nbytes))
    if source.kind in ("text", "jsonl"):
        refuse_no_text(url, head, "text in UTF-8" if source.kind == "text" else "JSON Lines in UTF-8")
    else:
        refuse_other(url, head, f"a file of kind {source.kind!r}", but="Parquet" if source.kind == "parquet" else "")
    return blob


def _stdlib_part(source: SourceConfig, name: str) -> TextPart:
    if name not in ("code", "doc", "prose"):
        raise ConfigError("the Python library has no such text", found=name, expected="code, doc or prose")
    digest = hashlib.blake2b(digest_size=8)
    for text in _stdlib(name):
        digest.update(text.encode("utf-8", "replace"))
    return TextPart(source=source, urls=(name,), identities=(digest.hexdigest(),))


def _stdlib(name: str) -> Iterator[str]:
    return (text for _, text in stdlib_texts((name,)))


def _joined(source: SourceConfig, urls: Sequence[str], limit: int) -> list[TextPart]:
    parts: list[TextPart] = []
    names: list[str] = []
    identities: list[str] = []
    size = 0
    for url in urls:
        blob = _looked_at(source, url)
        names.append(url)
        identities.append(blob.identity())
        size += blob.nbytes
        if size >= limit:
            parts.append(TextPart(source=source, urls=tuple(names), identities=tuple(identities)))
            names, identities, size = [], [], 0
    return [*parts, TextPart(source=source, urls=tuple(names), identities=tuple(identities))] if names else parts


def _ranges(source: SourceConfig, url: str, split_bytes: int) -> list[TextPart]:
    blob = _looked_at(source, url)
    identity = (blob.identity(),)
    edges = [*range(0, blob.nbytes, split_bytes), blob.nbytes]
    return [
        TextPart(source=source, urls=(url,), first=first, last=last, identities=identity)
        for first, last in itertools.pairwise(edges)
    ]


def _row_groups(source: SourceConfig, url: str, _: int) -> list[TextPart]:
    identity = (_looked_at(source, url).identity(),)
    count = _arrow(url, lambda: _parquet(source, url).num_row_groups)
    return [TextPart(source=source, urls=(url,), first=i, last=i + 1, identities=identity) for i in range(count)]


def _whole(source: SourceConfig, url: str, _: int) -> list[TextPart]:
    return [TextPart(source=source, urls=(url,), identities=(_looked_at(source, url).identity(),))]


_SPLITTERS = {"jsonl": _ranges, "parquet": _row_groups, "datasets": _whole}


def _text_files(part: TextPart) -> Iterator[tuple[str, str]]:
    for url in part.urls:
        yield url, decoded(b"".join(data for _, data in _blob(part.source, url).chunks()), url)


def _json_lines(part: TextPart) -> Iterator[tuple[str, str]]:
    url = part.urls[0]
    for start, line in _lines(_blob(part.source, url), part.first, part.last):
        if not line.strip():
            continue
        words, where = decoded(line, url, offset=start), f"the line at byte {start}"
        try:
            text = json.loads(words)[part.source.key]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(part, where, f"{type(error).__name__}: {error}") from error
        yield _checked(part, where, text)


def _lines(blob: RemoteFile, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that begin in [first, last)."""
    at = max(0, first - 1)  # one byte before: a line that begins at `first` follows its newline
    start, rest, skipping = at, b"", first > 0
    while at < blob.nbytes and start < last:
        stop = min(at + _BLOCK, blob.nbytes)
        rest, at = rest + blob.read(at, stop), stop
        *whole, rest = rest.split(b"\n")
        for line in whole:
            if not skipping and start < last:
                yield start, line
            skipping, start = False, start + len(line) + 1
    if rest and start < last and not skipping:
        yield start, rest


def _rows(part: TextPart) -> Iterator[tuple[str, str]]:
    url = part.urls[0]

    def table() -> Any:
        file = _parquet(part.source, url)
        _check_column(part, file.schema_arrow)
        return file.read_row_group(part.first, columns=[part.source.key])

    for row, text in enumerate(_texts(part, _arrow(url, table), f"group {part.first}")):
        yield _checked(part, f"row {row} of group {part.first}", text)


def _texts(part: TextPart, table: Any, where: str) -> list[Any]:
    """Return a column as Python values; DataError where its bytes are no UTF-8, or it is there twice."""
    try:
        return list(table.column(part.source.key).to_pylist())
    except (UnicodeDecodeError, KeyError, ValueError) as error:
        raise _damaged(part, where, f"{type(error).__name__}: {error}") from error


def _data_set_rows(part: TextPart) -> Iterator[tuple[str, str]]:
    row = 0
    for batch in _batches(part):
        for text in _texts(part, batch, f"the batch of row {row}"):
            yield _checked(part, f"row {row}", text)
            row += 1


def _batches(part: TextPart) -> Iterator[Any]:
    """Yield the batches of a data set; a stream that broke is opened again, and read up to there."""
    url, read, kept = part.urls[0], 0, contextlib.ExitStack()
    reader: Any = None

    def following() -> Any:
        nonlocal reader
        if reader is None:
            reader = kept.enter_context(_stream(part.source, url))
            _check_column(part, reader.schema)
            for _ in range(read):
                reader.read_next_batch()
        return next(reader, None)

    def forget() -> None:
        nonlocal reader
        reader = None

    with kept:
        while (batch := _arrow(url, following, forget)) is not None:
            read += 1
            yield batch


def _check_column(part: TextPart, schema: Any) -> None:
    if part.source.key not in schema.names:
        raise _damaged(part, "the table", f"columns {', '.join(schema.names)}")


def _checked(part: TextPart, where: str, text: Any) -> tuple[str, str]:
    if not isinstance(text, str):
        raise _damaged(part, where, f"{type(text).__name__} under {part.source.key!r}")
    return f"{where} of {part.urls[0]}", text


def _parquet(source: SourceConfig, url: str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(_opened(source, url), page_checksum_verification=True)


def _stream(source: SourceConfig, url: str) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(_opened(source, url))


def _opened(source: SourceConfig, url: str) -> Any:
    if not is_remote(url):
        return str(local_path(url)) if source.kind == "parquet" else local_path(url).open("rb")
    import fsspec

    filesystem = fsspec.filesystem(urlsplit(url).scheme, **source.storage_options)
    return filesystem.open(url, "rb", cache_type="readahead")


def _arrow(url: str, work: Callable[[], Any], forget: Callable[[], None] = lambda: None) -> Any:
    def asked() -> Any:
        try:
            return work()
        except ModuleNotFoundError as error:
            raise ConfigError(
                "pyarrow is needed for Parquet files and data sets",
                found=str(error),
                remedy="pip install 'flashckpt[data]'",
            ) from error

    return reach(url, asked, forget=forget)


_READERS: dict[str, Callable[[TextPart], Iterator[tuple[str, str]]]] = {
    "text": _text_files, "jsonl": _json_lines, "parquet": _rows, "datasets": _data_set_rows,
    "stdlib": lambda part: (("the Python library", text) for text in _stdlib(part.urls[0])),
}  # fmt: skip


def _damaged(part: TextPart, where: str, found: str) -> DataError:
    return DataError(
        f"{where} of {part.urls[0]} has no text",
        found=found,
        expected=f"text under {part.source.key!r} (data.sources.key)",
        remedy="correct data.sources.key, or repair the file",
    )
