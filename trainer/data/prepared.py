"""What `data prepare` wrote, and the check of a run's data before anything slow is imported. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError, DataError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.data import DataConfig
from flashckpt.trainer.data.prepare import VERSION, index_name, read_indexes, settings_of, sizes_of
from flashckpt.trainer.data.token_windows import check_token_files, too_short
from flashckpt.trainer.data.vocabulary import BYTES, digest_of

_PREPARE = "run: python -m flashckpt.trainer data prepare --config FILE.toml"


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
