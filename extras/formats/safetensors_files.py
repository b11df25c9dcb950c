"""safetensors files and Hugging Face's folders of them, written and read as streams. Torch-free, without the library.

A file is: u64 bytes of the header, the header (JSON: name -> dtype, shape, [begin, end) in the data), the data.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.errors import DamagedError, UnsupportedStateError
from flashckpt.interop.foreign_files import decoding, refuse_shape, saw
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
THREADS = 2
"""Tensors that are written at a time."""
_MOST_HEADER_BYTES = 100_000_000  # the limit of the library
_METADATA = "__metadata__"
_LAYOUTS = ("pt", "np", "mlx")
"""What `format` may say: tensors lie in these as torch has them, in those of Flax and TensorFlow they do not."""
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def is_ours(path: Path) -> bool:
    """Return whether a file inside a folder is one that `write_folder` writes."""
    return path.is_file() and (path.name.endswith(SUFFIX) or path.name == INDEX)


def refuse_dtypes(tensors: Sequence[Outgoing]) -> None:
    """Raise UnsupportedStateError where safetensors has no type or no name for a tensor; names them."""
    if any(one.name == _METADATA for one in tensors):
        raise UnsupportedStateError(
            f"safetensors cannot hold a tensor named {_METADATA!r}",
            expected="another name: that one is of its header",
            state="Nothing was written.",
            remedy="rename it with --rename, or use --format torch",
        )
    if bad := [one for one in tensors if one.dtype not in _NAMES]:
        raise UnsupportedStateError(
            f"safetensors cannot hold {bad[0].name!r}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else ""),
            found=bad[0].dtype,
            expected=", ".join(_NAMES),
            state="Nothing was written.",
            remedy="leave them out with --only, or use --format torch",
        )


def write_files(files: Mapping[Path, Sequence[Outgoing]], source: StorageSource, metadata: Mapping[str, str]) -> None:
    """Write new files, THREADS tensors at a time, each where its file's header says, in the order of falling item size."""
    places: list[tuple[Path, int, Outgoing]] = []
    for path, tensors in files.items():
        ordered = sorted(tensors, key=lambda one: -ITEMSIZE[one.dtype])  # so that all are aligned
        ends = list(itertools.accumulate((one.nbytes for one in ordered), initial=0))
        text = _header(dict(zip(ordered, itertools.pairwise(ends), strict=True)), metadata)
        with path.open("xb") as file:
            file.write(text)
            file.truncate(len(text) + ends[-1])
        places += [(path, len(text) + begin, one) for begin, one in zip(ends[:-1], ordered, strict=True)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="flashckpt-export") as pool:
        for _ in pool.map(lambda place: _write(place, source), places):  # the first error ends the others
            pass


def _header(places: Mapping[Outgoing, tuple[int, int]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: {"format": "pt", **metadata}}
    for one, offsets in places.items():
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": list(offsets)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(place: tuple[Path, int, Outgoing], source: StorageSource) -> None:
    path, at, one = place
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        for part in one.parts(source):
            left = memoryview(part)
            while left:
                left = left[file.write(left) :]


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
    names = [f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else [f"model{SUFFIX}"]
    write_files({folder / name: shard for name, shard in zip(names, shards, strict=True)}, source, metadata)
    if len(names) == 1:
        return names
    where = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
    index = {"metadata": {"total_size": sum(one.nbytes for one in tensors)}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*names, INDEX]


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """One tensor of a file: where its bytes lie, and other names of it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    also: tuple[str, ...] = ()

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
        metadata = _metadata(path, header.pop(_METADATA, {}))
        also: dict[str, list[str]] = {}
        for alias, name in metadata.items():  # how the library writes tensors that share their memory, each once
            if name in header and alias not in header:
                also.setdefault(name, []).append(alias)
        others = sorted(metadata.keys() - {alias for own in also.values() for alias in own})
        if others:
            saw(path, f"metadata of {path.name}: " + ", ".join(others[:5]) + (", ..." if len(others) > 5 else ""))
        found = [_incoming(path, name, entry, data_start, size) for name, entry in header.items()]
        found = [replace(one, also=tuple(also.get(one.name, ()))) for one in found]
        _refuse_overlaps(path, found, data_start, size)
    return found


def origin_of(path: Path) -> tuple[int, int] | None:
    """Return (generation, step) of the checkpoint that a file or folder was exported from; None for anything else."""
    try:
        path = min(path.glob(f"*{SUFFIX}"), default=path) if path.is_dir() else path
        with path.open("rb") as file:
            found = _read_header(path, file, path.stat().st_size)[0][_METADATA]
        return int(found["flashckpt.generation"]), int(found["flashckpt.step"])
    except (OSError, DamagedError, KeyError, TypeError, ValueError):
        return None


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    """Return what a header says besides its tensors and how they lie; an unknown way to lie is refused."""
    if not isinstance(metadata, dict) or not {str}.issuperset(map(type, metadata.values())):
        raise _damaged(path, f"its {_METADATA} is no map of texts")
    layout = metadata.pop("format", "pt")
    if layout not in _LAYOUTS:
        raise UnsupportedStateError(
            f"the tensors of {path} do not lie as torch has them",
            found=f"{_METADATA} says format {layout!r:.40}",
            expected=" or ".join(map(repr, _LAYOUTS)),
            state="Nothing was imported.",
            remedy="load it with the library that wrote it, and save it for torch",
        )
    for key in [key for key in metadata if key.startswith("flashckpt.")]:
        del metadata[key]
    return metadata


def read_folder(folder: Path, *, is_judged: bool = False) -> list[Incoming]:
    """Return the tensors of a Hugging Face folder: by its index, else of all its safetensors files.

    Args:
        folder: The folder.
        is_judged: The caller knows which tensors there have to be: of numbered files some may be missing.

    Raises:
        DamagedError: Index and files do not say the same, or a numbered file is missing.
    """
    index = _index_of(folder)
    if index is None:
        files = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if "optim" not in path.name]
        if not is_judged:
            _refuse_missing(files)
        found = [one for path in files for one in read_file(path)]
        if doubles := [name for name, count in Counter(one.name for one in found).items() if count > 1]:
            both = [one.path.name for one in found if one.name == doubles[0]]
            raise _damaged(folder, f"{doubles[0]!r:.80} is in {both[0]} and in {both[1]}")
        return found
    weight_map, nbytes = read_index(index)
    found = [one for name in sorted(set(weight_map.values())) for one in read_file(folder / name)]
    held: dict[str, list[str]] = {}
    for one in found:
        held.setdefault(one.path.name, []).append(one.name)
    refuse_other_tensors(index, weight_map, held)
    if nbytes not in (None, total := sum(one.shard(one.name).nbytes for one in found)):
        saw(index, f"total_size of {index.name}: {nbytes!r:.40}, while its files hold {total} bytes of tensors")
    return found


def _index_of(folder: Path) -> Path | None:
    """Return the index of a folder; None where there is none."""
    indexes = sorted(folder.glob(f"*{SUFFIX}.index.json"))
    index = folder / INDEX if folder / INDEX in indexes else next(iter(indexes), None)
    single = folder / f"model{SUFFIX}"
    if (len(indexes) > 1 and index != folder / INDEX) or (index == folder / INDEX and single.is_file()):
        both = [one.name for one in indexes] if index != folder / INDEX else [INDEX, single.name]
        raise DamagedError(
            f"{folder} holds more than one set of weights",
            found=", ".join(both[:4]),
            expected="one",
            state="Nothing was imported.",
            remedy="remove the others, or give the path of the one file that is wanted",
        )
    return index


def read_index(index: Path) -> tuple[dict[str, str], Any]:
    """Return (tensor -> file, total_size) of an index; every file is in its folder."""
    with decoding(index, "the index of a folder of weights", nbytes=index.stat().st_size):
        document = json.loads(index.read_bytes(), object_pairs_hook=_once)
        weight_map, nbytes = document["weight_map"], (document.get("metadata") or {}).get("total_size")
        if not isinstance(weight_map, dict) or not all(type(name) is str for name in weight_map.values()):
            raise _damaged(index, "a weight_map that is no map of names to files")
        for name in sorted(set(weight_map.values())):
            if "/" in name or not (index.parent / name).is_file():
                raise _damaged(index, f"it names {name!r:.80}, which is not in the folder")
    return weight_map, nbytes


def refuse_other_tensors(index: Path, weight_map: Mapping[str, str], held: Mapping[str, Sequence[str]]) -> None:
    """Raise DamagedError where files hold other tensors than the index says: names of each file in `held`."""
    for file, own in sorted(held.items()):
        wanted = {name for name, place in weight_map.items() if place == file}
        if missing := sorted(wanted.difference(own)):
            raise _damaged(index, f"{missing[0]!r:.80} is not in {file}")
        if extra := [name for name in own if name not in wanted]:
            said = f"says that it is in {weight_map[extra[0]]}" if extra[0] in weight_map else "does not name it"
            raise _damaged(index, f"{extra[0]!r:.80} is in {file}, and the index {said}")


def _refuse_missing(files: Sequence[Path]) -> None:
    """Raise DamagedError where one of several numbered files (model-00001-of-00003) is missing."""
    sets: dict[tuple[str, str], list[int]] = {}
    for path in files:
        if found := _NUMBERED.fullmatch(path.name):
            sets.setdefault((found[1], found[3]), []).append(int(found[2]))
    for (name, count), numbers in sets.items():
        if len(numbers) != int(count):
            raise _damaged(files[0].parent, f"{len(numbers)} of the {int(count)} files {name}-*-of-{count}{SUFFIX}")


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    raw = file.read(8)
    nbytes = struct.unpack("<Q", raw)[0] if len(raw) == 8 else _MOST_HEADER_BYTES + 1
    if nbytes > min(_MOST_HEADER_BYTES, size - 8):
        raise _damaged(path, f"a file of {size} bytes whose header would have {nbytes}")
    with decoding(path, "a safetensors file", nbytes=nbytes):
        try:
            header = json.loads(file.read(nbytes), object_pairs_hook=_once)
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


def _refuse_overlaps(path: Path, tensors: Sequence[Incoming], begin: int, end: int) -> None:
    """Raise DamagedError where two tensors share bytes, or bytes are of none; the library refuses both too."""
    ends = sorted((one.start, one.start + one.shard(one.name).nbytes, one.name) for one in tensors)
    held = [(begin, begin, "its header"), *(one for one in ends if one[0] < one[1]), (end, end, "its end")]
    for (_, stop, name), (start, _, other) in itertools.pairwise(held):
        if start < stop:
            raise _damaged(path, f"{name!r:.80} and {other!r:.80} share bytes")
        if start > stop:
            raise _damaged(path, f"{start - stop} bytes between {name!r:.80} and {other!r:.80} are of no tensor")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError where a key is in it twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(
            f"{next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)!r:.80} twice"
        )
    return found


def _damaged(path: Path, found: str) -> DamagedError:
    return DamagedError(
        f"{path} is damaged", found=found, expected="a safetensors file or its index", remedy="get it again"
    )
