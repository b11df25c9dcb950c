"""`data prepare`: documents become shards of tokens, part by part, so that a killed preparation continues where it was.

A folder holds `NAME.train.bin` and `NAME.held.bin` (tokens) with `.idx` (lengths of the documents) per part,
`NAME.held.len` (bytes of text of each token, see `Vocabulary.encode_with_bytes`, as uint32), `NAME.json` (the record, written after them), tokenizers, and `index-SETTINGS.json`, written last: without it nothing is prepared. SETTINGS is a digest of `settings_of`: runs with other
settings may use the same folder, and share the parts that are the same. NAME is a digest of everything the tokens depend on: a part whose record is there is not read again. Torch-free.
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
from flashckpt.trainer.config.data import DataConfig
from flashckpt.trainer.data.prepared import (
    SPLITS,
    VERSION,
    index_name,
    plain_digest,
    read_indexes,
    settings_of,
    sizes_of,
)
from flashckpt.trainer.data.token_windows import KIND
from flashckpt.trainer.prepare.corpus import is_held_out
from flashckpt.trainer.prepare.documents import SPLIT_BYTES, TextPart, documents_of, parts_of, placed_documents
from flashckpt.trainer.prepare.vocabulary import Vocabulary, read_vocabulary, tokenizer_file, train_bpe

_BATCH_CHARACTERS = 4 << 20
_OURS = re.compile(
    r"\.?((?P<part>[0-9a-f]{24})|index(-[0-9a-f]{24})?|tokenizer-[0-9a-f]+|bpe-[0-9a-f]+)\.(.*\.)?(json|bin|idx|len|tmp)"
)


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


def prepare(
    data: DataConfig,
    report: Callable[[PrepareProgress], None] = lambda _: None,
    *,
    split_bytes: int = SPLIT_BYTES,
    name: str = "data.sources",
) -> dict[str, Any]:
    """Tokenise the sources of `data` into its folder and return the index.

    Args:
        data: The sources; those that hold tokens already are left where they are.
        report: Called after every part.
        split_bytes: See `parts_of`.
        name: What errors call the sources. If `data.holdout_every` is 1, all of them is held out, as it is for evaluation.

    Raises:
        ConfigError: no source is text, or a tokenizer cannot be used.
        DataError: a source cannot be read, has no document to use, or the folder cannot be written.
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
            "tokenizer": next(tokenizer_file(one.digest) for one in vocabularies if one),
            "digests": [one.digest if one else "" for one in vocabularies],
            "sources": records,
        }
        index["fingerprint"] = plain_digest(index)
        _refuse_nothing_to_use(index, name, data.holdout_every)
        crash_point("prepare.before-index")
        _replace(folder / index_name(data), json.dumps(index, indent=1).encode())
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
        path = folder / tokenizer_file(one.digest)
        if not path.exists():
            _replace(path, one.files["tokenizer.json"])
    return found


def _trained(folder: Path, data: DataConfig, parts: Sequence[Sequence[TextPart]]) -> Vocabulary:
    mine = [part for few, one in zip(parts, data.sources, strict=True) if not one.tokenizer for part in few]
    path = folder / f"bpe-{plain_digest([data.bpe, [part.facts for part in mine]])}.json"
    if not path.exists():
        texts = itertools.chain.from_iterable(documents_of(part) for part in mine)
        _replace(path, train_bpe(texts, data.bpe), before=lambda: crash_point("prepare.before-tokenizer"))
    return Vocabulary(path.read_bytes(), data.end_token, name=str(path))


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
            name = plain_digest([VERSION, part.facts, vocabulary.digest, target.every, target.dtype])
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
        sizes = [(folder / file).stat().st_size for file, _ in sizes_of(record, target.dtype)]
        wanted = [size for _, size in sizes_of(record, target.dtype)]
        indexed = all((folder / f"{name}.{split}.idx").is_file() for split in SPLITS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if sizes == wanted and indexed else None


def _write_part(target: _Target, name: str, part: TextPart, vocabulary: Vocabulary) -> dict[str, Any]:
    shards = {
        split: _Shard(target.folder / f"{name}.{split}", target.dtype, has_bytes=split == "held") for split in SPLITS
    }
    try:
        for texts in _batches(documents_of(part)):
            held = [is_held_out(text.encode("utf-8", "replace"), target.every) for text in texts]
            try:
                shards["train"].add([text for text, out in zip(texts, held, strict=True) if not out], vocabulary)
                shards["held"].add([text for text, out in zip(texts, held, strict=True) if out], vocabulary)
            except DataError:
                _name_culprit(part, vocabulary)
                raise
            crash_point("prepare.during-part")
        record = {"name": name, **{split: shard.publish() for split, shard in shards.items()}}
    finally:
        for shard in shards.values():
            shard.close()
    crash_point("prepare.before-record")
    _replace(target.folder / f"{name}.json", json.dumps(record).encode())
    return record


def _name_culprit(part: TextPart, vocabulary: Vocabulary) -> None:
    """Raise DataError for the first text of a part that the tokenizer does not take."""
    for where, text in placed_documents(part):
        try:
            vocabulary.encode_with_bytes([text])
        except DataError as error:
            raise DataError(
                f"{where} cannot be tokenised",
                found=error.found,
                expected=f"text that the tokenizer {vocabulary.name} takes",
                state="The parts that were tokenised are kept.",
                remedy="repair or leave out the text, or use another tokenizer",
            ) from error


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
    """Tokens of one part and split while they are written, under temporary names, and perhaps the bytes of each."""

    def __init__(self, path: Path, dtype: str, *, has_bytes: bool) -> None:
        self._path, self._dtype, self._has_bytes = path, dtype, has_bytes
        self._files: dict[str, IO[bytes]] = {
            ending: path.with_name(f"{path.name}.{ending}.tmp").open("wb")
            for ending in (("bin", "len") if has_bytes else ("bin",))
        }
        self._digest = hashlib.sha256()
        self._lengths: list[int] = []
        self._bytes = 0

    def add(self, texts: Sequence[str], vocabulary: Vocabulary) -> None:
        self._bytes += sum(len(text.encode("utf-8", "replace")) for text in texts)
        if self._has_bytes:
            found = vocabulary.encode_with_bytes(texts)
            self._files["len"].write(b"".join(text_bytes.astype("<u4").tobytes() for _, text_bytes in found))
            encoded = [tokens for tokens, _ in found]
        else:
            encoded = vocabulary.encode(texts)
        for tokens in encoded:
            data = tokens.astype(self._dtype).tobytes()
            self._files["bin"].write(data)
            self._digest.update(data)
            self._lengths.append(len(tokens))

    def publish(self) -> dict[str, Any]:
        """Make the files durable under their names and return what the record says of them."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        facts = {"tokens": sum(self._lengths), "sha256": self._digest.hexdigest()}
        lengths = np.array(self._lengths, np.int64)
        index_file.write(f"{self._path}.idx", index_file.encode(KIND, facts, {"lengths": lengths}))
        for ending, file in self._files.items():
            Path(file.name).replace(f"{self._path}.{ending}")
        return {**facts, "documents": len(lengths), "bytes": self._bytes}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)


def _refuse_nothing_to_use(index: dict[str, Any], name: str, every: int) -> None:
    split, purpose = ("train", "train on") if every > 1 else ("held", "evaluate on")
    for number, (records, settings) in enumerate(zip(index["sources"], index["settings"]["sources"], strict=True)):
        if len(settings) > 1 and not any(record[split]["tokens"] for record in records):
            raise DataError(
                f"{name}[{number}] has nothing to {purpose}",
                found=f"no text in {', '.join(settings[1])}" + (", or all of it is held out" if every > 1 else ""),
                expected="documents with text in them",
                state="The parts that were tokenised are kept.",
                remedy=f"correct {name}.urls" + (", or raise data.holdout_every" if every > 1 else ""),
            )


def _remove_others(folder: Path, index: dict[str, Any]) -> None:
    """Remove what no index names, of earlier preparations and killed ones; other people's files may be in the folder."""
    kept = {record["name"] for records in index["sources"] for record in records}
    for other in read_indexes(folder).values():
        kept |= {record["name"] for records in other["sources"] for record in records}
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
