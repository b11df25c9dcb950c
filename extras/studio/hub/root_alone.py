"""`--evaluate` of a checkpoint root alone: model, length and tokenizer are those on the root, the data of the run is not needed.

Torch-free.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig, from_values, to_values
from flashckpt.trainer.config.data import DataConfig
from flashckpt.trainer.config.eval import EvalConfig
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.hub.source import CheckpointWeights
from flashckpt.trainer.hub.tokenizer_files import TOKENIZER, files_of_saved
from flashckpt.trainer.prepare.vocabulary import byte_tokenizer
from flashckpt.trainer.scored.sets import prepare_sets


def is_root_alone(config: RunConfig) -> bool:
    """Return whether a run to evaluate names a root, and neither model nor data."""
    is_plain = (config.model, config.data) == (ModelConfig(), DataConfig())
    return is_plain and bool(config.checkpoint.root) and not config.init.from_


def recorded_on_root(config: RunConfig) -> dict[str, Any]:
    """Return what the run of the newest checkpoint recorded of itself, with its model and length, as `read_config` takes it.

    Raises:
        NoCheckpointError: There is none.
        ConfigError: It is not of the trainer.
    """
    source = CheckpointWeights(config.checkpoint.root, None, config.checkpoint.storage_options)
    source.close()
    values, run = source.recorded, to_values(source.run)
    train = {**values.get("train", {}), "seq_len": source.run.train.seq_len}
    # without `init`: of the weights that it began with nothing is needed
    return {**values, "model": run["model"], "train": train, "init": {}}


def of_root_alone(config: RunConfig, step: str | None = None) -> RunConfig:
    """Return the run to evaluate with what its root says of it; its sets of text are tokenised in a folder of this process.

    Sets and probes are those of `config`, or else those that the run recorded. Held-out text is not on the root. A run of
    the default model whose data is here is evaluated as it is configured.

    Raises:
        NoCheckpointError: There is none.
        ConfigError: It is not of the trainer, its tokenizer is not known, or there is nothing to evaluate.
        DataError: A set cannot be read.
    """
    options = config.checkpoint.storage_options
    source = CheckpointWeights(config.checkpoint.root, step, options)
    try:
        if source.model == config.model and Path(config.data.folder).is_dir():
            return config
        asked = config.eval if config.eval.sets or config.eval.probes else _recorded_eval(source)
        if not (asked.sets or asked.probes):
            raise ConfigError(
                "there is nothing to evaluate",
                found=f"a root alone ({source.where}), and no [[eval.sets]] or [[eval.probes]]",
                expected="sets or probes in --config; or the configuration of the run, whose held-out text is then needed",
                state="Nothing was started.",
            )
        data = _recorded_data(source.recorded)
        folder = tempfile.mkdtemp(prefix="flashckpt-evaluate-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        found = replace(
            config,
            model=source.model,
            train=replace(config.train, seq_len=source.run.train.seq_len),
            data=replace(data, folder=folder, bpe=0, tokenizer=_tokenizer(source, options, Path(folder))),
            eval=replace(asked, every=1, held_out=False),
        )
    finally:
        source.close()
    prepare_sets(found)
    return found


def _tokenizer(source: CheckpointWeights, options: Mapping[str, Any], folder: Path) -> str:
    """Return the path of the tokenizer of saved weights, written to `folder`; "" for bytes."""
    content = files_of_saved(source, options).get(TOKENIZER)
    if content is None:
        raise ConfigError(
            f"no tokenizer is known for {source.where}",
            found="none beside the checkpoints, and none in the data of the run",
            expected=f"{TOKENIZER} on the root, as a run leaves it there",
            state="Nothing was started.",
            remedy="evaluate with the configuration of the run, which names data.tokenizer",
        )
    if content == byte_tokenizer()[TOKENIZER]:
        return ""
    path = folder / TOKENIZER
    path.write_bytes(content)
    return str(path)


def _recorded_data(recorded: Mapping[str, Any]) -> DataConfig:
    """Return the data of the run as far as it says how text is cut and masked."""
    with contextlib.suppress(ConfigError, TypeError, KeyError):
        return from_values({"data": recorded["data"]}).data
    return DataConfig()


def _recorded_eval(source: CheckpointWeights) -> EvalConfig:
    """Return what the run was evaluated on, its files looked up from where it ran."""
    try:
        found = from_values({"eval": source.recorded["eval"]}).eval
    except (ConfigError, TypeError, KeyError):
        return EvalConfig()

    def place(url: str) -> str:
        return url if "://" in url else str(Path(source.cwd) / Path(url).expanduser())

    return replace(
        found,
        sets=tuple(replace(one, urls=tuple(map(place, one.urls))) for one in found.sets),
        probes=tuple(replace(one, url=place(one.url)) for one in found.probes),
    )
