"""Element-wise optimizers on local shards; their state stays DTensors, which know their global offsets.

`settle_gradients` has placed every gradient like its parameter, so DTensor has nothing to decide. Its dispatch would
still plan each list of tensors: a quarter of the first step after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from flashckpt.trainer.parallel.apply import local_tensor


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates local shards."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]  # untyped in torch
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


class LocalSGD(torch.optim.SGD):
    """SGD that updates local shards. The momentum begins at zero, which is what torch's first step makes of it."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002 -- as torch calls it
        """Update every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in moving]
            sgd(
                [local_tensor(parameter) for parameter in moving],
                [local_tensor(parameter.grad) for parameter in moving],
                [None if buffer is None else local_tensor(buffer) for buffer in buffers],
                has_sparse_grad=False,
                foreach=True,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
