"""Attention by FlexAttention, for GPUs: the mask is a rule, so nothing of T x T is held and blocks that nobody sees are left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flashckpt.trainer.model.context import ContextSlice


class FlexMasks:
    """Which key each query of some rows sees, as blocks; made when the first layer asks.

    Args:
        rows: B.
        window: Tokens that layers with a window reach back, itself included; 0: all.
        documents: Which document each token is of, integers (B, T); None: a row is one document.
        device: Of queries and keys.
        held: Which tokens of each row the queries are; keys are then gathered. None: all.
    """

    def __init__(
        self,
        rows: int,
        *,
        window: int,
        documents: Tensor | None,
        device: torch.device,
        held: ContextSlice | None = None,
    ) -> None:
        self._rows, self._device, self._held = rows, device, held
        self._window, self._documents = window, documents
        self._made: dict[int, BlockMask] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, has_window: bool) -> Tensor:
        """Return what the queries (B, H, T, K) find in keys and values (B, G, T, K), H a multiple of G: (B, H, T, K)."""
        if self._held is not None:
            k, v = self._held.gathered(torch.stack([k, v])).unbind(0)
        mask = self._mask(self._window if has_window else 0, q.shape[2], k.shape[2])
        found: Tensor = _kernel(self._device.type, flex_attention)(
            q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        return found

    def _mask(self, window: int, queries: int, keys: int) -> BlockMask:
        if window not in self._made:
            rows = None if self._documents is None else self._rows
            make = _kernel(self._device.type, create_block_mask)
            places = None if self._held is None else self._held.index(queries, self._device)
            rule = _rule(window, self._documents, places)
            self._made[window] = make(rule, rows, None, queries, keys, device=str(self._device))
        return self._made[window]


def _rule(
    window: int, documents: Tensor | None, places: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if places is None else places[query]
        seen = query >= key
        if window:
            seen = seen & (query - key < window)
        return seen if documents is None else seen & (documents[row, query] == documents[row, key])

    return sees


@functools.cache
def _kernel(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, on a CPU the function: eager, it holds T x T after all, and has no backward."""
    return torch.compile(function) if device == "cuda" else function
