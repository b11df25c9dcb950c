"""The names that a set of sources has, with aliases and the state of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashckpt.core.digest import chunk_count
from flashckpt.core.manifest import Manifest
from flashckpt.core.schema import mixed_coordinates
from flashckpt.core.shard import Shard, split_owner
from flashckpt.core.shard_table import ShardTable
from flashckpt.state import optimizer_entries
from flashckpt.state.optimizer_entries import Form

Ints = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """What all rows of a tensor have in common."""

    dtype: str
    global_shape: tuple[int, ...]


class SourceNames:
    """The names of tensors in some manifests.

    Attributes:
        aliases: Other names of tensors -> the name that each goes by.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._manifests = manifests
        self.aliases: dict[str, str] = {}
        for manifest in manifests:
            self.aliases |= manifest.aliases

    @cached_property
    def index(self) -> dict[str, int]:
        """Name -> place of the first manifest that has it."""
        found: dict[str, int] = {}
        for place in reversed(range(len(self._manifests))):  # the first one is entered last, and stays
            found |= dict.fromkeys(self._manifests[place].table.fqns, place)
        return found

    def find(self, fqn: str, *, exact: bool = False) -> str | None:
        """Return the name in the sources that `fqn` is to be read from, or None.

        What belongs to one rank alone comes from another rank's only where not `exact`.
        """
        if fqn in self.index:
            return fqn
        if (other := self.aliases.get(fqn)) in self.index:
            return other
        base, _ = split_owner(fqn)
        if base in self.index:
            return base
        others = None if exact else self.of_ranks.get(base)
        return min(others) if others else None

    @cached_property
    def of_ranks(self) -> dict[str, list[str]]:
        """Name without coordinate -> the names of that tensor that belong to one rank alone."""
        found: dict[str, list[str]] = {}
        if "@" not in "\0".join(self.index):  # nearly always, and one search says so
            return found
        for fqn in self.index:
            base, owner = split_owner(fqn)
            if owner:
                found.setdefault(base, []).append(fqn)
        return found

    def are_equal(self, alias: str, fqn: str) -> bool:
        """Return whether one live tensor can stand for both: no two tensors in the sources, or two of the same bytes.

        A tied weight is one tensor where all of the model is one process' own, and two on two pipeline stages.
        """
        if alias not in self.index or fqn not in self.index:
            return True
        return self._contents(alias) == self._contents(fqn)

    def _contents(self, fqn: str) -> dict[tuple[Any, ...], bytes]:
        """Return the digests of each box of a tensor."""
        found = {}
        for manifest in self._manifests:
            table = manifest.table
            for row in table.rows(fqn):
                shard, first = table.shard(row), int(table.first_chunk[row])
                digests = manifest.digests[first : first + chunk_count(int(table.nbytes[row]))]
                found[shard.dtype, shard.offsets, shard.lengths] = digests.tobytes()
        return found

    def form(self, fqn: str) -> Form:
        """Return how a tensor of optimizer state lies beside its parameter."""
        return self.forms.get(split_owner(fqn)[0], optimizer_entries.USUAL) if self.forms else optimizer_entries.USUAL

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The recorded forms of optimizer state, by name; what has the usual one is not among them."""
        found: dict[str, Form] = {}
        for manifest in self._manifests:
            for key, value in manifest.values.items():
                label, _, rest = split_owner(key)[0].partition(".")
                if rest == "forms" and isinstance(value, dict):
                    for name, (kind, device) in value.items():
                        found.setdefault(f"{label}.{name}", (kind, device))
        return found

    def kinds(self, fqns: Sequence[str]) -> list[Kind]:
        """Return dtype and global shape of known tensors."""
        if not fqns:
            return []
        _, kinds = self._kinds
        return [kinds[number] for number in self.kind_numbers(fqns).tolist()]

    def kind_numbers(self, fqns: Sequence[str]) -> Ints:
        """Return a number for the kind of each of these known tensors: equal for those of equal kinds."""
        tables, _ = self._kinds
        if len(tables) == 1:
            ((ids, numbers),) = tables
            return numbers[np.fromiter(map(ids.__getitem__, fqns), np.int64, len(fqns))]
        found = [tables[self.index[fqn]] for fqn in fqns]
        return np.array([numbers[ids[fqn]] for fqn, (ids, numbers) in zip(fqns, found, strict=True)], np.int64)

    @cached_property
    def _kinds(self) -> tuple[list[tuple[dict[str, int], Ints]], list[Kind]]:
        """Per manifest the places of the names in its table and the numbers of their kinds; and the kinds."""
        known: dict[Kind, int] = {}
        tables = []
        for manifest in self._manifests:
            which, kinds = _kinds(manifest.table)
            numbers = np.array([known.setdefault(kind, len(known)) for kind in kinds], np.int64)
            tables.append((manifest.table.ids, numbers[which]))
        return tables, list(known)

    def shard(self, fqn: str) -> Shard:
        """Return any row of `fqn`: its dtype and global shape."""
        table = self._manifests[self.index[fqn]].table
        return table.shard(table.rows(fqn)[0])


def _kinds(table: ShardTable) -> tuple[Ints, list[Kind]]:
    """Return the kind of each tensor (as a place in the list), and the kinds that there are: a handful."""
    order, starts = table.rows_by_tensor
    first = order[starts[:-1]]
    shapes = table.dims(table.global_shape, first, int(table.ndim.max(initial=0)), 0)
    keys = np.column_stack((table.dtype_id[first].astype(np.int64), table.ndim[first].astype(np.int64), shapes))
    mixed = mixed_coordinates(keys, np.broadcast_to(np.arange(keys.shape[1]), keys.shape)).sum(axis=1)
    _, examples, which = np.unique(mixed, return_index=True, return_inverse=True)
    shards = [table.shard(int(first[k])) for k in examples]
    return which.ravel(), [Kind(shard.dtype, shard.global_shape) for shard in shards]
