"""What a rank holds, tensor by tensor: parameters, gradients, optimizer state, and what is gathered of them. Pure.

The dry run builds ranks and counts the same; a test compares the two for every shipped configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.optim import OptimConfig
from flashckpt.trainer.parallel.layout import Layout, expert_dimension, needs_fsdp
from flashckpt.trainer.plan.activations import MASTER

SLOTS = 3
"""Snapshots that are kept in memory, where they fit (else 2)."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter. `cut`: the dimension that tensor parallelism cuts, None where every rank holds it whole."""

    shape: tuple[int, ...]
    cut: int | None = None
    is_expert: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """What a rank holds, in bytes; `block`, `rest`, `whole` in elements that FSDP gathers, as in `RankHoldings`.

    `experts` are those of `whole` that are gathered over the ranks with the same experts alone.
    """

    parameters: int
    gradients: int
    optimizer: int
    block: int
    rest: int
    whole: int
    experts: int = 0

    @property
    def state(self) -> int:
        """Bytes of one snapshot: what a restore brings back."""
        return self.parameters + self.optimizer


@dataclass(frozen=True, slots=True)
class ZeroBytes:
    """Bytes of mixed-precision training on one of many data-parallel ranks, in the arithmetic of the ZeRO paper."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def zero_bytes(parameters: float, ranks: int, stage: int, *, optimizer: float = 12.0) -> ZeroBytes:
    """Return 2 P + 2 P + 12 P bytes, of which each stage of ZeRO cuts one more: optimizer (1), gradients (2), parameters (3).

    Args:
        parameters: Of the model, P.
        ranks: Data-parallel ones.
        stage: 0 to 3.
        optimizer: Bytes per parameter: a float32 copy and two moments.

    Raises:
        LayoutError: There is no such stage.
    """
    if stage not in (0, 1, 2, 3):
        raise LayoutError("no such stage of ZeRO", found=str(stage), expected="0, 1, 2 or 3")

    def share(first: int) -> float:
        return parameters / (ranks if stage >= first else 1)

    return ZeroBytes(parameters=2 * share(3), gradients=2 * share(2), optimizer=optimizer * share(1))


def held(config: RunConfig, layout: Layout, pp_rank: int, shard: int = 0) -> StateBytes:
    """Return what a rank holds at its coordinates along "pp" and "dp_shard"; along the others all hold as much."""
    is_cut = config.parallel.data_parallel != "ddp" and needs_fsdp(config, layout)
    cut = _Cut(layout.tp, layout.dp_shard, layout.ep, shard, is_cut)
    layers, rule = config.model.layers, _rule(config.optim)
    units = [(n, _unit(config.model, -1 if n < 0 else int(n == layers), cut, rule)) for n in _units(layout, pp_rank)]
    elements = sum(unit.elements for _, unit in units)
    blocks = [unit.gathered for number, unit in units if 0 <= number < layers]
    whole = sum(unit.gathered for _, unit in units)
    nbytes = MASTER * elements
    return StateBytes(
        parameters=nbytes,
        gradients=nbytes,
        optimizer=sum(unit.state for _, unit in units) + nbytes * _copies(config, layout),
        block=max(blocks, default=0),
        rest=whole - sum(blocks),
        whole=whole,
        experts=sum(unit.experts for _, unit in units),
    )


def stored_bytes(config: RunConfig, layout: Layout) -> int:
    """Return the bytes of a checkpoint: weights, optimizer state and averages, what ranks hold alike once, groups that train apart each."""
    whole, layers, rule = _Cut(tp=1, dp_shard=1, ep=1, shard=0, is_cut=False), config.model.layers, _rule(config.optim)
    units = [_unit(config.model, place, whole, rule) for place in (-1, *[0] * layers, 1)]
    weights_bytes = MASTER * sum(unit.elements for unit in units)
    trained = weights_bytes + sum(unit.state for unit in units)
    return layout.groups * trained + weights_bytes * _copies(config, layout)


def _copies(config: RunConfig, layout: Layout) -> int:
    """Return how many more sets of the weights are held: their average, the synchronised ones, the outer momentum."""
    if layout.groups > 1:
        return 2 if config.parallel.outer_momentum else 1
    return 1 if config.ema.decay else 0


def _units(layout: Layout, pp_rank: int) -> Iterator[int]:
    """Yield -1 for the embedding, the numbers of the layers, and their number for final norm and head."""
    for stage in layout.stages_of(pp_rank):
        if stage == 0:
            yield -1
        yield from layout.stage_layers[stage]
        if stage == layout.stages - 1:
            yield sum(map(len, layout.stage_layers))


@dataclass(frozen=True, slots=True)
class _Cut:
    """How tensors are cut: degrees of "tp", "dp_shard" and "ep", the coordinate along the second, and whether FSDP cuts them."""

    tp: int
    dp_shard: int
    ep: int
    shard: int
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _Unit:
    """Elements of parameters, bytes of optimizer state, elements that FSDP gathers, and those of them that are experts'."""

    elements: int
    state: int
    gathered: int
    experts: int


@cache
def _unit(model: ModelConfig, place: int, cut: _Cut, rule: str) -> _Unit:
    """Return the sizes of the embedding (place -1), a layer (0), or final norm and head (1) on a rank."""
    found = weights(model, place)
    experts = sum(math.prod(weight.shape) // (cut.tp * cut.ep) for weight in found if weight.is_expert)
    experts = experts if cut.dp_shard > cut.ep else 0  # else each rank has its own
    return _Unit(
        elements=sum(math.prod(_local(weight, cut)) for weight in found),
        state=sum(_state_bytes(weight, cut, _rule_of(rule, weight, place)) for weight in found),
        gathered=experts
        + sum(
            math.prod(weight.shape) // (cut.tp if weight.cut is not None else 1)
            for weight in found
            if not weight.is_expert
        ),
        experts=experts,
    )


def _rule(optim: OptimConfig) -> str:
    """Return the optimizer by name; "plain": SGD without momentum, which has no state."""
    return "plain" if optim.name == "sgd" and not optim.momentum else optim.name


def _rule_of(rule: str, weight: Weight, place: int) -> str:
    """Return what updates one parameter: Muon the matrices of the layers alone, AdamW then the rest."""
    is_matrix = place == 0 and len(weight.shape) > 1 and not weight.is_expert
    return "adamw" if rule == "muon" and not is_matrix else rule


def _state_bytes(weight: Weight, cut: _Cut, rule: str) -> int:
    """Return the bytes of optimizer state of one parameter on a rank."""
    if rule == "adafactor":  # a row and a column of a matrix, whole on every rank, and a step
        *rows, columns = weight.shape
        factors = math.prod(rows) + math.prod(rows[:-1]) * columns if rows else columns
        return MASTER * (factors + 1)
    own = math.prod(_local(weight, cut))
    # AdamW: two moments, and a step of 4 bytes
    return MASTER * {"adamw": 2 * own + 1, "muon": own, "sgd": own, "plain": 0}[rule]


def weights(model: ModelConfig, place: int) -> Sequence[Weight]:
    """Return the parameters of the embedding (-1), of a layer (0), or of final norm and head (1)."""
    if place == -1:
        return (Weight((model.vocab, model.dim), 0),)
    if place == 1:
        return (Weight((model.dim,)), Weight((model.vocab, model.dim), 0))
    return _layer(model)


def _layer(model: ModelConfig) -> tuple[Weight, ...]:
    size, dim = model.head_size, model.dim
    queries, keys = model.heads * size, model.kv_heads * size
    found = [Weight((dim,)), Weight((dim,)), Weight((queries, dim), 0), Weight((keys, dim), 0), Weight((keys, dim), 0)]
    found.append(Weight((dim, queries), 1))
    if model.qkv_bias:
        found += [Weight((queries,), 0), Weight((keys,), 0), Weight((keys,), 0)]
    if model.qk_norm:
        found += [Weight((size,)), Weight((size,))]
    if not model.experts:
        return (*found, *_swiglu(dim, model.ffn))
    count, ffn = model.experts, model.ffn
    found += [
        Weight((count, dim)),
        Weight((count, ffn, dim), 1, is_expert=True),
        Weight((count, dim, ffn), 2, is_expert=True),
        Weight((count, ffn, dim), 1, is_expert=True),
    ]
    if model.shared_ffn:
        found += [Weight((1, dim)), *_swiglu(dim, model.shared_ffn)]
    return tuple(found)


def _swiglu(dim: int, ffn: int) -> tuple[Weight, ...]:
    return Weight((ffn, dim), 0), Weight((dim, ffn), 1), Weight((ffn, dim), 0)


def _local(weight: Weight, cut: _Cut) -> tuple[int, ...]:
    lengths = list(weight.shape)
    if weight.cut is not None:
        lengths[weight.cut] //= cut.tp
    if weight.is_expert:
        lengths[0] //= cut.ep
        lengths[expert_dimension(weight.shape[0], cut.dp_shard)] //= cut.dp_shard // cut.ep
    elif cut.is_cut:  # as torch.chunk: equal parts, the last ones shorter or empty
        most = -(-lengths[0] // cut.dp_shard)
        lengths[0] = min(max(lengths[0] - cut.shard * most, 0), most)
    return tuple(lengths)
