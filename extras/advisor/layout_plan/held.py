"""What a rank holds, tensor by tensor: parameters, gradients, optimizer state, and what is gathered of them. Pure.

`plan` and the dry run print it; tests compare it with ranks that are built, for every shipped configuration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from flashckpt.errors import LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.optim import OptimConfig
from flashckpt.trainer.config.weights import Weight, weights
from flashckpt.trainer.parallel.groups import group_label
from flashckpt.trainer.parallel.layout import Layout, expert_dimension, needs_fsdp
from flashckpt.trainer.plan.activations import MASTER

Shape: TypeAlias = tuple[int, ...]
SLOTS = 3
"""Snapshots that are kept in memory, where they fit (else 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """What a rank holds, in bytes; `block`, `rest`, `whole` in elements that FSDP gathers: of the largest block, outside of blocks, of all.

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


def zero_bytes(parameters: float, ranks: int, stage: int) -> ZeroBytes:
    """Return 2 P + 2 P + 12 P bytes (a float32 copy and two moments), of which each stage of ZeRO cuts one more: optimizer (1), gradients (2), parameters (3).

    Args:
        parameters: Of the model, P.
        ranks: Data-parallel ones.
        stage: 0 to 3.

    Raises:
        LayoutError: There is no such stage.
    """
    if stage not in (0, 1, 2, 3):
        raise LayoutError("no such stage of ZeRO", found=str(stage), expected="0, 1, 2 or 3")

    def share(first: int) -> float:
        return parameters / (ranks if stage >= first else 1)

    return ZeroBytes(parameters=2 * share(3), gradients=2 * share(2), optimizer=12 * share(1))


def held(config: RunConfig, layout: Layout, pp_rank: int, shard: int = 0) -> StateBytes:
    """Return what a rank holds at its coordinates along "pp" and "dp_shard"; along the others all hold as much."""
    cut = _cut_of(config, layout, shard)
    rule, places = _rule(config.optim), _places(config, layout, pp_rank)
    units = {place: (count, _unit(config.model, place, cut, rule)) for place, count in places.items()}
    elements = sum(count * unit.elements for count, unit in units.values())
    block = units[0][1].gathered if 0 in units else 0
    whole = sum(count * unit.gathered for count, unit in units.values())
    nbytes = MASTER * elements
    return StateBytes(
        parameters=nbytes,
        gradients=nbytes,
        optimizer=sum(count * unit.state for count, unit in units.values()) + nbytes * _copies(config, layout),
        block=block,
        rest=whole - places[0] * block,
        whole=whole,
        experts=sum(count * unit.experts for count, unit in units.values()),
    )


def local_lengths(config: RunConfig, layout: Layout, pp_rank: int, shard: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of a rank's parts: ranks with the same ones hold as much."""
    cut = _cut_of(config, layout, shard)
    return tuple(
        _local(weight, cut) for place in _places(config, layout, pp_rank) for weight in weights(config.model, place)
    )


def snapshot_tensors(config: RunConfig, layout: Layout, pp_rank: int, shard: int) -> Iterator[tuple[str, Shape, Shape]]:
    """Yield name, whole shape and shape on a rank of the tensors of a snapshot, all of float32."""
    model, rule, cut = config.model, _rule(config.optim), _cut_of(config, layout, shard)
    labels, of_group = _labels(config, layout), f"{group_label(0)}." if layout.groups > 1 else ""
    for number in _units(layout, pp_rank):
        place = -1 if number < 0 else int(number == model.layers)
        where = "" if place else f"layers.{number}."
        for weight in weights(model, place):
            yield from ((f"{label}.{where}{weight.name}", weight.shape, _local(weight, cut)) for label in labels)
            for kind, part in _state(weight, cut, _rule_of(rule, weight, place)).items():
                whole = weight.shape if part == _local(weight, cut) else part
                yield f"optimizer.{of_group}{where}{weight.name}.{kind}", whole, part
        if place == 0 and model.router_bias_rate:
            yield f"model.{where}feed_forward.router_bias", (model.experts,), (model.experts,)


def _labels(config: RunConfig, layout: Layout) -> list[str]:
    """Return the names under which a run tracks weights: those that it trains, and copies of them."""
    if layout.groups > 1:
        return [group_label(0), "model", *(["outer"] if config.parallel.outer_momentum else [])]
    return ["model", *(["ema"] if config.ema.decay else [])]


def stored_bytes(config: RunConfig, layout: Layout) -> int:
    """Return the bytes of a checkpoint: weights, optimizer state and averages, what ranks hold alike once, groups that train apart each."""
    whole, layers, rule = _Cut(tp=1, dp_shard=1, ep=1, shard=0, is_cut=False), config.model.layers, _rule(config.optim)
    units = [_unit(config.model, place, whole, rule) for place in (-1, *[0] * layers, 1)]
    weights_bytes = MASTER * sum(unit.elements for unit in units)
    biases = MASTER * layers * config.model.experts if config.model.router_bias_rate else 0
    trained = weights_bytes + biases + sum(unit.state for unit in units)
    return layout.groups * trained + weights_bytes * _copies(config, layout)


def _copies(config: RunConfig, layout: Layout) -> int:
    """Return how many more sets of the weights are held: their average, the synchronised ones, the outer momentum."""
    return len(_labels(config, layout)) - 1


def _cut_of(config: RunConfig, layout: Layout, shard: int) -> _Cut:
    is_cut = config.parallel.data_parallel != "ddp" and needs_fsdp(config, layout)
    return _Cut(layout.tp, layout.dp_shard, layout.ep, shard, is_cut)


def _places(config: RunConfig, layout: Layout, pp_rank: int) -> Counter[int]:
    """Return how many embeddings (-1), layers (0), and final norms with head (1) a rank has."""
    return Counter(-1 if n < 0 else int(n == config.model.layers) for n in _units(layout, pp_rank))


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
        state=MASTER
        * sum(
            math.prod(one) for weight in found for one in _state(weight, cut, _rule_of(rule, weight, place)).values()
        ),
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


def _state(weight: Weight, cut: _Cut, rule: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what an optimizer keeps of one parameter on a rank."""
    local = _local(weight, cut)
    if rule == "adafactor":  # a row and a column of a matrix, whole on every rank
        *rows, columns = weight.shape
        factors = {"row_var": (*rows, 1), "col_var": (*rows[:-1], 1, columns)} if rows else {"variance": (columns,)}
        return {"step": (), **factors}
    if rule == "adamw":
        return {"step": (), "exp_avg": local, "exp_avg_sq": local}
    return {"muon": {"momentum_buffer": local}, "sgd": {"momentum_buffer": local}, "plain": {}}[rule]


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
