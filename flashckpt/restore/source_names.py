"""The names that a set of sources has, with aliases and the state of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from flashckpt.core.digest import chunk_count
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.state import state_forms
from flashckpt.state.state_forms import Form


class SourceNames:
    """The names of tensors in some manifests.

    Attributes:
        known: Name -> place of the first manifest that has it.
        aliases: Other names of tensors -> the name that each goes by.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._manifests = manifests
        self.known: dict[str, int] = {}
        self.aliases: dict[str, str] = {}
        for place in reversed(range(len(manifests))):  # the first one is entered last, and stays
            self.known |= dict.fromkeys(manifests[place].table.fqns, place)
        for manifest in manifests:
            self.aliases |= manifest.aliases

    def find(self, fqn: str, *, exact: bool = False) -> str | None:
        """Return the name in the sources that `fqn` is to be read from, or None.

        What belongs to one rank alone comes from another rank's only where not `exact`.
        """
        if fqn in self.known:
            return fqn
        if (other := self.aliases.get(fqn)) in self.known:
            return other
        base = fqn.partition("@")[0]
        if base in self.known:
            return base
        others = None if exact else self.of_ranks.get(base)
        return min(others) if others else None

    @cached_property
    def of_ranks(self) -> dict[str, list[str]]:
        """Name without coordinate -> the names of that tensor that belong to one rank alone."""
        found: dict[str, list[str]] = {}
        for fqn in self.known:
            if "@" in fqn:
                found.setdefault(fqn.partition("@")[0], []).append(fqn)
        return found

    def are_equal(self, alias: str, fqn: str) -> bool:
        """Return whether one live tensor can stand for both: no two tensors in the sources, or two of the same bytes.

        A tied weight is one tensor where all of the model is one process' own, and two on two pipeline stages.
        """
        if alias not in self.known or fqn not in self.known:
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
        return self.forms.get(fqn.partition("@")[0], state_forms.USUAL) if self.forms else state_forms.USUAL

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The recorded forms of optimizer state, by name; what has the usual one is not among them."""
        found: dict[str, Form] = {}
        for manifest in self._manifests:
            for key, value in manifest.values.items():
                label, _, rest = key.partition("@")[0].partition(".")
                if rest == "forms" and isinstance(value, dict):
                    for name, (kind, device) in value.items():
                        found.setdefault(f"{label}.{name}", (kind, device))
        return found

    def kinds(self, fqns: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
        """Return (dtype, global shape) of known tensors."""
        found = []
        per_table = [_first_rows(manifest) for manifest in self._manifests]
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for fqn in fqns:
            ids, dtypes, dims, starts = per_table[self.known[fqn]]
            i = ids[fqn]
            shape = tuple(dims[starts[i] : starts[i + 1]])
            found.append((dtypes[i], shapes.setdefault(shape, shape)))
        return found

    def shard(self, fqn: str) -> Shard:
        """Return any row of `fqn`: its dtype and global shape."""
        table = self._manifests[self.known[fqn]].table
        return table.shard(table.rows(fqn)[0])


def _first_rows(manifest: Manifest) -> tuple[dict[str, int], list[str], list[int], list[int]]:
    """Return (place of each name, dtype of each tensor, dimensions of all tensors, where each one's start)."""
    table = manifest.table
    order, starts = table.rows_by_tensor
    first = table.take(order[starts[:-1]])
    dtypes = [first.dtypes[i] for i in first.dtype_id.tolist()]
    return table.ids, dtypes, first.global_shape.tolist(), first.dim_start.tolist()
