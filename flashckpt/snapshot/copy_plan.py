"""Where every byte of a structure goes: made once per structure, ahead of the first snapshot where that can be."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from flashckpt.core.manifest import ShardTable, encode_table
from flashckpt.core.shard import layout_hash, place
from flashckpt.snapshot.copy import Item, StalePlanError, item_of, stale_plan
from flashckpt.snapshot.segments import MemoryNeed, manifest_room
from flashckpt.state.deferred_optimizer import is_like
from flashckpt.state.placement import local_of
from flashckpt.state.structure import Structure

_VERSION = operator.attrgetter("_version")  # the only counter torch has
_FORM = operator.attrgetter("dtype", "shape")
_FORMS_AT_A_TIME = 1024  # looked at without letting training have the interpreter


class CopyPlan:
    """Where every row of a structure goes: made once per structure, then only read.

    Args:
        structure: What is to be copied.
        stand_ins: Tensors in it that stand for optimizer state that does not exist yet (`tracking.ahead`).

    Attributes:
        structure: What it was made for.
        signature: u64 layout hash of its rows.
        total: Bytes of the data area.
        end: Byte behind the last one that a copy writes; checked against the slot before the first copy.
        unfenced: Items copied before `step()` returns.
        fresh: The same, of tensors that objects give out anew each time.
        fenced: Items copied beside the next forward/backward, host memory only.
        device, device_unfenced: The same for tensors on an accelerator.
        rows_compared: First digests of what should change from step to step.
        is_stale: A snapshot found that a tensor has another shape or storage now.
        watched: Local tensors whose version counters prove the fence, with their names.
        awaits: It has stand-ins, and nothing can be copied before `take_in`.
    """

    def __init__(self, structure: Structure, stand_ins: Sequence[torch.Tensor] = ()) -> None:
        self.structure, self.is_stale = structure, False
        shards = structure.shards
        placement = place(shards)
        self.signature, self.total = layout_hash(shards), placement.total
        self.table = ShardTable.from_shards(shards, placement.offsets)
        self.table_bytes = encode_table(self.table)
        places = zip(
            placement.offsets.tolist(), self.table.nbytes.tolist(), self.table.first_chunk.tolist(), strict=True
        )
        items = [item_of(row, *place_) for row, place_ in zip(structure.rows, places, strict=True)]
        self.end = max((i.offset + i.nbytes for i in items), default=0)
        host = [i for i in items if i.is_host]
        fresh = structure.fresh
        self.fresh = [i for i in items if i.row.entry.fqn in fresh]
        loose = [i for i in items if not i.row.entry.fenced and i.row.entry.fqn not in fresh]
        self.unfenced = [i for i in loose if i.is_host]
        self.device_unfenced = [i for i in loose if not i.is_host]
        self.fenced = sorted((i for i in host if i.row.entry.fenced), key=lambda item: item.offset)
        self.device = [i for i in items if i.row.entry.fenced and not i.is_host]
        self.uses_device = bool(self.device or self.device_unfenced)
        self.rows_compared = np.array([i.first_chunk for i in items if i.row.entry.fenced and i.nbytes], np.int64)
        watched = {id(i.row.entry.tensor): i.row.entry for i in [*self.fenced, *self.device]}
        awaited = [watched.pop(id(tensor)) for tensor in stand_ins]
        self.watched = [entry.local for entry in watched.values()]
        self.watched_names = [entry.fqn for entry in [*watched.values(), *awaited]]
        self.awaits, self._stand_ins = bool(stand_ins), stand_ins
        self._taken_in: Sequence[torch.Tensor] = ()
        self._runs: list[tuple[list[torch.Tensor], list[tuple[torch.dtype, torch.Size]], list[Item]]] = []
        self._has_dtensors = any(isinstance(tensor, DTensor) for tensor in stand_ins)

    def take_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the tensors that exist now take the place of the stand-ins, in their order; the copy thread checks them."""
        self.watched += map(local_of, tensors) if self._has_dtensors else tensors
        self.awaits, self._taken_in = False, tensors

    def settle(self) -> None:
        """Give the items what was taken in; in the copy thread, before anything is read.

        Raises:
            StalePlanError: A tensor has another form than was predicted.
        """
        stand_ins, tensors, self._stand_ins, self._taken_in = self._stand_ins, self._taken_in, (), ()
        if not tensors:
            return
        places: dict[int, torch.Tensor] = {}
        for stand_in, tensor in zip(stand_ins, tensors, strict=True):
            places[id(stand_in)] = tensor
            if not is_like(tensor, stand_in):
                raise StalePlanError(
                    "an optimizer made its state in another form than was planned ahead",
                    found=f"{type(tensor).__name__} of {tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}",
                    expected=f"{type(stand_in).__name__} of {stand_in.dtype}, shape {tuple(stand_in.shape)}, on {stand_in.device}",
                    state="That snapshot was discarded; the next one is planned anew.",
                )
        for item in chain(self.fenced, self.device):
            if (found := places.get(id(item.row.entry.tensor))) is not None:
                item.local = local_of(found)

    def check_forms(self) -> None:
        """Check that what is copied by its address is of the planned dtypes and shapes; in the copy thread.

        `p.data = ...` changes neither the parameter's identity nor its version: the bytes fit, and mean something else.

        Raises:
            StalePlanError: A tensor is of another form now.
        """
        if not self._runs:
            items = [i for i in chain(self.fenced, self.unfenced) if i.start >= 0]
            parts = (items[first : first + _FORMS_AT_A_TIME] for first in range(0, len(items), _FORMS_AT_A_TIME))
            self._runs = [([i.local for i in part], [(i.dtype, i.shape) for i in part], part) for part in parts]
        for tensors, forms, part in self._runs:
            if list(map(_FORM, tensors)) != forms:
                raise next(stale_plan(i, i.local) for i in part if _FORM(i.local) != (i.dtype, i.shape))

    def need(self, value_bytes: int) -> MemoryNeed:
        """Return what a slot for this plan and about `value_bytes` of non-tensor state needs."""
        manifest = manifest_room(self.table, len(self.table_bytes), value_bytes)
        return MemoryNeed(layout=self.signature, data_bytes=self.total, manifest_bytes=manifest)

    def versions(self) -> list[int]:
        """Return the version counters of all fenced tensors."""
        return list(map(_VERSION, self.watched))

    def changed(self, before: Sequence[int]) -> list[str]:
        """Return the names of fenced tensors whose counters differ from `before`."""
        now = self.versions()
        if now == before:
            return []
        return [name for name, a, b in zip(self.watched_names, before, now, strict=True) if a != b]
