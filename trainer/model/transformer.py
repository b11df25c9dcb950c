"""A Llama-like model: RMSNorm, real-valued rotary positions, grouped queries, SwiGLU.

A pipeline stage is the same class with parts left out; layers keep their global number as name, so
state names are unique over stages. Shapes: B batch, T tokens, D model, H local heads, K head size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashckpt.trainer.config import ModelConfig
from flashckpt.trainer.model.moe import MixtureOfExperts

INIT_STD = 0.02


def rope_table(seq_len: int, head_dim: int, base: float) -> Tensor:
    """Return cosines and sines, float32 of shape (2, seq_len, head_dim / 2)."""
    inverse = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), inverse)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs of features by position: (B, T, H, K) -> the same, in real arithmetic."""
    cos, sin = (part[: x.shape[1], None, :].to(x.dtype) for part in table)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention with grouped queries; the number of local heads follows from the weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, tokens, _ = x.shape
        shape = (batch, tokens, -1, self.head_dim)  # -1: the local heads under tensor parallelism
        q = rotate(self.wq(x).view(shape), table).transpose(1, 2)
        k = rotate(self.wk(x).view(shape), table).transpose(1, 2)
        v = self.wv(x).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]  # nn.Module calls are Any


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]  # nn.Module calls are Any


class Block(nn.Module):
    """One layer. `recompute`: "none", "ffn" (only the feed-forward part) or "full"."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = MixtureOfExperts(config) if config.experts else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.recompute = "none"

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D); under sequence parallelism T is this rank's part."""
        # Recomputing here instead of in a wrapper module keeps the names of all state unchanged.
        if self.recompute == "full" and self.training:
            return checkpoint(self._both, x, table, use_reentrant=False)  # type: ignore[no-any-return]  # untyped in torch
        return self._both(x, table)

    def _both(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), table))
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
        self.layers = nn.ModuleDict({str(i): Block(config) for i in numbers})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.output = nn.Linear(config.dim, config.vocab, bias=False) if last else None
        table = rope_table(seq_len, config.dim // config.heads, config.rope_base)
        self.register_buffer("rope", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T) int64 or activations (B, T, D) -> activations or logits (B, T, vocab)."""
        hidden = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for block in self.layers.values():
            hidden = block(hidden, self.rope)
        if self.norm is None or self.output is None:
            return hidden
        return self.output(self.norm(hidden))  # type: ignore[no-any-return]  # nn.Module calls are Any

    def set_recompute(self, mode: str, every: int) -> None:
        """Choose activation checkpointing: "ffn" for all blocks, else "full" for each `every`-th (0: none)."""
        for number, block in self.layers.items():
            assert isinstance(block, Block)
            full = every > 0 and int(number) % every == 0
            block.recompute = "ffn" if mode == "ffn" else "full" if full else "none"


def initialise(model: nn.Module, seed: int, layers: int) -> None:
    """Draw every weight from a generator seeded by (seed, its name), whatever the layout.

    Norm weights are one; matrices are normal with standard deviation 0.02, those that write to the
    residual stream divided by sqrt(2 x layers). Must run before parameters are sharded.
    """
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = (
                INIT_STD / (2 * layers) ** 0.5
                if name.endswith(("attention.wo.weight", "w2.weight", "experts.w2"))
                else INIT_STD
            )
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def name_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed of (seed, name), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") >> 1


def count_parameters(config: ModelConfig, *, active: bool = False) -> int:
    """Return the number of parameters of the whole model; `active`: of those that one token meets."""
    head_dim = config.dim // config.heads
    attention = config.dim * head_dim * (2 * config.heads + 2 * config.kv_heads)
    feed_forward = 3 * config.dim * config.ffn
    if config.experts:
        experts = config.experts_per_token if active else config.experts
        feed_forward = experts * feed_forward + config.dim * config.experts
    block = attention + feed_forward + 2 * config.dim
    return config.layers * block + 2 * config.vocab * config.dim + config.dim


def per_token_loss(logits: Any, targets: Tensor) -> Tensor:
    """Cross entropy of each token in nats, float32, shape (B x T,)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
