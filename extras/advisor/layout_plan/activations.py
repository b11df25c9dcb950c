"""What a device needs beside the state: an estimate by formula, with the attention kernel that keeps no T x T scores. Pure.

docs/trainer-dry-run.md says the formulas in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.model.recompute import FEED_FORWARD, FULL, KEPT, SELECTIVE, group_size, recompute_of
from flashckpt.trainer.parallel.layout import SPLIT_BACKWARD, Layout, needs_fsdp
from flashckpt.trainer.parallel.switches import keeps_scores, masks_documents

MASTER = 4
"""Bytes of an element of parameters, gradients and moments: float32 in every precision, cast where it is gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes on a device: what data parallelism gathers and what forward keeps for backward; `moved`: of that, in host memory."""

    gathered: int
    activations: int
    moved: int = 0


def estimate(
    config: RunConfig, layout: Layout, pp_rank: int, *, block: int, rest: int, whole: int, is_plain: bool = False
) -> Estimate:
    """Return the estimate for a pipeline rank whose all-gathers bring together so many elements (see `StateBytes`).

    `is_plain`: on a processor in float32 without tensor parallelism, where the model's own operators keep less.
    """
    return Estimate(
        gathered=_gathered(config, layout, pp_rank, block=block, rest=rest, whole=whole),
        activations=_activations(config, layout, pp_rank, is_plain=is_plain),
        moved=moved_bytes(config, layout, pp_rank, is_plain=is_plain),
    )


def _gathered(config: RunConfig, layout: Layout, pp_rank: int, *, block: int, rest: int, whole: int) -> int:
    item = itemsize(config)
    if config.parallel.data_parallel == "ddp":
        return whole * (4 + (2 if item == 2 else 0))  # buckets of gradients; casts that autocast keeps
    if not needs_fsdp(config, layout):
        return 0
    stays = layout.pp > 1 or config.parallel.zero in (0, 1, 2)  # gathered until the step ends
    parameters = whole if stays else rest + 2 * block
    if layout.micro_batches > 1 and config.parallel.zero < 2:  # all add up to the last one
        return parameters * item + whole * MASTER
    # Block by block; those of the head, which come first, are scattered with those of the embedding, which come last.
    embedding = config.model.vocab * config.model.dim // layout.tp if 0 in layout.stages_of(pp_rank) else 0
    return (parameters + max(block + rest - embedding, rest)) * item


def _activations(config: RunConfig, layout: Layout, pp_rank: int, *, is_plain: bool) -> int:
    tokens = config.train.micro_batch * config.train.seq_len // layout.cp
    stages = layout.stages_of(pp_rank)
    layers = [number for stage in stages for number in layout.stage_layers[stage]]
    modes = Counter(recompute_of(config.parallel.activation_checkpoint, number) for number in layers)
    kept = sum(count * _layer(config, layout, mode, is_plain=is_plain) for mode, count in modes.items())
    again = tokens * _made_again(config, layout, layers, is_plain=is_plain)
    if config.parallel.activation_offload:  # what layers keep is in host memory, but for the one that is at work
        kept, again = 0, tokens * _at_work(config, layout) * itemsize(config)
    per_token = kept * in_flight(layout, pp_rank) // len(stages) * itemsize(config)
    # Logits are freed before the first layer is made again for its backward.
    total = tokens * per_token + max(again, _loss(config, layout, stages, tokens))
    if layout.cp == 1 and _has_document_mask(config):
        total += tokens * config.train.seq_len * in_flight(layout, pp_rank)
    total += _scores(config, layout, layers) * in_flight(layout, pp_rank) // len(stages)
    return total + _context(config, layout, layers) * in_flight(layout, pp_rank) // len(stages)


def _at_work(config: RunConfig, layout: Layout) -> int:
    """Return the elements per token of the layer whose backward runs while its activations come back, an operator's at a time.

    What enters it and goes out, and of its feed-forward part or attention what it saved, with gradients.
    """
    heads = 4 * (config.model.heads + config.model.kv_heads) * config.model.head_size // layout.tp
    attention = _gathered_input(config, layout) + heads
    return 2 * _stream(config, layout) + max(attention, _feed_forward(config, layout, is_plain=False))


def moved_bytes(config: RunConfig, layout: Layout, pp_rank: int, *, is_plain: bool) -> int:
    """Return the bytes that `activation_offload` holds in host memory, of all micro-batches that wait for their backward.

    Without experts and tensor parallelism on a processor in float32 to the byte; elsewhere with what torch's operators for
    GPUs save. Each tensor once, however many operators save it; without the mask of documents, which is no float.
    """
    if not config.parallel.activation_offload:
        return 0
    stages = layout.stages_of(pp_rank)
    layers = sum(len(layout.stage_layers[stage]) for stage in stages)
    tokens = config.train.micro_batch * config.train.seq_len // layout.cp
    rows = config.train.micro_batch if config.data.sources else 1  # of documents, each row has other positions
    angles = rows * config.train.seq_len // layout.cp * config.model.head_size
    tables = 0 if is_plain and not config.model.qk_norm else angles
    of_layer = tokens * _moved_per_token(config, layout, is_plain=is_plain) + tables * MASTER
    gathered = gathered_elements(config, layout) * itemsize(config) if layout.cp > 1 else 0
    return (of_layer + gathered) * layers * in_flight(layout, pp_rank) // len(stages)


def _moved_per_token(config: RunConfig, layout: Layout, *, is_plain: bool) -> int:
    """Return the bytes per token of what a layer saves: its activations, and scales of norms and of attention in float32."""
    model = config.model
    norms = (model.heads + model.kv_heads) // layout.tp if model.qk_norm else 0
    scales = model.heads // layout.tp + norms + 1  # of attention, of queries and keys, of the first norm
    if recompute_of(config.parallel.activation_checkpoint, 0) == FEED_FORWARD:
        kept = _whole_layer(config, layout, is_plain=is_plain) - _feed_forward(config, layout, is_plain=is_plain)
        return kept * itemsize(config) + scales * MASTER
    # what the last product takes is made again on a processor, but where float8 saves it
    again = _width(config, layout) if is_plain else 0
    kept = _whole_layer(config, layout, is_plain=is_plain) - again
    return kept * itemsize(config) + (scales + 1) * MASTER


def _context(config: RunConfig, layout: Layout, layers: Sequence[int]) -> int:
    """Return the bytes of the keys and values that context parallelism gathers, while their layers keep them, and of its mask."""
    if layout.cp == 1:
        return 0
    if config.parallel.cp_exchange == "ring":
        return _ring(config, layout, layers)
    keeping = sum(recompute_of(config.parallel.activation_checkpoint, number) != FULL for number in layers)
    mask = 0
    if config.train.attention != "flex":  # of two chunks of T / 2N queries, to T (2N + 1) / 2N keys
        rows = config.train.micro_batch if _has_document_mask(config) else 1
        mask = rows * config.train.seq_len**2 * (2 * layout.cp + 1) // (4 * layout.cp**2) * itemsize(config)
    most = max(keeping, group_size(config.parallel.activation_checkpoint))  # those of a group are made again together
    return most * gathered_elements(config, layout) * itemsize(config) + mask


def _scores(config: RunConfig, layout: Layout, layers: Sequence[int]) -> int:
    """Return the bytes of the scores that torch's attention keeps on a GPU, in float32, of layers and of the one at work."""
    train, model = config.train, config.model
    is_held = (
        train.attention == "sdpa" and train.device != "cpu" and itemsize(config) != MASTER and keeps_scores(config)
    )
    if not is_held or config.parallel.cp_exchange == "ring":
        return 0
    layers_kept = sum(recompute_of(config.parallel.activation_checkpoint, number) != FULL for number in layers)
    keys = train.seq_len if layout.cp == 1 else train.seq_len * (2 * layout.cp + 1) // (4 * layout.cp)
    scores = train.micro_batch * model.heads // layout.tp * (train.seq_len // layout.cp) * keys
    return MASTER * scores * max(layers_kept, group_size(config.parallel.activation_checkpoint))


def _ring(config: RunConfig, layout: Layout, layers: Sequence[int]) -> int:
    """Return the bytes of what goes round for the layer at work, of one mask, and of the logarithms that layers keep."""
    model, train = config.model, config.train
    part = gathered_elements(config, layout) // layout.cp
    at_work = part * (2 * itemsize(config) + 3 * MASTER)  # here and arriving; gradients made, arriving, and at home
    is_masked = bool(model.window) or _has_document_mask(config)
    mask = (train.micro_batch if _has_document_mask(config) else 1) * (train.seq_len // (2 * layout.cp)) ** 2
    logarithms = train.micro_batch * train.seq_len // layout.cp * model.heads // layout.tp * MASTER
    keeping = sum(recompute_of(config.parallel.activation_checkpoint, number) != FULL for number in layers)
    return at_work + mask * itemsize(config) * is_masked + keeping * logarithms


def _has_document_mask(config: RunConfig) -> bool:
    return masks_documents(config) and config.train.attention != "flex"


def gathered_elements(config: RunConfig, layout: Layout) -> int:
    """Return the elements of the keys and values of whole rows, of one layer and micro-batch: what context parallelism gathers."""
    width = 2 * config.model.kv_heads * config.model.head_size // layout.tp
    return config.train.micro_batch * config.train.seq_len * width


def _loss(config: RunConfig, layout: Layout, stages: Sequence[int], tokens: int) -> int:
    """Return the bytes that the loss of a micro-batch needs at a time."""
    chunk = config.train.loss_chunk
    if not 0 < chunk < tokens or layout.stages - 1 not in stages:
        return tokens * _logits(config, layout, stages)
    # Each piece makes a gradient of the whole head, which is added to that of the pieces before.
    return chunk * _logits(config, layout, stages) + 2 * config.model.vocab * config.model.dim * itemsize(config)


def _logits(config: RunConfig, layout: Layout, stages: Sequence[int]) -> int:
    """Return the bytes per token of the logits, their logarithms in float32, and the gradients of these."""
    if layout.stages - 1 not in stages:
        return 0
    cut = layout.tp if config.parallel.loss_parallel else 1
    return config.model.vocab // cut * (8 if itemsize(config) == MASTER else 10)


def _made_again(config: RunConfig, layout: Layout, layers: Sequence[int], *, is_plain: bool) -> int:
    """Return the bytes per token of the layer that is computed again first, beyond what those after it had kept."""
    whole, freed = _whole_layer(config, layout, is_plain=is_plain), 0
    for number in reversed(layers):
        mode = recompute_of(config.parallel.activation_checkpoint, number)
        if mode != KEPT:
            again = _feed_forward(config, layout, is_plain=is_plain) if mode == FEED_FORWARD else whole
            again += 2 * _width(config, layout)  # and gradients of its products
            again += (group_size(config.parallel.activation_checkpoint) - 1) * whole
            return max(0, again - freed) * itemsize(config)
        freed += whole
    return 0


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


def _layer(config: RunConfig, layout: Layout, mode: str, *, is_plain: bool) -> int:
    """Return the elements per token that a layer keeps of which so much is computed again."""
    if mode == FULL:
        return _stream(config, layout) // group_size(config.parallel.activation_checkpoint)
    if mode == SELECTIVE:
        return _products(config, layout)
    whole = _whole_layer(config, layout, is_plain=is_plain)
    return whole - (_feed_forward(config, layout, is_plain=is_plain) if mode == FEED_FORWARD else 0)


def _products(config: RunConfig, layout: Layout) -> int:
    """What comes into a layer and out of its products and of attention."""
    model = config.model
    heads = 2 * (model.heads + model.kv_heads) * model.head_size // layout.tp
    return 3 * _stream(config, layout) + heads + 2 * _width(config, layout)


def _whole_layer(config: RunConfig, layout: Layout, *, is_plain: bool) -> int:
    model = config.model
    copies = 3 if model.qk_norm else 2  # q and k turned, v, and what comes out; before them those that are normed
    heads = copies * (model.heads + model.kv_heads) * model.head_size // layout.tp
    normed = _gathered_input(config, layout)
    return 2 * _stream(config, layout) + normed + heads + _feed_forward(config, layout, is_plain=is_plain)


def _feed_forward(config: RunConfig, layout: Layout, *, is_plain: bool) -> int:
    model = config.model
    copies = 2 * model.dim * model.experts_per_token if model.experts else 0
    inner = 3 if is_plain else 4  # both products, what they become, and the gate's silu
    return _gathered_input(config, layout) + copies + inner * _width(config, layout)


def _width(config: RunConfig, layout: Layout) -> int:
    model = config.model
    return (model.ffn * (model.experts_per_token if model.experts else 1) + model.shared_ffn) // layout.tp


def _stream(config: RunConfig, layout: Layout) -> int:
    return config.model.dim // (layout.tp if config.parallel.sequence_parallel else 1)


def _gathered_input(config: RunConfig, layout: Layout) -> int:
    """A norm's output, and under sequence parallelism the same of all tokens."""
    whole = config.model.dim if config.parallel.sequence_parallel and layout.tp > 1 else 0
    return _stream(config, layout) + whole


def itemsize(config: RunConfig) -> int:
    """Return the bytes of an element of what is computed."""
    return 2 if config.train.precision in ("bfloat16", "float16") else MASTER
