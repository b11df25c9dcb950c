"""Rows of tokens scored by the model as it is, in any layout and under every schedule: what each row's targets cost.

Everything that is evaluated is a list of rows; each is scored exactly once, and all ranks hold all results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashckpt.trainer.generate.samples import quiet
from flashckpt.trainer.model.operators import per_token_loss
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.train.step import loss_context

NO_TARGET = -100
Ints = npt.NDArray[np.int64]
LEAST_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """B rows of T tokens.

    Attributes:
        tokens, targets: int64 (B, T); a position without target has -100.
        documents: Which document each token is of, int64 (B, T); None: a row is one document.
        text: Which targets are text, bool (B, T): all but the tokens that end documents; None: all.
        nbytes: Bytes of text of the targets of each row, (B,); nan: not known. None: 0.
    """

    tokens: Ints
    targets: Ints
    documents: Ints | None = None
    text: npt.NDArray[np.bool_] | None = None
    nbytes: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScores:
    """What N rows cost, each array float64 (N,).

    Attributes:
        nats: Sum of the negative log-likelihoods of the targets, and `text_nats` of those that are text.
        greedy: How many of them are the likeliest token of their place.
        nbytes: Bytes of text of the targets; nan: not known.
    """

    nats: npt.NDArray[np.float64]
    targets: npt.NDArray[np.float64]
    greedy: npt.NDArray[np.float64]
    text_nats: npt.NDArray[np.float64]
    nbytes: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The numbers of up to a global batch of rows, and the tokens of the longest."""

    ids: Ints
    length: int


def chunks_of(lengths: npt.ArrayLike, batch: int, *, most: int, multiple: int = 1) -> list[Chunk]:
    """Return rows of these lengths in chunks of `batch`, the longest first, so that little is computed on padding.

    Args:
        lengths: Tokens of each row.
        batch: Rows of a chunk.
        most: Tokens that the model takes; it is a multiple of `multiple`.
        multiple: What the length of a row has to be a multiple of. Lengths are powers of two up to `most` besides: every
            new one costs a plan.
    """
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    chunks = []
    for first in range(0, len(order), batch):
        ids = order[first : first + batch]
        power = max(LEAST_LENGTH, 1 << (int(sizes[ids[0]]) - 1).bit_length())
        chunks.append(Chunk(ids=ids, length=min(most, math.ceil(power / multiple) * multiple)))
    return chunks


class RowScorer:
    """Scores rows with the parts of this rank."""

    def __init__(self, parallel: Parallel, *, loss_parallel_on: bool) -> None:
        self._parallel = parallel
        self._is_sharded = loss_parallel_on and parallel.layout.tp > 1

    @torch.no_grad()
    def score(self, chunks: Sequence[Chunk], read: Callable[[Ints, int], Rows]) -> RowScores:
        """Return the scores of all rows, by their numbers, the same on every rank. Collective.

        Args:
            chunks: Which rows go together, the same on every rank; every number from 0 on comes once.
            read: Returns the rows with these numbers at a length. It is asked for this rank's rows alone.
        """
        parallel, count = self._parallel, sum(len(chunk.ids) for chunk in chunks)
        found = torch.zeros(count, 5, dtype=torch.float64, device=parallel.device)
        with quiet(parallel):
            for chunk in chunks:
                mine = chunk.ids[parallel.dp_rank :: parallel.layout.dp]
                # a rank without rows takes part all the same: gathering parameters is a collective
                rows = read(mine if len(mine) else chunk.ids[:1], chunk.length)
                results = self._forward(_filled(rows, parallel.layout.local_batch))
                if results is not None and parallel.coordinate("tp") == 0 and len(mine):
                    numbers = torch.from_numpy(mine).to(parallel.device)
                    found[numbers, :4] = results[: len(mine)]
                    if rows.nbytes is not None and (parallel.context is None or parallel.context.rank == 0):
                        found[numbers, 4] = torch.from_numpy(rows.nbytes).to(parallel.device)
        dist.all_reduce(found)
        return RowScores(
            **dict(zip(("nats", "targets", "greedy", "text_nats", "nbytes"), found.cpu().numpy().T, strict=True))
        )

    def _forward(self, rows: Rows) -> Tensor | None:
        """Return sums per row, (B, 4); None where the last stage is not."""
        tokens, targets = self._micro(rows.tokens, is_cut=True), self._micro(rows.targets, is_cut=True)
        documents = [None] * len(tokens) if rows.documents is None else self._micro(rows.documents)
        text = [None] * len(tokens) if rows.text is None else self._micro(rows.text, is_cut=True)
        with loss_context(is_sharded=self._is_sharded):
            if self._parallel.layout.pp == 1:
                part = self._parallel.parts[0]
                # one after the other: the logits of one micro-batch are held at a time
                results = [
                    self._sums(part(x, row), y, is_text)
                    for x, row, y, is_text in zip(tokens, documents, targets, text, strict=True)
                ]
            else:
                logits = self._parallel.forward_only(tokens, documents)  # none where the last stage is elsewhere
                results = [self._sums(out, y, is_text) for out, y, is_text in zip(logits, targets, text, strict=False)]
        return torch.cat(results) if results else None

    def _micro(self, values: npt.NDArray[Any], *, is_cut: bool = False) -> list[Tensor]:
        rows = torch.from_numpy(values)
        if is_cut and self._parallel.context is not None:  # results are then sums over a part of each row
            rows = self._parallel.context.cut(rows)
        return list(rows.to(self._parallel.device).chunk(self._parallel.layout.micro_batches))

    def _sums(self, logits: Tensor, targets: Tensor, text: Tensor | None) -> Tensor:
        losses = per_token_loss(logits, targets)
        whole = losses.full_tensor() if isinstance(losses, DTensor) else losses
        nats = whole.double().view(targets.shape)
        is_target = targets != NO_TARGET
        greedy = (likeliest(logits) == targets) & is_target
        is_text = is_target if text is None else is_target & text
        return torch.stack([nats.sum(1), is_target.sum(1), greedy.sum(1), (nats * is_text).sum(1)], 1)


def likeliest(logits: Tensor) -> Tensor:
    """Return the token with the largest logit, the first of equals, int64 (B, T); the vocabulary may be sharded."""
    if not isinstance(logits, DTensor):
        return logits.argmax(-1)
    local, group = logits.to_local(), logits.device_mesh.get_group()
    value, index = local.max(-1)  # not max() and argmax(): of equals both have to mean the same
    first = logits.shape[-1] // logits.device_mesh.size() * logits.device_mesh.get_local_rank()
    best = value.float()
    dist.all_reduce(best, dist.ReduceOp.MAX, group)
    candidate = torch.where(value.float() == best, index + first, logits.shape[-1])
    dist.all_reduce(candidate, dist.ReduceOp.MIN, group)
    return candidate


def _filled(rows: Rows, count: int) -> Rows:
    """Return `count` rows: those after the given ones have no targets."""
    padding = ((0, count - len(rows.tokens)), (0, 0))
    return Rows(
        tokens=np.pad(rows.tokens, padding),
        targets=np.pad(rows.targets, padding, constant_values=NO_TARGET),
        documents=None if rows.documents is None else np.pad(rows.documents, padding),
        text=None if rows.text is None else np.pad(rows.text, padding),
    )
