"""megatron-core on a CPU: what it asks of a graphics card, gloo and the CPU answer; its own code stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """A tensor that is asked to be on a card stays where it is, and has the type that it would have there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def install() -> None:
    """Prepare this process, before a model is made."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new, *_a, **_k: torch.set_rng_state(new)
    card: Any = torch.cuda
    card.get_rng_state = lambda *_: torch.get_rng_state()
    card.manual_seed = torch.manual_seed
    card.current_device = lambda: torch.device("cpu")
    OnCpu().__enter__()
