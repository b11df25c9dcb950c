"""Folders of torch.distributed.checkpoint. Their metadata is a pickle: nothing of ours is ever one.

The metadata is read by an unpickler that knows the classes of dcp's metadata and nothing else, items by `torch.load` with
weights_only=True. tests/project/test_imports.py allows this module and `torch_files` by name.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
import mmap
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from flashckpt.core.shard import Shard
from flashckpt.dcp.direct_writer import StreamedRow
from flashckpt.dcp.names import Path as StatePath
from flashckpt.errors import DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding, refuse_boundless, refuse_expanded, refuse_shape, saw
from flashckpt.interop.outgoing import Outgoing
from flashckpt.interop.state_dicts import StateDict, nest, reader_of, refuse_tensor, shard_of
from flashckpt.interop.torch_files import unpickling
from flashckpt.restore.sources import StorageSource

METADATA = ".metadata"
_DCP_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath", "Path"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "Path"),
}  # fmt: skip


def write_dcp_folder(
    folder: Path,
    tensors: Mapping[str, Outgoing],
    values: Mapping[str, Any],
    paths: Mapping[str, StatePath],
    source: StorageSource,
) -> None:
    """Write a folder that `dcp.load` with torch's own FileSystemReader reads; arguments as `write_torch_file`."""
    leaves = {
        key: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta") for key, one in tensors.items()
    }
    nested = nest({**leaves, **values}, paths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        try:
            torch_dcp.save(  # type: ignore[attr-defined]  # torch exports it without saying so
                nested, storage_writer=FileSystemWriter(folder), planner=_Filling(tensors, source), no_dist=True
            )
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


class _Filling(DefaultSavePlanner):
    """Plans by tensors without data, and reads each one when it is written; only one is in memory."""

    def __init__(self, tensors: Mapping[str, Outgoing], source: StorageSource) -> None:
        super().__init__()
        self._tensors, self._source = tensors, source
        self._before: mmap.mmap | None = None

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        one = self._tensors.get(write_item.index.fqn)
        if one is None:
            return super().resolve_data(write_item)
        if self._before is not None:  # torch's writer keeps what it has written until its file is done: take the pages
            self._before.madvise(mmap.MADV_DONTNEED)
        self._before = mmap.mmap(-1, max(one.nbytes, 1))
        into, at = np.frombuffer(self._before, np.uint8), 0
        for part in one.parts(self._source):
            into[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        tensor = torch.frombuffer(self._before, dtype=torch.uint8, count=max(one.nbytes, 1))[: one.nbytes]
        return tensor.view(getattr(torch, one.dtype)).reshape(one.shape)


def read_dcp_folder(folder: Path, *, skips: Callable[[str], bool] = lambda _: False) -> StateDict:
    """Return what a folder of torch.distributed.checkpoint holds; tensors are read when they are asked for.

    Args:
        folder: The folder.
        skips: Whether the value of a key is not even read; those are listed as `skipped`.

    Raises:
        DamagedError: Its metadata or a file cannot be read.
        UnsupportedStateError: Metadata of other classes than dcp's, transformed files, a value that needs code.
    """
    path = folder / METADATA
    with decoding(path, "the metadata of a dcp checkpoint", nbytes=path.stat().st_size if path.is_file() else 0):
        metadata = _read_metadata(path)
        found = StateDict(paths={_text(key): _place_of(place) for key, place in (metadata.planner_data or {}).items()})
        places: Mapping[MetadataIndex, Any] = metadata.storage_data or {}
        _note_others(metadata, path)
        _refuse_shared_bytes(places, folder)
        for key, kind in metadata.state_dict_metadata.items():
            found.paths.setdefault(_text(key), (key,))
            if not isinstance(kind, TensorStorageMetadata) and skips(_text(key)):
                found.skipped.append(key)
                continue
            if not isinstance(kind, TensorStorageMetadata):
                found.values[key] = _load_item(folder, key, places.get(MetadataIndex(key)))
                refuse_boundless([found.values[key]], folder, path.stat().st_size)
                continue
            _refuse_gaps(key, kind, metadata, path)
            for chunk in kind.chunks:
                place = places.get(MetadataIndex(key, chunk.offsets))
                for shape in (kind.size, chunk.offsets, chunk.sizes):
                    refuse_shape(key, tuple(shape), path)
                shard = shard_of(key, kind.properties.dtype, kind.size, chunk.offsets, chunk.sizes)
                refuse_expanded(key, shard.nbytes, _stored_bytes(folder, key, place), folder)
                found.tensors.append(StreamedRow(shard=shard, read=reader_of(_lazy(folder, key, place, shard))))
    return found


def _note_others(metadata: Metadata, path: Path) -> None:
    """Say which names the metadata has a place for, in a file or in the nested dict, and nothing else."""
    known = metadata.state_dict_metadata.keys()
    named = {*(metadata.planner_data or {}), *(index.fqn for index in metadata.storage_data or {})}
    if others := sorted(map(str, named - known)):
        saw(
            path,
            f"{len(others)} names of which {path.name} gives no shape: {others[0]:.80}"
            + (", ..." if others[1:] else ""),
        )


def _refuse_shared_bytes(places: Mapping[MetadataIndex, Any], folder: Path) -> None:
    """Raise DamagedError where two items lie in the same bytes of a file: one of them is not what its name says."""
    held = [
        (str(place.relative_path), int(place.offset), int(place.length), str(index.fqn))
        for index, place in places.items()
    ]
    for (file, start, length, name), (other_file, other_start, _, other) in itertools.pairwise(sorted(held)):
        if file == other_file and start + length > other_start and length:
            raise DamagedError(
                f"{folder / METADATA} is damaged",
                found=f"{name!r:.80} and {other!r:.80} share bytes of {file}",
                expected="separate bytes for each item",
                state="Nothing was imported.",
            )


def _refuse_gaps(key: str, kind: TensorStorageMetadata, metadata: Metadata, path: Path) -> None:
    """Raise DamagedError where the chunks of a tensor are not all of it, each element once.

    Raises:
        UnsupportedStateError: Megatron wrote it in another shape than it has.
    """
    original = getattr(metadata, "mcore_data", {}).get(key, {}).get("nd_reformulated_orig_global_shape")
    if original is not None and tuple(original) != tuple(kind.size):
        raise UnsupportedStateError(
            f"the tensor {key!r} of {path.parent} is written in another shape than it has",
            found=f"shape {list(kind.size)}", expected=f"shape {list(original)}", state="Nothing was imported.",
            remedy="save it with Megatron's fully_sharded_model_space, or leave it out with --only",
        )  # fmt: skip
    begins = np.array([tuple(chunk.offsets) for chunk in kind.chunks], np.int64).reshape(len(kind.chunks), -1)
    ends = begins + np.array([tuple(chunk.sizes) for chunk in kind.chunks], np.int64).reshape(begins.shape)
    problem = ""
    if len(kind.chunks) and (begins.min(initial=0) < 0 or (ends > np.array(tuple(kind.size), np.int64)).any()):
        problem = "a part beyond its end"
    elif sum(math.prod(chunk.sizes) for chunk in kind.chunks) < math.prod(kind.size):
        problem = "parts that leave some of it out"
    else:
        full = np.all(ends > begins, axis=1)
        for at in np.flatnonzero(full).tolist():
            meets = np.all((begins[at + 1 :] < ends[at]) & (ends[at + 1 :] > begins[at]), axis=1)
            problem = "parts that overlap" if np.any(meets & full[at + 1 :]) else problem
    if problem:
        raise DamagedError(
            f"{path} is damaged", found=f"{key!r:.80} of shape {list(kind.size)}: {problem}",
            expected="parts that are all of it, each element once", state="Nothing was imported.",
        )  # fmt: skip


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} where a name is expected")
    return value


def _place_of(path: Any) -> StatePath:
    """Return the place of a leaf in its nested state dict."""
    if type(path) is not tuple or not path or not all(type(part) in (str, int) for part in path):
        raise TypeError(f"{path!r:.80} where a path of names and numbers is expected")
    return path


def _stored_bytes(folder: Path, key: str, place: Any) -> int:
    """Return how many bytes of `folder` a place of the metadata can have, at most."""
    size = (folder / _file_of(folder, key, place)).stat().st_size
    if type(place.offset) is not int or type(place.length) is not int or not 0 <= place.offset <= size:
        raise DamagedError(
            f"the place of {key!r} in {folder} cannot be", found=f"{place!r:.200}", expected=f"within {size} bytes"
        )
    return max(0, min(int(place.length), size - place.offset))


def _file_of(folder: Path, key: str, place: Any) -> str:
    """Return the file that a place names; it lies in the folder itself."""
    name = getattr(place, "relative_path", None)
    if type(name) is not str or name in ("", ".", "..") or "/" in name or getattr(place, "transform_descriptors", None):
        raise UnsupportedStateError(
            f"{key!r} of {folder} cannot be read",
            found="no place in the metadata" if place is None else f"{place!r:.200}",
            expected="a file of the folder, written without extensions",
        )
    saw(folder / name)
    return name


def _lazy(folder: Path, key: str, place: Any, shard: Shard) -> Any:
    def tensor() -> torch.Tensor:
        found: Any = _load_item(folder, key, place)
        if isinstance(found, torch.Tensor):
            refuse_tensor(key, found, folder)
        dtype = str(getattr(found, "dtype", "")).removeprefix("torch.")
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shard.lengths or dtype != shard.dtype:
            raise DamagedError(
                f"the tensor {key!r} of {folder} is not what its metadata says",
                found=f"{dtype} of shape {list(found.shape)}" if dtype else type(found).__name__,
                expected=f"{shard.dtype} of shape {list(shard.lengths)}",
            )
        return found

    return tensor


def _load_item(folder: Path, key: str, place: Any) -> Any:
    name = _file_of(folder, key, place)
    with decoding(f"{key!r} of {folder}", "an item of a dcp checkpoint"):
        try:
            with (folder / name).open("rb") as file:
                file.seek(place.offset)
                raw = io.BytesIO(file.read(_stored_bytes(folder, key, place)))
            return torch.load(raw, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise unpickling(f"the value of {key!r} in {folder}", error) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of dcp's metadata, dtypes and layouts; everything else is refused, never imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        if name in _DCP_CLASSES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise unpickling(str(path), error) from error
    if not isinstance(found, Metadata):
        raise DamagedError(f"{path} is not the metadata of a dcp checkpoint", found=type(found).__name__)
    return found
