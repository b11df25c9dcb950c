"""Which tokenizer goes with weights: the one they were stored with, came with, or were trained on. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import from_values
from flashckpt.trainer.data.prepare import read_indexes, settings_of
from flashckpt.trainer.hub.byte_tokenizer import byte_tokenizer
from flashckpt.trainer.hub.source import BESIDE, CONFIG, CheckpointWeights, SavedWeights, read_json

TOKENIZER = "tokenizer.json"


def files_of_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder that travel with weights, config.json among them."""
    found = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}
    if CONFIG in found:
        read_json(folder / CONFIG)
    return found


def files_of_saved(source: SavedWeights, options: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files that go with saved weights, from the first place that has some; {} where nobody knows.

    They are stored with the checkpoint (`hub import`), lie in the folder of the prepared data, lie where the weights
    came from (`init.from`); a run on bytes has a tokenizer of bytes.
    """
    found = dict(source.beside) or _of_run(source, options)
    is_bytes = source.model.vocab == 256 or _reads_bytes(source.recorded.get("data"))
    return {**byte_tokenizer(), **found} if is_bytes and not has_tokenizer(found) else found


def has_tokenizer(files: Mapping[str, bytes]) -> bool:
    """Return whether there is a tokenizer among files that travel with weights."""
    return any(name in files for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _of_run(source: SavedWeights, options: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the files that a run's settings lead to: from where it was, else from where this process is."""
    for cwd in dict.fromkeys((source.cwd, "")):
        if prepared := _prepared(source.recorded.get("data"), Path(cwd)):
            return prepared
        came_from = source.init_from
        if came_from and (
            found := _of_origin(came_from if "://" in came_from else str(Path(cwd) / came_from), options)
        ):
            return found
    return {}


def _of_origin(where: str, options: Mapping[str, Any] | None) -> dict[str, bytes]:
    if Path(where).is_dir() and (found := files_of_folder(Path(where))):
        return found
    try:
        origin = CheckpointWeights(where, options=options)
    except Exception:  # noqa: BLE001 -- gone or elsewhere: the weights are here, and the caller learns that there is no tokenizer
        return {}
    origin.close()
    return dict(origin.beside)


def _reads_bytes(data: Any) -> bool:
    """Return whether a run's text was bytes, by what it recorded."""
    if not isinstance(data, dict):
        return False
    sources = data.get("sources") or []
    kinds = [one.get("kind") for one in sources if isinstance(one, dict)]
    return not (data.get("bpe") or data.get("tokenizer")) and not any(
        kind in ("tokens", "megatron") or one.get("tokenizer") for kind, one in zip(kinds, sources, strict=True)
    )


def _prepared(data: Any, cwd: Path) -> dict[str, bytes]:
    """Return the tokenizer that `data prepare` left in `data.folder`, if the run used one and it is there."""
    if not isinstance(data, dict) or _reads_bytes(data):
        return {}
    folder = cwd / str(data.get("folder", ""))
    try:
        index = _index_of(folder, data)
        content = (folder / Path(str(index["tokenizer"])).name).read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        tokenizer = str(data.get("tokenizer") or "")
        place = cwd / Path(tokenizer).expanduser()
        try:
            content = (place if tokenizer.endswith(".json") else place / TOKENIZER).read_bytes()
        except OSError:
            return {}
    return {TOKENIZER: content}


def _index_of(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Return the index of a run's recorded `data`; the newest in the folder if it recorded other keys than today's runs."""
    found = list(read_indexes(folder).values())
    if not found:
        raise FileNotFoundError(str(folder))
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        wanted = settings_of(from_values({"data": data}).data)
        found.sort(key=lambda index: index["settings"] != wanted)
    return found[0]
