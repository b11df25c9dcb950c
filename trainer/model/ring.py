"""Attention over parts of rows that are on several ranks, whose keys and values go round: no rank ever holds all of them.

As ring attention has it (Liu et al. 2023), with the two chunks of a row that `ContextSlice` gives each rank: in each of N rounds a rank
attends to the keys and values of one rank, while those of the next arrive. What rounds find is merged by the logarithms of
their sums. Backward lets keys and values go round once more, and with them, one round behind, their gradients on the way home.
Masks come from true positions, and are made for one pair of chunks at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashckpt.trainer.model.context import ContextSlice

_KEYS, _GRADIENTS = 0, 1
"""Tags of what goes round."""


class RingAttention:
    """Attention of the tokens that a rank holds to all tokens of some rows.

    Args:
        held: Which tokens those are.
        window: Tokens that layers with a window reach back, itself included; 0: all.
        documents: Which document each token of the whole rows is of, integers (B, T); None: a row is one document.
    """

    def __init__(self, held: ContextSlice, *, window: int, documents: Tensor | None) -> None:
        self.held, self._window, self._documents = held, window, documents

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; messages and masks stay out of compiled blocks
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, has_window: bool) -> Tensor:
        """Return what the queries (B, H, T / N, K) find in keys and values (B, G, T / N, K) of all ranks. Collective."""
        device = q.device.type
        if torch.is_autocast_enabled(device):  # as it does for torch's attention
            q, k, v = (each.to(torch.get_autocast_dtype(device)) for each in (q, k, v))
        sight = Sight(self.held, self._window if has_window else 0, self._documents)
        with torch.autocast(device, enabled=False):
            found: Tensor = _Ring.apply(q, k, v, sight)  # type: ignore[no-untyped-call]  # untyped in torch
        return found


@dataclass(frozen=True)
class Sight:
    """Which keys the queries of a rank see: those not behind them, inside the window, of the same document."""

    held: ContextSlice
    window: int = 0
    documents: Tensor | None = None

    def pairs(self, source: int, q: Tensor) -> Iterator[tuple[int, int, Tensor | None, bool]]:
        """Yield the halves of the queries (B, H, T / N, K), and of a rank's keys, that see something, their mask, and whether it is causal."""
        length = q.shape[2] // 2
        for mine, query in enumerate(self.held.chunks):
            for theirs, key in enumerate(ContextSlice(source, self.held.ranks).chunks):
                is_near = not self.window or (query - key - 1) * length + 1 < self.window
                if key <= query and is_near:
                    yield mine, theirs, *self._mask(query, key, length, q)

    def _mask(self, query: int, key: int, length: int, q: Tensor) -> tuple[Tensor | None, bool]:
        """Return what is added to the scores of two chunks, and whether they are masked as causal ones instead."""
        farthest = (query - key + 1) * length
        if self.documents is None and (not self.window or farthest <= self.window):
            return None, query == key
        at = torch.arange(query * length, (query + 1) * length, device=q.device)[:, None]
        keys = torch.arange(key * length, (key + 1) * length, device=q.device)
        seen = keys <= at
        if self.window:
            seen &= keys > at - self.window
        if self.documents is not None:
            mine, theirs = self.documents[:, at[:, 0]], self.documents[:, keys]
            seen = seen & (mine[:, None, :, None] == theirs[:, None, None, :])
        # not infinite: of a query that sees nothing here, another chunk's numbers are larger by any measure, its own among them
        return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, lowest(q.dtype)), False


def lowest(dtype: torch.dtype) -> float:
    """Return a number that makes a score nothing, and stays finite with it."""
    return torch.finfo(dtype).min / 2


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        ctx.sight = sight
        found: list[tuple[Tensor, Tensor] | None] = [None, None]
        queries = q.chunk(2, 2)
        for source, there in _rounds(torch.stack([k, v]), sight.held):
            for mine, theirs, mask, is_causal in sight.pairs(source, q):
                keys, values = _half(there, theirs, q.shape[1])
                part, before = _attend(queries[mine], keys, values, mask, is_causal=is_causal), found[mine]
                found[mine] = part if before is None else _merged(before, part)
        outs, sums = zip(*(each for each in found if each is not None), strict=True)
        out, logsums = torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)
        ctx.save_for_backward(q, k, v, out, logsums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, logsums = ctx.saved_tensors
        sight: Sight = ctx.sight
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        home = coming = torch.empty(0)
        on_the_way: list[dist.Work] = []
        halves = list(zip(*(each.chunk(2, 2) for each in (grad, q, out, logsums)), strict=True))
        for step, (source, there) in enumerate(_rounds(torch.stack([k, v]), sight.held)):
            grads = torch.zeros(there.shape, dtype=torch.float32, device=q.device)
            for mine, theirs, mask, is_causal in sight.pairs(source, q):
                keys, values = _half(there, theirs, q.shape[1])
                of_q, *of_pair = _attend_backward(halves[mine], keys, values, mask, is_causal=is_causal)
                grad_q.chunk(2, 2)[mine].add_(of_q)
                for whole, part in zip(grads.chunk(2, 3)[theirs], of_pair, strict=True):
                    whole.add_(part.view(k.shape[0], k.shape[1], -1, *part.shape[2:]).sum(2))
            if step == 0:  # of a rank's own keys: they stay
                home = grads
                continue
            _wait(on_the_way)
            coming, on_the_way = _passed_on(grads + coming if step > 1 else grads, sight.held, _GRADIENTS)
        _wait(on_the_way)
        grad_k, grad_v = (home + coming if sight.held.ranks > 1 else home).to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _rounds(own: Tensor, held: ContextSlice) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank of the ring and its tensor, a rank's own first; that of the next round arrives meanwhile. Collective."""
    here = own
    for step in range(held.ranks):
        is_last = step == held.ranks - 1
        coming, on_the_way = (here, []) if is_last else _passed_on(here, held, _KEYS)
        yield (held.rank - step) % held.ranks, here
        _wait(on_the_way)
        here = coming


def _passed_on(tensor: Tensor, held: ContextSlice, tag: int) -> tuple[Tensor, list[dist.Work]]:
    """Begin to send a tensor to the next rank, and to receive one from the rank before: return that, and what to wait for."""
    coming = torch.empty_like(tensor)
    after, before = (held.rank + 1) % held.ranks, (held.rank - 1) % held.ranks
    send = dist.P2POp(dist.isend, tensor, group=held.group, tag=tag, group_peer=after)
    receive = dist.P2POp(dist.irecv, coming, group=held.group, tag=tag, group_peer=before)
    return coming, dist.batch_isend_irecv([send, receive])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _half(there: Tensor, half: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return one chunk of keys and values (2, B, G, T / N, K), once for each of the query heads that share them."""
    shared = heads // there.shape[2]
    keys, values = there.chunk(2, 3)[half].repeat_interleave(shared, 2) if shared > 1 else there.chunk(2, 3)[half]
    return keys, values


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what attention to the keys of both finds, and its logarithm of sums, float32."""
    both = torch.logaddexp(one[1], other[1])
    outs = [out.float() * (logsum - both).exp().unsqueeze(-1) for out, logsum in (one, other)]
    return outs[0] + outs[1], both


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return what queries (B, H, L, K) find in keys and values of one chunk, and the logarithm of the sum of each: (B, H, L)."""
    if _has_kernel(q):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 -- its name in torch
        out, logsums = flash(q, k, v, 0.0, is_causal, attn_mask=mask)
        return out, logsums
    scores = _scores(q, k, mask, is_causal=is_causal)
    logsums = scores.logsumexp(-1)
    return (scores - logsums.unsqueeze(-1)).exp() @ v.float(), logsums


def _attend_backward(
    queries: tuple[Tensor, ...], k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        queries: The gradient of what they find, they themselves, what they find, and the logarithms of their sums: these are
            of all chunks together, so that each chunk's share is its share of all.
        k: Keys of one chunk.
        v: Values of it.
        mask: What is added to the scores.
        is_causal: Whether they are masked as causal ones instead.
    """
    grad, q, out, logsums = queries
    if _has_kernel(q):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 -- its name in torch
        of_q, of_k, of_v = flash(grad, q, k, v, out, logsums, 0.0, is_causal, attn_mask=mask)
        return of_q, of_k, of_v
    grad, keys, values = grad.float(), k.float(), v.float()
    shares = (_scores(q, k, mask, is_causal=is_causal) - logsums.unsqueeze(-1)).exp()
    of_scores = grad @ values.mT - (grad * out.float()).sum(-1, keepdim=True)
    of_scores = of_scores.mul_(shares).mul_(q.shape[-1] ** -0.5)
    return of_scores @ keys, of_scores.mT @ q.float(), shares.mT @ grad


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    scores = (q.float() @ k.float().mT).mul_(q.shape[-1] ** -0.5)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, lowest(torch.float32))
    return scores if mask is None else scores.add_(mask)


def _has_kernel(q: Tensor) -> bool:
    """Return whether torch has attention that gives logarithms of sums, with and without a mask, and its backward."""
    return q.device.type == "cpu"
