"""A nested dict of a framework as named tensors and msgpack types, exactly: what `pytree` would change is noted beside it.

`state.pytree` gives a dict for every mapping and a tensor for every parameter, which is right for state that objects load.
A dict that is to come back as it was also has ordered dicts with attributes, counters, paths, parameters and strides.
Each of them becomes its plain form, and a note says at which place what it was. Anything else is refused by its place.

On disk it is a folder, a root with one committed checkpoint, which `flashckpt inspect`, `verify` and `export` read. It is
written under a temporary name and renamed when everything is durable; one that is replaced changes names with it.
"""

from __future__ import annotations

import collections
import io
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.choice import OURS, choose_checkpoint
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.core.values import RESERVED
from flashckpt.dcp import direct_writer
from flashckpt.errors import (
    ConfigError,
    DamagedError,
    FlashckptError,
    FormatVersionError,
    NoCheckpointError,
    UnsupportedStateError,
)
from flashckpt.interop.target import replacing, sweep
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.live_memory import bytes_of
from flashckpt.restore.sources import StorageSource
from flashckpt.state import pytree
from flashckpt.storage.posix import PosixStore

_OVERHEAD_BYTES = 1 << 20
"""Room for names, values and digests."""
_TRIES = 5
"""Reads of a folder that is replaced again and again meanwhile."""


def write_folder(
    tree: Mapping[Any, Any], path: Path, *, step: int, job: str, remedy: Callable[[str], str] | str
) -> None:
    """Write a dict to a folder of this name, durable when it returns; what has the name keeps it until then.

    Args:
        tree: Nested dicts, lists and tuples of tensors and values.
        path: The folder.
        step: Of the checkpoint.
        job: What wrote it.
        remedy: As `take_apart`.

    Raises:
        UnsupportedStateError: A part cannot be held; names it. Nothing was written.
        ConfigError: The folder holds something else.
        StoreError, RootError: The disk is full or refuses; the folder is as it was.
    """
    parts = take_apart(tree, remedy)
    _refuse_foreign(path)
    if path.parent.is_dir():
        sweep(path.parent)
    nbytes = sum(tensor.nbytes for tensor in parts.tensors.values()) + _OVERHEAD_BYTES
    room = "free some room, or keep fewer checkpoints (save_top_k)"
    with replacing(path, nbytes=nbytes, force=True, is_ours=lambda _: True, remedy=room) as temporary:
        store = PosixStore(temporary)
        claim = Generation(number=1, token=secrets.token_hex(8), world_size=1, created_s=time.time())
        place = direct_writer.CheckpointSlot(claim=claim, step=step, world_size=1)
        rows = [_row(name, tensor) for name, tensor in parts.tensors.items()]
        direct_writer.write(store, place, 0, rows, parts.values, job=job)
        direct_writer.finish(store, place)


def _refuse_foreign(path: Path) -> None:
    foreign = [one.name for one in sorted(path.iterdir()) if not one.name.startswith(OURS)] if path.is_dir() else []
    if foreign:
        raise ConfigError(
            f"the folder {path} holds files that are no checkpoint of this kind, and saving would remove them",
            found=", ".join(foreign[:5]),
            state="It was left unchanged.",
            remedy="choose another name",
        )


def _row(name: str, tensor: torch.Tensor) -> direct_writer.StreamedRow:
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    shard = Shard(fqn=name, dtype=dtype, global_shape=shape, offsets=(0,) * len(shape), lengths=shape)

    def load() -> memoryview:
        return bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())

    return direct_writer.StreamedRow(shard=shard, read=direct_writer.held_while_read(load))


def read_folder(path: Path, *, device: Any = "cpu") -> dict[Any, Any]:
    """Return the dict that `write_folder` wrote, every digest verified.

    Raises:
        NoCheckpointError: There is no such folder, or no checkpoint of this kind.
        DamagedError, FormatVersionError: It is damaged, or newer than this program.
    """
    for again in range(_TRIES, 0, -1):
        before = _identity(path)
        try:
            return _read(path, device)
        except FlashckptError:
            if again == 1 or _identity(path) == before:  # else it was replaced while it was read
                raise
    raise AssertionError


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise NoCheckpointError(
            f"{path} does not exist", expected="a folder with a checkpoint", remedy="check the path"
        ) from None
    return found.st_dev, found.st_ino


def _read(path: Path, device: Any) -> dict[Any, Any]:
    if not path.is_dir():
        raise NoCheckpointError(
            f"{path} is a file, and checkpoints of this kind are folders",
            remedy="load it with the framework's own plugin; flashckpt reads no pickles here",
        )
    store = PosixStore(path)
    info = choose_checkpoint(store)
    manifest = read_manifest(store, info)
    if RECORD not in manifest.values:
        raise NoCheckpointError(
            f"{path} holds a checkpoint of another kind",
            found=f"written by {manifest.job!r}",
            remedy="read it with Checkpointer.restore() or FlashStorageReader",
        )
    try:
        tensors = {name: _empty(manifest, name) for name in manifest.table.fqns}
        source = StorageSource(store, manifest, info.prefix)
        execute_reads([Target(shard=shard, buffer=bytes_of(tensor)) for shard, tensor in tensors.values()], [source])
        return put_together(manifest.values, lambda name: tensors[name][1].to(device))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} cannot be put together", found=f"{type(error).__name__}: {error}", state="Nothing was loaded."
        ) from error


def _empty(manifest: Manifest, name: str) -> tuple[Shard, torch.Tensor]:
    table = manifest.table
    shard = table.shard(table.rows(name)[0])
    return shard, torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))


RECORD = "nested"
"""Key of the value that says which values are which members of the dict, in order, and the notes."""
_RESERVED = (RECORD, *RESERVED)
_ORDERED, _COUNTER, _SIZE, _PATH, _TENSOR = "ordered", "counter", "size", "path", "tensor"
_METADATA = "_metadata"  # what `Module.state_dict` hangs on its ordered dict: versions that `load_state_dict` reads
_AS_THEY_ARE = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)

Place = tuple[int, ...]
"""Where a part is: the number of the member at each level. Not its key, which may be of any type."""


@dataclass(kw_only=True)
class TakenApart:
    """A dict in pieces."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def take_apart(tree: Mapping[Any, Any], remedy: Callable[[str], str] | str) -> TakenApart:
    """Return a dict in pieces.

    Args:
        tree: Nested dicts, lists and tuples.
        remedy: What to do about a part that cannot be held; called with its place ("hyper_parameters.loss").

    Raises:
        UnsupportedStateError: A part cannot be held; names its place and its type.
    """
    walk, found, members = _Plain(remedy), TakenApart(), []
    for number, (key, item) in enumerate(tree.items()):
        name = key if _may_be_name(key) else f"member{number}"
        plain = walk.node(item, name, (number,), 1)
        skeleton, own = walk.flattened(plain, name)
        if not found.tensors.keys().isdisjoint(own):  # members "a" and "a.b": the same names inside
            skeleton, own = walk.flattened(plain, f"member{number}~{name}")
        found.values[name] = skeleton
        found.tensors |= own
        members.append([walk.checked_key(key, name), name])
    found.values[RECORD] = {"members": members, "notes": walk.notes}
    return found


def _may_be_name(key: Any) -> bool:
    usual = type(key) is str and key.isascii() and key.isprintable() and 0 < len(key) < 200 and "@" not in key
    return usual and key not in _RESERVED and not key.endswith(".groups") and not key.startswith("member")


class _Plain:
    """One dict that is being replaced by plain containers and tensors.

    Attributes:
        notes: [place, kind, more] of each part that is not what stands for it.
    """

    def __init__(self, remedy: Callable[[str], str] | str) -> None:
        self.notes: list[list[Any]] = []
        self._remedy = remedy
        self._views: dict[Any, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def node(self, node: Any, path: str, place: Place, depth: int) -> Any:  # noqa: PLR0911 -- one case per type
        kind = type(node)
        if kind in _AS_THEY_ARE:
            return node
        if depth > pytree.DEEPEST:
            self._refuse(path[:80] + "...", f"dicts, lists and tuples nested more than {pytree.DEEPEST} deep")
        if kind in (dict, collections.OrderedDict, collections.Counter):
            if kind is not dict:
                self._note_mapping(node, path, place)
            parts = enumerate(node.items())
            return {key: self.node(item, f"{path}.{key}", (*place, i), depth + 1) for i, (key, item) in parts}
        if kind in (list, tuple):
            return kind(self.node(item, f"{path}.{i}", (*place, i), depth + 1) for i, item in enumerate(node))
        if kind is torch.Size:
            return self._note(place, _SIZE, tuple(node))
        if isinstance(node, torch.Tensor):
            return self._tensor(node, path, place)
        if kind is pathlib.PosixPath:
            return self._note(place, _PATH, str(node))
        if isinstance(node, (np.ndarray, np.generic)) or kind is io.BytesIO:
            return node  # `pytree` takes them exactly, or refuses
        return self._refuse(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _note(self, place: Place, kind: str, plain: Any, more: Any = None) -> Any:
        self.notes.append([list(place), kind, more])
        return plain

    def _note_mapping(self, node: Any, path: str, place: Place) -> None:
        more, attributes = None, vars(node)
        if unknown := [name for name in attributes if name != _METADATA or type(node) is collections.Counter]:
            self._refuse(f"{path}.{unknown[0]}", "an attribute of a dict")
        if _METADATA in attributes:
            inner = take_apart({_METADATA: attributes[_METADATA]}, self._remedy)
            if inner.tensors:
                self._refuse(f"{path}.{_METADATA}", "tensors in an attribute of a dict")
            more = inner.values
        self._note(place, _COUNTER if type(node) is collections.Counter else _ORDERED, None, more)

    def _tensor(self, tensor: torch.Tensor, path: str, place: Place) -> torch.Tensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_meta or tensor.is_nested or dtype not in ITEMSIZE:
            found = f"a {type(tensor).__name__} of dtype {dtype}, {tensor.layout}, on {tensor.device}"
            self._refuse(path, found, "a dense tensor with its values")
        more: dict[str, Any] = {}
        if isinstance(tensor, torch.nn.Parameter):
            more["parameter"] = True
        if tensor.requires_grad:
            more["requires_grad"] = True
        if not tensor.is_contiguous() and _is_dense(tensor):
            more["strides"] = list(tensor.stride())
        if more:
            self._note(place, _TENSOR, None, more)
        return self._once(tensor)

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one tensor for all that are the same part of the same memory: tied weights."""
        self._kept.append(tensor)  # else its address could be another's
        seen = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return self._views.setdefault(seen if tensor.numel() else id(tensor), tensor.detach())

    def flattened(self, plain: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
        try:
            return pytree.flatten(plain, name)
        except UnsupportedStateError as error:
            path = error.problem.removeprefix("the value of ").partition(" cannot be held")[0].strip("'\"")
            return self._refuse(path, error.found, error.expected)  # type: ignore[no-any-return]  # it raises

    def checked_key(self, key: Any, name: str) -> Any:
        """Return a key of the dict itself, if it can be held."""
        self.flattened({key: None}, name)
        return key

    def _refuse(self, path: str, found: str, expected: str = "") -> Any:
        raise UnsupportedStateError(
            f"the value of {path!r} cannot be held in a checkpoint",
            found=found,
            expected=expected
            or "tensors, numpy arrays, None, bool, int, float, str, bytes, paths, or dicts, lists and tuples of them",
            state="Nothing was written.",
            remedy=self._remedy if isinstance(self._remedy, str) else self._remedy(path),
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, each once, in whatever order of the dimensions (channels last)."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def put_together(values: Mapping[str, Any], tensor: Callable[[str], torch.Tensor]) -> dict[Any, Any]:
    """Return the dict that `take_apart` took apart.

    Raises:
        FormatVersionError: A note is of a kind that is not known here.
    """
    record = values[RECORD]
    notes = {tuple(place): (kind, more) for place, kind, more in record["notes"]}
    names = [name for _, name in record["members"]]
    parts = pytree.unflatten([values[name] for name in names], tensor)  # at once: a tensor in two members stays one
    items = [_exact(part, (number,), notes) for number, part in enumerate(parts)]
    return {key: item for (key, _), item in zip(record["members"], items, strict=True)}


def _exact(node: Any, place: Place, notes: Mapping[Place, tuple[str, Any]]) -> Any:
    if type(node) is dict:
        node = {key: _exact(item, (*place, i), notes) for i, (key, item) in enumerate(node.items())}
    elif type(node) in (list, tuple):
        node = type(node)(_exact(item, (*place, i), notes) for i, item in enumerate(node))
    if place not in notes:
        return node
    kind, more = notes[place]
    if kind == _ORDERED:
        node = collections.OrderedDict(node)
        if more is not None:
            node._metadata = put_together(more, _no_tensor)[_METADATA]  # noqa: SLF001 -- the name is torch's
        return node
    if kind == _TENSOR:
        return _exact_tensor(node, more)
    makers: dict[str, Callable[[Any], Any]] = {
        _COUNTER: collections.Counter, _SIZE: torch.Size, _PATH: pathlib.Path,
    }  # fmt: skip
    if kind not in makers:
        raise FormatVersionError(
            f"the checkpoint has a part of the kind {kind!r}, which this version does not know",
            remedy="read it with a newer flashckpt",
        )
    return makers[kind](node)


def _no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)


def _exact_tensor(tensor: torch.Tensor, more: Mapping[str, Any]) -> torch.Tensor:
    if "strides" in more:
        laid = torch.empty_strided(tuple(tensor.shape), more["strides"], dtype=tensor.dtype, device=tensor.device)
        tensor = laid.copy_(tensor)
    needs_grad = bool(more.get("requires_grad"))
    if more.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=needs_grad)
    return tensor.detach().requires_grad_(needs_grad)
