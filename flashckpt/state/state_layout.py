"""From live objects to a structure, and where every byte of it is in a slot: computed once per structure."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, count, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.core.manifest import ShardTable, encode_table
from flashckpt.core.shard import ITEMSIZE, Shard, hash_rows, hashed_part, layout_hash, place, place_sizes
from flashckpt.core.shard_table import first_chunks
from flashckpt.planning.write_partition import WritePart, WriteShare, cut_dimension, partition_writes
from flashckpt.state import optimizer_state
from flashckpt.state.box_sets import BoxSet, BoxSets, first_alike
from flashckpt.state.module_tensors import ModuleTensors, two_of_one_name
from flashckpt.state.optimizer_entries import NamedParameters, OptimizerEntries, StateColumns
from flashckpt.state.optimizer_state import DeferredState
from flashckpt.state.parts import Parts, PartSets
from flashckpt.state.placement import (
    LocalBox,
    Replication,
    World,
    dtensor,
    shard_of,
    spread_of_dtensor,
    spread_of_plain,
)
from flashckpt.state.structure import Captured, StateForecast, Structure, arranged

MANIFEST_SLACK_BYTES = 256 << 10
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What one slot of a rank needs.

    Attributes:
        layout: u64 layout hash; names the segment.
        data_bytes: Bytes of the data area.
        manifest_bytes: Bytes of the manifest area.
    """

    layout: int
    data_bytes: int
    manifest_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, its header page included, and a share of the superblock."""
        return self.data_bytes + self.manifest_bytes + 3 * 4096

    def with_room(self, nbytes: int) -> MemoryNeed:
        """Return the same need with more bytes in the data area, for state that grows."""
        return replace(self, data_bytes=self.data_bytes + nbytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateLayout:
    """A structure and the places of its bytes. Immutable: another structure has another layout.

    Attributes:
        structure: What it is the layout of.
        table: The rows, with their offsets in the data area.
        total: Bytes of the data area.
        row_tensors: np.int64[rows]; the place in the structure of each row's tensor.
        row_boxes: np.int64[rows]; the place in `boxes` of each row's box.
        boxes: The boxes that occur.
        hashed: What the layout hash takes of each box.
    """

    structure: Structure
    table: ShardTable
    total: int
    row_tensors: Ints
    row_boxes: Ints
    boxes: Sequence[LocalBox]
    hashed: Sequence[bytes]

    @classmethod
    def of(cls, structure: Structure) -> StateLayout:
        """Compute the layout of a structure."""
        pieces = _Pieces(structure.box_sets)
        counts = pieces.counts[structure.sets]
        tensors = np.repeat(np.arange(len(structure.names)), counts)
        rows = ranges(pieces.starts[structure.sets], counts)
        placement = place_sizes(pieces.nbytes[rows])
        table = _table(structure, tensors, pieces, rows, placement.offsets)
        return cls(
            structure=structure,
            table=table,
            total=placement.total,
            row_tensors=tensors,
            row_boxes=rows,
            boxes=pieces.boxes,
            hashed=pieces.hashed,
        )

    def with_tensors(self, structure: Structure) -> StateLayout:
        """Return the layout of a structure that has other tensors of the same names and boxes."""
        found = replace(self, structure=structure)
        known = {"table_bytes", "signature"} & self.__dict__.keys()
        found.__dict__.update({name: self.__dict__[name] for name in known})
        return found

    @cached_property
    def table_bytes(self) -> bytes:
        """The table as every manifest of this structure has it: made where somebody asks, as a restore need not."""
        return encode_table(self.table)

    @cached_property
    def signature(self) -> int:
        """u64 layout hash of the rows."""
        fqns = self.structure.names
        if len(self.row_tensors) != len(fqns) or bool((np.diff(self.row_tensors) != 1).any()):
            fqns = [fqns[at] for at in self.row_tensors.tolist()]
        return hash_rows(fqns, self.hashed, self.row_boxes)

    def need(self, value_bytes: int) -> MemoryNeed:
        """Return what a slot needs for this structure, its forecast, and about `value_bytes` of non-tensor state."""
        layout = self._with_forecast
        room = manifest_room(layout.table, len(layout.table_bytes), value_bytes)
        return MemoryNeed(layout=layout.signature, data_bytes=layout.total, manifest_bytes=room)

    def places(self, rows: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the places of the tensors and of the boxes of `rows`."""
        numbers = np.fromiter(rows, np.int64)
        return self.row_tensors[numbers].tolist(), self.row_boxes[numbers].tolist()

    @cached_property
    def _with_forecast(self) -> StateLayout:
        return StateLayout.of(self.structure.with_forecast()) if self.structure.forecast else self

    @property
    def reserved(self) -> ShardTable:
        """The rows together with the forecast."""
        return self._with_forecast.table


class _Pieces:
    """The boxes of all kinds of tensors one after another, as columns."""

    def __init__(self, box_sets: Sequence[BoxSet]) -> None:
        boxes = [(one.dtype, box) for one in box_sets for box in one.boxes]
        self.boxes = [box for _, box in boxes]
        self.counts = np.array([len(one.boxes) for one in box_sets], np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.dtypes = [dtype for dtype, _ in boxes]
        self.nbytes = np.array([math.prod(box.lengths) * ITEMSIZE[dtype] for dtype, box in boxes], np.int64)
        self.ndim = np.array([len(box.lengths) for box in self.boxes], np.uint8)
        self.replica = np.array([box.replica for box in self.boxes], np.int32)
        self.hashed = [hashed_part(shard_of("", dtype, box)) for dtype, box in boxes]

    def dims(self, rows: Ints) -> dict[str, Ints]:
        """Return shapes, offsets and lengths of the boxes of `rows`, the numbers of one row behind those of another."""
        ndim = self.ndim.astype(np.int64)
        which = ranges((np.cumsum(ndim) - ndim)[rows], ndim[rows])
        found = {}
        for name in ("global_shape", "offsets", "lengths"):
            every = chain.from_iterable(map(operator.attrgetter(name), self.boxes))
            found[name] = np.fromiter(every, np.int64)[which]
        return found


def _table(structure: Structure, tensors: Ints, pieces: _Pieces, rows: Ints, offsets: Ints) -> ShardTable:
    names = unique = list(structure.names)
    of_tensor = np.arange(len(names))
    if structure.first_double is not None:
        unique = list(dict.fromkeys(names))
        numbers = {name: number for number, name in enumerate(unique)}
        of_tensor = np.array([numbers[name] for name in names], np.int64)
    kinds = list(dict.fromkeys(pieces.dtypes))
    codes = np.array([kinds.index(dtype) for dtype in pieces.dtypes], np.int64)[rows]
    occurring, firsts = np.unique(codes, return_index=True)
    in_order = occurring[np.argsort(firsts)]  # of first appearance, as the format says
    numbered = np.zeros(len(kinds), np.uint8)
    numbered[in_order] = np.arange(len(in_order))
    nbytes = pieces.nbytes[rows]
    columns: dict[str, np.ndarray] = {
        "fqn_id": of_tensor[tensors].astype(np.uint32),
        "dtype_id": numbered[codes],
        "ndim": pieces.ndim[rows],
        "replica": pieces.replica[rows],
        "byte_offset": offsets,
        "nbytes": nbytes,
        "first_chunk": first_chunks(nbytes),
        "object_id": np.zeros(len(rows), np.int32),
        **pieces.dims(rows),
    }
    return ShardTable(unique, [kinds[code] for code in in_order.tolist()], columns)


def need_of(shards: Sequence[Shard], value_bytes: int = 0) -> MemoryNeed:
    """Return what a slot for `shards` and about `value_bytes` of non-tensor state needs, with room to grow."""
    placement = place(shards)
    table = ShardTable.from_shards(shards, placement.offsets)
    manifest = manifest_room(table, len(encode_table(table)), value_bytes)
    return MemoryNeed(layout=layout_hash(shards), data_bytes=placement.total, manifest_bytes=manifest)


def manifest_room(table: ShardTable, table_bytes: int, value_bytes: int) -> int:
    """Return the bytes to reserve for a manifest: its table and digests, and values that may grow."""
    return 2 * table_bytes + 8 * table.chunks + 8 * len(table) + 4 * value_bytes + MANIFEST_SLACK_BYTES


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Return the indexes start, start + 1, ... of every range, one range behind the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    indexes: Ints = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return indexes


# -- From live objects to a structure ------------------------------------------------------------------------------


Optimizers = Mapping[str, Sequence[torch.optim.Optimizer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """What a structure is built of.

    Attributes:
        world: The ranks.
        found: The tensors of all modules.
        names: id(parameter) -> name without the track name.
        optimizers: torch optimizers by track name.
        fenced: Track names whose tensors change only inside `optimizer.step()`, as the user says.
        captured: What was read last; objects' tensors are taken from it.
        ahead: Optimizer state that does not exist yet and is planned all the same.
        parts: Tensors that lie in parts, of each object that has some.
        plans_only: Tensors may be on the meta device.
    """

    world: World
    found: ModuleTensors
    names: Mapping[int, str]
    optimizers: Optimizers
    fenced: Collection[str]
    captured: Captured
    ahead: DeferredState
    parts: Parts
    plans_only: bool = False


def build(tracked: Tracked) -> tuple[Structure, OptimizerEntries]:
    """Return the structure of the state as it is now, and what was found out about optimizer state.

    Raises:
        UnsupportedStateError: A tensor that cannot be held; names it.
        ConfigError: Two tensors of one name, or an optimizer over parameters of no tracked module.
    """
    world, found, box_sets = tracked.world, tracked.found, BoxSets(takes_meta=tracked.plans_only)
    numbers = _module_sets(found, world, tracked.optimizers, box_sets)
    columns = StateColumns()
    _enter_modules(columns, tracked, numbers, box_sets)
    parameters = NamedParameters(tracked.names, found.by_id(numbers))
    entries = OptimizerEntries(world, parameters, box_sets, tracked.ahead)
    for label, group in tracked.optimizers.items():
        for optimizer in group:
            entries.add(label, optimizer)
    entries.refuse_shared()
    first = len(columns.names)
    state = entries.columns
    columns.extend(state.names, state.tensors, state.sets, state.fenced)
    _enter_captured(columns, tracked, box_sets)
    names = [*columns.names, *_enter_parts(columns, tracked, box_sets)]  # the parts of a tensor share one
    structure = arranged(
        columns.names,
        columns.tensors,
        columns.sets,
        columns.fenced,
        box_sets.known,
        awaited=list(compress(count(first), map(operator.is_, state.tensors, repeat(None)))),
        forecast=StateForecast(entries.forecast.names, entries.forecast.sets),
        aliases=found.aliases,
        fresh=frozenset(tracked.captured.tensors),
        forms=tracked.captured.forms,
    )
    if structure.first_double is not None and (double := _first_double(names)) is not None:
        raise two_of_one_name(double)
    return structure, entries


def _first_double(names: Sequence[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _module_sets(found: ModuleTensors, world: World, optimizers: Optimizers, box_sets: BoxSets) -> list[int]:
    """Return the number of each module tensor's boxes."""
    firsts = first_alike(found.tensors, found.ddp_ranks, forms=found.forms)
    of_first: dict[int, int] = {}
    for first in dict.fromkeys(firsts):
        tensor, ranks = found.tensors[first], found.ddp_ranks[first]
        spread = spread_of_dtensor(tensor, world) if isinstance(tensor, dtensor()) else spread_of_plain(world, ranks)
        of_first[first] = box_sets.add(found.names[first], tensor, spread)
    numbers = [of_first[first] for first in firsts]
    if not any(one.spread.replicas > 1 for one in box_sets.known):
        return numbers
    chosen = _shares(found, numbers, box_sets, [o for group in optimizers.values() for o in group])
    return [
        box_sets.shared(number, chosen[name]) if name in chosen else number
        for name, number in zip(found.names, numbers, strict=True)
    ]


def _shares(
    found: ModuleTensors, numbers: Sequence[int], box_sets: BoxSets, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, tuple[WriteShare, ...]]:
    """Return which replica persists which rows of each parameter and its state, balanced within each replica set.

    Sizes of optimizer state are those it will have: the cuts must not move with the first step.
    """
    state_bytes = optimizer_state.bytes_per_byte(optimizers)
    parts: dict[tuple[int, tuple[Any, ...]], list[WritePart]] = {}
    sizes = [(_rows(one.whole), one.nbytes) for one in box_sets.known]
    columns = zip(found.names, found.tensors, found.is_parameter, numbers, strict=True)
    for name, tensor, is_parameter, number in columns:
        spread = box_sets.known[number].spread
        if spread.replicas > 1 and is_parameter:  # buffers stay with replica 0, whose DDP broadcasts
            rows, nbytes = sizes[number]
            part = WritePart(name=name, rows=rows, nbytes=nbytes, weight=nbytes * (1 + state_bytes.get(id(tensor), 0)))
            parts.setdefault((spread.replicas, spread.over), []).append(part)
    return {name: shares for (count, _), own in parts.items() for name, shares in partition_writes(own, count).items()}


def _rows(boxes: Sequence[Any]) -> int:
    (box, *others) = boxes
    return 1 if others or not box.lengths else int(box.lengths[cut_dimension(box.lengths)])


def _enter_modules(columns: StateColumns, tracked: Tracked, numbers: Sequence[int], box_sets: BoxSets) -> None:
    found, known = tracked.found, box_sets.known
    groups = [group["params"] for all_ in tracked.optimizers.values() for o in all_ for group in o.param_groups]
    owned = set(map(id, chain.from_iterable(groups)))
    names = found.names
    if any(one.spread.per_rank for one in known):
        suffix = tracked.world.suffix
        names = [known[number].name(name, suffix) for name, number in zip(names, numbers, strict=True)]
    fenced = np.fromiter(map(owned.__contains__, found.ids), np.bool_) & np.array(found.is_parameter, np.bool_)
    if labels := tuple(f"{label}." for label in tracked.fenced):
        fenced |= np.array([name.startswith(labels) for name in found.names], np.bool_)
    versioned = np.array([not one.is_inference for one in known], np.bool_)[np.array(numbers, np.int64)]
    columns.extend(names, found.tensors, numbers, (fenced & versioned).tolist())


def _enter_captured(columns: StateColumns, tracked: Tracked, box_sets: BoxSets) -> None:
    """Enter the tensors that objects gave out."""
    if not tracked.captured.tensors:
        return
    known = dict(zip(columns.names, columns.tensors, strict=True))
    for name, tensor in tracked.captured.tensors.items():
        if name in known and known[name] is tensor:
            continue  # it was a number when the values were looked for, and is a held tensor from now on
        spread = Replication(per_rank="@" in name and tracked.world.size > 1)
        if isinstance(tensor, dtensor()):
            spread = spread_of_dtensor(tensor, tracked.world)
        columns.extend([name], [tensor], [box_sets.add(name, tensor, spread)], [False])


def _enter_parts(columns: StateColumns, tracked: Tracked, box_sets: BoxSets) -> list[str]:
    """Enter what this rank holds of tensors that lie in parts, under one name each; return the names."""
    if not tracked.parts:
        return []
    part_sets, names = PartSets(tracked.parts, tracked.world, box_sets), list[str]()
    for by_name in tracked.parts:
        for name, parts in by_name.items():
            numbers = [part_sets.number(name, part) for part in parts]
            fenced = [part.is_fenced and not part.tensor.is_inference() for part in parts]
            columns.extend([name] * len(parts), [part.tensor for part in parts], numbers, fenced)
            names.append(name)
    return names
