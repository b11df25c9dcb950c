"""safetensors files and Hugging Face's folders of them, written and read as streams. Torch-free, without the library.

A file is: u64 bytes of the header, the header (JSON: name -> dtype, shape, [begin, end) in the data), the data.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.errors import DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding, refuse_shape
from flashckpt.interop.outgoing import Outgoing
from flashckpt.restore.sources import StorageSource

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000  # the limit of the library


def is_ours(path: Path) -> bool:
    """Return whether a file inside a folder is one that `write_folder` writes."""
    return path.is_file() and (path.name.endswith(SUFFIX) or path.name == INDEX)


def refuse_dtypes(tensors: Sequence[Outgoing]) -> None:
    """Raise UnsupportedStateError where safetensors has no type for a tensor; names them."""
    if bad := [one for one in tensors if one.dtype not in _NAMES]:
        raise UnsupportedStateError(
            f"safetensors cannot hold {bad[0].name!r}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else ""),
            found=bad[0].dtype,
            expected=", ".join(_NAMES),
            state="Nothing was written.",
            remedy="leave them out with --only, or use --format torch",
        )


def write_file(path: Path, tensors: Sequence[Outgoing], source: StorageSource, metadata: Mapping[str, str]) -> None:
    """Write one file; tensors lie in the order of falling item size, so that all are aligned."""
    ordered = sorted(tensors, key=lambda one: -ITEMSIZE[one.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for one in ordered:
        header[one.name] = {
            "dtype": _NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [at, at + one.nbytes],
        }
        at += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in ordered:
            for part in one.parts(source):
                file.write(part)


def plan_shards(tensors: Sequence[Outgoing], limit: int) -> list[list[Outgoing]]:
    """Return the tensors of each file: in order, a file is closed before the tensor that takes it over `limit` bytes."""
    shards: list[list[Outgoing]] = []
    size = 0
    for one in tensors:
        if not shards or size + one.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.nbytes
    return shards


def write_folder(
    folder: Path, tensors: Sequence[Outgoing], source: StorageSource, metadata: Mapping[str, str], *, limit: int
) -> list[str]:
    """Write `model.safetensors`, or numbered files and their index, into a new folder; return the files' names."""
    folder.mkdir()
    shards = plan_shards(tensors, limit)
    if len(shards) == 1:
        write_file(folder / "model.safetensors", tensors, source, metadata)
        return ["model.safetensors"]
    names = [f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, source, metadata)
    where = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
    index = {"metadata": {"total_size": sum(one.nbytes for one in tensors)}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*names, INDEX]


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """One tensor of a file: where its bytes lie."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def shard(self, name: str) -> Shard:
        """Return it as one box under a name of ours."""
        return Shard(
            fqn=name, dtype=self.dtype, global_shape=self.shape, offsets=(0,) * len(self.shape), lengths=self.shape
        )

    def read(self, start: int, stop: int) -> memoryview:
        """Return some of its bytes."""
        out = memoryview(bytearray(stop - start))
        done = 0
        with self.path.open("rb") as file:
            while done < len(out):
                count = os.preadv(file.fileno(), [out[done:]], self.start + start + done)
                if not count:
                    raise _damaged(self.path, f"it ends inside {self.name!r}")
                done += count
        return out


def read_file(path: Path) -> list[Incoming]:
    """Return the tensors of one file; DamagedError where header and size do not fit together."""
    with decoding(path, "a safetensors file"):
        size = path.stat().st_size
        with path.open("rb") as file:
            header, data_start = _read_header(path, file, size)
        found = [
            _incoming(path, name, entry, data_start, size) for name, entry in header.items() if name != "__metadata__"
        ]
        _refuse_overlaps(path, found)
    return found


def read_folder(folder: Path) -> list[Incoming]:
    """Return the tensors of a Hugging Face folder: by its index, else of all its safetensors files."""
    indexes = sorted(folder.glob(f"*{SUFFIX}.index.json"))
    if not indexes:
        return [one for path in sorted(folder.glob(f"*{SUFFIX}")) for one in read_file(path)]
    with decoding(indexes[0], "the index of a safetensors folder", nbytes=indexes[0].stat().st_size):
        weight_map = json.loads(indexes[0].read_bytes())["weight_map"]
        if not isinstance(weight_map, dict) or not all(type(name) is str for name in weight_map.values()):
            raise _damaged(indexes[0], "a weight_map that is no map of names to files")
        files = sorted(set(weight_map.values()))
        for name in files:
            if "/" in name or not (folder / name).is_file():
                raise _damaged(indexes[0], f"it names {name!r:.80}, which is not in the folder")
    found = [one for name in files for one in read_file(folder / name) if weight_map.get(one.name) == name]
    if missing := sorted(set(weight_map) - {one.name for one in found}):
        raise _damaged(indexes[0], f"{missing[0]!r} is not in {weight_map[missing[0]]}")
    return found


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    raw = file.read(8)
    nbytes = struct.unpack("<Q", raw)[0] if len(raw) == 8 else _MOST_HEADER_BYTES + 1
    if nbytes > min(_MOST_HEADER_BYTES, size - 8):
        raise _damaged(path, f"a file of {size} bytes whose header would have {nbytes}")
    with decoding(path, "a safetensors file", nbytes=nbytes):
        try:
            header = json.loads(file.read(nbytes))
        except ValueError as error:
            raise _damaged(path, f"its header is not JSON ({str(error)[:100]})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header, 8 + nbytes


def _incoming(path: Path, name: str, entry: Any, data_start: int, size: int) -> Incoming:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the entry of {name!r:.80} cannot be read") from error
    refuse_shape(name, shape, path)
    if type(begin) is not int or type(end) is not int or type(kind) is not str:
        raise _damaged(path, f"the entry of {name!r:.80} cannot be read")
    if kind not in DTYPES:
        raise UnsupportedStateError(
            f"the tensor {name!r} of {path} has a dtype that cannot be held", found=kind, expected=", ".join(DTYPES)
        )
    if end - begin != math.prod(shape) * ITEMSIZE[DTYPES[kind]]:
        raise _damaged(path, f"{end - begin} bytes for {name!r:.80}, {kind} of shape {list(shape)}")
    if begin < 0 or data_start + end > size:
        raise _damaged(path, f"{name!r:.80} ends at byte {data_start + end} of {size}: the file is cut short")
    return Incoming(path=path, name=name, dtype=DTYPES[kind], shape=shape, start=data_start + begin)


def _refuse_overlaps(path: Path, tensors: Sequence[Incoming]) -> None:
    """Raise DamagedError where two tensors share bytes; the library refuses that too."""
    ends = sorted((one.start, one.start + one.shard(one.name).nbytes, one.name) for one in tensors)
    held = [range_ for range_ in ends if range_[0] < range_[1]]
    for (_, stop, name), (start, _, other) in itertools.pairwise(held):
        if start < stop:
            raise _damaged(path, f"{name!r:.80} and {other!r:.80} share bytes")


def _damaged(path: Path, found: str) -> DamagedError:
    return DamagedError(
        f"{path} is damaged", found=found, expected="a safetensors file or its index", remedy="get it again"
    )
