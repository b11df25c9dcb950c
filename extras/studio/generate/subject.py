"""What SOURCE names: a Hugging Face folder, a job in this machine's memory, or a checkpoint root. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler.datasets.remote_file import RemoteFile
from flashckpt.storage.factory import is_process_local
from flashckpt.trainer.generate.codec import TOKENIZER, TextCodec, codec_of_files
from flashckpt.trainer.hub.memory import LiveWeights, is_in_memory, job_of_root
from flashckpt.trainer.hub.source import MODEL, CheckpointWeights, HubFolder, SavedWeights, WeightSource, is_hub_folder
from flashckpt.trainer.hub.tokenizer_files import files_of_folder, files_of_saved

_EXPECTED = (
    "a checkpoint root, a Hugging Face folder (config.json and *.safetensors), or the id of a job on this machine"
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that can be asked."""

    weights: WeightSource
    codec: TextCodec
    context: int


def open_subject(
    where: str,
    *,
    live: bool = False,
    step: str | None = None,
    tokenizer: str = "",
    options: Mapping[str, Any] | None = None,
    label: str = MODEL,
) -> Subject:
    """Return the model that SOURCE names.

    Args:
        where: SOURCE. A path that exists and a URL come before a job of that name.
        live: A root stands for the job on this machine that writes to it.
        step: Which checkpoint or snapshot; None: the newest.
        tokenizer: A tokenizer.json or a folder with one; empty: the model's own.
        options: Of the store.
        label: MODEL or AVERAGE: which weights of a run.

    Raises:
        ConfigError: It is none of these, has no average, or no tokenizer is known.
        NoCheckpointError, RootError, DamagedError, ShardGapError: There is no such state, or not all of it.
    """
    weights = _open(where, live=live, step=step, options=options, label=label)
    try:
        codec = _codec(weights, tokenizer, options)
    except BaseException:
        weights.close()
        raise
    seq_len = weights.run.train.seq_len if isinstance(weights, SavedWeights) else 0
    return Subject(weights=weights, codec=codec, context=weights.model.context or seq_len)


def _open(
    where: str, *, live: bool, step: str | None, options: Mapping[str, Any] | None, label: str = MODEL
) -> WeightSource:
    if live:
        return LiveWeights(where if _is_job(where) else job_of_root(where), _number(step), label)
    if _is_job(where):
        return LiveWeights(where, _number(step), label)
    if is_hub_folder(where):
        if label != MODEL:
            raise ConfigError(
                f"{where} holds no average of the weights",
                found="a Hugging Face folder",
                expected="a root or a job of a run with ema.decay above 0",
                remedy="leave --ema out, or export the average: hub export",
            )
        if step is not None:
            raise ConfigError(
                "--step has no effect on a Hugging Face folder", found=f"--step {step}", expected="a root"
            )
        return HubFolder(Path(where))
    if not where or is_process_local(where) or ("://" not in where and not Path(where).is_dir()):
        raise ConfigError(f"{where!r} is no model", found=_what_is_there(where), expected=_EXPECTED)
    return CheckpointWeights(where, step, options, label)


def _is_job(where: str) -> bool:
    return bool(where) and "/" not in where and not Path(where).exists() and is_in_memory(where)


def _what_is_there(where: str) -> str:
    if where and is_process_local(where):
        return "a place in the memory of one process"
    return "a file" if where and Path(where).exists() else "no such folder, and no job of that id in memory"


def _number(step: str | None) -> int | None:
    if step is None or step.isdecimal():
        return None if step is None else int(step)
    raise ConfigError("a step in memory cannot be read", found=step, expected="STEP, e.g. 120")


def _codec(weights: WeightSource, tokenizer: str, options: Mapping[str, Any] | None) -> TextCodec:
    if tokenizer:
        return _given(tokenizer)
    if isinstance(weights, SavedWeights):
        found = codec_of_files(files_of_saved(weights, options), special=bool(weights.beside), name=weights.where)
    else:
        found = codec_of_files(weights.beside, special=True, name=weights.where)
    if found is None:
        raise ConfigError(
            f"no tokenizer is known for {weights.where}",
            found=f"none beside the weights{_folder_of(weights)}",
            expected=TOKENIZER,
            remedy="name it: --tokenizer FOLDER_OR_FILE",
        )
    return found


def _folder_of(weights: WeightSource) -> str:
    data = weights.recorded.get("data") if isinstance(weights, SavedWeights) else None
    folder = data.get("folder") if isinstance(data, dict) else None
    return f", nor in data.folder = {folder}" if folder else ""


def _given(place: str) -> TextCodec:
    """Return the codec of --tokenizer: "bytes", a file (any fsspec URL), or a folder."""
    if place == "bytes":
        return TextCodec(b"")
    path = Path(place).expanduser()
    if path.is_dir():
        found = codec_of_files(files_of_folder(path), special=True, name=place)
        if found is None:
            raise ConfigError(f"{place} holds no tokenizer", found=f"no {TOKENIZER}", expected=TOKENIZER)
        return found
    try:
        blob = RemoteFile(place if "://" in place else path)
        content = blob.read(0, blob.nbytes)
    except DataError as error:
        raise ConfigError(
            f"the tokenizer {place} cannot be read", found=error.found or error.problem, expected=f"a {TOKENIZER}"
        ) from error
    return TextCodec(content, special=True, name=place)
