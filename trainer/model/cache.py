"""Keys and values of the tokens so far, so that the next token costs one token's work.

The model runs the same code with and without it: `Positions.behind` gives it the positions of the new tokens, and attention
asks `KeyValueCache.extend` for all keys and values. One process, the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True, eq=False)
class KeyValueCache:
    """Room for `capacity` tokens per layer, taken when the first of them comes.

    Attributes:
        capacity: Most tokens, of prompt and continuation together.
        window: Tokens that layers with a window reach back, itself included; 0: all.
        length: Tokens that every layer has.
    """

    capacity: int
    window: int = 0
    length: int = 0
    _held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: object, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values (B, H, T, K) of T new tokens of a layer; return those of all tokens so far."""
        held = self._held.get(id(layer))
        if held is None:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            held = self._held[id(layer)] = (keys.new_empty(shape), values.new_empty(shape))
        end = self.length + keys.shape[2]
        for whole, new in zip(held, (keys, values), strict=True):
            whole[:, :, self.length : end] = new
        return held[0][:, :, :end], held[1][:, :, :end]

    def mask(self, tokens: int, device: torch.device, *, has_window: bool) -> Tensor | None:
        """Return which key each of `tokens` new queries sees, bool (T, length + T); None: those that are not after it.

        None is for the first tokens of all: to attention a causal mask begins with the first key.
        """
        window = self.window if has_window else 0
        end = self.length + tokens
        if not self.length and not 0 < window < end:
            return None
        query = torch.arange(self.length, end, device=device)[:, None]
        key = torch.arange(end, device=device)[None, :]
        seen = key <= query
        return seen & (key > query - window) if window else seen
