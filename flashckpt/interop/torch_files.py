"""torch.save files and folders of torch.distributed.checkpoint: the one module that touches pickles, which are theirs.

Nothing of ours is ever pickled. Here foreign files are written and read because a user asks for exactly that:
`torch.load` only with weights_only=True, and the metadata of a dcp folder by an unpickler that knows the classes of
dcp's metadata and nothing else. tests/test_imports.py allows this module by name.
"""

from __future__ import annotations

import importlib
import io
import mmap
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from flashckpt.checkpoint.direct_writer import StreamedRow, held_while_read
from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.dcp.names import Path as StatePath
from flashckpt.errors import ConfigError, DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding, refuse_boundless, refuse_expanded, refuse_shape
from flashckpt.interop.outgoing import Outgoing
from flashckpt.restore.live_memory import bytes_of
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


@dataclass(kw_only=True)
class StateDict:
    """A flattened state dict of torch's world.

    Attributes:
        tensors: Boxes by flattened key; one row per box, `shard.fqn` is the key.
        values: Other leaves by flattened key.
        paths: Places in the nested state dict.
    """

    tensors: list[StreamedRow] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, StatePath] = field(default_factory=dict)


# -- writing ---------------------------------------------------------------------------------------------


def write_torch_file(
    path: Path,
    tensors: Mapping[str, Outgoing],
    values: Mapping[str, Any],
    paths: Mapping[str, StatePath],
    source: StorageSource,
) -> None:
    """Write one file that `torch.load(weights_only=True)` reads, whatever its size: one block in memory at a time.

    The file is laid out first, with fake tensors in place of the real ones; then each tensor's bytes are streamed to
    where torch says its storage lies.

    Args:
        path: New file.
        tensors: By key.
        values: Other leaves by key.
        paths: Where each key lies in the nested dict.
        source: The checkpoint.
    """
    with FakeTensorMode():
        leaves = {key: torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for key, one in tensors.items()}
    nested = _nested({**leaves, **{key: _weights_only(value) for key, value in values.items()}}, paths)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(nested, path)
    with FakeTensorMode():
        places, _ = flatten_state_dict(torch.load(path, weights_only=True))
    checksums: dict[int, int] = {}
    with path.open("r+b") as file:
        for key, one in tensors.items():
            storage: Any = _at(places, paths[key]).untyped_storage()
            start = storage._checkpoint_offset  # noqa: SLF001 -- how torch documents it for skip_data
            file.seek(start)
            checksums[start] = 0
            for part in one.parts(source):
                file.write(part)
                checksums[start] = zlib.crc32(part, checksums[start])
        _set_checksums(path, file, checksums)


def _set_checksums(path: Path, file: BinaryIO, checksums: Mapping[int, int]) -> None:
    """Put the CRC-32 of each storage into the zip's headers, where torch left that of no data.

    Args:
        path: The zip.
        file: The same, open for reading and writing.
        checksums: First byte of a storage in the file -> CRC-32 of its bytes.
    """
    with zipfile.ZipFile(path) as archive:
        at, entries = archive.start_dir, archive.infolist()
    for entry in entries:
        file.seek(at)
        central = file.read(46)
        name, extra, comment = struct.unpack_from("<HHH", central, 28)
        file.seek(entry.header_offset)
        local = file.read(30)
        start = entry.header_offset + 30 + sum(struct.unpack_from("<HH", local, 26))
        if central[:4] != b"PK\1\2" or local[:4] != b"PK\3\4":
            raise DamagedError(f"{path} is not laid out as torch lays out its files", state="Nothing was exported.")
        if start in checksums and entry.file_size:
            raw = struct.pack("<I", checksums[start])
            places = [at + 16, entry.header_offset + 14]
            if entry.flag_bits & 8:  # a descriptor behind the data repeats it
                file.seek(start + entry.file_size)
                places.append(start + entry.file_size + (4 if file.read(4) == b"PK\7\x08" else 0))
            for place in places:
                file.seek(place)
                file.write(raw)
        at += 46 + name + extra + comment


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
    nested = _nested({**leaves, **values}, paths)
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


def _nested(leaves: Mapping[str, Any], paths: Mapping[str, StatePath]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, leaf in leaves.items():
        set_element(nested, paths[key], leaf)
    return nested


def _at(flat: Mapping[str, Any], path: StatePath) -> Any:
    return flat[".".join(map(str, path))]


def _weights_only(value: Any) -> Any:
    """Return a value with numpy's types turned into torch's and Python's, which weights_only=True knows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _weights_only(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_weights_only(item) for item in value)
    return value


# -- reading ---------------------------------------------------------------------------------------------


def read_torch_file(path: Path) -> StateDict:
    """Return what a torch.save file holds; its tensors stay in the file (mapped) where torch can do that.

    Raises:
        UnsupportedStateError: It holds objects that need code to load.
        DamagedError: It cannot be read as such a file.
        ConfigError: It holds no dict.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file", expected="a file of torch.save")
    nbytes = path.stat().st_size
    if not nbytes:
        raise DamagedError(f"{path} is empty", expected="a file of torch.save", state="Nothing was imported.")
    with decoding(path, "a file of torch.save", nbytes=nbytes):
        try:
            loaded = _load(path)
        except pickle.UnpicklingError as error:
            raise _unpickling(str(path), error) from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} holds no state dict", found=type(loaded).__name__, expected="a dict of tensors")
        refuse_boundless(loaded, path, nbytes)
        flat, paths = flatten_state_dict(dict(loaded))
        found = StateDict(paths=dict(paths))
        for key, leaf in flat.items():
            if isinstance(leaf, torch.Tensor):
                _refuse_tensor(key, leaf, path)
                found.tensors.append(_row_of(key, leaf))
            else:
                found.values[key] = leaf
    return found


def _refuse_tensor(key: str, tensor: torch.Tensor, path: Path) -> None:
    """Refuse what has no bytes in row-major order: sparse, quantized, nested and subclassed tensors, those without data."""
    kind = type(tensor)
    plain = (
        kind in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    )
    if not plain or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedStateError(
            f"the tensor {key!r} of {path} cannot be held",
            found=f"{kind.__name__}, {tensor.layout}, on {tensor.device}",
            expected="a dense tensor with its data",
            state="Nothing was imported.",
            remedy="leave it out with --only, or save it as a dense tensor",
        )
    nbytes = tensor.numel() * tensor.element_size()
    refuse_expanded(key, nbytes, tensor.untyped_storage().nbytes(), path)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6


def rows_of(tensors: Mapping[str, torch.Tensor]) -> list[StreamedRow]:
    """Return tensors in memory as rows under their names."""
    return [_row_of(key, tensor) for key, tensor in tensors.items()]


def _row_of(key: str, tensor: torch.Tensor) -> StreamedRow:
    shape = tuple(tensor.shape)
    return StreamedRow(shard=_shard(key, tensor.dtype, shape, (0,) * len(shape), shape), read=_reader(lambda: tensor))


def _shard(key: str, dtype: torch.dtype, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Shard:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise UnsupportedStateError(f"the tensor {key!r} has a dtype that cannot be held", found=name)
    return Shard(fqn=key, dtype=name, global_shape=tuple(shape), offsets=tuple(offsets), lengths=tuple(lengths))


def _reader(tensor: Callable[[], torch.Tensor]) -> Callable[[int, int], memoryview]:
    return held_while_read(lambda: bytes_of(tensor().detach().resolve_conj().resolve_neg().contiguous()))


def read_dcp_folder(folder: Path) -> StateDict:
    """Return what a folder of torch.distributed.checkpoint holds; tensors are read when they are asked for.

    Raises:
        DamagedError: Its metadata or a file cannot be read.
        UnsupportedStateError: Metadata of other classes than dcp's, transformed files, a value that needs code.
    """
    path = folder / METADATA
    with decoding(path, "the metadata of a dcp checkpoint", nbytes=path.stat().st_size if path.is_file() else 0):
        metadata = _read_metadata(path)
        found = StateDict(paths={_text(key): _place_of(place) for key, place in (metadata.planner_data or {}).items()})
        places: Mapping[MetadataIndex, Any] = metadata.storage_data or {}
        for key, kind in metadata.state_dict_metadata.items():
            found.paths.setdefault(_text(key), (key,))
            if not isinstance(kind, TensorStorageMetadata):
                found.values[key] = _load_item(folder, key, places.get(MetadataIndex(key)))
                refuse_boundless([found.values[key]], folder, path.stat().st_size)
                continue
            for chunk in kind.chunks:
                place = places.get(MetadataIndex(key, chunk.offsets))
                for shape in (kind.size, chunk.offsets, chunk.sizes):
                    refuse_shape(key, tuple(shape), path)
                shard = _shard(key, kind.properties.dtype, kind.size, chunk.offsets, chunk.sizes)
                refuse_expanded(key, shard.nbytes, _stored_bytes(folder, key, place), folder)
                found.tensors.append(StreamedRow(shard=shard, read=_reader(_lazy(folder, key, place, shard))))
    return found


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
    return name


def _lazy(folder: Path, key: str, place: Any, shard: Shard) -> Any:
    def tensor() -> torch.Tensor:
        found: Any = _load_item(folder, key, place)
        if isinstance(found, torch.Tensor):
            _refuse_tensor(key, found, folder)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shard.lengths:
            raise DamagedError(
                f"the tensor {key!r} of {folder} is not what its metadata says",
                found=str(getattr(found, "shape", type(found).__name__)),
                expected=f"shape {list(shard.lengths)}",
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
            raise _unpickling(f"the value of {key!r} in {folder}", error) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of dcp's metadata, dtypes and layouts; everything else is refused, never imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        if name in _DCP_CLASSES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        msg = f"GLOBAL {module}.{name}"
        raise pickle.UnpicklingError(msg)


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise _unpickling(str(path), error) from error
    if not isinstance(found, Metadata):
        raise DamagedError(f"{path} is not the metadata of a dcp checkpoint", found=type(found).__name__)
    return found


def _unpickling(what: str, error: Exception) -> DamagedError | UnsupportedStateError:
    line = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "")
    if not line:
        lines = str(error).splitlines() or [type(error).__name__]
        found = next((line.rpartition("rror: ")[2].strip() for line in lines if "rror: " in line), "") or lines[0]
        return DamagedError(
            f"{what} cannot be read as a file of torch.save", found=found[:200], remedy="check the file"
        )
    return UnsupportedStateError(
        f"{what} holds objects that only running their code could load",
        found=line[:200],
        expected="tensors, None, bool, int, float, str, bytes, and dicts, lists and tuples of them",
        state="Nothing was loaded.",
        remedy="load it where it was written, and save the tensors alone",
    )
