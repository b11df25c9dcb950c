"""Sources that have the very names that were planned before the restore: a run that continues as it was.

Then what is absent is known by its places in the planned structure, and nothing has to be searched by name. Whatever is
otherwise is left to `absent_state`, which finds the same by search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard_table import ShardTable
from flashckpt.restore.absent_state import AbsentBlock, AbsentState, key_of_kind
from flashckpt.restore.source_names import Kind, SourceNames
from flashckpt.state.optimizer_state import PredictedBlock
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout
from flashckpt.state.structure import Structure

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ForeseenState:
    """What there is to know where all sources have the planned names, in the planned order.

    Attributes:
        rows: The rows of the live table that are to be filled.
        absent: The state that is still to be made.
        places: Where the names of the live tensors, then those of `absent`, stand among the names of every source.
    """

    rows: Ints
    absent: AbsentState
    places: Ints

    def note(self, wanted: ShardTable, tables: Sequence[ShardTable]) -> None:
        """Tell the tables of the sources where these wanted names stand in them."""
        if len(wanted.fqns) != len(self.places):
            return  # a tensor of which this rank holds no box has no row: the tables look its neighbours up by name
        for table in tables:
            table.note_places(wanted.fqns, self.places)


def foreseen_state(
    tracked: StateRegistry, live: StateLayout, names: SourceNames, manifests: Sequence[Manifest]
) -> ForeseenState | None:
    """Return the state that the live optimizers lack; None where it has to be searched by name.

    Args:
        tracked: The live objects.
        live: Their tensors as they are now.
        names: Of the sources.
        manifests: Of the sources.
    """
    foreseen = tracked.foreseen()
    layout = live if foreseen is None else foreseen.layout
    if not manifests or names.forms or not _are_named_alike(manifests, layout):
        return None
    structure = layout.structure
    if foreseen is None:
        rows, here = _held_rows(live, np.arange(len(structure.names)))
        return ForeseenState(rows=rows, absent=AbsentState(), places=here)
    if len(live.structure.names) + len(structure.awaited) != len(structure.names):
        return None
    blocks: list[AbsentBlock] = []
    rows, here = _held_rows(live, np.flatnonzero(~structure.is_awaited()))
    places: list[Ints] = [here]
    start = 0
    for optimizer, predicted in foreseen.state.blocks():
        count = len(predicted.params) * len(predicted.keys)
        awaited = structure.awaited[start : start + count].reshape(len(predicted.params), len(predicted.keys))
        start += count
        for which in _alike(structure, awaited):
            kinds = [_kind(manifests[0].table, of_key) for of_key in awaited[which].T]
            if None in kinds:
                return None
            chosen = _Chosen(predicted=predicted, which=which, awaited=awaited[which])
            blocks.append(_block(optimizer, chosen, layout.table.fqns, [kind for kind in kinds if kind]))
            places += list(awaited[which].T)
    absent = AbsentState(blocks, are_distinct=True)
    return ForeseenState(rows=rows, absent=absent, places=np.concatenate(places))


def _held_rows(live: StateLayout, places: Ints) -> tuple[Ints, Ints]:
    """Return the rows of live tensors, without those that objects return for each snapshot, and their places.

    Args:
        live: The live tensors.
        places: Where the names of all of them stand among the planned ones.
    """
    structure = live.structure
    if not structure.fresh:
        return np.arange(len(live.table)), places
    is_held = np.fromiter((name not in structure.fresh for name in structure.names), np.bool_, len(places))
    return np.flatnonzero(is_held[live.row_tensors]), places[is_held]


def _are_named_alike(manifests: Sequence[Manifest], planned: StateLayout) -> bool:
    """Return whether each manifest has just the planned names, in this order, and none is of one rank but in values."""
    fqns, fresh = planned.table.fqns, planned.structure.fresh
    if not all(manifest.table.fqns == fqns for manifest in manifests):
        return False
    return "@" not in "\0".join(fqns) or all("@" not in fqn or fqn in fresh for fqn in fqns)


def _alike(structure: Structure, awaited: Ints) -> Iterator[Ints]:
    """Yield the parameters of one block that are of one kind, for each kind: then their state is of one kind, too."""
    kinds = np.zeros(len(awaited), np.int64)
    for key in range(awaited.shape[1]):
        numbers = structure.sets[awaited[:, key]]
        kinds = kinds * len(structure.box_sets) + numbers
        if len(kinds) and (kinds == kinds[0]).all():
            kinds = np.zeros(len(awaited), np.int64)
        else:
            kinds = np.unique(kinds, return_inverse=True)[1].ravel()
    order = np.argsort(kinds, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chosen:
    """Parameters of one kind, of those that an optimizer will make state of.

    Attributes:
        predicted: The parameters of a group, and what will be made of each.
        which: np.int64; which of them.
        awaited: np.int64[parameters, keys]; the places of the names.
    """

    predicted: PredictedBlock
    which: Ints
    awaited: Ints


def _block(
    optimizer: torch.optim.Optimizer, chosen: _Chosen, fqns: Sequence[str], kinds: Sequence[Kind]
) -> AbsentBlock:
    """Return the state of parameters of one kind; `kinds` are those of its keys."""
    params: Sequence[torch.Tensor] = chosen.predicted.params
    if len(chosen.which) != len(params):
        params = list(map(params.__getitem__, chosen.which.tolist()))
    columns = zip(chosen.predicted.keys, chosen.awaited.T, kinds, strict=True)
    keys = [
        key_of_kind(params[0], key, list(map(fqns.__getitem__, places.tolist())), kind)
        for (key, _), places, kind in columns
    ]
    return AbsentBlock(optimizer=optimizer, group=chosen.predicted.group, params=params, keys=keys)


def _kind(held: ShardTable, places: Ints) -> Kind | None:
    """Return dtype and shape of the tensors at some places; None where they differ."""
    order, starts = held.rows_by_tensor
    if not len(places) or (starts[places] == starts[places + 1]).any():
        return None
    rows = order[starts[places]]
    width = int(held.ndim[rows].max())
    shapes = held.dims(held.global_shape, rows, width, 0)
    is_one = (held.dtype_id[rows] == held.dtype_id[rows[0]]).all() and (held.ndim[rows] == held.ndim[rows[0]]).all()
    if not is_one or not (shapes == shapes[0]).all():
        return None
    return Kind(held.dtypes[int(held.dtype_id[rows[0]])], tuple(shapes[0].tolist()))
