"""What a step does beside communication: kernels that move bytes, and how many FLOPs each part has per byte. Pure.

Norms, residuals, rotations, gates and the loss are no products: their time is that of reading and writing their operands, counted
from the model's own operators ("Data Movement Is All You Need", arXiv 2007.00072, measured them as 0.2 % of the FLOPs and a
third of the time).
"""

from __future__ import annotations

import math

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.model.recompute import FEED_FORWARD, FULL, SELECTIVE, recompute_of
from flashckpt.trainer.parallel.layout import Layout
from flashckpt.trainer.plan.activations import itemsize
from flashckpt.trainer.plan.gpus import Gpu

MOVED = 0.8
"""Share of a device's memory rate that long kernels reach."""

SPREAD = 0.02
"""Spread of the step times of ranks: a step waits for the slowest of n, at sqrt(2 ln n) spreads (the largest of n normal values)."""

_NORMS, _RESIDUALS, _TURNED, _GATE = 2 * 2, 2 * 3, 2, 3  # reads and writes of an element in forward
_BACKWARD = 2
_AGAIN = {FULL: 1.0, SELECTIVE: 1.0, FEED_FORWARD: 0.5}
_LOSS_BYTES = 24
"""Of each logit: written, read, its float32 and logarithm, their gradients."""


def kernel_bytes(config: RunConfig, layout: Layout, pp_rank: int) -> float:
    """Return the bytes that kernels which are no products read and write on a rank in a step."""
    model, parallel = config.model, config.parallel
    stream = model.dim / (layout.tp if parallel.sequence_parallel else 1)
    turned = (model.heads + model.kv_heads) * model.head_size / layout.tp
    width = (model.ffn * (model.experts_per_token if model.experts else 1) + model.shared_ffn) / layout.tp
    forward = (_NORMS + _RESIDUALS) * stream + _TURNED * turned + _GATE * width
    stages = layout.stages_of(pp_rank)
    layers = [number for stage in stages for number in layout.stage_layers[stage]]
    passes = sum(1 + _BACKWARD + _AGAIN.get(recompute_of(parallel.activation_checkpoint, one), 0.0) for one in layers)
    of_token = passes * forward * itemsize(config)
    if layout.stages - 1 in stages:
        of_token += _LOSS_BYTES * model.vocab / layout.tp
    return of_token * tokens_of_rank(config, layout)


def tokens_of_rank(config: RunConfig, layout: Layout) -> int:
    """Return the tokens that pass through a rank in a step."""
    return layout.local_batch * config.train.seq_len // layout.cp


def straggling(world: int) -> float:
    """Return how much longer a step of so many ranks takes than one of the usual rank."""
    return 1 + SPREAD * math.sqrt(2 * math.log(world)) if world > 1 else 1.0


def intensities(config: RunConfig, layout: Layout, gpu: Gpu) -> list[dict[str, object]]:
    """Return FLOPs per byte of each part of a layer and of the head, and what bounds it on this device."""
    model, item = config.model, itemsize(config)
    tokens = config.train.micro_batch * config.train.seq_len // layout.cp
    queries, keys = (heads * model.head_size // layout.tp for heads in (model.heads, model.kv_heads))
    experts = model.experts_per_token / model.experts if model.experts else 1.0
    shapes = {
        "attention products": (tokens, model.dim, queries + 2 * keys),
        "feed-forward": (max(1, round(tokens * experts)), model.dim, max(1, model.ffn // layout.tp)),
        "head": (tokens, model.dim, model.vocab // layout.tp),
    }
    found = {name: product_intensity(*shape, item) for name, shape in shapes.items()}
    found["one token generated"] = product_intensity(1, model.dim, model.dim, item)
    found["norms, gates, residuals"] = 1 / item  # about one operation for each element that is read or written
    ridge = gpu.flops / gpu.memory_rate
    return [
        {"part": name, "flops_per_byte": value, "bound": "compute" if value >= ridge else "memory"}
        for name, value in found.items()
    ]


def product_intensity(tokens: int, inputs: int, outputs: int, itemsize: int) -> float:
    """Return FLOPs per byte of a product: 2 b d f over b d + d f + b f elements, about b / (itemsize / 2) for few tokens b."""
    elements = tokens * inputs + inputs * outputs + tokens * outputs
    return 2 * tokens * inputs * outputs / (itemsize * elements)
