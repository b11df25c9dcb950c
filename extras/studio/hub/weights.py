"""Fills the weights of a parallel model from a folder or a root: each rank reads the boxes that it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashckpt.core.shard import ITEMSIZE
from flashckpt.errors import ConfigError
from flashckpt.trainer.hub.source import FLOATS, WeightSource
from flashckpt.trainer.model.initial import box

BLOCK_BYTES = 16 << 20
"""Bytes of a tensor that are read at a time."""


@torch.no_grad()
def load(parts: Sequence[nn.Module], source: WeightSource) -> None:
    """Overwrite all parameters and the biases of routers of model parts, or this rank's shards of them; no communication.

    The parts have no wrappers around them; all their parameters are floating-point numbers.

    Raises:
        ConfigError: A tensor is of a type that is no number.
        DamagedError, ShardGapError: Bytes are missing or damaged.
    """
    for part in parts:
        for name, parameter in part.named_parameters():
            offsets, local = box(parameter)
            _load(name, offsets, local, source)
        for name, bias in part.named_buffers():
            if source.model.router_bias_rate:  # else it begins at 0
                _load(name, (0,), bias, source)


def _load(name: str, offsets: tuple[int, ...], local: Tensor, source: WeightSource) -> None:
    if not local.numel():
        return
    dtype = source.dtype(name)
    if dtype not in FLOATS:
        raise ConfigError(
            f"the tensor {name!r} of {source.where} cannot be trained", found=dtype, expected=", ".join(FLOATS)
        )
    row_bytes = math.prod(local.shape[1:]) * ITEMSIZE[dtype]
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, local.shape[0], step):
        lengths = (min(step, local.shape[0] - start), *local.shape[1:])
        raw = source.read(name, (offsets[0] + start, *offsets[1:]), lengths)
        block = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).view(lengths)
        local[start : start + lengths[0]].copy_(block)
