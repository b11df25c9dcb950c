"""Checkpoints of Lightning: one file of torch.save with the module, its optimizers, schedulers and loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashckpt.errors import DamagedError
from flashckpt.interop.foreign_files import decoding
from flashckpt.interop.framework_state import MODEL, OPTIMIZER, SCHEDULER, Taken, Wants, shapes_of

_LABEL = "lightning"
_INERT = ("lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict")
_KEPT = ("epoch", "global_step", "loops", "pytorch-lightning_version")


def read_file(path: Path, parameters: Sequence[str] | None, *, wants: Wants) -> Taken:
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
