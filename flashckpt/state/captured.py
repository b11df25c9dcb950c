"""State that is read for every snapshot: hyperparameters, objects' state, random number generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashckpt.state.rng import Generators


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
