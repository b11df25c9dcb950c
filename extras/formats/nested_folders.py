"""A nested dict in a folder: written whole or not at all, read back exactly. What a framework's plugin stores.

The folder is a root with one committed checkpoint, so `flashckpt inspect`, `verify` and `export` read it. It is written
under a temporary name and renamed when everything is durable; a folder that is replaced changes names with it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flashckpt.checkpoint import direct_writer
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.choice import OURS, choose_checkpoint
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, NoCheckpointError
from flashckpt.interop import nested_state
from flashckpt.interop.target import replacing, sweep
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.live_memory import bytes_of
from flashckpt.restore.sources import StorageSource
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
        remedy: As `nested_state.take_apart`.

    Raises:
        UnsupportedStateError: A part cannot be held; names it. Nothing was written.
        ConfigError: The folder holds something else.
        StoreError, RootError: The disk is full or refuses; the folder is as it was.
    """
    parts = nested_state.take_apart(tree, remedy)
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
    if nested_state.RECORD not in manifest.values:
        raise NoCheckpointError(
            f"{path} holds a checkpoint of another kind",
            found=f"written by {manifest.job!r}",
            remedy="read it with Checkpointer.restore() or FlashStorageReader",
        )
    try:
        tensors = {name: _empty(manifest, name) for name in manifest.table.fqns}
        source = StorageSource(store, manifest, info.prefix)
        execute_reads([Target(shard=shard, buffer=bytes_of(tensor)) for shard, tensor in tensors.values()], [source])
        return nested_state.put_together(manifest.values, lambda name: tensors[name][1].to(device))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} cannot be put together", found=f"{type(error).__name__}: {error}", state="Nothing was loaded."
        ) from error


def _empty(manifest: Manifest, name: str) -> tuple[Shard, torch.Tensor]:
    table = manifest.table
    shard = table.shard(table.rows(name)[0])
    return shard, torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))


__all__ = ["read_folder", "write_folder"]
