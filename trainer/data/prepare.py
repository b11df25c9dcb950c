"""`data prepare`: documents become shards of tokens, part by part, so that a killed preparation continues where it was.

A folder holds `NAME.train.bin` and `NAME.held.bin` (tokens) with `.idx` (lengths of the documents) per part,
`NAME.json` (the record, written after them), tokenizers, and `index.json`, written last: without it nothing is prepared.
NAME is a digest of everything the tokens depend on: a part whose record is there is not read again. Torch-free.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from flashckpt.errors import ConfigError, DataError
from flashckpt.faults import crash_point
from flashckpt.sampler.datasets import index_file
from flashckpt.trainer.data.corpus import is_held_out
from flashckpt.trainer.data.documents import SPLIT_BYTES, TextPart, documents_of, parts_of
from flashckpt.trainer.data.vocabulary import Tokens, Vocabulary, read_vocabulary, train_bpe
from flashckpt.trainer.data_config import DataConfig

VERSION = 1
SPLITS = ("train", "held")
KIND = "documents"
_BATCH_CHARACTERS = 4 << 20
_OURS = re.compile(r"\.?((?P<part>[0-9a-f]{24})|index|tokenizer-[0-9a-f]+|bpe-[0-9a-f]+)\.(.*\.)?(json|bin|idx|tmp)")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareProgress:
    """How far a preparation is: parts, and tokens and bytes of text so far; `reused` parts were there before."""

    done: int
    parts: int
    reused: int
    tokens: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """Where tokens go, and as what: the folder, the type of a token, and which documents are held out."""

    folder: Path
    dtype: str
    every: int


def settings_of(data: DataConfig) -> dict[str, Any]:
    """Return the settings that prepared tokens depend on, as plain values."""
    return {
        "holdout_every": data.holdout_every, "tokenizer": data.tokenizer, "bpe": data.bpe, "end_token": data.end_token,
        "sources": [
            [one.kind, list(one.urls), one.key, one.tokenizer] if one.has_text else [one.kind] for one in data.sources
        ],
    }  # fmt: skip


def prepare(
    data: DataConfig, report: Callable[[PrepareProgress], None] = lambda _: None, *, split_bytes: int = SPLIT_BYTES
) -> dict[str, Any]:
    """Tokenise the sources of `data` into its folder and return the index.

    Args:
        data: The sources; those that hold tokens already are left where they are.
        report: Called after every part.
        split_bytes: See `parts_of`.

    Raises:
        ConfigError: no source is text, or a tokenizer cannot be used.
        DataError: a source cannot be read, has no document to train on, or the folder cannot be written.
    """
    if not any(source.has_text for source in data.sources):
        raise ConfigError(
            "there is nothing to prepare", found="no source that is text", expected="[[data.sources]] of text"
        )
    with _locked(Path(data.folder)) as folder:
        parts = [parts_of(source, split_bytes=split_bytes) if source.has_text else [] for source in data.sources]
        vocabularies = _vocabularies(folder, data, parts)
        dtype = "<u2" if max(one.size for one in vocabularies if one) <= 1 << 16 else "<u4"
        target = _Target(folder=folder, dtype=dtype, every=data.holdout_every)
        records = _records(target, parts, vocabularies, report)
        index = {
            "version": VERSION,
            "settings": settings_of(data),
            "dtype": dtype,
            "vocab": max(one.size for one in vocabularies if one),
            "tokenizer": next(_file_name(one) for one in vocabularies if one),
            "digests": [one.digest if one else "" for one in vocabularies],
            "sources": records,
        }
        index["fingerprint"] = _digest(index)
        _refuse_nothing_to_train(index)
        crash_point("prepare.before-index")
        _replace(folder / "index.json", json.dumps(index, indent=1).encode())
        _remove_others(folder, index)
        return index


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    except OSError as error:
        raise DataError(
            f"the data folder {path} cannot be written",
            found=error.strerror or str(error),
            expected="a writable folder with room for 2 or 4 bytes per token",
            remedy="set data.folder to another place",
        ) from error


def _vocabularies(folder: Path, data: DataConfig, parts: Sequence[Sequence[TextPart]]) -> list[Vocabulary | None]:
    """Return the vocabulary of each source that is text, the same object where it is the same; each is kept as a file."""
    opened: dict[str, Vocabulary] = {}
    found: list[Vocabulary | None] = []
    for source in data.sources:
        place = source.tokenizer or data.tokenizer
        if source.has_text and place not in opened:
            trained = not place and data.bpe > 0
            opened[place] = _trained(folder, data, parts) if trained else read_vocabulary(place, data.end_token)
        found.append(opened[place] if source.has_text else None)
    for one in opened.values():
        path = folder / _file_name(one)
        if not path.exists():
            _replace(path, one.files["tokenizer.json"])
    return found


def _trained(folder: Path, data: DataConfig, parts: Sequence[Sequence[TextPart]]) -> Vocabulary:
    mine = [part for few, one in zip(parts, data.sources, strict=True) if not one.tokenizer for part in few]
    path = folder / f"bpe-{_digest([data.bpe, [part.facts for part in mine]])}.json"
    if not path.exists():
        texts = itertools.chain.from_iterable(documents_of(part) for part in mine)
        _replace(path, train_bpe(texts, data.bpe), before=lambda: crash_point("prepare.before-tokenizer"))
    return Vocabulary(path.read_bytes(), data.end_token, name=str(path))


def _file_name(vocabulary: Vocabulary) -> str:
    return f"tokenizer-{vocabulary.digest}.json"


def _records(
    target: _Target,
    parts: Sequence[Sequence[TextPart]],
    vocabularies: Sequence[Vocabulary | None],
    report: Callable[[PrepareProgress], None],
) -> list[list[dict[str, Any]]]:
    """Return the records of each source's parts, writing those that are not there."""
    total, done, reused, tokens, nbytes = sum(len(few) for few in parts), 0, 0, 0, 0
    found: list[list[dict[str, Any]]] = []
    for few, vocabulary in zip(parts, vocabularies, strict=True):
        found.append([])
        for part in few:
            assert vocabulary is not None
            name = _digest([VERSION, part.facts, vocabulary.digest, target.every, target.dtype])
            record = _recorded(target, name)
            reused += record is not None
            record = record or _write_part(target, name, part, vocabulary)
            found[-1].append(record)
            done += 1
            tokens += sum(record[split]["tokens"] for split in SPLITS)
            nbytes += sum(record[split]["bytes"] for split in SPLITS)
            report(PrepareProgress(done=done, parts=total, reused=reused, tokens=tokens, nbytes=nbytes))
    return found


def _recorded(target: _Target, name: str) -> dict[str, Any] | None:
    folder = target.folder
    try:
        record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        sizes = [(folder / f"{name}.{split}.bin").stat().st_size for split in SPLITS]
        wanted = [record[split]["tokens"] * np.dtype(target.dtype).itemsize for split in SPLITS]
        indexed = all((folder / f"{name}.{split}.idx").is_file() for split in SPLITS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if sizes == wanted and indexed else None


def _write_part(target: _Target, name: str, part: TextPart, vocabulary: Vocabulary) -> dict[str, Any]:
    shards = {split: _Shard(target.folder / f"{name}.{split}", target.dtype) for split in SPLITS}
    try:
        for texts in _batches(documents_of(part)):
            for text, tokens in zip(texts, vocabulary.encode(texts), strict=True):
                data = text.encode("utf-8", "replace")
                shards["held" if is_held_out(data, target.every) else "train"].add(tokens, len(data))
            crash_point("prepare.during-part")
        record = {"name": name, **{split: shard.publish() for split, shard in shards.items()}}
    finally:
        for shard in shards.values():
            shard.close()
    crash_point("prepare.before-record")
    _replace(target.folder / f"{name}.json", json.dumps(record).encode())
    return record


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if text.strip():
            batch.append(text)
            size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Shard:
    """Tokens of one part and split while they are written, under a temporary name."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._file: IO[bytes] = self._temporary.open("wb")
        self._digest = hashlib.sha256()
        self._lengths: list[int] = []
        self._bytes = 0

    def add(self, tokens: Tokens, nbytes: int) -> None:
        data = tokens.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._lengths.append(len(tokens))
        self._bytes += nbytes

    def publish(self) -> dict[str, Any]:
        """Make both files durable under their names and return what the record says of them."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        facts = {"tokens": sum(self._lengths), "sha256": self._digest.hexdigest()}
        lengths = np.array(self._lengths, np.int64)
        index_file.write(f"{self._path}.idx", index_file.encode(KIND, facts, {"lengths": lengths}))
        self._temporary.replace(f"{self._path}.bin")
        return {**facts, "documents": len(lengths), "bytes": self._bytes}

    def close(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _refuse_nothing_to_train(index: dict[str, Any]) -> None:
    for number, (records, settings) in enumerate(zip(index["sources"], index["settings"]["sources"], strict=True)):
        if len(settings) > 1 and not any(record["train"]["tokens"] for record in records):
            raise DataError(
                f"data.sources[{number}] has nothing to train on",
                found=f"no text in {', '.join(settings[1])}, or all of it is held out",
                expected="documents with text in them",
                state="The parts that were tokenised are kept.",
                remedy="correct data.sources.urls, or raise data.holdout_every",
            )


def _remove_others(folder: Path, index: dict[str, Any]) -> None:
    """Remove what earlier preparations and killed ones left; other people's files may be in the folder."""
    kept = {record["name"] for records in index["sources"] for record in records}
    for path in folder.iterdir():
        match = _OURS.fullmatch(path.name)
        if match and (path.suffix == ".tmp" or (match["part"] and match["part"] not in kept)):
            path.unlink(missing_ok=True)


def _replace(path: Path, data: bytes, *, before: Callable[[], None] = lambda: None) -> None:
    """Write a file whole or not at all, durably."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    before()
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()
