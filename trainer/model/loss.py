"""The loss of tokens: from whole logits, or a piece of them at a time, whose logits are made again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashckpt.trainer.model.operators import token_losses


def per_token_loss(logits: Any, targets: Tensor) -> Tensor:
    """Cross entropy of each token in nats, float32, shape (B x T,); 0 where there is no target (-100)."""
    return token_losses(logits.flatten(0, 1), targets.flatten())


def chunked_losses(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross entropy of each token, float32 (B, T), holding the logits of `chunk` tokens at a time.

    Backward makes each piece's logits again, with its gradient: one product with the head more, and never the logits
    of all tokens, neither in their own type nor in float32.

    Args:
        head: Activations (N, D) -> logits (N, vocab).
        hidden: (B, T, D).
        targets: (B, T) int64; negative: no target, loss 0.
        chunk: Tokens of a piece.
    """

    def piece(rows: Tensor, wanted: Tensor) -> Tensor:
        return token_losses(head(rows), wanted)

    pairs = zip(torch.split(hidden.flatten(0, 1), chunk), torch.split(targets.flatten(), chunk), strict=True)
    losses = [checkpoint(piece, rows, wanted, use_reentrant=False) for rows, wanted in pairs]
    return torch.cat(losses).view(targets.shape)
