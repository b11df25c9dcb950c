"""Initial weights: each rank makes what it holds, and the whole is the same in every layout.

Norm weights are one, biases zero; matrices are normal with standard deviation 0.02, those that write to the residual
stream divided by sqrt(2 x layers).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model.counter_normal import fill_normal, stream_keys

INIT_STD = 0.02
TIED = {"output.weight": "tok_embeddings.weight"}
"""The second name of a tied tensor and its first, from which both get their numbers."""
_TO_RESIDUAL = ("attention.wo.weight", "w2.weight", "experts.w2")


@torch.no_grad()
def fill(part: nn.Module, config: ModelConfig, seed: int) -> int:
    """Fill the parameters of a model part, or this rank's shards of them; return the elements written.

    Args:
        part: A Transformer; its parameters may be DTensors. No wrapper around it.
        config: Of the whole model.
        seed: Of the run.
    """
    count = 0
    for name, parameter in part.named_parameters():
        offsets, local = box(parameter)
        if name.endswith("norm.weight"):
            local.fill_(1.0)
        elif name.endswith(".bias"):
            local.zero_()
        else:
            std = INIT_STD / ((2 * config.layers) ** 0.5 if name.endswith(_TO_RESIDUAL) else 1.0)
            known = TIED.get(name, name) if config.tied_embeddings else name
            fill_normal(local, stream_keys(seed, known), tuple(parameter.shape), offsets, std)
        count += local.numel()
    return count


def box(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return where this rank's part of a tensor begins in the whole, and the part; no communication."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tensor.to_local()


def materialise(part: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of a part on the meta device memory on `device`: zeros.

    Zeros and not what lies there: whatever a restore decides, ranks that hold the same tensor hold the same bytes.
    """
    part.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*part.parameters(), *part.buffers()):
            box(tensor)[1].zero_()


def name_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed of (seed, name), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") >> 1
