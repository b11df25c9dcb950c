"""What is read anew for every snapshot: hyperparameters, objects' state, random number generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The part of the state that is read anew for every snapshot.

    Attributes:
        values: Non-tensor state by key, msgpack types.
        tensors: Tensors that objects gave out, by name.
    """

    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def forms(self) -> tuple[Any, ...]:
        """What a plan is made for: it holds for every reading with equal forms."""
        return tuple((name, t.dtype, t.shape, t.layout) for name, t in self.tensors.items())
