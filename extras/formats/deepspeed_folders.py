"""Universal checkpoints of DeepSpeed: for every parameter a folder with the weight and its moments, whole and in fp32.

The folders of a training run itself are refused: their shards depend on the ranks that wrote them, and DeepSpeed's own
`ds_to_universal.py` puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flashckpt.errors import DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding
from flashckpt.interop.framework_state import MODEL, OPTIMIZER, SCHEDULER, Taken, Wants, shapes_of
from flashckpt.interop.origins import folder_of_newest, step_in_name

_WEIGHT, _STEP, _GROUPS = "fp32", "step", "optimizer_state.pt"
_INERT = tuple(
    f"deepspeed.{name}"
    for name in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
)
"""Settings of a run, in files that hold what is wanted too; nothing of them is taken."""


def read_folder(path: Path, *, wants: Wants) -> Taken:
    """Return what a universal checkpoint holds; tensors stay in their files, mapped.

    Raises:
        UnsupportedStateError: It is a folder that has not been made universal.
        DamagedError: A parameter has no weight.
    """
    folder = folder_of_newest(path, "deepspeed")
    if folder is None:
        raise UnsupportedStateError(
            f"{path} is a DeepSpeed checkpoint in the shards of the ranks that wrote it",
            found="files *_optim_states.pt and no folder zero/",
            expected="a universal checkpoint",
            state="Nothing was imported.",
            remedy="python -m deepspeed.checkpoint.ds_to_universal --input_folder STEP_FOLDER --output_folder UNIVERSAL",
        )
    found = Taken(step=step_in_name(folder))
    state: dict[str, dict[str, Any]] = {}
    weights: dict[str, Any] = {}
    with decoding(folder, "a universal checkpoint of DeepSpeed"):
        for place in sorted(one.parent for one in (folder / "zero").glob(f"**/{_WEIGHT}.pt")):
            name = place.relative_to(folder / "zero").as_posix()
            weights[name] = _tensor(place / f"{_WEIGHT}.pt")
            if wants(OPTIMIZER):
                state[name] = _moments(place, weights[name])
        if not weights:
            raise DamagedError(f"{folder} holds no parameter", expected="zero/PARAMETER/fp32.pt")
        found.add(MODEL, weights, folder)
        if wants(OPTIMIZER):
            found.add(OPTIMIZER, {"state": state, "param_groups": _groups(folder, weights, found)}, folder)
        _add_rest(folder, found, wants)
    return found


def _load(path: Path) -> dict[Any, Any]:
    from flashckpt.interop import torch_files

    return torch_files.load_torch_file(path, inert=_INERT)


def _tensor(path: Path) -> torch.Tensor:
    value = _load(path).get("param")
    if not isinstance(value, torch.Tensor):
        raise DamagedError(f"{path} holds no tensor 'param'", found=type(value).__name__, state="Nothing was imported.")
    return value


def _moments(place: Path, weight: torch.Tensor) -> dict[str, Any]:
    from flashckpt.interop import torch_files

    own: dict[str, Any] = {}
    for path in sorted(place.glob("*.pt")):
        key = path.stem
        if key == _WEIGHT:
            continue
        if key == _STEP:
            step = torch_files.load_torch_value(path)
            own[key] = torch.as_tensor(step, dtype=torch.float32).reshape(())
            continue
        own[key] = _tensor(path)
        if own[key].shape != weight.shape:
            raise DamagedError(
                f"{path} does not belong to its parameter",
                found=f"shape {list(own[key].shape)}",
                expected=f"shape {list(weight.shape)}",
                state="Nothing was imported.",
            )
    return own


def _groups(folder: Path, weights: Mapping[str, Any], found: Taken) -> list[dict[str, Any]]:
    """Return a group for each name: which group a parameter was in is only known by number.

    Groups that all have the same settings give theirs; else the settings of the live optimizer stay, and one group has all.
    """
    path = folder / "zero" / _GROUPS
    settings: list[dict[str, Any]] = []
    if path.is_file():
        try:
            settings = [
                {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for group in _load(path).get("param_groups", [])
            ]
        except UnsupportedStateError as error:
            found.omitted.append(f"the settings of the optimizer: {error.found}")
    same = settings[0] if settings and all(one == settings[0] for one in settings) else {}
    if len(settings) > 1 and not same:
        found.omitted.append(
            f"the settings of {len(settings)} parameter groups: the checkpoint does not name their members"
        )
    return [{**same, "params": [name]} for name in weights] if same else [{"params": list(weights)}]


def _add_rest(folder: Path, found: Taken, wants: Wants) -> None:
    """Add buffers, the scheduler and the step, from the file of the first rank, where that can be read."""
    path = next(iter(sorted(folder.glob("mp_rank_00*_model_states.pt"))), None)
    if path is None:
        return
    try:
        loaded = _load(path)
    except UnsupportedStateError as error:
        found.omitted.append(f"buffers and schedulers in {path.name}: {error.found}")
        return
    if type(step := loaded.get("global_steps")) is int:
        found.step = step
    module = loaded.get("module") or {}
    held = shapes_of(found.state)
    buffers = loaded.get("buffer_names") or []
    found.add(MODEL, {name: module[name] for name in buffers if name in module and name not in held}, path)
    if wants(SCHEDULER) and isinstance(loaded.get("lr_scheduler"), dict):
        found.add_schedulers([loaded["lr_scheduler"]])
