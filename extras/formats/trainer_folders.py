"""Folders of Hugging Face's Trainer (checkpoint-120/), Accelerate and PEFT: weights, optimizer, scheduler, generators. And files of Lightning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashckpt.dcp.direct_writer import StreamedRow
from flashckpt.errors import DamagedError, UnsupportedStateError
from flashckpt.interop import safetensors_files as st
from flashckpt.interop.foreign_files import decoding
from flashckpt.interop.framework_state import MODEL, OPTIMIZER, SCHEDULER, Taken, Wants, shapes_of
from flashckpt.interop.origins import step_of_trainer

_ADAPTER = "adapter_model"
_WEIGHTS = "pytorch_model.bin"
_FOLDERS = {MODEL: "pytorch_model_fsdp_0", OPTIMIZER: "optimizer_0"}
_LEFT = ("training_args.bin", "scaler.pt")
_ACCELERATE = ("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")
"""What Accelerate calls the states of python, numpy, torch and its devices."""
_SECOND = re.compile(r"(model|pytorch_model|optimizer|scheduler)_[1-9]\d*\.(safetensors|bin)")
_LABEL = "lightning"
_INERT = ("lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict")
_KEPT = ("epoch", "global_step", "loops", "pytorch-lightning_version")


def read_folder(folder: Path, parameters: Sequence[str] | None, *, wants: Wants) -> Taken:
    """Return what a folder of a Trainer, or of an adapter alone, holds.

    Raises:
        ConfigError: The names of the optimizer's parameters are not certain.
        DamagedError: There are no weights, or a file cannot be read.
    """
    found = Taken(step=step_of_trainer(folder))
    if seconds := sorted(one.name for one in folder.iterdir() if _SECOND.fullmatch(one.name)):
        raise UnsupportedStateError(
            f"{folder} holds more than one model, optimizer or scheduler",
            found=", ".join(seconds[:4]),
            expected="the folder of a job with one of each",
            state="Nothing was imported.",
            remedy="import the file of each model alone, each with --rename =NAME",
        )
    has_order = _add_weights(folder, found)
    if wants(OPTIMIZER):
        shapes = shapes_of(found.state)
        ordered = shapes if has_order else None if parameters else _order_of_class(folder)
        _add_optimizer(folder, found, parameters, ordered)
    if wants(SCHEDULER) and (path := _either(folder, "scheduler")) is not None:
        from flashckpt.interop import torch_files

        found.add_schedulers([torch_files.load_torch_file(path)])
    if wants("rng"):
        _add_generators(folder, found)
    found.omitted += [f"{name}: made again by the program" for name in _LEFT if (folder / name).is_file()]
    return found


def _add_weights(folder: Path, found: Taken) -> bool:
    """Add the model; return whether its tensors came in the order of its modules."""
    from flashckpt.interop import dcp_folders, torch_files

    if (folder / _FOLDERS[MODEL]).is_dir():
        found.join(dcp_folders.read_dcp_folder(folder / _FOLDERS[MODEL]))
        return False
    if any(folder.glob(f"*{st.SUFFIX}")):
        adapter = (folder / f"{_ADAPTER}{st.SUFFIX}").is_file() and not (folder / f"model{st.SUFFIX}").is_file()
        rename = _adapter_names(folder) if adapter else str
        for one in st.read_file(folder / f"{_ADAPTER}{st.SUFFIX}") if adapter else st.read_folder(folder):
            name = rename(one.name)
            key = f"{MODEL}.{name}"
            found.state.tensors.append(StreamedRow(shard=one.shard(key), read=one.read))
            found.state.paths[key] = (MODEL, name)
            for alias in map(rename, one.also):
                found.values.setdefault("aliases", {})[f"{MODEL}.{alias}"] = key
        return False
    files = _parts(folder)
    if not files:
        raise DamagedError(
            f"{folder} holds no weights",
            found=", ".join(sorted(one.name for one in folder.iterdir())[:8]),
            expected=f"model{st.SUFFIX}, {_WEIGHTS}, {_ADAPTER}{st.SUFFIX} or {_FOLDERS[MODEL]}/",
            state="Nothing was imported.",
        )
    loaded = {path: torch_files.load_torch_file(path) for path in files}
    if files[0].name != _WEIGHTS:
        index = folder / f"{_WEIGHTS}.index.json"
        st.refuse_other_tensors(index, st.read_index(index)[0], {path.name: list(own) for path, own in loaded.items()})
    for path, own in loaded.items():
        found.add(MODEL, _without_aliases(own, found), path)
    return len(files) == 1


def _parts(folder: Path) -> list[Path]:
    """Return the files of pytorch_model.bin, as its index names them where it is in several."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / f"{_WEIGHTS}.index.json"
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(st.read_index(index)[0].values()))]


def _without_aliases(loaded: Mapping[str, Any], found: Taken) -> dict[str, Any]:
    """Return the tensors without those that are another one's memory under a second name; these become aliases."""
    kept: dict[str, Any] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in loaded.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if (first := seen.setdefault(place, name)) != name:
                found.values.setdefault("aliases", {})[f"{MODEL}.{name}"] = f"{MODEL}.{first}"
                continue
        kept[name] = tensor
    return kept


def _adapter_names(folder: Path) -> Any:
    """Return what turns a name of an adapter's file into that of the live module, which has the adapter's name in it."""
    path = folder / "adapter_config.json"
    whole: list[str] = []
    if path.is_file():
        with decoding(path, "the configuration of an adapter", nbytes=path.stat().st_size):
            whole = [str(name) for name in json.loads(path.read_bytes()).get("modules_to_save") or []]

    def live(name: str) -> str:
        head, dot, leaf = name.rpartition(".")
        for module in whole:
            if f".{module}." in f".{head}.":
                return (
                    re.sub(rf"(^|\.){re.escape(module)}(\.|$)", rf"\1{module}.modules_to_save.default\2", head)
                    + dot
                    + leaf
                )
        if re.search(r"lora_\w+$", head):
            return f"{head}.default.{leaf}"
        return f"{name}.default" if leaf.startswith("lora_") else name

    return live


def _order_of_class(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the parameters of a model in its order, from the class of transformers that config.json names.

    Files of safetensors are sorted by name. Only classes of the installed package are used, built without data; None
    where there is no such class or no such package.
    """
    path = folder / "config.json"
    try:
        import transformers
    except ImportError:
        return None
    if not path.is_file():
        return None
    with decoding(path, "the configuration of a model"):
        name = str((json.loads(path.read_bytes()).get("architectures") or [""])[0])
        kind = getattr(transformers, name, None) if name.isidentifier() else None
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            model = kind(transformers.AutoConfig.from_pretrained(folder))
        return {name: tuple(one.shape) for name, one in model.named_parameters()}


def _either(folder: Path, name: str) -> Path | None:
    """Return the file of this name: Trainer calls it .pt and Accelerate .bin; None where there is none."""
    return next((path for end in ("pt", "bin") if (path := folder / f"{name}.{end}").is_file()), None)


def _add_optimizer(
    folder: Path, found: Taken, parameters: Sequence[str] | None, ordered: Mapping[str, tuple[int, ...]] | None
) -> None:
    from flashckpt.interop import dcp_folders, torch_files

    if (folder / _FOLDERS[OPTIMIZER]).is_dir():
        found.join(dcp_folders.read_dcp_folder(folder / _FOLDERS[OPTIMIZER]))
        return
    path = _either(folder, "optimizer")
    if path is None:
        return
    loaded = torch_files.load_torch_file(path)
    shapes = shapes_of(found.state)
    with decoding(path, "the state of an optimizer"):
        found.add_optimizer(loaded, path, ordered=ordered, parameters=parameters, shapes=shapes)


def _add_generators(folder: Path, found: Taken) -> None:
    from flashckpt.interop import torch_files

    for path in sorted([*folder.glob("rng_state*.pth"), *folder.glob("random_states_*.pkl")]):
        number = re.fullmatch(r"(?:rng_state(?:_(\d{1,6}))?\.pth|random_states_(?P<of>\d{1,6})\.pkl)", path.name)
        if number is None:
            continue
        try:
            loaded = torch_files.load_torch_file(path, with_numpy=True)
        except UnsupportedStateError as error:
            found.omitted.append(f"{path.name}: {error.found}")
            continue
        with decoding(path, "the state of the random number generators"):
            found.values[f"rng@rank{int(number[1] or number['of'] or 0)}"] = _generators(loaded)


def _generators(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators as a snapshot holds them."""
    names = _ACCELERATE if "torch_manual_seed" in loaded else ("python", "numpy", "cpu", "cuda")
    version, words, gauss = loaded[names[0]]
    kind, keys, position, has_gauss, cached = loaded[names[1]]
    cuda = loaded.get(names[3])
    state: dict[str, Any] = {
        "torch": loaded[names[2]].numpy().tobytes(),
        "python": [int(version), np.asarray(words, "<u4").tobytes(), gauss],
        "numpy": [str(kind), np.asarray(keys, "<u4").tobytes(), int(position), int(has_gauss), float(cached)],
    }
    if isinstance(cuda, list) and len(cuda) == 1:
        (cuda,) = cuda
    if isinstance(cuda, torch.Tensor):
        state["cuda"] = cuda.numpy().tobytes()
    return state


def read_lightning_file(path: Path, parameters: Sequence[str] | None, *, wants: Wants) -> Taken:
    """Return what a .ckpt file holds: `track(model=module, optimizer=, scheduler=)`, the loops as value `lightning`."""
    from flashckpt.interop import torch_files

    loaded = torch_files.load_torch_file(path, inert=_INERT)
    with decoding(path, "a checkpoint of Lightning"):
        found = Taken(step=_step(loaded, path))
        found.add(MODEL, loaded["state_dict"], path)
        if wants(OPTIMIZER) and (states := loaded.get("optimizer_states")):
            shapes = shapes_of(found.state)
            found.add_optimizer(_joined(states), path, ordered=shapes, parameters=parameters, shapes=shapes)
        if wants(SCHEDULER) and (schedulers := loaded.get("lr_schedulers")):
            found.add_schedulers(schedulers)
        if wants(_LABEL):
            found.add_whole(_LABEL, {key: loaded[key] for key in _KEPT if key in loaded})
        left = sorted({"callbacks", "hyper_parameters", "datamodule_hyper_parameters"} & loaded.keys())
        found.omitted += [f"{key}: belongs to Lightning's own objects" for key in left if loaded[key]]
    return found


def _step(loaded: Mapping[str, Any], path: Path) -> int:
    step = loaded.get("global_step")
    if type(step) is not int or step < 0 or not isinstance(loaded.get("state_dict"), dict):
        raise DamagedError(
            f"{path} is not a whole checkpoint of Lightning",
            found=f"global_step {step!r:.40}, members {sorted(map(str, loaded))[:8]}",
            expected="'state_dict' and a 'global_step' from 0 on",
            state="Nothing was imported.",
        )
    return step


def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state dict of several optimizers; groups are found again by the names of their parameters."""
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    first = 0
    for state in states:
        groups = [
            {**group, "params": [first + number for number in group["params"]]} for group in state["param_groups"]
        ]
        joined["state"] |= {first + number: own for number, own in state["state"].items()}
        joined["param_groups"] += groups
        first += sum(len(group["params"]) for group in groups)
    return joined
