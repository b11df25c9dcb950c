"""Tied embeddings: the embedding and the head are two parameters that get the sum of both gradients.

Equal weights, gradients and optimizer state stay equal to the bit, whatever the layout: a sum of two is the same in
either order. The price is one more vocab x dim of state, where both are on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flashckpt.trainer.parallel.layout import Layout

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"


def add_tied_gradients(parts: Iterable[nn.Module], layout: Layout, stages: dist.ProcessGroup) -> None:
    """Give embedding and head the sum of their gradients. Collective over the two ends of a pipeline.

    Runs once all gradients are placed as their parameters (`settle_gradients`).
    """
    held = {
        name.removeprefix("module."): parameter
        for part in parts
        for name, parameter in part.named_parameters()
        if name.removeprefix("module.") in (EMBEDDING, HEAD)
    }
    if held.keys() == {EMBEDDING, HEAD}:
        embedding, head = _grad(held[EMBEDDING]), _grad(held[HEAD])
        embedding.add_(head)
        head.copy_(embedding)
    elif held:
        (name,) = held
        other = layout.rank_of_stage(layout.stages - 1 if name == EMBEDDING else 0)
        mine = _grad(held[name])
        theirs = torch.empty_like(mine)
        if name == EMBEDDING:  # one end sends first: no backend then waits for both at once
            dist.send(mine, group=stages, group_dst=other)
            dist.recv(theirs, group=stages, group_src=other)
        else:
            dist.recv(theirs, group=stages, group_src=other)
            dist.send(mine, group=stages, group_dst=other)
        mine.add_(theirs)


def is_tied_head(name: str) -> bool:
    """Return whether a parameter is the second one of two, to be left out of the gradient norm."""
    return name.removeprefix("module.") == HEAD


def _grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None, "both ends take part in every step"
    return grad.to_local() if isinstance(grad, DTensor) else grad
