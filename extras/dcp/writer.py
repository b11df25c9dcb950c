"""`FlashStorageWriter`: what `dcp.save` and `dcp.async_save` write through."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.retention import Policy, prune
from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.dcp import contents, direct_writer, names
from flashckpt.errors import ConfigError, FlashckptError, UnsupportedStateError
from flashckpt.restore.live_memory import bytes_of
from flashckpt.state.placement import dtype_name
from flashckpt.storage.factory import open_in_rank
from flashckpt.storage.store import Store

_log = logging.getLogger("flashckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What the coordinator sends to every rank inside the plan.

    Attributes:
        place: Folder and generation of this save.
        rank: Of the writer among those that save.
        labels: Top-level names of optimizers.
        paths: Places in the nested state dict that are not the default; {} but for rank 0.
    """

    place: direct_writer.CheckpointSlot
    rank: int
    labels: list[str]
    paths: dict[str, names.Path]


class FlashStorageWriter(StorageWriter):
    """Writes checkpoints that `flashckpt` commands, `Checkpointer` and `FlashStorageReader` read.

    Packs with digests, durable one by one; then MANIFEST by one conditional write, so that a crash leaves nothing
    visible. Non-tensor values are kept as msgpack types, never pickled; anything else is refused by its key.

    Args:
        root: A directory, s3://bucket/run, gs://...
        step: Number of the checkpoint; None takes the one after the newest on the root (1 on an empty one).
            `dcp.save(checkpoint_id=...)` gives a step too.
        overwrite: False: refuse a save where a checkpoint is already, of this step or, without a step, of any. True saves
            beside it, as a newer generation or the next step: nothing is overwritten either way.
        storage_options: As `Checkpointer`.
        keep_last, keep_every: Retention after each commit; None for `keep_last` deletes nothing.

    Attributes:
        place: Folder of the last save of this object (on the coordinator); `place.prefix` is its folder.
        save_id: Name of the save that is next or under way.
        checkpoint_id: The root, or what `dcp.save(checkpoint_id=...)` was given.

    Raises:
        ConfigError: The step is not a number.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        step: int | None = None,
        overwrite: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        self.root = os.fspath(root)
        self.checkpoint_id: str | os.PathLike[str] = self.root
        self.overwrite = overwrite
        self._step = None if step is None else parse_step(step)[0]
        self._options = dict(storage_options or {})
        self._policy = Policy(keep_last=keep_last, keep_every=keep_every)
        self.place: direct_writer.CheckpointSlot | None = None
        self.save_id = uuid.uuid4().hex

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step from `dcp.save(checkpoint_id=...)`."""
        if checkpoint_id is not None:
            self._step = parse_step(checkpoint_id)[0]
            self.checkpoint_id = checkpoint_id
        self.save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta:
        """Return what the caller named and the name of this save; the reader gives that of the coordinator."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a step."""
        return is_step(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what would write one checkpoint per rank."""
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "the ranks of a FlashStorageWriter must agree on one checkpoint",
                found="use_collectives=False",
                remedy="leave use_collectives out, or save per rank with no_dist=True and a root for each",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse by key, before anything is written, tensors that cannot be held."""
        for item in plan.items:
            if item.tensor_data is not None:
                _dtype(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the place of this save (coordinator only) and tell it to every rank.

        Raises:
            ConfigError: With `overwrite=False`, there is one already; or a plan is cached.
        """
        if not all(plan.usable for plan in plans):
            raise ConfigError(
                "cached plans cannot be used with FlashStorageWriter: a plan contains the place of its checkpoint",
                remedy="use DefaultSavePlanner(enable_plan_caching=False), which is the default",
            )
        items = (item for plan in plans for item in plan.items if item.type == WriteItemType.BYTE_IO)
        labels = names.optimizer_labels(item.index.fqn for item in items)
        paths: dict[str, names.Path] = {}
        for plan in plans:
            paths |= plan.planner_data if isinstance(plan.planner_data, dict) else {}
        odd = {key: path for key, path in paths.items() if path != names.default_path(key, labels)}
        store = self._open()
        try:
            store.check(write=True)
            self._refuse_existing(store)  # before a claim, which would fence another saver off for nothing
            self.place = direct_writer.begin(store, self._step, world_size=len(plans))
            self._refuse_existing(store)  # again: who commits from now on has a later claim, and fences this save off
        finally:
            store.close()
        return [
            replace(plan, storage_data=_Task(place=self.place, rank=rank, labels=labels, paths={} if rank else odd))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream this rank's items into packs, one tensor at a time; write the index."""
        task: _Task = plan.storage_data
        rows = [_row(item, planner, task.labels) for item in plan.items if item.type != WriteItemType.BYTE_IO]
        values, loose = _values(plan, planner, task, self.save_id)
        rows += [_row_of(key, tensor) for key, tensor in loose.items()]
        store = self._open()
        try:
            direct_writer.write(store, task.place, task.rank, rows, values, job="dcp")
        finally:
            store.close()
        results = [WriteResult(index=item.index, size_in_bytes=_size(item), storage_data=None) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit (coordinator only): MANIFEST by one conditional write, then retention."""
        del metadata, results
        assert self.place is not None
        store = self._open()
        try:
            direct_writer.finish(store, self.place)
            _log.info("dcp: step %d is committed as %s in %s", self.place.step, self.place.prefix, store.url)
            self._prune(store)
        finally:
            store.close()

    def _refuse_existing(self, store: Store) -> None:
        if self.overwrite:
            return
        found = [one for one in list_checkpoints(store, damaged=True) if self._step in {None, one.step}]
        if found:
            place = store.url if self._step is None else f"step {self._step} of {store.url}"
            raise ConfigError(
                "overwrite=False: Checkpoint already exists",  # with torch's words: loops and tests look for them
                found=f"{place} has {found[0].prefix.rstrip('/')}",
                state="Nothing was written.",
                remedy="name another step or root, or leave overwrite out: a save never replaces another",
            )

    def _prune(self, store: Store) -> None:
        if self._policy.keep_last is None:
            return
        try:
            prune(store, self._policy)
        except (FlashckptError, OSError) as error:  # the checkpoint is safe; the next save tries again
            _log.warning("older checkpoints of %s were not removed: %s", store.url, str(error).splitlines()[0])

    def _open(self) -> Store:
        return open_in_rank(self.root, self._options)


def parse_step(text: object) -> tuple[int, int | None]:
    """Return (step, generation or None) of 120, "120", "120.g3" or "step-000000120.g3"; ConfigError for anything else."""
    word = str(text).rpartition("/")[2].removeprefix("step-")
    number, dot, generation = word.partition(".g")
    if not number.isdigit() or (dot and not generation.isdigit()):
        raise ConfigError("a checkpoint of flashckpt is named by its step", found=str(text), expected="120 or 120.g3")
    return int(number), int(generation) if dot else None


def is_step(text: object) -> bool:
    """Return whether `parse_step` takes it."""
    try:
        parse_step(text)
    except ConfigError:
        return False
    return True


def _dtype(item: WriteItem) -> str:
    assert item.tensor_data is not None
    properties = item.tensor_data.properties
    name = str(properties.dtype).removeprefix("torch.")
    if name not in ITEMSIZE or properties.layout != torch.strided:
        raise UnsupportedStateError(
            f"the tensor {item.index.fqn!r} cannot be held in a checkpoint",
            found=f"dtype {properties.dtype}, layout {properties.layout}",
            expected="a strided tensor of one of: " + ", ".join(ITEMSIZE),
            state="Nothing was written.",
            remedy="convert it before the save, or leave the key out of the state dict",
        )
    return name


def _row(item: WriteItem, planner: SavePlanner, labels: Iterable[str]) -> direct_writer.StreamedRow:
    data = item.tensor_data
    assert data is not None
    shard = Shard(
        fqn=names.to_ours(item.index.fqn, labels),
        dtype=_dtype(item),
        global_shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        lengths=tuple(data.chunk.sizes),
    )

    def load() -> memoryview:
        tensor: Any = planner.resolve_data(item)
        dtype_name(item.index.fqn, tensor)
        return _bytes_in_host(tensor, shard)

    return direct_writer.StreamedRow(shard=shard, read=direct_writer.held_while_read(load))


def _bytes_in_host(tensor: torch.Tensor, shard: Shard) -> memoryview:
    found = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tuple(found.shape) != shard.lengths or str(found.dtype) != f"torch.{shard.dtype}":
        raise UnsupportedStateError(
            f"the planner gives other data for {shard.fqn!r} than it planned",
            found=f"{found.dtype} of shape {list(found.shape)}",
            expected=f"torch.{shard.dtype} of shape {list(shard.lengths)}",
            state="Nothing was committed.",
        )
    return bytes_of(found)


def _row_of(key: str, tensor: torch.Tensor) -> direct_writer.StreamedRow:
    shape = tuple(tensor.shape)
    dtype = dtype_name(key, tensor)
    shard = Shard(fqn=key, dtype=dtype, global_shape=shape, offsets=(0,) * len(shape), lengths=shape)
    view = _bytes_in_host(tensor, shard)
    return direct_writer.StreamedRow(shard=shard, read=lambda start, stop: view[start:stop])


def _values(
    plan: SavePlan, planner: SavePlanner, task: _Task, save_id: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return this rank's non-tensor state: dcp's leaves by name, and the same as a Checkpointer would have it."""
    leaves: dict[str, Any] = {}
    loose: dict[str, torch.Tensor] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            key = item.index.fqn
            leaves[key], own = contents.take_apart(_look_up(planner, item), key)
            loose |= own
    values: dict[str, Any] = {}
    state, paths = getattr(planner, "state_dict", None), getattr(planner, "mappings", None)
    if isinstance(state, dict) and isinstance(paths, dict) and state.keys() <= paths.keys():
        values = contents.values_for_checkpointer(state, paths, task.labels)
    if leaves or not task.rank:
        values[contents.RECORD] = {
            "labels": task.labels,
            "values": leaves,
            "paths": {key: list(path) for key, path in task.paths.items()},
            **({} if task.rank else {"save_id": save_id}),
        }
    return values, loose


def _look_up(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the object itself: `resolve_data` would give it pickled."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise UnsupportedStateError(
            f"the value of {item.index.fqn!r} cannot be saved with this planner",
            found=f"{type(planner).__qualname__} has no lookup_object(), only bytes that it serialised itself",
            expected="DefaultSavePlanner or a subclass of it",
            state="Nothing was written.",
            remedy="derive the planner from DefaultSavePlanner, or leave non-tensor values out of the state dict",
        )
    return look_up(item.index)


def _size(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
