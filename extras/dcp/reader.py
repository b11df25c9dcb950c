"""`FlashStorageReader`: what `dcp.load` reads through, for any checkpoint of ours."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from flashckpt.checkpoint.catalog import CheckpointInfo, read_manifest
from flashckpt.checkpoint.choice import choose_checkpoint
from flashckpt.checkpoint.retention import reading
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.dcp.contents import Contents, contents_of
from flashckpt.dcp.writer import is_step, parse_step
from flashckpt.errors import ConfigError, DisagreementError
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.live_memory import bytes_of
from flashckpt.restore.sources import StorageSource
from flashckpt.state import pytree
from flashckpt.storage.factory import open_in_rank
from flashckpt.storage.store import Store

BATCH_BYTES = 256 << 20
"""Bytes that are read at a time: bounds the buffers of tensors that cannot be read into directly."""


class FlashStorageReader(StorageReader):
    """Reads any checkpoint of a root, resharded by dcp's planner: by byte range, every digest verified.

    Args:
        root: The root of `FlashStorageWriter` or `Checkpointer`.
        step: Which checkpoint; None takes the newest that no later run rolled back.
        generation: Only of this generation, where a step exists twice.
        storage_options: As `Checkpointer`.

    Attributes:
        step, generation: Of the checkpoint that was read last.
        checkpoint_id: The root, or what `dcp.load(checkpoint_id=...)` was given.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        step: int | None = None,
        generation: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = os.fspath(root)
        self.checkpoint_id: str | os.PathLike[str] = self.root
        self._wanted = step, generation
        self._options = dict(storage_options or {})
        self.step: int | None = None
        self.generation: int | None = None
        self._info: CheckpointInfo | None = None
        self._contents = Contents()
        self.load_id = uuid.uuid4().hex

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take step and generation from `dcp.load(checkpoint_id=...)`."""
        if checkpoint_id is not None:
            self._wanted = parse_step(checkpoint_id)
            self.checkpoint_id = checkpoint_id
        self.load_id = uuid.uuid4().hex

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a step."""
        return is_step(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Choose the checkpoint and return what it holds in dcp's words.

        Raises:
            NoCheckpointError: There is none, or not the wanted one.
            DamagedError: The wanted one, or every one, is damaged.
        """
        del args, kwargs
        store = self._open()
        try:
            store.check(write=False)
            self._info = choose_checkpoint(store, *self._wanted)
            manifest = read_manifest(store, self._info)
        finally:
            store.close()
        self.generation, self.step = self._info.identity
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._contents = contents_of(manifest, rank)
        return Metadata(
            {key: _tensor_metadata(manifest, name) for key, name in self._contents.tensors.items()}
            | {key: BytesStorageMetadata() for key in self._contents.values},
            planner_data=dict(self._contents.paths),
            version="1.0.0",
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id,
                save_id=self._contents.save_id or self._info.prefix.rstrip("/"),
                load_id=self.load_id,
            ),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept open between planning and reading."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say in the plan which checkpoint this rank has chosen."""
        plan.storage_data = (self.generation, self.step)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse a load where ranks have chosen different checkpoints (coordinator only)."""
        chosen = sorted({plan.storage_data for plan in plans})
        if len(chosen) > 1:
            raise DisagreementError(
                "ranks found different newest checkpoints: one was committed while they looked",
                found=", ".join(f"step {step} of generation {generation}" for generation, step in chosen),
                state="Nothing was loaded.",
                remedy=f"load again, or name the step: FlashStorageReader(root, step={chosen[-1][1]})",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and values of this rank.

        Raises:
            DamagedError: Bytes do not match their digest; the state dict must not be used.
        """
        assert self._info is not None
        store = self._open()
        try:
            with reading(store, self._info.prefix) as manifest:
                source = StorageSource(store, manifest, self._info.prefix)
                for item in plan.items:
                    if item.type == LoadItemType.BYTE_IO:
                        _set_value(planner, item, self._value(item, source))
                tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
                for batch in _batches(tensors):
                    _read_batch(batch, planner, source, self._contents)
        finally:
            store.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _value(self, item: ReadItem, source: StorageSource) -> Any:
        skeleton = self._contents.values[item.storage_index.fqn]
        return pytree.unflatten(skeleton, lambda name: whole_tensor(source, name))

    def _open(self) -> Store:
        return open_in_rank(self.root, self._options)


def _tensor_metadata(manifest: Manifest, name: str) -> TensorStorageMetadata:
    table = manifest.table
    shards = [table.shard(row) for row in table.rows(name)]
    chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.lengths)) for s in shards]
    properties = TensorProperties(dtype=getattr(torch, shards[0].dtype))
    return TensorStorageMetadata(properties, torch.Size(shards[0].global_shape), chunks)


def whole_tensor(source: StorageSource, name: str) -> torch.Tensor:
    """Return one whole tensor of a checkpoint in host memory, its digests verified."""
    table = source.manifest.table
    shard = table.shard(table.rows(name)[0])
    shape = shard.global_shape
    tensor = torch.empty(shape, dtype=getattr(torch, shard.dtype))
    whole = Shard(fqn=name, dtype=shard.dtype, global_shape=shape, offsets=(0,) * len(shape), lengths=shape)
    execute_reads([Target(shard=whole, buffer=bytes_of(tensor))], [source])
    return tensor


def _batches(items: Sequence[ReadItem]) -> Iterator[list[ReadItem]]:
    batch: list[ReadItem] = []
    nbytes = 0
    for item in items:
        size = item.lengths.numel() * 8  # the widest common element: a bound
        if batch and nbytes + size > BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch


def _read_batch(items: Sequence[ReadItem], planner: LoadPlanner, source: StorageSource, held: Contents) -> None:
    targets: list[Target] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    filled: list[tuple[ReadItem, torch.Tensor]] = []
    for item in items:
        live = planner.resolve_tensor(item).detach()
        table = source.manifest.table
        name = held.tensors[item.storage_index.fqn]
        known = table.shard(table.rows(name)[0])
        starts = item.storage_index.offset or (0,) * len(item.lengths)
        shard = Shard(
            fqn=name,
            dtype=known.dtype,
            global_shape=known.global_shape,
            offsets=tuple(a + b for a, b in zip(starts, item.storage_offsets, strict=True)),
            lengths=tuple(item.lengths),
        )
        into = live
        dtype = getattr(torch, known.dtype)
        if live.dtype != dtype or live.device.type != "cpu" or not live.is_contiguous() or live.is_conj():
            into = torch.empty(tuple(item.lengths), dtype=dtype)
            copies.append((live, into))
        targets.append(Target(shard=shard, buffer=bytes_of(into)))
        filled.append((item, live))
    execute_reads(targets, [source])
    with torch.no_grad():
        for live, staged in copies:
            live.copy_(staged)
    for item, live in filled:
        planner.commit_tensor(item, live)


def _set_value(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Put a value where the planner's own `load_bytes` would put what it unpickles."""
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        raise ConfigError(
            f"the value of {item.dest_index.fqn!r} cannot be loaded with this planner",
            found=f"{type(planner).__qualname__} unpickles values itself; flashckpt holds none that are pickled",
            expected="DefaultLoadPlanner, or a subclass that leaves load_bytes() alone",
            state="The state dict may hold some loaded values already.",
        )
    if not planner.flatten_state_dict:
        planner.state_dict[item.dest_index.fqn] = value
        return
    from torch.distributed.checkpoint._traverse import set_element

    set_element(planner.original_state_dict, planner.mappings[item.dest_index.fqn], value)
