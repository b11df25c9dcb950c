"""Attention by FlexAttention, for GPUs: the mask is a rule, so nothing of T x T is held and blocks that nobody sees are left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class FlexMasks:
    """Which key each query of some rows sees, as blocks; made when the first layer asks.

    Args:
        rows: B.
        tokens: T.
        window: Tokens that layers with a window reach back, itself included; 0: all.
        documents: Which document each token is of, integers (B, T); None: a row is one document.
        device: Of queries and keys.
    """

    def __init__(self, rows: int, tokens: int, *, window: int, documents: Tensor | None, device: torch.device) -> None:
        self._rows, self._tokens, self._device = rows, tokens, device
        self._window, self._documents = window, documents
        self._made: dict[int, BlockMask] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, has_window: bool) -> Tensor:
        """Return what the queries (B, H, T, K) find in keys and values (B, G, T, K), H a multiple of G: (B, H, T, K)."""
        found: Tensor = _kernel(self._device.type, flex_attention)(
            q, k, v, block_mask=self._mask(self._window if has_window else 0), enable_gqa=q.shape[1] != k.shape[1]
        )
        return found

    def _mask(self, window: int) -> BlockMask:
        if window not in self._made:
            rows = None if self._documents is None else self._rows
            make = _kernel(self._device.type, create_block_mask)
            self._made[window] = make(
                _rule(window, self._documents), rows, None, self._tokens, self._tokens, device=str(self._device)
            )
        return self._made[window]


def _rule(window: int, documents: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window:
            seen = seen & (query - key < window)
        return seen if documents is None else seen & (documents[row, query] == documents[row, key])

    return sees


@functools.cache
def _kernel(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, on a CPU the function: eager, it holds T x T after all, and has no backward."""
    return torch.compile(function) if device == "cuda" else function
