"""Folders of torch_checkpointing: a file of torch.save for each item and rank, and its metadata, a pickle of plain dicts.

Each file says by its DTensors which part of a tensor its rank held, so the metadata is read only for what lies in other
files than the usual ones, by an unpickler that knows no class. tests/project/test_imports.py allows this module by name.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from flashckpt.dcp.direct_writer import StreamedRow
from flashckpt.dcp.names import Path as StatePath
from flashckpt.errors import DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding, saw
from flashckpt.interop.outgoing import Outgoing
from flashckpt.interop.state_dicts import StateDict, nest, reader_of, refuse_tensor, shard_of
from flashckpt.interop.torch_files import load_torch_value, write_torch_file
from flashckpt.restore.sources import StorageSource

METADATA = "metadata.pkl"
_FILE = re.compile(r"(.+)_(\d{1,6})\.pt")
_STEP = re.compile(r"(?:step|checkpoint|ckpt)?[-_]?(\d{1,18})")
Box = tuple[tuple[int, ...], tuple[int, ...]]


def is_ours(path: Path) -> bool:
    """Return whether a file may be one of an earlier export."""
    return path.is_file() and (path.name == METADATA or _FILE.fullmatch(path.name) is not None)


def step_of(folder: Path, state: StateDict) -> int | None:
    """Return the step that an item of this name says, or the name of the folder."""
    step = state.values.get("step")
    if type(step) is int and step >= 0:
        return step
    found = _STEP.fullmatch(folder.absolute().name)
    return int(found[1]) if found else None


def read_folder(folder: Path) -> StateDict:
    """Return what all ranks saved; tensors are read when they are asked for.

    Raises:
        DamagedError: A file is missing or cannot be read, or the parts of a tensor are not all of it.
        UnsupportedStateError: A file holds what only its code could load, or is of another kind than torch.save.
    """
    found, boxes = StateDict(), defaultdict[str, dict[Box, StreamedRow]](dict)
    with decoding(folder, "a checkpoint of torch_checkpointing"), _quiet():
        for item, files in _files(folder).items():
            for rank, path in sorted(files.items()):
                leaves, paths = flatten_state_dict({item: load_torch_value(path)})
                found.paths |= paths
                for key, leaf in leaves.items():
                    if isinstance(leaf, torch.Tensor):
                        row = _row(key, leaf, rank, path)
                        boxes[key].setdefault((row.shard.offsets, row.shard.lengths), row)
                    elif not _same(found.values.setdefault(key, leaf), leaf):
                        saw(folder, f"{key} of rank {rank}: other than that of the first rank, which is taken")
    for key, parts in boxes.items():
        found.tensors += [row for row in parts.values() if row.shard.nbytes or len(parts) == 1]
        _refuse_gaps(key, parts, folder)
    tops = {paths[0] for key, paths in found.paths.items() if key in boxes}
    found.whole = {
        top: one for top, one in nest(found.values, found.paths).items() if top not in tops and isinstance(one, dict)
    }
    return found


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _files(folder: Path) -> dict[str, dict[int, Path]]:
    """Return the file of each rank of each item."""
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        if name := _FILE.fullmatch(path.name):
            found[name[1]][int(name[2])] = path
    ranks = 1 + max((rank for files in found.values() for rank in files), default=-1)
    if (path := folder / METADATA).is_file():
        document = _read_metadata(path)
        ranks = max(ranks, int(document["world_size"]))
        for item, one in document["metadata"].items():
            for rank, layout in one["rank_to_layout_info"].items():
                if layout is not None:
                    _refuse_kind(item, layout, folder)
                    found[item][int(rank)] = _inside(folder, layout["file_path"])
                else:
                    found[item].setdefault(int(rank), folder / f"{item}_{int(rank)}.pt")
    for item, files in found.items():
        missing = [f"{item}_{rank}.pt" for rank in range(ranks) if rank not in files and len(files) > 1]
        missing += [one.name for one in files.values() if not one.is_file()]
        if missing:
            raise DamagedError(
                f"{folder} lacks {missing[0]}", found=", ".join(sorted(one.name for one in files.values())[:5]),
                expected=f"a file of {item!r} for each of {ranks} ranks", state="Nothing was imported.",
            )  # fmt: skip
    return found


def _refuse_kind(item: str, layout: Mapping[str, Any], folder: Path) -> None:
    if (kind := layout["serialization_format"]["type"]) != "TorchSerialization":
        raise UnsupportedStateError(
            f"the item {item!r} of {folder} is not a file of torch.save",
            found=f"{kind}, in {layout['file_path']}",
            state="Nothing was imported.",
            remedy="import safetensors on their own: the path of the file",
        )


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DamagedError(
            f"{folder / METADATA} is damaged", found=f"the file {name!r:.80}", expected="one of the folder"
        )
    return path


def _row(key: str, leaf: torch.Tensor, rank: int, path: Path) -> StreamedRow:
    """Return what a file holds of a tensor as a row: a part where it is a DTensor, else all of it."""
    shape, local = tuple(leaf.shape), leaf
    offsets, lengths = (0,) * len(shape), shape
    if isinstance(leaf, DTensor):
        mesh, local = leaf.device_mesh.mesh, leaf._local_tensor  # noqa: SLF001 -- to_local() needs a process group
        where = (mesh == rank).nonzero()
        if len(where) != 1 or any(one.is_partial() for one in leaf.placements):
            _refuse_part(key, path, f"rank {rank} of the mesh {mesh.tolist()}, {leaf.placements}")
        lengths, offsets = _compute_local_shape_and_global_offset(
            shape, tuple(mesh.shape), where[0].tolist(), leaf.placements
        )
        if tuple(local.shape) != tuple(lengths):
            _refuse_part(key, path, f"a part of shape {list(local.shape)}, where {list(lengths)} is due")
    refuse_tensor(key, local, path)
    if not local.numel():
        offsets = (0,) * len(shape)
    shard = shard_of(key, local.dtype, shape, offsets, tuple(local.shape))
    return StreamedRow(shard=shard, read=reader_of(lambda: local))


def _refuse_part(key: str, path: Path, found: str) -> NoReturn:
    raise DamagedError(
        f"the tensor {key!r} of {path} is no part that is known", found=found, state="Nothing was imported."
    )


def _refuse_gaps(key: str, parts: Mapping[Box, StreamedRow], folder: Path) -> None:
    shapes = {row.shard.global_shape for row in parts.values()}
    held = sum(math.prod(row.shard.lengths) for row in parts.values())
    if len(shapes) > 1 or held != math.prod(next(iter(shapes))):
        raise DamagedError(
            f"{folder} does not hold all of {key!r}",
            found=f"parts of {held} elements, shape {' or '.join(str(list(shape)) for shape in sorted(shapes))}",
            expected="each element once", state="Nothing was imported.",
        )  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    """Knows dicts, lists, tuples, text and numbers: every class is refused, none is imported."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _read_metadata(path: Path) -> dict[str, Any]:
    with decoding(path, "the metadata of torch_checkpointing", nbytes=path.stat().st_size):
        document = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        if document.get("version") != "2.0":
            raise UnsupportedStateError(
                f"{path} is of another version", found=str(document.get("version")), expected="2.0",
                state="Nothing was imported.", remedy="load it with torch_checkpointing, and save it again",
            )  # fmt: skip
        found: dict[str, Any] = document
        return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch says of each mesh that is read without a process group."""
    log = logging.getLogger("torch.distributed.device_mesh")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# -- out ------------------------------------------------------------------------------------------------------------


def write_folder(
    folder: Path,
    tensors: Mapping[str, Outgoing],
    values: Mapping[str, Any],
    paths: Mapping[str, StatePath],
    source: StorageSource,
) -> None:
    """Write a folder that torch_checkpointing loads on any number of ranks; arguments as `write_torch_file`.

    It is one that a single rank wrote: tensors are whole, and said to be replicated.
    """
    folder.mkdir()
    items = dict.fromkeys(str(path[0]) for path in paths.values())
    document: dict[str, Any] = {"metadata": {}, "world_size": 1, "version": "2.0"}
    for item in items:
        inside = {key: path[1:] for key, path in paths.items() if str(path[0]) == item}
        own = {key: one for key, one in tensors.items() if key in inside}
        places = {
            json.dumps(list(inside[key]), separators=(",", ":")): [
                {"sharding_metadata": _replicated(one), "ranks": (0,)}
            ]
            for key, one in own.items()
        }
        document["metadata"][item] = {"nested_path_to_metadata": places, "rank_to_layout_info": {0: None}}
        _write_item(folder / f"{item}_0.pt", own, {key: values[key] for key in inside if key in values}, inside, source)
    (folder / METADATA).write_bytes(pickle.dumps(document))


def _write_item(
    path: Path,
    tensors: Mapping[str, Outgoing],
    values: Mapping[str, Any],
    paths: Mapping[str, StatePath],
    source: StorageSource,
) -> None:
    whole = [key for key, inside in paths.items() if not inside]
    if not whole:
        write_torch_file(path, tensors, values, paths, source)
    elif whole[0] in values:
        torch.save(values[whole[0]], path)
    else:
        raise UnsupportedStateError(
            f"the tensor {whole[0]!r} is no member of an item", state="Nothing was exported.",
            remedy="leave out --strip, or name an item for it with --rename",
        )  # fmt: skip


def _replicated(one: Outgoing) -> dict[str, Any]:
    strides = tuple(math.prod(one.shape[at + 1 :]) for at in range(len(one.shape)))
    mesh = {"device_type": "cpu", "mesh_shape": (1,), "mesh_data": (0,), "mesh_dim_names": None}  # hashed by its reader
    data = {"global_shape": one.shape, "dtype": f"torch.{one.dtype}", "stride": strides, "mesh_spec": mesh}
    return {"type": "DTensorShardingMetadata", "data": {**data, "placements": [{"type": "Replicate"}]}}
