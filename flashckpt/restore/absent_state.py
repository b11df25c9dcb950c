"""Optimizer state that the sources have and the live optimizers have not made yet.

Parameters of one kind that lack the same state are one block: there may be hundreds of thousands of them, and a handful
of kinds.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard, split_owner
from flashckpt.core.shard_table import ShardTable
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import FlashckptError
from flashckpt.planning.read_plan import USUAL, Form, Kind, SourceNames
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.state import optimizer_entries, optimizer_state
from flashckpt.state.box_sets import first_alike
from flashckpt.state.placement import LocalBox, boxes_of
from flashckpt.state.registry import StateRegistry

Ints = npt.NDArray[np.int64]
_LAST = operator.itemgetter(2)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, kw_only=True, eq=False)
class AbsentKey:
    """One key of the state of the parameters of a block.

    Attributes:
        key: Where it belongs: `optimizer.state[param][key]`.
        fqns: Its names in the sources, one for each parameter.
        kind: Dtype and shape of each global tensor.
        boxes: What this rank holds of each.
        form: How each lies beside its parameter.
    """

    key: str
    fqns: Sequence[str]
    kind: Kind
    boxes: Sequence[LocalBox]
    form: Form


@dataclass(frozen=True, kw_only=True, eq=False)
class AbsentBlock:
    """State that is still to be made, the same for each of several parameters of one kind."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    params: Sequence[torch.Tensor]
    keys: Sequence[AbsentKey]

    def allocate(self) -> list[list[torch.Tensor]]:
        """Make the tensors of each key and attach them to the optimizer; the restore overwrites all of them."""
        made = [self._make(key) for key in self.keys]
        names, state = [key.key for key in self.keys], self.optimizer.state
        members = map(dict, map(zip, repeat(names), zip(*made, strict=True)))
        if type(state) in (dict, defaultdict) and not (state and any(map(state.__contains__, self.params))):
            state.update(zip(self.params, members, strict=True))
            return made
        for param, own in zip(self.params, members, strict=True):
            state[param].update(own)
        return made

    def _make(self, key: AbsentKey) -> list[torch.Tensor]:
        shape, dtype = key.kind.global_shape, getattr(torch, key.kind.dtype)
        is_plain = key.form == USUAL and type(self.params[0]) in _PLAIN
        singly = self.params[:1] if is_plain else self.params
        made = [
            optimizer_entries.allocate(p, key.key, shape=shape, dtype=dtype, group=self.group, fqn=fqn, form=key.form)
            for p, fqn in zip(singly, key.fqns, strict=False)
        ]
        alike = self.params[len(singly) :]
        if not shape or shape != tuple(self.params[0].shape):
            return made + list(map(torch.empty_like, repeat(made[0], len(alike))))
        if dtype == self.params[0].dtype:
            return made + list(map(torch.empty_like, alike))
        return made + [torch.empty_like(param, dtype=dtype) for param in alike]


@dataclass(frozen=True, eq=False)
class AbsentState:
    """All of it, block by block."""

    blocks: Sequence[AbsentBlock] = ()
    are_distinct: bool = False

    @cached_property
    def table(self) -> ShardTable:
        """The rows that are wanted of it: block by block, key by key, box by box, one for each parameter."""
        rows = [(key, box) for block in self.blocks for key in block.keys for box in key.boxes]
        kinds = ShardTable.from_boxes(
            [str(number) for number in range(len(rows))],
            [key.kind.dtype for key, _ in rows],
            [key.kind.global_shape for key, _ in rows],
            [box.offsets for _, box in rows],
            [box.lengths for _, box in rows],
        )
        which = np.repeat(np.arange(len(rows)), [len(key.fqns) for key, _ in rows])
        fqns = list(chain.from_iterable([key.fqns for key, _ in rows]))
        are_distinct = self.are_distinct and all(len(key.boxes) == 1 for key, _ in rows)
        return kinds.under(fqns, which, are_distinct=are_distinct)

    @property
    def shards(self) -> list[Shard]:
        """The same rows as shards."""
        return [self.table.shard(row) for row in range(len(self.table))]

    @property
    def params(self) -> Iterator[torch.Tensor]:
        """The parameters that lack something."""
        return (param for block in self.blocks for param in block.params)


def absent_state(
    tracked: StateRegistry, names: SourceNames, *, exact: bool = False, wanted: Callable[[str], bool] | None = None
) -> AbsentState:
    """Return the optimizer state that the sources have and the live optimizers have not made yet.

    Args:
        tracked: The live objects.
        names: Of the sources.
        exact: Another rank's state is not taken in place of one's own.
        wanted: Tells of a name whether it is asked for; None asks for everything.
    """
    blocks: list[AbsentBlock] = []
    for label, optimizers in tracked.optimizers.items():
        keys = _recorded_keys(label, names)
        for optimizer in optimizers if keys else ():
            live = tracked.names_for([optimizer])
            for group in optimizer.param_groups:
                params = group["params"]
                search = _StateSearch(label, [live[id(param)] for param in params], names, tracked.world.suffix, exact)
                found = {key: search.find(key) for key in optimizer_state.key_order(optimizer, group, keys)}
                if optimizer.state:
                    found = {key: _unmade(optimizer, params, key, fqns) for key, fqns in found.items()}
                if wanted is not None:
                    found = {key: [f if f and wanted(f) else None for f in fqns] for key, fqns in found.items()}
                blocks += _blocks(optimizer, group, found, names)
    return AbsentState(blocks)


def is_of_this_rank(name: str, suffix: str, known: Container[str]) -> bool:
    """Whether the sources hold a parameter of this rank's own: then another rank's state of it is another tensor's."""
    return f"model.{name}@{suffix}" in known or f"{name}@{suffix}" in known


def _recorded_keys(label: str, names: SourceNames) -> list[str]:
    """Return the keys that the sources have of the state of one optimizer."""
    prefix = f"{label}."
    state = [fqn for fqn in names.index if fqn.startswith(prefix)]
    if names.of_ranks:
        state = [split_owner(fqn)[0] for fqn in state]
    return sorted(set(map(_LAST, map(str.rpartition, state, repeat(".")))))


@dataclass(frozen=True)
class _StateSearch:
    """A search for the state of some parameters of one optimizer."""

    label: str
    params: Sequence[str]
    names: SourceNames
    suffix: str
    exact: bool

    def find(self, key: str) -> list[str | None]:
        """Return the name in the sources of each parameter's state of one key."""
        index = self.names.index
        fqns = [f"{self.label}.{name}.{key}" for name in self.params]
        if not self.names.of_ranks:
            return [fqn if fqn in index else None for fqn in fqns]
        return [self._of_rank(name, fqn) for name, fqn in zip(self.params, fqns, strict=True)]

    def _of_rank(self, name: str, fqn: str) -> str | None:
        """Return this rank's tensor, else that of all ranks, else (where not `exact`) another rank's."""
        index = self.names.index
        if (own := f"{fqn}@{self.suffix}") in index:
            return own
        if fqn in index or self.exact or is_of_this_rank(name, self.suffix, index):
            return fqn if fqn in index else None
        return min(self.names.of_ranks.get(fqn, ()), default=None)


def _unmade(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], key: str, fqns: Sequence[str | None]
) -> list[str | None]:
    """Return the names without those of tensors that the optimizer has made."""
    states = map(optimizer.state.get, params)
    made = [state is not None and isinstance(state.get(key), torch.Tensor) for state in states]
    return [None if is_made else fqn for is_made, fqn in zip(made, fqns, strict=True)]


def _blocks(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    found: Mapping[str, Sequence[str | None]],
    names: SourceNames,
) -> Iterator[AbsentBlock]:
    """Yield the blocks of one group.

    Args:
        optimizer: The optimizer.
        group: The group.
        found: By key: for each parameter the name of what is to be made; None where there is nothing.
        names: Of the sources.
    """
    lacking = {key: fqns for key, fqns in found.items() if any(fqns)}
    if not lacking:
        return
    params = group["params"]
    alike = np.array(first_alike(params), np.int64)
    is_lacking = np.zeros(len(params), np.bool_)
    for fqns in lacking.values():
        numbers = _numbers(fqns, names)
        is_lacking |= numbers > 0
        alike = np.unique(alike * (numbers.max() + 1) + numbers, return_inverse=True)[1]
    order = np.flatnonzero(is_lacking)
    order = order[np.argsort(alike[order], kind="stable")]
    for which in np.split(order, np.flatnonzero(np.diff(alike[order])) + 1):
        places = which.tolist()
        keys = [(key, fqns) for key, fqns in lacking.items() if fqns[places[0]]]
        of_block = [params[at] for at in places]
        yield AbsentBlock(
            optimizer=optimizer,
            group=group,
            params=of_block,
            keys=[_key(of_block[0], key, [fqns[at] or "" for at in places], names) for key, fqns in keys],
        )


def _numbers(fqns: Sequence[str | None], names: SourceNames) -> Ints:
    """Return for each name a number that stands for its dtype, shape and form; 0 where there is none."""
    known = [fqn for fqn in fqns if fqn is not None]
    numbers = names.kind_numbers(known)
    if names.forms:
        seen: dict[Form, int] = {}
        forms = np.array([seen.setdefault(names.form(fqn), len(seen)) for fqn in known], np.int64)
        numbers = numbers * len(seen) + forms
    found = np.zeros(len(fqns), np.int64)
    found[[fqn is not None for fqn in fqns]] = numbers + 1
    return found


def _key(param: torch.Tensor, key: str, fqns: Sequence[str], names: SourceNames) -> AbsentKey:
    (kind,) = names.kinds(fqns[:1])
    return key_of_kind(param, key, fqns, kind, names.form(fqns[0]))


def key_of_kind(param: torch.Tensor, key: str, fqns: Sequence[str], kind: Kind, form: Form = USUAL) -> AbsentKey:
    """Return one key of state that parameters lack."""
    is_beside = kind.global_shape == tuple(param.shape) and form[0] in ("", optimizer_entries.LOCAL)
    like = param if is_beside else torch.empty(kind.global_shape, device="meta")
    return AbsentKey(key=key, fqns=fqns, kind=kind, boxes=boxes_of(fqns[0], like), form=form)


# -- What the newest snapshot on this node has and live state has not made yet: memory is reserved for that too ----


def recorded_beside(table: ShardTable, layout: int, directory: JobDirectory, tracked: StateRegistry) -> list[Shard]:
    """Return shards of the newest snapshot that are not among the planned ones: optimizer state, lists of tensors.

    Only a forecast: what the restore then brings is planned when it is there.

    Args:
        table: What memory would be reserved for.
        layout: Its layout hash; where this rank's newest snapshot has the same, there is nothing to add.
        directory: Of the job on this node.
        tracked: The live objects, after `structure`.
    """
    own = [(identity, held) for identity, _, held, *_ in _slots(directory.segments(rank=tracked.world.rank))]
    if own and max(own)[1] == layout:  # the usual restart: without a look at the segments of all other ranks
        return []
    slots = list(_slots(directory.segments()))
    newest = max((identity for identity, *_ in slots), default=None)
    held = [one for one in slots if one[0] == newest]
    mine = [one for one in held if one[1] == tracked.world.rank]
    if not held or any(one[2] == layout for one in mine):
        return []
    labels = {*tracked.modules, *tracked.optimizers, *tracked.objects}
    known = set(table.fqns)
    manifests = list(_manifests(mine or held))
    if mine and manifests and manifests[0].world_size == tracked.world.size:
        held_rows = manifests[0].table
        found = [held_rows.shard(row) for row in range(len(held_rows)) if held_rows.fqn(row) not in known]
        named = [(split_owner(shard.fqn)[0], shard) for shard in found]
        return [shard for fqn, shard in named if fqn.partition(".")[0] in labels and not tracked.exclusion(fqn)]
    state = absent_state(tracked, SourceNames(list(_manifests(held))))
    return [shard for shard in state.shards if shard.fqn not in known]


def _slots(segments: Sequence[Path]) -> Iterator[tuple[SnapshotId, int, int, Path, int]]:
    """Yield (identity, rank, layout hash, segment, slot) of each COMPLETE slot of some segments of this node."""
    for path in segments:
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as segment:
            for slot, header in enumerate(segment.headers()):
                if header.is_complete:
                    yield header.identity, segment.spec.rank, segment.spec.layout_hash, path, slot


def _manifests(slots: Sequence[tuple[SnapshotId, int, int, Path, int]]) -> Iterator[Manifest]:
    for identity, _, _, path, slot in slots:
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as segment:
            pin = segment.pin(slot)
            if pin is not None:
                with pin:
                    manifest = pin.manifest()
                if manifest.identity == identity:
                    yield manifest
