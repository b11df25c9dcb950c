"""What a device needs beside the state: an estimate by formula, with the attention kernel that keeps no T x T scores. Pure.

docs/trainer-dry-run.md says the formulas in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.parallel.layout import SPLIT_BACKWARD, Layout, check_recompute, needs_fsdp


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes on a device: what data parallelism gathers and what forward keeps for backward."""

    gathered: int
    activations: int


def estimate(config: RunConfig, layout: Layout, pp_rank: int, *, block: int, rest: int, whole: int) -> Estimate:
    """Return the estimate for a pipeline rank whose all-gathers bring together so many elements (see `RankHoldings`)."""
    return Estimate(
        gathered=_gathered(config, layout, block, rest, whole), activations=_activations(config, layout, pp_rank)
    )


def _gathered(config: RunConfig, layout: Layout, block: int, rest: int, whole: int) -> int:
    item = _itemsize(config)
    if config.parallel.data_parallel == "ddp":
        return whole * (4 + (2 if item == 2 else 0))  # buckets of gradients; casts that autocast keeps
    if not needs_fsdp(config, layout):
        return 0
    stays = layout.pp > 1  # gathered until the step ends
    parameters = whole if stays else rest + 2 * block
    gradients = whole * 4 if layout.micro_batches > 1 else block * item
    return parameters * item + gradients


def _activations(config: RunConfig, layout: Layout, pp_rank: int) -> int:
    tokens = config.train.micro_batch * config.train.seq_len
    stages = layout.stages_of(pp_rank)
    kept = sum(_layer(config, layout, number) for stage in stages for number in layout.stage_layers[stage])
    per_token = kept * in_flight(layout, pp_rank) // len(stages)
    if check_recompute(config.parallel.activation_checkpoint) or config.parallel.activation_checkpoint == "ffn":
        per_token += _whole_layer(config, layout)  # one is made again at a time
    total = tokens * per_token * _itemsize(config)
    if layout.stages - 1 in stages:
        cut = layout.tp if config.parallel.loss_parallel else 1
        total += tokens * config.model.vocab // cut * (_itemsize(config) + 8)  # logits, in float32, their gradient
    if config.data.sources and config.data.document_mask and config.train.attention == "sdpa":
        total += tokens * config.train.seq_len * in_flight(layout, pp_rank)
    return total


def in_flight(layout: Layout, pp_rank: int) -> int:
    """Return how many forwards of a stage wait for their backward at most, over all stages of a rank."""
    every = layout.micro_batches * layout.stages_per_rank
    if layout.pp == 1:
        return 1
    if layout.schedule == "1F1B":
        return min(every, layout.pp - pp_rank)
    if layout.schedule in ("GPipe", "LoopedBFS"):
        return every
    if layout.schedule in SPLIT_BACKWARD and layout.schedule != "InterleavedZeroBubble":
        return min(every, 2 * layout.pp)
    return min(every, (layout.stages_per_rank - 1) * layout.pp + 2 * (layout.pp - pp_rank - 1) + 1)


def _layer(config: RunConfig, layout: Layout, number: int) -> int:
    """Return the elements per token that one layer keeps, as its activation checkpointing says."""
    mode = config.parallel.activation_checkpoint
    every = check_recompute(mode)
    if every and number % every == 0:
        return _stream(config, layout)
    return _whole_layer(config, layout) - (_feed_forward(config, layout) if mode == "ffn" else 0)


def _whole_layer(config: RunConfig, layout: Layout) -> int:
    model = config.model
    heads = 3 * (model.heads + model.kv_heads) * model.head_size // layout.tp  # q, k, v; q and k turned; what comes out
    normed = _gathered_input(config, layout)
    return 2 * _stream(config, layout) + normed + heads + _feed_forward(config, layout)


def _feed_forward(config: RunConfig, layout: Layout) -> int:
    model = config.model
    width, copies = model.ffn, 0
    if model.experts:
        width, copies = model.ffn * model.experts_per_token, 2 * model.dim * model.experts_per_token
    return _gathered_input(config, layout) + copies + 4 * (width + model.shared_ffn) // layout.tp


def _stream(config: RunConfig, layout: Layout) -> int:
    return config.model.dim // (layout.tp if config.parallel.sequence_parallel else 1)


def _gathered_input(config: RunConfig, layout: Layout) -> int:
    """A norm's output, and under sequence parallelism the same of all tokens."""
    whole = config.model.dim if config.parallel.sequence_parallel and layout.tp > 1 else 0
    return _stream(config, layout) + whole


def _itemsize(config: RunConfig) -> int:
    return 2 if config.train.precision == "bfloat16" else 4
