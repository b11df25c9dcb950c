"""What `data prepare` and the corpus of bytes wrote, and the check of a run's data before anything slow is imported. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.datasets.remote_file import RemoteFile
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.data import DataConfig
from flashckpt.trainer.data.token_windows import check_token_files, too_short

VERSION = 2
SPLITS = ("train", "held")
BYTES = 256
"""Tokens of text that is read as bytes."""
_PREPARE = "run: python -m flashckpt.trainer data prepare --config FILE.toml"


def settings_of(data: DataConfig) -> dict[str, Any]:
    """Return the settings that prepared tokens depend on, as plain values."""
    return {
        "holdout_every": data.holdout_every, "tokenizer": data.tokenizer, "bpe": data.bpe, "end_token": data.end_token,
        "sources": [
            [one.kind, list(one.urls), one.key, one.tokenizer] if one.has_text else [one.kind] for one in data.sources
        ],
    }  # fmt: skip


def index_name(data: DataConfig) -> str:
    """Return the name of the index of what is prepared with these settings."""
    return f"index-{plain_digest(settings_of(data))}.json"


def read_indexes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what is prepared in a folder, by the name of its index, the newest first."""
    found: list[tuple[int, str, dict[str, Any]]] = []
    for path in folder.glob("index-*.json"):
        try:
            index = json.loads(path.read_bytes())
            assert isinstance(index["settings"], dict)
            assert all(record["name"] for records in index["sources"] for record in records)
            found.append((path.stat().st_mtime_ns, path.name, index))
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            continue  # not one of ours, or damaged: what it names is prepared again
    return {name: index for _, name, index in sorted(found, key=lambda one: one[:2], reverse=True)}


def sizes_of(record: dict[str, Any], dtype: str) -> list[tuple[str, int]]:
    """Return the files of a part whose sizes follow from its record, and these sizes in bytes."""
    name, held = record["name"], record["held"]["tokens"]
    files = [(f"{name}.{split}.bin", record[split]["tokens"] * np.dtype(dtype).itemsize) for split in SPLITS]
    return [*files, (f"{name}.held.len", held * 4)]


def plain_digest(value: Any) -> str:
    """Return the digest of plain values, by which what is prepared of them is named."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()


def digest_of(place: str, end_token: str) -> str | None:
    """Return the digest of `read_vocabulary(place, end_token)` without the library; None if the file is not here."""
    if place in ("", "bytes"):
        return tokenizer_digest(b"", end_token)
    try:
        blob = tokenizer_at(place)
        return tokenizer_digest(blob.read(0, blob.nbytes), end_token)
    except DataError:
        return None


def tokenizer_at(place: str) -> RemoteFile:
    """Return the tokenizer.json that a path, a URL or a folder of one names."""
    url = place if place.endswith(".json") else f"{place.rstrip('/')}/tokenizer.json"
    return RemoteFile(url if "://" in url else Path(url).expanduser())


def tokenizer_digest(text: bytes, end_token: str) -> str:
    """Return the digest of a tokenizer and the end token that is used with it."""
    return hashlib.blake2b(text + b"\0" + end_token.encode(), digest_size=8).hexdigest()


def read_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the index of a prepared corpus.

    Raises:
        DataError: no complete corpus is prepared there.
    """
    index = index_of_corpus(Path(folder))
    if index is None:
        raise DataError(
            f"there is no prepared corpus in {folder}",
            found="no readable index.json",
            expected="index.json and one .bin per channel",
            remedy="set data.source, or remove the folder so that it is prepared again",
        )
    return index


def index_of_corpus(path: Path) -> dict[str, Any] | None:
    """Return the index of a folder that holds a whole corpus."""
    try:
        index: dict[str, Any] = json.loads((path / "index.json").read_text())
        whole = all((path / name).stat().st_size == entry["tokens"] for name, entry in index["sets"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return index if whole else None


def read_prepared(data: DataConfig, *, name: str = "data") -> dict[str, Any] | None:
    """Return the index of the prepared sources; None if every source holds tokens already.

    Raises:
        DataError: nothing is prepared, it is not whole, or it was prepared from other settings.
    """
    if not any(source.has_text for source in data.sources):
        return None
    folder = Path(data.folder)
    try:
        index = _index(folder, data)
        version, settings, dtype = index["version"], dict(index["settings"]), index["dtype"]
        whole = all(
            (folder / file).stat().st_size == size
            for records in index["sources"]
            for record in records
            for file, size in sizes_of(record, dtype)
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"no prepared data in {folder}",
            found=f"{type(error).__name__}: {error}",
            expected=f"{index_name(data)} and the shards that it names",
            state="Nothing was started.",
            remedy=_PREPARE,
        ) from error
    wanted = settings_of(data)
    if version != VERSION or settings != wanted or not whole:
        before = {f"{name}.{key}": value for key, value in settings.items()} | {"version": version}
        now = {f"{name}.{key}": value for key, value in wanted.items()} | {"version": VERSION}
        different = [key for key in now if before.get(key) != now[key]]
        raise DataError(
            f"the prepared data in {folder} is not that of this run",
            found=", ".join(f"{key} = {before.get(key)}" for key in different) or "shards that were cut short",
            expected=", ".join(f"{key} = {now[key]}" for key in different) or "whole shards",
            state="Nothing was started.",
            remedy=_PREPARE,
        )
    _check_tokenizers(data, index)
    return index


def _index(folder: Path, data: DataConfig) -> dict[str, Any]:
    """Return the index of these settings; the newest of others if there is none, for what is different."""
    found = read_indexes(folder)
    if not found:
        raise FileNotFoundError(f"no index in {folder}")
    wanted = settings_of(data)
    same = [index for index in found.values() if index["settings"] == wanted]
    return [*same, *found.values()][0]


def _check_tokenizers(data: DataConfig, index: dict[str, Any]) -> None:
    """Refuse data whose tokenizer.json has another content now; one that is not here any more is not needed."""
    for source, prepared in zip(data.sources, index["digests"], strict=True):
        place = source.tokenizer or data.tokenizer
        now = digest_of(place, data.end_token) if place and source.has_text else None
        if now not in (None, prepared):
            raise DataError(
                f"the tokenizer {place} is not the one that the data in {data.folder} was prepared with",
                found=f"digest {now}",
                expected=f"digest {prepared}",
                state="Nothing was started.",
                remedy=f"use the earlier file again, or {_PREPARE}",
            )


def check_sources(config: RunConfig) -> None:
    """Refuse what `check_prepared` refuses, sources without a window, and files of tokens that cannot be read.

    Raises:
        DataError: see `read_prepared`; or a file is missing or damaged, or a source is shorter than one window.
        ConfigError: the tokenizer has more tokens than the model.
    """
    index = check_prepared(config)
    for number, source in enumerate(config.data.sources):
        if not source.has_text:
            check_token_files(source, config.train.seq_len, config.model.vocab)
        elif index is not None and config.data.packing == "stream":
            tokens = sum(record["train"]["tokens"] for record in index["sources"][number])
            if tokens <= config.train.seq_len:
                raise too_short(number, config.train.seq_len)
    if index is not None and config.eval.every and config.eval.held_out:
        missing = not_held_out(config, index)
        if len(missing) == len({source.channel for source in config.data.sources}):
            raise DataError(
                "nothing is held out for the evaluation",
                found="; ".join(missing),
                expected=f"more than {config.train.seq_len} tokens (train.seq_len) of a channel",
                state="Nothing was started.",
                remedy="lower data.holdout_every and prepare again, add documents, or set eval.held_out = false",
            )


def not_held_out(config: RunConfig, index: dict[str, Any]) -> list[str]:
    """Return a sentence for each channel of text of which not one window is held out, with the numbers behind it."""
    data, found = config.data, []
    needed = config.train.seq_len + 1 if data.packing == "stream" else 1
    pairs = list(zip(data.sources, index["sources"], strict=True))
    for channel in dict.fromkeys(source.channel for source in data.sources):
        mine = [records for source, records in pairs if source.channel == channel]
        texts = [source.has_text for source in data.sources if source.channel == channel]
        tokens = [sum(record["held"]["tokens"] for record in records) for records in mine]
        if not all(texts) or max(tokens) >= needed:
            continue
        held, train = (sum(one[split]["documents"] for few in mine for one in few) for split in ("held", "train"))
        found.append(
            f"channel {channel}: {held} of {held + train} documents, {sum(tokens)} tokens are held out (about one document "
            f"in data.holdout_every = {data.holdout_every}): it cannot be evaluated"
        )
    return found


def check_prepared(config: RunConfig) -> dict[str, Any] | None:
    """Return the index of a run's data; refuse what is not prepared, or has tokens for which the model has no rows.

    Raises:
        DataError: see `read_prepared`.
        ConfigError: the tokenizer has more tokens than the model.
    """
    index = read_prepared(config.data)
    tokens = BYTES if not config.data.sources else 0 if index is None else index["vocab"]
    if tokens > config.model.vocab:
        raise ConfigError(
            "the tokenizer has more tokens than the model",
            found=f"model.vocab = {config.model.vocab}",
            expected=f"{tokens} or more, as the data in {config.data.folder} is tokenised",
            state="Nothing was started.",
            remedy="raise model.vocab, or prepare the data with the tokenizer of the model",
        )
    return index
