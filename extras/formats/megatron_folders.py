"""Checkpoints of Megatron in its torch_dist format: a folder of torch.distributed.checkpoint and common.pt.

Megatron stacks the layers of a transformer: `decoder.layers.mlp.linear_fc1.weight` has one row for each layer. Here
each row is the tensor of that layer again, `decoder.layers.3.mlp.linear_fc1.weight`: bytes are not moved, as a row of
a box is one range of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.dcp.direct_writer import StreamedRow
from flashckpt.errors import ConfigError, DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding
from flashckpt.interop.framework_state import MODEL, OPTIMIZER, Taken, Wants
from flashckpt.interop.origins import folder_of_newest, step_in_name
from flashckpt.interop.state_dicts import StateDict

_STACKED = re.compile(r"^(.*\blayers)\.(?!\d)(.+)$")
_NOT_MODEL = ("optimizer.", "chained_")
_STATE = re.compile(r"^optimizer\.state\.([^.]+)\.(.+)$")


def read_folder(path: Path, *, wants: Wants) -> Taken:
    """Return what a torch_dist folder holds: `model.<name>`, `optimizer.<name>.<moment>`, layer by layer."""
    from flashckpt.interop import dcp_folders

    folder = folder_of_newest(path, "megatron")
    if folder is None:
        raise ConfigError(f"{path} is no checkpoint of Megatron", expected="a folder with common.pt and .metadata")
    found = Taken(step=step_in_name(folder))
    _refuse_other_backend(folder / "metadata.json")
    _add_common(folder, found)
    raw = dcp_folders.read_dcp_folder(folder, skips=_is_object)
    names: dict[str, None] = {}
    origins: dict[str, str] = {}
    with decoding(folder, "a checkpoint of Megatron"):
        for row in raw.tensors:
            for one in _rows(row):
                fqn = one.shard.fqn
                if origins.setdefault(fqn, row.shard.fqn) != row.shard.fqn:
                    raise DamagedError(
                        f"{folder} holds {fqn!r} twice",
                        found=f"in {origins[fqn]!r} and in {row.shard.fqn!r}",
                        expected="the layers of a model stacked, or each on its own",
                        state="Nothing was imported.",
                    )
                if (moment := _STATE.match(fqn)) and wants(OPTIMIZER):
                    names.setdefault(moment[2])
                    _keep(found.state, one, (OPTIMIZER, "state", moment[2], moment[1]))
                elif not fqn.startswith(_NOT_MODEL) and "rng_state" not in fqn:
                    _keep(found.state, one, (MODEL, fqn))
    if names:
        found.state.values[f"{OPTIMIZER}.param_groups.0.params"] = list(names)
        found.state.paths[f"{OPTIMIZER}.param_groups.0.params"] = (OPTIMIZER, "param_groups", 0, "params")
    others = sorted({row.shard.fqn.split(".param_state", 1)[0] for row in raw.tensors if _is_unnamed(row.shard.fqn)})
    found.omitted += [f"{name}: not named by parameter (save with fully_sharded_model_space)" for name in others]
    if raw.skipped:
        found.omitted.append(f"{len(raw.skipped)} objects that only Megatron can load: {raw.skipped[0]} ...")
    return found


def _is_unnamed(fqn: str) -> bool:
    return fqn.startswith(_NOT_MODEL) and not _STATE.match(fqn)


def _is_object(key: str) -> bool:
    """Return whether a key is one of Megatron's sharded objects: pickles of generators and of extra state."""
    return re.search(r"/shard_[\d._]+$", key) is not None


def _keep(state: StateDict, row: StreamedRow, path: tuple[str, ...]) -> None:
    key = ".".join(path)
    state.tensors.append(replace(row, shard=replace(row.shard, fqn=key)))
    state.paths[key] = path


def _rows(row: StreamedRow) -> Iterator[StreamedRow]:
    """Yield the layers of a stacked tensor's box, each as a tensor; any other box as it is."""
    moment = _STATE.match(row.shard.fqn)
    prefix = f"optimizer.state.{moment[1]}." if moment else ""
    stacked = _STACKED.match(row.shard.fqn.removeprefix(prefix))
    if stacked is None or not row.shard.lengths:
        yield row
        return
    shard = row.shard
    size = shard.nbytes // shard.lengths[0] if shard.lengths[0] else 0
    for number in range(shard.lengths[0]):
        own = replace(
            shard,
            fqn=f"{prefix}{stacked[1]}.{shard.offsets[0] + number}.{stacked[2]}",
            global_shape=shard.global_shape[1:],
            offsets=shard.offsets[1:],
            lengths=shard.lengths[1:],
        )
        yield StreamedRow(shard=own, read=_part_of(row.read, number * size))


def _part_of(read: Callable[[int, int], memoryview], first: int) -> Callable[[int, int], memoryview]:
    return lambda start, stop: read(first + start, first + stop)


def _refuse_other_backend(path: Path) -> None:
    """Raise UnsupportedStateError where metadata.json says that tensors are written by something else than dcp."""
    if not path.is_file():
        return
    with decoding(path, "the description of a checkpoint of Megatron", nbytes=path.stat().st_size):
        backend = json.loads(path.read_bytes()).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise UnsupportedStateError(
            f"{path.parent} is written in another format",
            found=f"sharded_backend {backend!r:.40} in {path.name}",
            expected="'torch_dist'",
            state="Nothing was imported.",
            remedy="load it with Megatron and save it with --ckpt-format torch_dist",
        )


def _add_common(folder: Path, found: Taken) -> None:
    """Take the step from common.pt, where that can be read: it holds arguments of the run as objects, as a rule."""
    from flashckpt.interop import torch_files

    try:
        common: Any = torch_files.load_torch_file(folder / "common.pt", inert=("argparse.Namespace",))
    except UnsupportedStateError as error:
        found.omitted.append(f"common.pt: {error.found}")
        return
    if type(step := common.get("iteration")) is int:
        if found.step not in (None, step):
            found.omitted.append(f"{folder.name}: step {found.step} by this name, while common.pt says {step}")
        found.step = step
    found.omitted.append("common.pt: arguments, schedulers and settings of Megatron")
