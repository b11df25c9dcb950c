"""A foreign checkpoint as rows and values of ours: what `flashckpt import` writes."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashckpt import entry_points
from flashckpt.core.shard import split_owner
from flashckpt.core.values import RESERVED
from flashckpt.dcp import names
from flashckpt.dcp.direct_writer import StreamedRow
from flashckpt.dcp.names import Path as StatePath
from flashckpt.errors import ConfigError
from flashckpt.interop import origins
from flashckpt.interop import safetensors_files as st
from flashckpt.interop.foreign_files import decoding, refuse_shape, seeing
from flashckpt.interop.selection import Selection, refuse_clashes, refuse_nothing

if TYPE_CHECKING:
    from flashckpt.interop.framework_state import Taken, Wants
    from flashckpt.interop.numbered_state import Renaming
    from flashckpt.interop.state_dicts import StateDict

_PART = re.compile(r"-\d{1,9}-of-(\d{1,9})\.")
KINDS = ("safetensors", "torch", "dcp", "torch_checkpointing", *origins.ORIGINS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """What is taken of a foreign checkpoint.

    Attributes:
        kind: One of KINDS.
        values: Non-tensor state, msgpack types.
        tensors: Number of tensors (a dcp folder has several rows of one).
        step: What it says about its step; None where it says nothing.
        omitted: What it has and what is not taken, with the reason.
        renamed: Members of it -> the track name they are taken under.
    """

    kind: str
    rows: list[StreamedRow]
    values: dict[str, Any]
    tensors: int
    step: int | None = None
    omitted: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)


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
        marks = {"torch_checkpointing": ("metadata.pkl", "*_0.pt"), "safetensors": (f"*{st.SUFFIX}",)}
        for kind, patterns in marks.items():
            if any(any(path.glob(pattern)) for pattern in patterns):
                return kind
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
        expected="a .safetensors file, a Hugging Face folder, a torch.save file, a folder with .metadata (dcp) or of torch_checkpointing, or a checkpoint "
        "of Hugging Face's Trainer, Accelerate, PEFT, Lightning, DeepSpeed (universal) or Megatron",
        remedy="pass the path of one checkpoint, or --format",
    )


def open_foreign(
    path: Path, kind: str, selection: Selection, parameters: Sequence[str] | None = None, *, is_asked: bool = False
) -> Foreign:
    """Return what is taken of a foreign checkpoint; nothing but headers is read yet.

    Args:
        path: File or folder.
        kind: One of KINDS, or a format of a plug-in.
        selection: Which names, and what they become.
        parameters: Names of the optimizer's parameters in its order, where the checkpoint numbers them.
        is_asked: The user named this kind: what others would read is left out.

    Raises:
        ConfigError: Names clash, nothing is taken, parameters have numbers that no name can be found for, or a file
            of an optimizer would be left out.
        DamagedError, UnsupportedStateError: The files cannot be read.
    """
    with seeing() as seen:
        found = _opened(path, kind, selection, parameters)
    left = seen.left_in(path) if path.is_dir() else []
    said = {one.partition(":")[0] for one in found.omitted}
    optimizers = [name for name in left if name not in said and _is_optimizer(path / name, kind)]
    if optimizers and selection.may_take("optimizer") and not (is_asked and kind == "safetensors"):
        raise ConfigError(
            f"{path} holds the state of an optimizer that would not be imported",
            found=", ".join(optimizers[:4]),
            expected=f"a file that --format {kind} reads",
            state="Nothing was imported.",
            remedy="take the model alone: --format trainer --only 'model.*', or the path of the file of weights",
        )
    if (part := _PART.search(path.name)) and path.is_file() and int(part[1]) > 1:
        seen.notes.append(f"{path.name} is one of {int(part[1])} files: name their folder to import all")
    more = [*seen.notes, *(f"{name}: not read" for name in left if name not in said)]
    return replace(found, omitted=[*found.omitted, *more])


def _is_optimizer(path: Path, kind: str) -> bool:
    """Return whether this is the state of an optimizer, by its name; DeepSpeed's is in a folder of a Trainer's."""
    is_step = kind == "trainer" and path.name.startswith("global_step")
    return "optim" in path.name or (is_step and any(path.glob("*optim*")))


def _opened(path: Path, kind: str, selection: Selection, parameters: Sequence[str] | None) -> Foreign:
    if kind in origins.ORIGINS:
        from flashckpt.interop.numbered_state import Renaming

        taken = _of_framework(path, kind, parameters, wants=selection.may_take)
        new = Renaming(selection, taken.state, is_plain=False)
        with decoding(path, f"a {kind} checkpoint"):
            found = _from_state_dict(taken.state, kind, selection, path, new)
        found.values.update(_selected(taken.values, selection, new))
        return replace(found, step=taken.step, omitted=taken.omitted)
    if kind == "safetensors":
        if parameters is not None:
            raise ConfigError("--parameters is of no use here", found="safetensors, which holds no optimizer")
        return _from_safetensors(st.read_folder(path) if path.is_dir() else st.read_file(path), selection)
    from flashckpt.interop import dcp_folders, torch_checkpointing_folders, torch_files
    from flashckpt.interop.numbered_state import Renaming, named

    step = None
    if kind == "dcp":
        state = dcp_folders.read_dcp_folder(path)
    elif kind == "torch_checkpointing":
        state = torch_checkpointing_folders.read_folder(path)
        step = torch_checkpointing_folders.step_of(path, state)
    elif kind == "torch":
        state = torch_files.read_torch_file(path)
    else:
        state = torch_files.flattened(entry_points.load(entry_points.FORMATS, kind)(path), path)
    with decoding(path, f"a {kind} checkpoint"):
        new = Renaming(selection, state, is_plain=True)
        state = named(state, new, lambda key: selection.takes(key, new(key)), parameters, path)
        return replace(_from_state_dict(state, kind, selection, path, new), renamed=new.labels, step=step)


def _of_framework(path: Path, kind: str, parameters: Sequence[str] | None, *, wants: Wants) -> Taken:
    from flashckpt.interop import deepspeed_folders, megatron_folders, trainer_folders

    if kind == "lightning":
        return trainer_folders.read_lightning_file(path, parameters, wants=wants)
    if kind == "deepspeed":
        return deepspeed_folders.read_folder(path, wants=wants)
    if kind == "megatron":
        return megatron_folders.read_folder(path, wants=wants)
    return trainer_folders.read_folder(path, parameters, wants=wants)


def _selected(values: Mapping[str, Any], selection: Selection, new: Renaming) -> dict[str, Any]:
    """Return the values that are taken, under their new names; second names of tensors follow their tensor."""
    found = {new(key): one for key, one in values.items() if selection.takes(split_owner(key)[0])}
    found.pop("aliases", None)
    pairs = {alias: name for alias, name in values.get("aliases", {}).items() if selection.takes(name)}
    if pairs:
        found["aliases"] = {new(alias): new(name) for alias, name in pairs.items()}
    return found


def _place(key: str, to: str, path: StatePath, labels: Iterable[str]) -> StatePath:
    """Return where a renamed leaf lies: where it lay, if no more than the member of the file has another name."""
    if key == to:
        return path
    top, tail = str(path[0]), key.removeprefix(str(path[0]))
    head = to.removesuffix(tail) if key.startswith(top) and to.endswith(tail) else "."
    return (head, *path[1:]) if "." not in head and head else names.default_path(to, labels)


def _is_names(value: Any, path: StatePath) -> bool:
    """Return whether this is the list of the parameters of an optimizer's group, by name."""
    is_list = path[-3:-2] == (names.GROUPS,) and path[-1] == "params" and isinstance(value, list)
    return is_list and all(type(name) is str for name in value)


def _from_safetensors(tensors: Iterable[st.Incoming], selection: Selection) -> Foreign:
    found = list(tensors)
    new_name: Callable[[str], str] = selection.rename
    if any(wrapper in one.name for one in found for wrapper in ("module.", "_wrapped_module", "_orig_mod")):
        from flashckpt.interop.numbered_state import Renaming
        from flashckpt.interop.state_dicts import StateDict

        held = [StreamedRow(shard=one.shard(one.name), read=one.read) for one in found]
        new_name = Renaming(selection, StateDict(tensors=held), is_plain=True)
    taken = [(one.name, new_name(one.name)) for one in found if selection.takes(one.name)]
    refuse_nothing(len(taken), selection, (one.name for one in found))
    refuse_clashes(taken)
    new = dict(taken)
    rows = [StreamedRow(shard=one.shard(new[one.name]), read=one.read) for one in found if one.name in new]
    aliases = {new_name(alias): new[one.name] for one in found if one.name in new for alias in one.also}
    return Foreign(kind="safetensors", rows=rows, values={"aliases": aliases} if aliases else {}, tensors=len(rows))


def _from_state_dict(state: StateDict, kind: str, selection: Selection, path: Path, new_name: Renaming) -> Foreign:
    """Rename, then store as `dcp.save` through our writer would: names of ours, values without pickle."""
    import torch

    from flashckpt.dcp import contents
    from flashckpt.interop.state_dicts import rows_of

    keys = list(dict.fromkeys([*(row.shard.fqn for row in state.tensors), *state.values]))
    for key in keys:
        refuse_shape(key, (), path)
    labels = names.optimizer_labels(state.values)
    pairs = [(key, new_name(key)) for key in keys]
    taken = [(key, to) for key, to in pairs if selection.takes(key, names.to_ours(key, labels), to)]
    refuse_nothing(len(taken), selection, keys)
    refuse_clashes(taken)
    new = dict(taken)
    labels = names.optimizer_labels(new[key] for key in state.values if key in new)
    paths = {to: _place(key, to, state.paths.get(key, (key,)), labels) for key, to in taken}
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
            leaves[to] = list(map(new_name.bare, value)) if _is_names(value, paths[to]) else value
            values[to], own = contents.take_apart(leaves[to], to)
            loose |= own
    tensors = len({row.shard.fqn for row in rows})
    record = {
        "labels": labels,
        "values": values,
        "paths": {key: list(path) for key, path in paths.items() if path != names.default_path(key, labels)},
    }
    recorded = contents.values_for_checkpointer(leaves, paths, labels) | _whole(
        state, {key: paths[to] for key, to in taken}, labels
    )
    return Foreign(
        kind=kind, rows=[*rows, *rows_of(loose)], values=recorded | {contents.RECORD: record}, tensors=tensors
    )


def _whole(state: StateDict, places: Mapping[str, StatePath], labels: Sequence[str]) -> dict[str, Any]:
    """Return the members without tensors as they are, by new name, where all of one is taken."""
    from flashckpt.dcp import contents

    found: dict[str, Any] = {}
    for top, whole in state.whole.items():
        inside = [key for key in state.values if state.paths.get(key, (key,))[0] == top]
        tops = {str(places[key][0]) if key in places else "" for key in inside}
        if len(tops) == 1 and (to := tops.pop()) not in ("", *labels, *RESERVED) and not {"@", "."} & set(to):
            found[to] = contents.take_apart(whole, to)[0]
    return found
