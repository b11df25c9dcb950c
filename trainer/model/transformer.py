"""A Llama-like model: RMSNorm, rotary positions, grouped queries, SwiGLU. Its families differ by configuration.

A tied head is a separate parameter, equal to the embedding in every layout: gradients of both are added
(`parallel/tied`), so that the two ends of a pipeline each have what they need and state has the same names everywhere.

A pipeline stage is the same class with parts left out; layers keep their global number as name, so
state names are unique over stages. Shapes: B batch, T tokens, D model, H local heads, K head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashckpt.trainer.model.cache import KeyValueCache, continued
from flashckpt.trainer.model.flex import FlexMasks
from flashckpt.trainer.model.moe import FeedForward, MixtureOfExperts
from flashckpt.trainer.model.operators import RMSNorm, token_losses
from flashckpt.trainer.model.positions import Positions, make_positions, rotate, with_documents
from flashckpt.trainer.model_config import ModelConfig


class Attention(nn.Module):
    """Causal self-attention with grouped queries; the number of local heads follows from the weights."""

    def __init__(self, config: ModelConfig, *, has_window: bool) -> None:
        super().__init__()
        self.head_dim, self.has_window = config.head_size, has_window
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, tokens, _ = x.shape
        shape = (batch, tokens, -1, self.head_dim)  # -1: the local heads under tensor parallelism
        q, k, v = self.wq(x).view(shape), self.wk(x).view(shape), self.wv(x).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, positions), rotate(k, positions), v))
        out = self._attend(q, k, v, positions)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]  # nn.Module calls are Any

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        """(B, H, T, K), (B, G, T, K) twice -> (B, H, T, K)."""
        if positions.flex is not None:
            return positions.flex.attend(q, k, v, has_window=self.has_window)
        mask = positions.mask(q.shape[2], has_window=self.has_window)
        if positions.cache is not None:
            k, v = positions.cache.extend(self, k, v)
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped)


class Block(nn.Module):
    """One layer. `recompute`: "none", "ffn" (only the feed-forward part) or "full"."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, has_window=config.window > 0 and number >= config.window_from)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = MixtureOfExperts(config) if config.experts else FeedForward(config.dim, config.ffn)
        self.dropout = nn.Dropout(config.dropout)
        self.recompute = "none"

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """(B, T, D) -> (B, T, D); under sequence parallelism T is this rank's part."""
        # Recomputing here instead of in a wrapper module keeps the names of all state unchanged.
        if self.recompute == "full" and self.training:
            return checkpoint(self._both, x, positions, use_reentrant=False)  # type: ignore[no-any-return]  # untyped in torch
        return self._both(x, positions)

    def _both(self, x: Tensor, positions: Positions) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        if self.recompute == "ffn" and self.training:
            recomputed: Tensor = checkpoint(self._ffn, x, use_reentrant=False)
            return x + recomputed
        return x + self._ffn(x)

    def _ffn(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed_forward(self.ffn_norm(x)))  # type: ignore[no-any-return]  # nn.Module calls are Any


class Transformer(nn.Module):
    """The model, or the part of it that one pipeline stage holds.

    Args:
        config: Sizes.
        seq_len: Longest sequence, in tokens.
        layers: Global numbers of the layers held; None for all.
        first: Whether the embedding is held.
        last: Whether the final norm and the head are held.
    """

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        *,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        numbers = range(config.layers) if layers is None else layers
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim) if first else None
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in numbers})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.output = nn.Linear(config.dim, config.vocab, bias=False) if last else None
        self.window, self.uses_flex = config.window, False
        self._positions: Positions | None = None
        self._make_positions = functools.partial(make_positions, config, seq_len)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Tokens (B, T) int64 or activations (B, T, D) -> activations or logits (B, T, vocab).

        `documents`, integers (B, T), tells tokens of one document from those of another; None: a row is one document.
        """
        positions = self._known_positions()
        if documents is not None:
            positions = with_documents(positions, documents, mask=not self.uses_flex)
        if self.uses_flex:
            rows, tokens = x.shape[:2]
            masks = FlexMasks(rows, tokens, window=self.window, documents=documents, device=x.device)
            positions = replace(positions, flex=masks)
        return self._through(x, positions)

    def step(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Tokens (B, T) int64 behind those of a cache -> their logits (B, T, vocab); the cache has them afterwards.

        Only for a whole model that is in one piece: no wrapper sees the call.
        """
        logits = self._through(tokens, continued(self._known_positions(), cache, tokens.shape[1]))
        cache.length += tokens.shape[1]
        return logits

    def _known_positions(self) -> Positions:
        if self._positions is None:  # not before: the model is made on the meta device
            self._positions = self._make_positions(next(self.parameters()).device, mask=not self.uses_flex)
        return self._positions

    def _through(self, x: Tensor, positions: Positions) -> Tensor:
        hidden = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for block in self.layers.values():
            hidden = block(hidden, positions)
        if self.norm is None or self.output is None:
            return hidden
        return self.output(self.norm(hidden))  # type: ignore[no-any-return]  # nn.Module calls are Any

    def set_recompute(self, mode: str, every: int) -> None:
        """Choose activation checkpointing: "ffn" for all blocks, else "full" for each `every`-th (0: none)."""
        for number, block in self.layers.items():
            assert isinstance(block, Block)
            full = every > 0 and int(number) % every == 0
            block.recompute = "ffn" if mode == "ffn" else "full" if full else "none"

    def compile_blocks(self) -> None:
        """Let torch.compile make the forward of every block, at its first call; names and hooks stay as they are."""
        for block in self.layers.values():
            # not the module: its hooks, with which FSDP gathers parameters, are no part of the graph
            block.forward = torch.compile(block.forward)


def per_token_loss(logits: Any, targets: Tensor) -> Tensor:
    """Cross entropy of each token in nats, float32, shape (B x T,); 0 where there is no target (-100)."""
    return token_losses(logits.flatten(0, 1), targets.flatten())
