"""What `data prepare` wrote, and the check of a run's data before anything slow is imported. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError, DataError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.prepare import VERSION, settings_of
from flashckpt.trainer.data_config import DataConfig

_PREPARE = "run: python -m flashckpt.trainer data prepare --config FILE.toml"


def read_prepared(data: DataConfig) -> dict[str, Any] | None:
    """Return the index of the prepared sources; None if every source holds tokens already.

    Raises:
        DataError: nothing is prepared, it is not whole, or it was prepared from other settings.
    """
    if not any(source.has_text for source in data.sources):
        return None
    folder = Path(data.folder)
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_text())
        version, settings, dtype = index["version"], index["settings"], index["dtype"]
        whole = all(
            (folder / f"{record['name']}.{split}.bin").stat().st_size == record[split]["tokens"] * int(dtype[-1])
            for records in index["sources"]
            for record in records
            for split in ("train", "held")
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"no prepared data in {folder}",
            found=f"{type(error).__name__}: {error}",
            expected="index.json and the shards that it names",
            state="Nothing was started.",
            remedy=_PREPARE,
        ) from error
    wanted = settings_of(data)
    if version != VERSION or settings != wanted or not whole:
        different = [key for key in wanted if settings.get(key) != wanted[key]]
        raise DataError(
            f"the prepared data in {folder} is not that of this run",
            found=", ".join(f"data.{key} = {wanted[key]}" for key in different) or "shards that were cut short",
            expected=", ".join(f"data.{key} = {settings.get(key)}" for key in different) or "whole shards",
            state="Nothing was started.",
            remedy=_PREPARE,
        )
    return index


def check_prepared(config: RunConfig) -> None:
    """Refuse a run whose data is not prepared, or whose tokens the model has no rows for.

    Raises:
        DataError: see `read_prepared`.
        ConfigError: the tokenizer has more tokens than the model.
    """
    index = read_prepared(config.data)
    if index is not None and index["vocab"] > config.model.vocab:
        raise ConfigError(
            "the tokenizer has more tokens than the model",
            found=f"model.vocab = {config.model.vocab}",
            expected=f"{index['vocab']} or more, as the data in {config.data.folder} was tokenised",
            state="Nothing was started.",
            remedy="raise model.vocab, or prepare the data with the tokenizer of the model",
        )
