"""Names the ranks, and the parameters, whose losses or gradients are not finite. Only called once some are not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flashckpt.errors import DivergedError
from flashckpt.trainer.parallel.apply import Parallel, local_tensor

logger = logging.getLogger(__name__)
_NAMED = 3
"""Parameters that a rank names; the first NaN of a step is in few, or in all."""


def report_nonfinite(parallel: Parallel, losses: Sequence[Tensor], step: int) -> bool:
    """Log where a step is not finite; return whether parameters are not: the state is bad, and not the batch alone. Collective.

    Gradients are those after the sum over data-parallel ranks: a rank is named for the part that it holds. Losses are of
    the samples of a rank.

    Args:
        parallel: This rank's parts.
        losses: Of the samples of this rank; none where the loss is computed elsewhere.
        step: For the log.
    """
    named = [pair for part in parallel.bare_parts() for pair in part.named_parameters()]
    bad = [name for name, p in named if p.grad is not None and not _is_finite(local_tensor(p.grad))]
    state = [name for name, p in named if not _is_finite(local_tensor(p.detach()))]
    flags = torch.zeros(3, dist.get_world_size(), device=parallel.device)
    flags[0, dist.get_rank()] = float(not all(map(_is_finite, losses)))
    flags[1, dist.get_rank()] = float(bool(bad))
    flags[2, dist.get_rank()] = float(bool(state))
    dist.all_reduce(flags)
    by_loss, by_gradient, by_state = ([rank for rank, flag in enumerate(row) if flag] for row in flags.tolist())
    if bad:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        logger.warning("step %d: gradients of %s%s are not finite here", step, ", ".join(bad[:_NAMED]), more)
    if dist.get_rank() == 0:
        logger.warning(
            "step %d: losses are not finite on %s, gradients on %s, parameters on %s",
            step, _ranks(by_loss), _ranks(by_gradient), _ranks(by_state),
        )  # fmt: skip
    return bool(by_state)


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _ranks(numbers: list[int]) -> str:
    return f"rank {', '.join(map(str, numbers))}" if numbers else "no rank"


def no_way_back(step: int, snapshot_every: int) -> DivergedError:
    """Return the error of parameters that are not finite before there was a snapshot of better ones."""
    return DivergedError(
        f"parameters are not finite at step {step}, and no snapshot is there to go back to",
        found=f"checkpoint.snapshot_every = {snapshot_every}",
        state="Nothing was kept of this run.",
        remedy="lower checkpoint.snapshot_every or the learning rate, and start again",
    )
