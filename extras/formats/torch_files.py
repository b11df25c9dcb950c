"""Files of torch.save. Their pickles are theirs: nothing of ours is ever pickled.

Foreign files are written and read because a user asks for exactly that: `torch.load` only with weights_only=True.
tests/project/test_imports.py allows this module and `dcp_folders` by name.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from flashckpt.dcp.names import Path as StatePath
from flashckpt.errors import ConfigError, DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding, refuse_boundless
from flashckpt.interop.outgoing import Outgoing
from flashckpt.interop.state_dicts import StateDict, at_path, nest, refuse_tensor, row_of
from flashckpt.restore.sources import StorageSource


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
    nested = nest({**leaves, **{key: _weights_only(value) for key, value in values.items()}}, paths)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(nested, path)
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)
    checksums: dict[int, int] = {}
    with path.open("r+b") as file:
        for key, one in tensors.items():
            storage: Any = at_path(places, paths[key]).untyped_storage()
            start = storage._checkpoint_offset  # noqa: SLF001 -- how torch documents it for skip_data
            file.seek(start)
            checksums[start] = 0
            for part in one.parts(source):
                file.write(part)
                checksums[start] = zlib.crc32(part, checksums[start])
        _set_checksums(path, file, checksums)


def _set_checksums(path: Path, file: BinaryIO, checksums: Mapping[int, int]) -> None:
    """Put the CRC-32 of each storage into the zip's headers, where torch left that of no data.

    `checksums` maps the first byte of a storage in the file to the CRC-32 of its bytes.
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


def read_torch_file(path: Path) -> StateDict:
    """Return what a torch.save file holds; its tensors stay in the file (mapped) where torch can do that.

    Raises:
        UnsupportedStateError: It holds objects that need code to load.
        DamagedError: It cannot be read as such a file.
        ConfigError: It holds no dict.
    """
    return flattened(load_torch_file(path), path)


def load_torch_file(path: Path, *, with_numpy: bool = False, inert: Sequence[str] = ()) -> dict[Any, Any]:
    """Return the dict of a torch.save file; arguments and errors as `load_torch_value`."""
    loaded = load_torch_value(path, with_numpy=with_numpy, inert=inert)
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds no state dict", found=type(loaded).__name__, expected="a dict of tensors")
    return loaded


def load_torch_value(path: Path, *, with_numpy: bool = False, inert: Sequence[str] = ()) -> Any:
    """Return what a torch.save file holds, nested as it was saved; raises as `read_torch_file`.

    Args:
        path: The file.
        with_numpy: Arrays of numpy are let through too, as generators of random numbers need them.
        inert: Full names of classes whose objects are read as empty ones of a class of ours, which drops what they
            held: known holders of settings that nothing here needs.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file", expected="a file of torch.save")
    nbytes = path.stat().st_size
    if not nbytes:
        raise DamagedError(f"{path} is empty", expected="a file of torch.save", state="Nothing was imported.")
    allowed = [*(_NUMPY if with_numpy else ()), *((_Inert, name) for name in inert)]
    with decoding(path, "a file of torch.save", nbytes=nbytes):
        try:
            with torch.serialization.safe_globals(allowed):
                loaded = _load(path)
        except pickle.UnpicklingError as error:
            raise unpickling(str(path), error) from error
        if isinstance(loaded, (dict, list, tuple)):
            refuse_boundless(loaded, path, nbytes)
    return loaded


def flattened(nested: Mapping[Any, Any], path: Path) -> StateDict:
    """Return the leaves of a nested state dict; `path` is where it was read, for error texts."""
    with decoding(path, "a state dict"):
        flat, paths = flatten_state_dict(dict(nested))
        found = StateDict(paths=dict(paths))
        seen: set[Any] = set()
        for key, leaf in flat.items():
            if isinstance(leaf, torch.Tensor):
                refuse_tensor(key, leaf, path)
                found.tensors.append(row_of(key, leaf))
                place = (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride())
                found.doubles |= {key} if leaf.numel() and place in seen else set()
                seen.add(place)
            else:
                found.values[key] = leaf
        tops = {places[0] for key, places in paths.items() if key not in found.values}
        found.whole = {
            key: one for key, one in nested.items() if isinstance(one, dict) and type(key) is str and key not in tops
        }
    return found


class _Inert:
    """Stands for an object whose class is not imported; whatever it held is dropped."""

    def __init__(self, *_args: Any) -> None:
        """Take what the class would be called with."""

    def __setstate__(self, _state: Any) -> None:
        """Drop the state."""


_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
_NUMPY: tuple[Any, ...] = (
    np.ndarray,
    np.dtype,
    *{type(np.dtype(kind)) for kind in ("u1", "u4", "u8", "i4", "i8", "f4", "f8")},
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
)
"""What a pickled array of numbers names, before and since numpy 2. None of it runs code of the file."""


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6


def unpickling(what: str, error: Exception) -> DamagedError | UnsupportedStateError:
    """Return the error for what torch's unpickler refused: damage, or objects that need code."""
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
