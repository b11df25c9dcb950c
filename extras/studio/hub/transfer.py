"""`hub import` and `hub export`: a Hugging Face folder as a checkpoint, and back, bit for bit. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.core.shard import Shard
from flashckpt.dcp import direct_writer
from flashckpt.dcp.direct_writer import StreamedRow
from flashckpt.errors import ConfigError
from flashckpt.interop import safetensors_files as st
from flashckpt.interop.outgoing import Outgoing, parse_dtype, target_dtype
from flashckpt.interop.target import replacing
from flashckpt.printable import printable
from flashckpt.storage.factory import is_process_local, open_store
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.flops import count_parameters, flops_per_token
from flashckpt.trainer.hub.families import HubTensor, tensors_of
from flashckpt.trainer.hub.hub_config import to_hub
from flashckpt.trainer.hub.source import (
    AVERAGE,
    BESIDE,
    CONFIG,
    MODEL,
    RECORD,
    CheckpointWeights,
    HubFolder,
    file_shard,
    held_name,
)
from flashckpt.trainer.hub.tokenizer_files import TOKENIZER, files_of_folder, files_of_saved, has_tokenizer
from flashckpt.trainer.prepare.vocabulary import END_TOKEN

SHARD_BYTES = 5 << 30
_OVERHEAD_BYTES = 64 << 20
CARD = "README.md"


def import_folder(folder: Path, root: str, step: int = 0, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write the weights of a folder as a checkpoint of `root` that `[init] from` and `hub export` take; say what was done.

    Types stay as they are. The tokenizer's files and config.json are stored along. Nothing of an optimizer is in it.

    Raises:
        ConfigError: The folder holds no model of a known family, or not the one it describes.
        DamagedError: A file is damaged.
        RootError, StoreError, JobInUseError: As a save.
    """
    if step < 0:
        raise ConfigError("--step is not a step", found=str(step), expected="0 or more")
    source = HubFolder(folder)
    if is_process_local(root):
        raise ConfigError(f"{root} is private to one process: no other could read the checkpoint")
    rows = [
        StreamedRow(shard=_shard(tensor, file.dtype), read=file.read)
        for parts in source.parts.values()
        for tensor, file in parts
    ]
    rows += [
        StreamedRow(shard=file_shard(name, len(content)), read=_reader(content))
        for name, content in source.beside.items()
        if content
    ]
    config = replace(RunConfig(), model=source.model)
    store = open_store(root, **(options or {}))
    store.check(write=True)
    place = direct_writer.begin(store, step, world_size=1)
    values: dict[str, object] = {"run": {"config": {"model": recorded_values(config)["model"]}, "tokens": 0}}
    direct_writer.write(store, place, 0, rows, values, job="import")
    direct_writer.finish(store, place)
    nbytes = sum(row.shard.nbytes for row in rows)
    return {
        "root": store.url, "prefix": place.prefix, "family": source.model.family, "tensors": len(source.parts),
        "nbytes": nbytes, "files": sorted(source.beside),
    }  # fmt: skip


def _shard(tensor: HubTensor, dtype: str) -> Shard:
    if tensor.expert is None:
        offsets, lengths = (0,) * len(tensor.shape), tensor.shape
    else:
        offsets, lengths = (tensor.expert, *(0 for _ in tensor.shape)), (1, *tensor.shape)
    name = held_name(tensor.ours)
    return Shard(fqn=name, dtype=dtype, global_shape=tensor.whole, offsets=offsets, lengths=lengths)


def _reader(content: bytes) -> Any:
    return lambda start, stop: memoryview(content)[start:stop]


def export_folder(
    root: str,
    folder: Path,
    *,
    step: str | None = None,
    dtype: str | None = None,
    tokenizer: str = "",
    force: bool = False,
    average: bool = False,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a checkpoint's model as a folder that `AutoModelForCausalLM.from_pretrained` reads; say what was done.

    Args:
        root: Of the trainer, or of `import_folder`.
        folder: Made new.
        step: "120" or "120.g3"; None: the newest.
        dtype: To cast floating-point tensors to; None: as they are.
        tokenizer: A folder whose tokenizer files are copied. Empty: those that the checkpoint has or its weights came
            with; for 256 tokens, a tokenizer of bytes.
        force: Replace a folder that an export wrote.
        average: Write the exponential moving average instead of the weights.
        options: Of the store.

    Raises:
        NoCheckpointError, ConfigError, DamagedError: There is no such checkpoint, or no model to be read in it.
    """
    source = CheckpointWeights(root, step, options, AVERAGE if average else MODEL)
    try:
        wanted = parse_dtype(dtype)
        tensors = [_outgoing(tensor, source, wanted) for tensor in _written(source.model)]
        st.refuse_dtypes(tensors)
        beside = _beside(source, tokenizer, options)
        before = json.loads(beside[CONFIG]) if CONFIG in beside else None
        values = to_hub(source.model, source.run.train.seq_len, tensors[0].dtype, before)
        if values.get("eos_token_id") is None:
            values["eos_token_id"] = _end_of(beside)
        beside[CONFIG] = _json(values)
        for name, content in generation_files(beside, values).items():
            beside.setdefault(name, content)
        beside[CARD] = card(source, values, has_tokenizer(beside))
        nbytes = sum(one.nbytes for one in tensors)
        with replacing(folder, nbytes=nbytes + _OVERHEAD_BYTES, force=force, is_ours=_is_ours) as temporary:
            manifest = source.source.manifest
            metadata = {"flashckpt.step": str(manifest.step), "flashckpt.generation": str(manifest.generation)}
            files = st.write_folder(temporary, tensors, source.source, metadata, limit=SHARD_BYTES)
            for name, content in beside.items():
                (temporary / name).write_bytes(content)
    finally:
        source.close()
    return {
        "from": source.where, "to": str(folder.absolute()), "family": values["model_type"], "tensors": len(tensors),
        "nbytes": nbytes, "files": sorted([*files, *beside]), "has_tokenizer": has_tokenizer(beside),
    }  # fmt: skip


def _written(model: ModelConfig) -> list[HubTensor]:
    """Return the tensors of a folder: a tied head is not one of them."""
    return [one for one in tensors_of(model) if not (model.tied_embeddings and one.ours == "output.weight")]


def _outgoing(tensor: HubTensor, source: CheckpointWeights, dtype: str | None) -> Outgoing:
    stored = source.dtype(tensor.ours)
    return Outgoing(
        name=tensor.theirs,
        held=held_name(tensor.ours, source.label),
        stored=stored,
        dtype=target_dtype(stored, dtype),
        shape=tensor.shape,
        index=tensor.expert,
        held_rows=tensor.whole[0],
    )


def _beside(source: CheckpointWeights, tokenizer: str, options: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the files that go with the weights, from the first place that has some."""
    if tokenizer:
        found = files_of_folder(Path(tokenizer))
        if not has_tokenizer(found):
            raise ConfigError(
                f"{tokenizer} holds no tokenizer",
                found="none of its files",
                expected=", ".join(BESIDE[2:]),
                state="Nothing was written.",
            )
        return {**source.beside, **{name: content for name, content in found.items() if name != CONFIG}}
    return files_of_saved(source, options)


def generation_files(beside: Mapping[str, bytes], values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return generation_config.json, and for a tokenizer of ours its settings, which name the token that ends a text."""
    end = values.get("eos_token_id")
    if end is None:
        return {}
    ids = {name: values.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    found = {"generation_config.json": _json({name: token for name, token in ids.items() if token is not None})}
    if _end_of(beside) == end:
        found["tokenizer_config.json"] = _json({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "clean_up_tokenization_spaces": False,
            "model_max_length": values["max_position_embeddings"],
        })  # fmt: skip
    return found


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _end_of(files: Mapping[str, bytes]) -> int | None:
    """Return the token that ends a document in a tokenizer of ours: with None `generate` of transformers never stops."""
    try:
        tokens = json.loads(files.get(TOKENIZER, b"{}")).get("added_tokens", [])
        return next((int(one["id"]) for one in tokens if one["content"] == END_TOKEN), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # a tokenizer of somebody else: it goes along as it is


def _is_ours(path: Path) -> bool:
    return st.is_ours(path) or (path.is_file() and path.name in (*BESIDE, CARD))


def card(source: CheckpointWeights, values: Mapping[str, Any], has_tokenizer: bool) -> bytes:
    """Return README.md as the Hugging Face hub shows it: no licence and no claim, which are the author's to write."""
    manifest, model = source.source.manifest, source.model
    tokens = int(manifest.values[RECORD].get("tokens", 0))
    rows = [("parameters", f"{count_parameters(model):,}"), ("architecture", values["architectures"][0])]
    rows += [("context", f"{values['max_position_embeddings']:,} tokens"), ("vocabulary", f"{model.vocab:,} tokens")]
    rows += [("step", f"{manifest.step:,}" + (", average of the weights" if source.label == AVERAGE else ""))]
    if tokens:
        flops = tokens * flops_per_token(model, source.run.train.seq_len)
        rows += [("trained on", f"{tokens:,} tokens"), ("training compute", f"{flops:.3g} FLOPs")]
    rows += [(name, text) for name, text in _settings(source.recorded).items() if text]
    if not has_tokenizer:
        rows.append(("tokenizer", "not in this folder"))
    table = "\n".join(f"| {name} | {printable(text).replace('|', '/')} |" for name, text in rows)
    kind = str(values["model_type"])
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- {kind}\n---\n\n"
        f"# {kind}, {count_parameters(model):,} parameters\n\n| | |\n|---|---|\n{table}\n"
    ).encode()


def _settings(recorded: Mapping[str, Any]) -> dict[str, str]:
    def section(name: str) -> Mapping[str, Any]:
        found = recorded.get(name)
        return found if isinstance(found, dict) else {}

    data, optim, train = section("data"), section("optim"), section("train")
    channels = dict.fromkeys(str(one.get("channel", "")) for one in data.get("sources") or [])
    return {
        "data": ", ".join(channels),
        "batch": f"{train['global_batch']} x {train['seq_len']} tokens" if "global_batch" in train else "",
        "optimizer": f"{optim['name']}, rate {optim['lr']:g}" if {"name", "lr"} <= optim.keys() else "",
        "precision": str(train.get("precision", "")),
        "started from": str(section("init").get("from", "")),
    }
