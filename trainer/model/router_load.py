"""How many tokens chose each expert, and a bias that evens it out without a loss (Wang et al., 2024).

The bias is added to the scores where experts are chosen, and nowhere else: weights of the chosen are those of the scores alone. After a
step of the optimizer it goes up by the rate for each expert with less than its share, and down for each with more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RouterLoad:
    """Counts the choices of one layer, on this rank, in the micro-batches of a step."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch; what is added up changes between calls
    def add(self, counts: Tensor) -> None:
        """Add the choices of a forward that trains; (experts,), integers.

        Neither of one without gradients (the trial of a pipeline), nor of one that backward repeats to recompute activations.
        """
        is_recomputed = torch._C._current_graph_task_id() != -1  # noqa: SLF001 -- torch's own checkpointing asks the same
        if torch.is_grad_enabled() and not is_recomputed:
            self._counts = counts if self._counts is None else self._counts + counts

    def take(self) -> Tensor | None:
        """Return the sums since the last call, and begin again at none."""
        counts, self._counts = self._counts, None
        return counts


def choose(scores: Tensor, top_k: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scores and numbers of the experts that each token chooses, (N, top_k) both.

    Args:
        scores: (N, experts).
        top_k: How many.
        bias: (experts,), for the choice alone; None: none.
    """
    if bias is None:
        return torch.topk(scores, top_k, dim=-1)
    chosen = torch.topk(scores.detach() + bias, top_k, dim=-1).indices
    return scores.gather(-1, chosen), chosen


@torch.no_grad()
def move_bias(bias: Tensor, tokens: Sequence[int], rate: float) -> None:
    """Move the bias of each expert by `rate` against the sign of what it has beyond its share.

    In integers up to there: whoever knows the same tokens per expert gets the same bits.
    """
    share = sum(tokens)
    signs = [(share > len(tokens) * own) - (share < len(tokens) * own) for own in tokens]
    bias.add_(torch.tensor(signs, dtype=bias.dtype, device=bias.device), alpha=rate)
