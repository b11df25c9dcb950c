"""The structure of the state on this rank: every tensor, its boxes, and a cheap way to see that it changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from flashckpt.core.shard import Shard
from flashckpt.state.placement import Box, local_of, shard_of

_VALUES = operator.methodcaller("values")
_LOCAL = operator.attrgetter("_local_tensor")  # of a DTensor; to_local() would make a new view each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of the state on this rank.

    Attributes:
        fqn: Global name; state of this rank alone ends in `@<coordinate>`.
        tensor: The tensor as its owner holds it (a DTensor where it is one).
        dtype: Name of its dtype.
        boxes: What this rank holds of it, in pieces where several ranks persist parts of it.
        replicas: How many ranks hold an equal copy.
        fenced: It changes only inside `optimizer.step()`, so it may be copied beside the next forward/backward.
    """

    fqn: str
    tensor: torch.Tensor
    dtype: str
    boxes: tuple[Box, ...]
    replicas: int
    fenced: bool

    @property
    def local(self) -> torch.Tensor:
        """The tensor with this rank's bytes."""
        return local_of(self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One box of an entry: one row of the table."""

    entry: Entry
    box: Box
    shard: Shard


class StructureGuard:
    """Sees that a dict or list of tensors, or a DTensor, got another member: about 40 ns per member.

    Args:
        dicts: Held dicts, e.g. a module's parameters; their values are the members.
        lists: Held lists, e.g. the parameters of a group.
        sharded: DTensors, whose local tensors are members too.
        mixed: Held dicts in which some values are read anew for each snapshot, e.g. a step counter beside a tensor:
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
        self._held = list(self._members())

    def _members(self) -> Iterator[Any]:
        dicts = chain.from_iterable(map(_VALUES, self._dicts))
        rest = chain.from_iterable(self._lists), map(_LOCAL, self._sharded), chain.from_iterable(self._mixed)
        # the keys come first: where one is gone, the comparison ends before it is looked up
        return chain(dicts, *rest, map(operator.getitem, self._owners, self._keys))

    def holds(self) -> bool:
        """Tell whether every member is still the very object it was."""
        count = sum(map(len, self._dicts)) + sum(map(len, self._lists)) + len(self._sharded)
        count += sum(map(len, self._mixed)) + len(self._keys)
        try:
            return count == len(self._held) and all(map(operator.is_, self._members(), self._held))
        except KeyError:  # a key moved from one dict to the next
            return False


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """All tensors of this rank's state, in the order of the table.

    Attributes:
        rows: One per box, sorted by name and offset.
        forecast: Shards of optimizer state that the first step will make; memory is reserved for them.
        aliases: Other names of tensors that are held once: alias -> name.
        fresh: Names of tensors that objects give out anew for every snapshot.
        forms: Name, dtype, shape and layout of each of them when it was built.
    """

    rows: tuple[Row, ...]
    forecast: tuple[Shard, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    forms: tuple[Any, ...] = ()

    @property
    def shards(self) -> list[Shard]:
        """The rows of the table."""
        return [row.shard for row in self.rows]

    @property
    def entries(self) -> list[Entry]:
        """Each tensor once."""
        return list({id(row.entry): row.entry for row in self.rows}.values())

    def reserved(self) -> list[Shard]:
        """Return the rows together with the forecast: what memory is reserved for."""
        return in_order([*self.shards, *self.forecast])


def structure_of(
    entries: Iterable[Entry],
    *,
    forecast: Iterable[Shard] = (),
    aliases: dict[str, str] | None = None,
    fresh: Iterable[str] = (),
    forms: tuple[Any, ...] = (),
) -> Structure:
    """Return the Structure of `entries`; the order they come in does not matter."""
    rows = [Row(entry=e, box=box, shard=shard_of(e.fqn, e.dtype, box)) for e in entries for box in e.boxes]
    rows.sort(key=lambda row: _order(row.shard))
    return Structure(
        rows=tuple(rows), forecast=tuple(forecast), aliases=aliases or {}, fresh=frozenset(fresh), forms=forms
    )


def in_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return shards in the order of the table, in which `layout_hash` takes them."""
    return sorted(shards, key=_order)


def _order(shard: Shard) -> tuple[str, tuple[int, ...]]:
    return shard.fqn, shard.offsets
