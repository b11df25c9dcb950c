"""A foreign checkpoint as rows and values of ours: what `flashckpt import` writes."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashckpt.checkpoint.direct_writer import StreamedRow
from flashckpt.dcp import names
from flashckpt.errors import ConfigError
from flashckpt.interop import origins
from flashckpt.interop import safetensors_files as st
from flashckpt.interop.foreign_files import decoding, refuse_shape
from flashckpt.interop.selection import Selection, refuse_clashes, refuse_nothing

if TYPE_CHECKING:
    from flashckpt.interop.state_dicts import StateDict

KINDS = ("safetensors", "torch", "dcp", *origins.ORIGINS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """What is taken of a foreign checkpoint.

    Attributes:
        kind: One of KINDS.
        rows: Under our names.
        values: Non-tensor state, msgpack types.
        tensors: Number of tensors (a dcp folder has several rows of one).
        step: What it says about its step; None where it says nothing.
        omitted: What it has and what is not taken, with the reason.
    """

    kind: str
    rows: list[StreamedRow]
    values: dict[str, Any]
    tensors: int
    step: int | None = None
    omitted: list[str] = field(default_factory=list)


def detect(path: Path) -> str:
    """Return what lies at `path`, one of KINDS.

    Raises:
        ConfigError: Nothing, nothing that is known, or it cannot be read.
    """
    with decoding(path, "a checkpoint"):
        return _detect(path)


def _detect(path: Path) -> str:
    if path.is_dir():
        if (origin := origins.origin_of(path)) is not None:
            return origin
        if (path / ".metadata").is_file():
            return "dcp"
        if any(path.glob(f"*{st.SUFFIX}")):
            return "safetensors"
        found = ", ".join(sorted(one.name for one in path.iterdir())[:5]) or "an empty folder"
    elif path.is_file():
        if path.suffix == st.SUFFIX:
            return "safetensors"
        if path.suffix == ".ckpt" and origins.is_lightning(path):
            return "lightning"
        if zipfile.is_zipfile(path) or path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
            return "torch"
        found = f"a file that starts with {path.open('rb').read(8)!r}"
    else:
        found = "nothing there"
    raise ConfigError(
        f"{path} is no checkpoint that can be imported",
        found=found,
        expected="a .safetensors file, a Hugging Face folder, a torch.save file, a folder with .metadata (dcp), or a checkpoint "
        "of Hugging Face's Trainer, PEFT, Lightning, DeepSpeed (universal) or Megatron",
        remedy="give the path of one, or say with --format what it is",
    )


def open_foreign(path: Path, kind: str, selection: Selection, parameters: Sequence[str] | None = None) -> Foreign:
    """Return what is taken of a foreign checkpoint; nothing but headers is read yet.

    Args:
        path: File or folder.
        kind: One of KINDS.
        selection: Which names, and what they become.
        parameters: Names of the optimizer's parameters in its order, where the checkpoint numbers them.

    Raises:
        ConfigError: Names clash, nothing is taken, or parameters have numbers that no name can be found for.
        DamagedError, UnsupportedStateError: The files cannot be read.
    """
    if kind in origins.ORIGINS:
        from flashckpt.interop import framework_state

        taken = framework_state.read(path, kind, parameters, wants=selection.may_take)
        with decoding(path, f"a {kind} checkpoint"):
            found = _from_state_dict(taken.state, kind, selection, path)
        found.values.update(_selected(taken.values, selection))
        return replace(found, step=taken.step, omitted=taken.omitted)
    if parameters is not None:
        raise ConfigError(
            "--parameters is of no use here",
            found=f"a {kind} checkpoint",
            expected="a checkpoint of " + ", ".join(origins.ORIGINS) + " that numbers the parameters of its optimizer",
        )
    if kind == "safetensors":
        return _from_safetensors(st.read_folder(path) if path.is_dir() else st.read_file(path), selection)
    from flashckpt.interop import dcp_folders, torch_files

    state = dcp_folders.read_dcp_folder(path) if kind == "dcp" else torch_files.read_torch_file(path)
    with decoding(path, f"a {kind} checkpoint"):
        return _from_state_dict(state, kind, selection, path)


def _selected(values: Mapping[str, Any], selection: Selection) -> dict[str, Any]:
    """Return the values that are taken, under their new names; second names of tensors follow their tensor."""
    found = {selection.rename(key): one for key, one in values.items() if selection.takes(key.partition("@")[0])}
    found.pop("aliases", None)
    pairs = {alias: name for alias, name in values.get("aliases", {}).items() if selection.takes(name)}
    if pairs:
        found["aliases"] = {selection.rename(alias): selection.rename(name) for alias, name in pairs.items()}
    return found


def _from_safetensors(tensors: Iterable[st.Incoming], selection: Selection) -> Foreign:
    found = list(tensors)
    taken = [(one.name, selection.rename(one.name)) for one in found if selection.takes(one.name)]
    refuse_nothing(len(taken), selection, (one.name for one in found))
    refuse_clashes(taken)
    new = dict(taken)
    rows = [StreamedRow(shard=one.shard(new[one.name]), read=one.read) for one in found if one.name in new]
    return Foreign(kind="safetensors", rows=rows, values={}, tensors=len(rows))


def _from_state_dict(state: StateDict, kind: str, selection: Selection, path: Path) -> Foreign:
    """Rename, then store as `dcp.save` through our writer would: names of ours, values without pickle."""
    import torch

    from flashckpt.dcp import contents
    from flashckpt.interop.state_dicts import rows_of

    keys = list(dict.fromkeys([*(row.shard.fqn for row in state.tensors), *state.values]))
    for key in keys:
        refuse_shape(key, (), path)
    labels = names.optimizer_labels(keys)
    taken = [(key, selection.rename(key)) for key in keys if selection.takes(key, names.to_ours(key, labels))]
    refuse_nothing(len(taken), selection, keys)
    refuse_clashes(taken)
    new = dict(taken)
    labels = names.optimizer_labels(new.values())
    paths = {to: state.paths.get(key, (key,)) if key == to else names.default_path(to, labels) for key, to in taken}
    rows: list[StreamedRow] = []
    leaves: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for row in state.tensors:
        if (to := new.get(row.shard.fqn)) is not None:
            rows.append(replace(row, shard=replace(row.shard, fqn=names.to_ours(to, labels))))
            leaves[to] = torch.empty(0)  # stands for it: only its name is recorded in values
    loose: dict[str, torch.Tensor] = {}
    for key, value in state.values.items():
        if (to := new.get(key)) is not None:
            leaves[to] = value
            values[to], own = contents.take_apart(value, to)
            loose |= own
    tensors = len({row.shard.fqn for row in rows})
    record = {
        "labels": labels,
        "values": values,
        "paths": {key: list(path) for key, path in paths.items() if path != names.default_path(key, labels)},
    }
    recorded = contents.values_for_checkpointer(leaves, paths, labels) | {contents.RECORD: record}
    return Foreign(kind=kind, rows=[*rows, *rows_of(loose)], values=recorded, tensors=tensors)
