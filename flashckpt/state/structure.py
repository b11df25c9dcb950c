"""The structure of the state on this rank: every tensor, its boxes and its place in the order of the table.

Columns and not one object per tensor: there may be hundreds of thousands, and a restart waits for them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from flashckpt.core.shard import Shard
from flashckpt.native.copying import same_members
from flashckpt.state.box_sets import BoxSet
from flashckpt.state.placement import LocalBox, local_of, shard_of
from flashckpt.state.rng import Generators

# -- State that is read for every snapshot: hyperparameters, objects' state, random number generators --------------


class ValuesRead(NamedTuple):
    """Non-tensor state as it was read: all of it is of that instant.

    Attributes:
        plain: By key, msgpack types.
        generators: Key and state of the random number generators, where they are tracked.
    """

    plain: dict[str, Any]
    generators: tuple[str, Generators] | None = None

    def packed(self) -> dict[str, Any]:
        """Return all of it by key, msgpack types; for a snapshot the copy thread asks, so that `step()` packs no generators."""
        if self.generators is None:
            return self.plain
        key, state = self.generators
        return {**self.plain, key: state.packed()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The part of the state that is read for every snapshot.

    Attributes:
        read: Non-tensor state.
        tensors: Tensors returned by objects, by name.
    """

    read: ValuesRead
    tensors: dict[str, torch.Tensor]

    @property
    def values(self) -> dict[str, Any]:
        """Non-tensor state by key, msgpack types."""
        return self.read.packed()

    @property
    def forms(self) -> tuple[Any, ...]:
        """What a plan is made for: it holds for every reading with equal forms."""
        return tuple((name, t.dtype, t.shape, t.layout) for name, t in self.tensors.items())


_SHAPE, _DTYPE, _DEVICE, _IS_CPU = (operator.attrgetter(name) for name in ("shape", "dtype", "device", "is_cpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of the state on this rank.

    Attributes:
        fqn: Global name; state of this rank alone ends in `@<coordinate>`.
        tensor: The tensor as its owner holds it (a DTensor where it is one); None where it does not exist yet.
        dtype: Name of its dtype.
        boxes: What this rank holds of it, in pieces where several ranks persist parts of it.
        replicas: How many ranks hold an equal copy.
        fenced: It changes only inside `optimizer.step()`, so it may be copied during the next forward/backward.
    """

    fqn: str
    tensor: torch.Tensor | None
    dtype: str
    boxes: tuple[LocalBox, ...]
    replicas: int
    fenced: bool

    @property
    def local(self) -> torch.Tensor:
        """The tensor with this rank's bytes."""
        assert self.tensor is not None, "it does not exist yet"
        return local_of(self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One box of an entry: one row of the table."""

    entry: Entry
    box: LocalBox

    @property
    def shard(self) -> Shard:
        """The box as the table says it."""
        return shard_of(self.entry.fqn, self.entry.dtype, self.box)


@dataclass(frozen=True, slots=True, eq=False)
class StateForecast:
    """Optimizer state that the first step will make and that is not planned yet: memory is reserved for it."""

    names: Sequence[str] = ()
    sets: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.names)


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """All tensors of this rank's state, in the order of the table: by name.

    Attributes:
        names: Global names, ascending.
        tensors: As their owners hold them; None where a tensor does not exist yet.
        sets: Number of each tensor's boxes in `box_sets`.
        fenced: np.bool_[n]; which change only inside `optimizer.step()`.
        box_sets: The kinds of tensors.
        awaited: np.int64; the places of the tensors that do not exist yet, in the order in which they will appear.
        forecast: More that the first step will make.
        aliases: Other names of tensors that are held once: alias -> name.
        fresh: Names of tensors that objects return for every snapshot.
        forms: Name, dtype, shape and layout of each of them when it was built.
    """

    names: Sequence[str]
    tensors: Sequence[torch.Tensor | None]
    sets: npt.NDArray[np.int64]
    fenced: npt.NDArray[np.bool_]
    box_sets: Sequence[BoxSet]
    awaited: npt.NDArray[np.int64]
    forecast: StateForecast = StateForecast()
    aliases: dict[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    forms: tuple[Any, ...] = ()

    @cached_property
    def is_sharded(self) -> bool:
        """Whether some of the tensors are DTensors."""
        return any(map(operator.attrgetter("is_sharded"), self.box_sets))

    @cached_property
    def first_double(self) -> str | None:
        """The first name that is there twice, or None."""
        if not any(map(operator.eq, self.names, itertools.islice(self.names, 1, None))):
            return None
        return next(a for a, b in itertools.pairwise(self.names) if a == b)

    @cached_property
    def entries(self) -> list[Entry]:
        """Each tensor, one object for each: made where somebody asks."""
        columns = zip(self.names, self.tensors, self.sets.tolist(), self.fenced.tolist(), strict=True)
        return [
            Entry(
                fqn=name,
                tensor=tensor,
                dtype=self.box_sets[number].dtype,
                boxes=self.box_sets[number].boxes,
                replicas=self.box_sets[number].spread.replicas,
                fenced=fenced,
            )
            for name, tensor, number, fenced in columns
        ]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One per box."""
        return tuple(Row(entry=entry, box=box) for entry in self.entries for box in entry.boxes)

    @property
    def shards(self) -> list[Shard]:
        """The rows of the table."""
        return [row.shard for row in self.rows]

    def reserved(self) -> list[Shard]:
        """Return the rows together with the forecast: what memory is reserved for."""
        return self.with_forecast().shards

    def with_forecast(self) -> Structure:
        """Return the structure in which all that is only forecast is a tensor that does not exist yet."""
        if not self.forecast:
            return self
        more = self.forecast
        return arranged(
            [*self.names, *more.names],
            [*self.tensors, *[None] * len(more.names)],
            [*self.sets.tolist(), *more.sets],
            [*self.fenced.tolist(), *[True] * len(more.names)],
            self.box_sets,
        )

    def is_awaited(self) -> npt.NDArray[np.bool_]:
        """Return for each tensor whether it does not exist yet."""
        found = np.zeros(len(self.names), np.bool_)
        found[self.awaited] = True
        return found

    def present(self) -> Structure:
        """Return the structure without what does not exist yet: that is only forecast."""
        if not len(self.awaited):
            return self
        is_there = ~self.is_awaited()
        places, kept = np.flatnonzero(is_there), is_there.tolist()
        return replace(
            self,
            names=list(itertools.compress(self.names, kept)),
            tensors=list(itertools.compress(self.tensors, kept)),
            sets=self.sets[places],
            fenced=self.fenced[places],
            awaited=np.zeros(0, np.int64),
            forecast=StateForecast(
                [*self.forecast.names, *map(self.names.__getitem__, self.awaited.tolist())],
                [*self.forecast.sets, *self.sets[self.awaited].tolist()],
            ),
        )

    def filled(self, tensors: Sequence[torch.Tensor]) -> Structure:
        """Return the structure with these tensors where it awaits some, in its order."""
        found = list(self.tensors)
        for place, tensor in zip(self.awaited.tolist(), tensors, strict=True):
            found[place] = tensor
        return replace(self, tensors=found, awaited=np.zeros(0, np.int64))

    def has_form(self) -> bool:
        """Tell whether every tensor still has the dtype and shape that it had: `p.data = ...` is seen by nothing else."""
        tensors: Sequence[torch.Tensor | None] = self.tensors
        sets = self.sets
        if len(self.awaited):
            here = ~self.is_awaited()
            tensors, sets = list(itertools.compress(tensors, here.tolist())), sets[here]
        if self.is_sharded:
            tensors = [None if tensor is None else local_of(tensor) for tensor in tensors]
        numbers = sets.tolist()
        for part, attribute in enumerate((_DTYPE, _SHAPE)):
            expected = [one.form[part] for one in self.box_sets]
            if not all(map(operator.eq, map(attribute, tensors), map(expected.__getitem__, numbers))):
                return False
        return True

    def is_in_place(self) -> bool:
        """Tell whether every tensor, none of which is a DTensor, is on the device that it was on, or is expected on."""
        devices = [one.device for one in self.box_sets]
        if {device.type for device in devices} <= {"cpu"}:
            return all(map(_IS_CPU, self.tensors))
        expected = map(devices.__getitem__, self.sets.tolist())
        return all(map(operator.eq, map(_DEVICE, self.tensors), expected))

    def sharded(self) -> Iterator[torch.Tensor]:
        """Yield the fenced DTensors that exist."""
        if self.is_sharded:
            for tensor, fenced in zip(self.tensors, self.fenced.tolist(), strict=True):
                if fenced and isinstance(tensor, DTensor):
                    yield tensor


def arranged(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor | None],
    sets: Sequence[int] | npt.NDArray[np.int64],
    fenced: Sequence[bool] | npt.NDArray[np.bool_],
    box_sets: Sequence[BoxSet],
    *,
    awaited: Sequence[int] | npt.NDArray[np.int64] = (),
    **rest: Any,
) -> Structure:
    """Return the Structure of columns in any order; `rest` are further attributes of it."""
    order = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(order), np.int64)
    places = np.fromiter(order, np.int64, len(order))
    place[places] = np.arange(len(order))
    return Structure(
        names=list(map(names.__getitem__, order)),
        tensors=list(map(tensors.__getitem__, order)),
        sets=np.asarray(sets, np.int64)[places],
        fenced=np.asarray(fenced, np.bool_)[places],
        box_sets=box_sets,
        awaited=place[np.asarray(awaited, np.int64)],
        **rest,
    )


def in_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return shards in the order of the table, in which `layout_hash` takes them."""
    return sorted(shards, key=lambda shard: (shard.fqn, shard.offsets))


# -- A cheap guard against changes of the structure: compares the identity of the objects it was made of -----------

_VALUES = operator.methodcaller("values")
_LOCAL = operator.attrgetter("_local_tensor")  # of a DTensor; to_local() would make a new view each time


class StructureGuard:
    """Sees that a dict or list of tensors, or a DTensor, got another member: 40 to 80 ns per member in Python, a fifth of it in C.

    Args:
        dicts: Held dicts, e.g. a module's parameters; their values are the members.
        lists: Held lists, e.g. the parameters of a group.
        sharded: DTensors, whose local tensors are members too.
        mixed: Held dicts in which some values are read for each snapshot, e.g. a step counter next to a tensor:
            their keys are members, and the values that `is_member` tells.
        is_member: Of a key and a value in `mixed`.
    """

    def __init__(
        self,
        dicts: Iterable[Any],
        lists: Iterable[Sequence[Any]],
        sharded: Iterable[torch.Tensor] = (),
        *,
        mixed: Iterable[Any] = (),
        is_member: Callable[[Any, Any], bool] = lambda _, value: isinstance(value, torch.Tensor),
    ) -> None:
        self._dicts, self._lists, self._sharded = list(dicts), list(lists), list(sharded)
        self._mixed = list(mixed)
        members = [(d, key) for d in self._mixed for key, value in d.items() if is_member(key, value)]
        self._owners, self._keys = [d for d, _ in members], [key for _, key in members]
        self._held, self._rest = list(self._members()), list(self._other_members())

    def _members(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(_VALUES, self._dicts)), chain.from_iterable(self._lists))

    def _other_members(self) -> Iterator[Any]:
        # the keys come first: where one is gone, the comparison ends before it is looked up
        keys = chain.from_iterable(self._mixed)
        return chain(map(_LOCAL, self._sharded), keys, map(operator.getitem, self._owners, self._keys))

    def holds(self) -> bool:
        """Tell whether every member is still the very object it was."""
        plain = same_members(self._dicts, self._lists, self._held)
        return (self._holds_plain() if plain is None else plain) and self._holds_rest()

    def _holds_plain(self) -> bool:
        count = sum(map(len, self._dicts)) + sum(map(len, self._lists))
        return count == len(self._held) and all(map(operator.is_, self._members(), self._held))

    def _holds_rest(self) -> bool:
        count = len(self._sharded) + sum(map(len, self._mixed)) + len(self._keys)
        try:
            return count == len(self._rest) and all(map(operator.is_, self._other_members(), self._rest))
        except KeyError:  # a key moved from one dict to the next
            return False
