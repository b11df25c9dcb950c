"""Positions: rotary tables with their scalings, and the mask of a sliding window.

Half-split as Hugging Face's: feature i turns with feature i + K/2. Frequencies are made in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model.operators import turn

if TYPE_CHECKING:
    from flashckpt.trainer.model.cache import KeyValueCache
    from flashckpt.trainer.model.context import ContextAttention
    from flashckpt.trainer.model.flex import FlexMasks
    from flashckpt.trainer.model.ring import RingAttention


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """What attention knows of where tokens are. No buffer and no tensor argument: FSDP would cast those to bfloat16.

    Attributes:
        cosines, sines: float32, (T, K / 2), or (B, T, K / 2) where documents begin again at 0.
        window: Which key (column) each query (row) sees in layers with a window, bool (T, T); None: no key is too far.
        documents: Which key each query sees because it is of its document and not after it, bool (B, 1, T, T); None: all
            tokens are one document.
        cache: Keys and values of the tokens before these; None: these are all.
        flex: Attention is computed by FlexAttention with these masks, in place of `window` and `documents`; None: it is not.
        context: Attention from a part of each row to all of it, in place of `window` and `documents`; None: rows are whole.
    """

    cosines: Tensor
    sines: Tensor
    window: Tensor | None
    documents: Tensor | None = None
    cache: KeyValueCache | None = None
    flex: FlexMasks | None = None
    context: ContextAttention | RingAttention | None = None

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for `tokens` tokens of heads: (T, 1, K / 2) or (B, T, 1, K / 2)."""
        if self.context is not None:
            index = self.context.held.index(tokens, self.cosines.device)
            cosines, sines = (table.index_select(-2, index) for table in (self.cosines, self.sines))
            return cosines[..., None, :], sines[..., None, :]
        return self.cosines[..., :tokens, None, :], self.sines[..., :tokens, None, :]

    def behind(self, cache: KeyValueCache, tokens: int) -> Positions:
        """Return the positions of `tokens` new tokens behind those of a cache."""
        span = slice(cache.length, cache.length + tokens)
        return replace(self, cosines=self.cosines[span], sines=self.sines[span], cache=cache)

    def mask(self, tokens: int, *, has_window: bool) -> Tensor | None:
        """Return which key each query of `tokens` sees in a layer; None: those that are not after it."""
        if self.cache is not None:
            return self.cache.mask(tokens, self.cosines.device, has_window=has_window)
        window = self.window[:tokens, :tokens] if has_window and self.window is not None else None
        if self.documents is None:
            return window
        return self.documents if window is None else self.documents & window


def make_positions(config: ModelConfig, seq_len: int, device: torch.device | str, *, mask: bool = True) -> Positions:
    """Return the tables of sequences of `seq_len` tokens; with `mask`, and a window, also its mask of T x T."""
    frequencies, factor = _SCALINGS[config.rope_scaling](config, seq_len)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    window = None
    if mask and 0 < config.window < seq_len:
        ones = torch.ones(seq_len, seq_len, dtype=torch.bool)
        window = ones.tril_().triu_(1 - config.window).to(device)
    return Positions(
        cosines=(angles.cos() * factor).float().to(device),
        sines=(angles.sin() * factor).float().to(device),
        window=window,
    )


def with_documents(positions: Positions, documents: Tensor, *, mask: bool = True) -> Positions:
    """Return the positions of rows of several documents: each begins at 0 and sees itself alone.

    Args:
        positions: Of one document.
        documents: Which document each token is of, integers (B, T); the tokens of one are next to each other.
        mask: Whether to make the mask, which holds B x T x T.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.zeros_like(documents, dtype=torch.int64)
    begins[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], index[1:], 0)
    within = index - begins.cummax(1).values
    return Positions(
        cosines=positions.cosines[within],
        sines=positions.sines[within],
        window=positions.window,
        documents=_document_mask(documents, index) if mask else None,
    )


def _document_mask(documents: Tensor, index: Tensor) -> Tensor:
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & (index[:, None] >= index[None, :])


def rotate(x: Tensor, positions: Positions) -> Tensor:
    """Turn the halves of each head by position, in float32: (B, T, H, K) -> the same."""
    return turn(x, *positions.tables(x.shape[1]))


Scaled = tuple[Tensor, float]
"""Frequencies, float64 of shape (K / 2,), and the factor of cosines and sines."""


def _frequencies(base: float, size: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float64) / size))


def _plain(config: ModelConfig, _: int) -> Scaled:
    return _frequencies(config.rope_base, config.head_size), 1.0


def _linear(config: ModelConfig, _: int) -> Scaled:
    return _frequencies(config.rope_base, config.head_size) / config.rope_factor, 1.0


def _ntk(config: ModelConfig, seq_len: int) -> Scaled:
    """The base grows with the length beyond `rope_context`: the slowest turn is stretched, the fastest stays."""
    size, factor = config.head_size, config.rope_factor
    stretch = factor * max(seq_len, config.rope_context) / config.rope_context - (factor - 1)
    return _frequencies(config.rope_base * stretch ** (size / (size - 2)), size), 1.0


def _yarn(config: ModelConfig, _: int) -> Scaled:
    """Fast turns stay, slow ones are interpolated, and a ramp over the features lies between."""
    size, plain = config.head_size, _frequencies(config.rope_base, config.head_size)

    def feature(turns: float) -> float:
        return size * math.log(config.rope_context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_base))

    low = max(math.floor(feature(config.rope_beta_fast)), 0)
    high: float = min(math.ceil(feature(config.rope_beta_slow)), size - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / config.rope_factor * ramp + plain * (1 - ramp), yarn_attention(config)


def yarn_attention(config: ModelConfig) -> float:
    """Return the factor by which YaRN makes queries and keys longer."""
    return config.rope_attention or (0.1 * math.log(config.rope_factor) + 1.0)


def _llama3(config: ModelConfig, _: int) -> Scaled:
    """Waves shorter than rope_context / rope_high stay, those longer than rope_context / rope_low are stretched."""
    plain = _frequencies(config.rope_base, config.head_size)
    turns = config.rope_context * plain / (2 * math.pi)
    smooth = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return (1 - smooth) * plain / config.rope_factor + smooth * plain, 1.0


_SCALINGS: dict[str, Callable[[ModelConfig, int], Scaled]] = {
    "none": _plain, "linear": _linear, "ntk": _ntk, "yarn": _yarn, "llama3": _llama3,
}  # fmt: skip
