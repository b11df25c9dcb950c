"""What a restore needs of its sources: live tensors they name, and state still to be made. Nothing is written here."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import split_owner
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning.peer_index import PeerQuery
from flashckpt.planning.read_plan import Kind, SourceNames
from flashckpt.restore.absent_state import AbsentBlock, AbsentState, absent_state, key_of_kind
from flashckpt.state import optimizer_state, pytree
from flashckpt.state.optimizer_state import PredictedBlock
from flashckpt.state.placement import LocalBox, boxes_of, shard_of
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout
from flashckpt.state.structure import Structure

Ints = npt.NDArray[np.int64]
Wanted: TypeAlias = "str | Callable[[str], bool] | None"
"""What is asked for: a pattern over names, what tells it of a name, or None for everything."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveRows:
    """Boxes of live tensors, one entry per row in each list: the name, the tensor, what is meant of it."""

    fqns: Sequence[str]
    tensors: Sequence[torch.Tensor]
    boxes: Sequence[LocalBox]


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveState:
    """The tracked objects and their tensors as they are now; read again once a restore has made state."""

    tracked: StateRegistry
    layout: StateLayout

    @classmethod
    def read(cls, tracked: StateRegistry) -> LiveState:
        """Return the state as it is now."""
        tracked.settled()
        return cls(tracked=tracked, layout=tracked.layout())

    @property
    def table(self) -> ShardTable:
        """The rows of the live tensors."""
        return self.layout.table

    def rows(self, numbers: Ints) -> LiveRows:
        """Return rows of the table, by their numbers."""
        structure = self.layout.structure
        tensors, boxes = self.layout.places(numbers)
        found = [structure.tensors[at] for at in tensors]
        assert not any(tensor is None for tensor in found), "settled: everything is there"
        return LiveRows(
            fqns=[structure.names[at] for at in tensors],
            tensors=cast("list[torch.Tensor]", found),
            boxes=[self.layout.boxes[box] for box in boxes],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Requirements:
    """Everything that is required of one set of sources.

    Attributes:
        wanted: All rows, under the names that the sources have: of live tensors, of absent state, of tensors in values.
        live: The first rows, of live tensors.
        absent: State to allocate; its rows come next.
        in_values: Names of tensors that values consist of, one row each; theirs come last.
        is_foreseen: The sources have just the names that were planned: see `foreseen_state`.
        unnamed: What these sources do not name although the snapshot may have it; found only on request.
    """

    wanted: ShardTable
    live: LiveRows
    absent: AbsentState
    in_values: Sequence[str]
    missing: tuple[str, ...] = ()
    is_foreseen: bool = False
    unnamed: tuple[PeerQuery, ...] = field(default=())

    def with_missing(self, names: Sequence[str]) -> Requirements:
        """Return the same with more missing names."""
        return replace(self, missing=tuple(sorted({*self.missing, *names}))) if names else self


def requirements(
    live: LiveState,
    names: SourceNames,
    manifests: Sequence[Manifest],
    *,
    in_values: Collection[str] = (),
    only: Wanted = None,
    exact: bool = False,
) -> Requirements:
    """Return what is required of the sources.

    Args:
        live: The state that is to be filled.
        names: That the sources have.
        manifests: Of the sources.
        in_values: Names of tensors in the values that are wanted; those that no source names are left out.
        only: A pattern over names ("model.*"), or None for everything.
        exact: The sources may not be all of the snapshot: what they do not name may be somewhere else, and
            another rank's state is not taken in place of one's own. Fills `unnamed`.
    """
    known = None if only is not None else foreseen_state(live.tracked, live.layout, names, manifests)
    if known is not None:
        of_live = live.table if len(known.rows) == len(live.table) else live.table.take(known.rows)
        rows, missing, absent = live.rows(known.rows), list[str](), known.absent
    else:
        of_live, rows, missing = _named_rows(live, names, only, exact=exact)
        is_asked_for = None if only is None else functools.partial(is_wanted, only=only)
        absent = absent_state(live.tracked, names, exact=exact, wanted=is_asked_for)
    inside = sorted(name for name in in_values if name in names.index)
    unnamed: list[PeerQuery] = []
    if exact:
        unnamed += _unnamed_tensors(live.table, set(missing))
        unnamed += _unnamed_state(live.tracked, manifests, absent, only)
    parts = [of_live, absent.table, *([_whole_tensors(inside, names)] if inside else [])]
    wanted = ShardTable.stacked(parts, are_distinct=known is not None and not inside)
    if known is not None and not inside:
        known.note(wanted, [manifest.table for manifest in manifests])
    return Requirements(
        wanted=wanted,
        live=rows,
        absent=absent,
        in_values=inside,
        missing=tuple(sorted(missing)),
        is_foreseen=known is not None,
        unnamed=tuple(unnamed),
    )


def _named_rows(
    live: LiveState, names: SourceNames, only: Wanted, *, exact: bool
) -> tuple[ShardTable, LiveRows, list[str]]:
    """Return the rows of live tensors that sources name, under the names they have there, and the names of others."""
    table, index = live.table, names.index
    left_out = set(live.layout.structure.fresh)
    if only is not None:
        left_out |= {fqn for fqn in table.fqns if not is_wanted(fqn, only)}
    if not left_out and all(fqn in index for fqn in table.fqns):  # nearly always
        return table, live.rows(np.arange(len(table))), []
    # None: no source has it
    found = ["" if f in left_out else f if f in index else names.find(f, exact=exact) for f in table.fqns]
    is_named = np.array([bool(name) for name in found], np.bool_)
    kept = np.flatnonzero(is_named[table.fqn_id]) if len(table) else np.zeros(0, np.int64)
    named = dict(zip(table.fqns, found, strict=True))
    taken = table.take(kept)
    rows = live.rows(kept)
    missing = [fqn for fqn, name in named.items() if name is None]
    return taken.renamed([named[fqn] or "" for fqn in taken.fqns]), rows, missing


def _unnamed_tensors(table: ShardTable, lost: set[str]) -> Iterator[PeerQuery]:
    """Yield a query for each box of live tensors that no source names."""
    for row in range(len(table) if lost else 0):
        if (fqn := table.fqn(row)) in lost:
            yield PeerQuery(split_owner(fqn)[0], fqn, replace(table.shard(row), replica=0))


def is_wanted(fqn: str, only: Wanted) -> bool:
    """Whether a name is part of what the caller asked for."""
    return only is None or (fnmatch.fnmatchcase(fqn, only) if isinstance(only, str) else only(fqn))


def _whole_tensors(fqns: Sequence[str], names: SourceNames) -> ShardTable:
    """Return whole tensors of the sources as wanted rows."""
    kinds = names.kinds(fqns)
    shapes = [shape for _, shape in kinds]
    zeros = [(0,) * len(shape) for shape in shapes]
    return ShardTable.from_boxes(fqns, [dtype for dtype, _ in kinds], shapes, zeros, shapes)


def _unnamed_state(
    tracked: StateRegistry, manifests: Sequence[Manifest], absent: AbsentState, only: Wanted
) -> Iterator[PeerQuery]:
    """Yield a query for the optimizer state of each parameter that no source has state of.

    A parameter that some source's optimizer had has no state to miss: it never stepped.
    """
    named = set(map(id, absent.params))
    for label, optimizers in tracked.optimizers.items():
        listed = set(_listed(label, manifests))
        live = tracked.names_for(optimizers)
        for optimizer in optimizers:
            for param in optimizer_state.parameters(optimizer):
                name = live[id(param)]
                known = optimizer.state.get(param) or id(param) in named or name in listed
                if known or not is_wanted(f"{label}.{name}.", only):
                    continue
                for box in boxes_of(name, param):
                    yield PeerQuery(f"{label}.{name}.*", "", shard_of(name, "float32", box, 0))


def _listed(label: str, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield the parameters of every optimizer that recorded its groups under `label`."""
    for manifest in manifests:
        for key, value in manifest.values.items():
            if split_owner(key)[0] == f"{label}.groups":
                for group in (g for one in pytree.unflatten(value, lambda _: torch.empty(0)) for g in one):
                    yield from group["params"]


# -- Sources that have the very names that were planned before the restore: a run that continues as it was. Then what is
#    absent is known by its places in the planned structure, and nothing is searched by name. Whatever is otherwise is
#    left to `absent_state`, which finds the same by search


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
    """Return the state that the live optimizers lack; None where it has to be searched by name."""
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
    """Return the rows of live tensors, without those that objects return for each snapshot, and their places."""
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
