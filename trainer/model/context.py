"""Context parallelism: each rank of a group holds a part of every row, and attention gathers the keys and values of all.

As Llama 3 was trained: of 2N equal chunks of a row, rank r of N holds chunk r and chunk 2N - 1 - r, so that all ranks have
equally many keys to look at; keys and values of a layer are gathered before its attention, their gradients are summed and
scattered in backward. Masks come from true positions. What is gathered lies in memory until backward has used it, and one
mask for all layers beside it, of about T x T / 2N numbers.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

# torch 2.13 gave it another name, and warns about the old one
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class ContextSlice:
    """Which tokens of a row one rank holds.

    Args:
        rank: Its place in the group.
        ranks: Of the group; a row is a multiple of twice as many tokens.
        group: The ranks that hold the same rows. None: nothing is gathered.
    """

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.ranks, self.group = rank, ranks, group
        self.chunks = (rank, 2 * ranks - 1 - rank)

    def index(self, tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Return the true positions of the `tokens` tokens held, int64 (tokens,)."""
        within = torch.arange(tokens // 2, device=device)
        return torch.cat([chunk * (tokens // 2) + within for chunk in self.chunks])

    def cut(self, rows: Tensor) -> Tensor:
        """Return this rank's part of whole rows: (B, T, ...) -> (B, T / ranks, ...)."""
        chunks = rows.chunk(2 * self.ranks, 1)
        return torch.cat([chunks[number] for number in self.chunks], 1)

    def cut_targets(self, targets: Tensor) -> Tensor:
        """Return this rank's part of targets (B, T + 1), whose last column is of the row: (B, T / ranks + 1)."""
        return torch.cat([self.cut(targets[:, :-1]), targets[:, -1:]], 1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; as below, for FlexAttention
    def gathered(self, part: Tensor) -> Tensor:
        """Return all tokens of the rows, in true order: (..., T / ranks, K) -> (..., T, K). Collective."""
        assert self.group is not None
        parts = _all_gather(part.contiguous().unsqueeze(0), 0, self.group).unflatten(-2, (2, -1))
        first, second = parts.unbind(-3)  # (ranks, ..., L, K): chunks 0 to N - 1, and 2N - 1 down to N
        return torch.cat([first, second.flip(0)]).movedim(0, -3).flatten(-3, -2)

    def at(self, values: Tensor, row: int, position: int) -> Tensor:
        """Return what `values` (B, T / ranks, V) have at a true position of a row, on every rank: (V,). Collective."""
        found = torch.zeros_like(values[row, 0])
        (place,) = (self.index(values.shape[1], values.device) == position).nonzero(as_tuple=True)
        if len(place):
            found.copy_(values[row, int(place)])
        dist.all_reduce(found, group=self.group)
        return found


class ContextAttention:
    """Attention of the tokens that a rank holds to all tokens of some rows; masks are made when the first layer asks.

    Args:
        held: Which tokens those are.
        window: Tokens that layers with a window reach back, itself included; 0: all.
        documents: Which document each token of the whole rows is of, integers (B, T); None: a row is one document.
    """

    def __init__(self, held: ContextSlice, *, window: int, documents: Tensor | None) -> None:
        self.held, self._window, self._documents = held, window, documents
        self._made: dict[int, list[tuple[slice, Tensor]]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; masks and collectives stay out of compiled blocks
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, has_window: bool) -> Tensor:
        """Return what the queries (B, H, T / N, K) find in keys and values (B, G, T / N, K) of all ranks. Collective."""
        keys, values = self.held.gathered(torch.stack([k, v])).unbind(0)
        masks, is_grouped = self._masks(self._window if has_window else 0, q), q.shape[1] != k.shape[1]
        found = [
            F.scaled_dot_product_attention(
                part, keys[:, :, seen], values[:, :, seen], attn_mask=mask, enable_gqa=is_grouped
            )
            for part, (seen, mask) in zip(q.chunk(2, 2), masks, strict=True)
        ]
        return torch.cat(found, 2)

    def _masks(self, window: int, q: Tensor) -> list[tuple[slice, Tensor]]:
        """Return for each chunk held the keys that it can see, and what is added to their scores."""
        if window not in self._made:
            self._made[window] = [self._mask(chunk, window, q) for chunk in self.held.chunks]
        return self._made[window]

    def _mask(self, chunk: int, window: int, q: Tensor) -> tuple[slice, Tensor]:
        # numbers, not booleans: those every layer would turn into numbers again, and keep until backward
        length = q.shape[2] // 2
        first, end = max(0, chunk * length - window + 1) if window else 0, (chunk + 1) * length
        query = torch.arange(chunk * length, end, device=q.device)[:, None]
        key = torch.arange(first, end, device=q.device)
        seen = key <= query
        if window:
            seen &= key > query - window
        if self._documents is not None:
            seen = seen & (self._documents[:, None, query[:, 0], None] == self._documents[:, None, None, first:end])
        return slice(first, end), torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -math.inf)
