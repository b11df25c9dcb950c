"""Which tokenizer goes with weights: the one they were stored with, came with, or were trained on. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.data.prepared import read_indexes, settings_of
from flashckpt.trainer.hub.source import BESIDE, CONFIG, CheckpointWeights, SavedWeights, read_json
from flashckpt.trainer.prepare.vocabulary import byte_tokenizer

TOKENIZER = "tokenizer.json"


def files_of_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder that travel with weights, config.json among them."""
    found = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}
    if CONFIG in found:
        read_json(folder / CONFIG)
    return found


def files_of_saved(source: SavedWeights, options: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files that go with saved weights, from the first place that has some; {} where nobody knows.

    They are stored with the checkpoint (`hub import`), lie beside the checkpoints (`root_files`), in the folder of the
    prepared data, or where the weights came from (`init.from`); a run on bytes has a tokenizer of bytes.

    Raises:
        ConfigError: The run's own tokenizer is there and cannot be read: that of another place might be another one.
    """
    found = dict(source.beside)
    if not has_tokenizer(found):
        found = {**(source.kept() or _of_run(source, options)), **found}
    data = source.recorded.get("data")
    is_bytes = _reads_bytes(data) or (source.model.vocab == 256 and not _own_tokenizers(data))
    return {**byte_tokenizer(), **found} if is_bytes and not has_tokenizer(found) else found


def files_of_run(config: RunConfig) -> dict[str, bytes]:
    """Return the tokenizer of a run that begins, with what lies beside it; {} for a run on bytes, or where none is found.

    What weights came with (`init.from`: config.json, a chat template) is in it if its tokenizer is the same, or the only one.
    """
    data = recorded_values(config)["data"]
    found = _prepared(data, Path())
    place = Path(str(data.get("tokenizer") or "")).expanduser()
    folder = place.parent if place.suffix == ".json" else place
    if found and data.get("tokenizer") and folder.is_dir():
        near = {name: content for name, content in files_of_folder(folder).items() if name in BESIDE[2:]}
        found = {**near, **found} if near.get(TOKENIZER) == found[TOKENIZER] else found
    if not (came_from := config.init.from_) or _reads_bytes(data):
        return found
    origin = _of_origin(came_from, config.checkpoint.storage_options)
    if found and origin.get(TOKENIZER) != found[TOKENIZER]:
        return found
    return {**origin, **found} if has_tokenizer(origin) else found


def has_tokenizer(files: Mapping[str, bytes]) -> bool:
    """Return whether there is a tokenizer among files that travel with weights."""
    return any(name in files for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _of_run(source: SavedWeights, options: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the files that a run's settings lead to: from where it was, else from where this process is."""
    unread: OSError | None = None
    for cwd in dict.fromkeys((source.cwd, "")):
        try:
            if prepared := _prepared(source.recorded.get("data"), Path(cwd)):
                return prepared
        except OSError as error:
            unread = unread or error
        came_from = "" if unread else source.init_from
        if came_from and (
            found := _of_origin(came_from if "://" in came_from else str(Path(cwd) / came_from), options)
        ):
            return found
    if unread:
        raise ConfigError(
            "the tokenizer of the run cannot be read",
            found=str(unread),
            state="Nothing was written.",
            remedy="make it readable, or name one: --tokenizer FOLDER",
        ) from unread
    return {}


def _of_origin(where: str, options: Mapping[str, Any] | None) -> dict[str, bytes]:
    if Path(where).is_dir() and (found := files_of_folder(Path(where))):
        return found
    try:
        origin = CheckpointWeights(where, options=options)
    except Exception:  # noqa: BLE001 -- gone or elsewhere: the weights are here, and the caller learns that there is no tokenizer
        return {}
    try:
        return dict(origin.beside) or dict(origin.kept())
    finally:
        origin.close()


def _reads_bytes(data: Any) -> bool:
    """Return whether a run's text was bytes, by what it recorded."""
    if not isinstance(data, dict):
        return False
    kinds = [one.get("kind") for one in data.get("sources") or []]
    return not _own_tokenizers(data) and not any(kind in ("tokens", "megatron") for kind in kinds)


def _own_tokenizers(data: Any) -> list[Any]:
    """Return what a run's settings say of tokenizers."""
    data = data if isinstance(data, dict) else {}
    said = [data.get("bpe"), data.get("tokenizer"), *(one.get("tokenizer") for one in data.get("sources") or [])]
    return [one for one in said if one]


def _prepared(data: Any, cwd: Path) -> dict[str, bytes]:
    """Return the tokenizer that `data prepare` left in `data.folder`, else data.tokenizer; {} where neither is there."""
    if not isinstance(data, dict) or _reads_bytes(data):
        return {}
    folder, tokenizer = cwd / str(data.get("folder", "")), str(data.get("tokenizer") or "")
    place = cwd / Path(tokenizer).expanduser()
    places = [place if tokenizer.endswith(".json") else place / TOKENIZER] if tokenizer else []
    if name := str((_index_of(folder, data) or {}).get("tokenizer") or ""):
        places.insert(0, folder / Path(name).name)
    for path in places:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return {TOKENIZER: path.read_bytes()}
    return {}


def _index_of(folder: Path, data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the index of a run's recorded `data`; if it recorded other keys than today's runs, the newest of its tokenizer."""
    if folder.is_dir():  # one that cannot be read is no index to `read_indexes`
        for path in folder.iterdir():
            if path.match("index*.json"):
                path.open("rb").close()
    keys = data.keys() & {"tokenizer", "bpe"}
    indexes = [(index, index["settings"]) for index in read_indexes(folder).values()]
    found = [index for index, settings in indexes if all(settings.get(key, data[key]) == data[key] for key in keys)]
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        wanted = settings_of(from_values({"data": data}).data)
        found.sort(key=lambda index: index["settings"] != wanted)
    return next(iter(found), None)
