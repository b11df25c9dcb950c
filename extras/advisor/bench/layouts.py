"""Shard tables of real models from their hyper-parameters and a TP x PP x DP x ZeRO layout. Pure, torch-free.

The state is what mixed-precision training keeps: bfloat16 weights and float32 master weights, first and second
moments, 14 bytes per parameter. Boxes follow torch's own parallelism: TP cuts rows or columns, ZeRO / FSDP cuts the
TP-local box along dimension 0, pipeline stages hold the layers that the trainer gives them. Ranks count TP fastest, then DP, then PP.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flashckpt.core.shard import Shard
from flashckpt.errors import LayoutError
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.weights import Weight, weights
from flashckpt.trainer.parallel.layout import stage_layers

BYTES_PER_PARAMETER = 14
WEIGHT = ("model.{}", "bfloat16")
OPTIMIZER = (
    ("optimizer.{}.master", "float32"),
    ("optimizer.{}.exp_avg", "float32"),
    ("optimizer.{}.exp_avg_sq", "float32"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A Llama-like dense transformer; untied embedding and output, no biases."""

    name: str
    layers: int
    hidden: int
    ffn: int
    kv: int
    vocab: int

    def weights(self, place: int) -> tuple[Weight, ...]:
        """Return those of a place (`flashckpt.trainer.config.weights`); `kv`: width of keys and of values."""
        kinds = ModelConfig(vocab=self.vocab, dim=self.hidden, heads=self.hidden, kv_heads=self.kv, ffn=self.ffn)
        return weights(kinds, place)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        repeats = {-1: 1, 0: self.layers, 1: 1}
        return sum(n * math.prod(weight.shape) for place, n in repeats.items() for weight in self.weights(place))


MODELS = {
    "llama3-8b": Model(name="llama3-8b", layers=32, hidden=4096, ffn=14336, kv=1024, vocab=128256),
    "llama3-70b": Model(name="llama3-70b", layers=80, hidden=8192, ffn=28672, kv=1024, vocab=128256),
    "llama3-405b": Model(name="llama3-405b", layers=126, hidden=16384, ffn=53248, kv=1024, vocab=128256),
    # no published model: the hyper-parameters of the benchmark table (192 heads, 32 of keys and values)
    "llama-1t": Model(name="llama-1t", layers=128, hidden=25872, ffn=98304, kv=4312, vocab=128256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model cut over `tp` x `pp` x `dp` ranks.

    Attributes:
        model: What is cut.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Data-parallel ranks.
        zero: 0 nothing is cut over DP, 1 the optimizer state is, 3 the weights are as well.
    """

    model: Model
    tp: int
    pp: int
    dp: int
    zero: int

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp) < 1 or self.zero not in (0, 1, 3):
            raise LayoutError(
                "invalid layout",
                found=f"tp {self.tp}, pp {self.pp}, dp {self.dp}, zero {self.zero}",
                expected="tp, pp and dp of at least 1; zero 0, 1 or 3",
            )
        narrow = min(self.model.hidden, self.model.ffn, self.model.kv, self.model.vocab)
        if self.pp > self.model.layers or self.tp > narrow:
            raise LayoutError(
                f"{self.model.name} cannot be cut that often",
                found=f"{self.pp} stages for {self.model.layers} layers, {self.tp} TP ranks for a width of {narrow}",
                expected="at most one stage per layer and one TP rank per row",
            )

    @property
    def ranks(self) -> int:
        """World size."""
        return self.tp * self.pp * self.dp

    @property
    def total_bytes(self) -> int:
        """Bytes of a whole checkpoint; what is replicated counts once."""
        return self.model.parameters * BYTES_PER_PARAMETER

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the mesh coordinate of a rank: TP fastest, then DP, then PP."""
        return {
            "pp": rank // (self.tp * self.dp),
            "dp": rank // self.tp % self.dp,
            "tp": rank % self.tp,
        }


DEFAULTS = {
    "llama3-8b": ModelLayout(model=MODELS["llama3-8b"], tp=1, pp=1, dp=8, zero=3),
    "llama3-70b": ModelLayout(model=MODELS["llama3-70b"], tp=8, pp=1, dp=8, zero=3),
    "llama3-405b": ModelLayout(model=MODELS["llama3-405b"], tp=8, pp=32, dp=2, zero=1),
    "llama-1t": ModelLayout(model=MODELS["llama-1t"], tp=8, pp=64, dp=2, zero=1),
}
"""The layouts of the published table of checkpoint sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row of the published table, and why ours differs."""

    layout: str
    stated: str
    why: str


PUBLISHED = (
    Published(
        layout="llama3-8b",
        stated="105 GB",
        why="the stated figure is our bytes in GiB: 8.03e9 parameters x 14 bytes",
    ),
    Published(
        layout="llama3-70b",
        stated="912 GB",
        why="GiB as well, and keys and values half as wide there (128 heads instead of 64): 69.88e9 x 14 = 911 GiB",
    ),
    Published(
        layout="llama3-405b",
        stated="5.29 TB",
        why="thousands of GiB: 405.85e9 x 14 = 5,292 GiB",
    ),
    Published(
        layout="llama-1t",
        stated="18 TB",
        why="an earlier form of that model had as many heads of keys and values as of queries: 1.326e12 x 14 = 18.6 TB",
    ),
)


def cut(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return (offset, length) of part `index` as torch.chunk cuts: equal parts, the last ones shorter or empty."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(start + size, length) - start


def rank_shards(layout: ModelLayout, rank: int, present: Collection[int] | None = None) -> list[Shard]:
    """Return the shards that a rank holds.

    Args:
        layout: The model and how it is cut.
        rank: 0 <= rank < layout.ranks.
        present: Ranks that take part when only some of the layout run (the first node); replicas are assigned to
            them. None: all.

    Returns:
        Weights, then optimizer state; `replica` is 0 where this rank persists the box.
    """
    return [shard for shard, _ in _held(layout, rank, present)]


def _held(layout: ModelLayout, rank: int, present: Collection[int] | None) -> list[tuple[Shard, tuple[int, ...]]]:
    """Return the shards that a rank holds, each with the ranks that hold the same box."""
    where = layout.coordinates(rank)
    held = _stage_weights(layout, where["pp"])
    shards = []
    for kind, zero in ((WEIGHT, 3), *((kind, 1) for kind in OPTIMIZER)):
        for index, weight in enumerate(held):
            shards.append(
                _shard(layout, where, weight, kind, over_dp=layout.zero >= zero, index=index, present=present)
            )
    return [(shard, holders) for shard, holders in shards if shard.nbytes]


@cache
def _stage_weights(layout: ModelLayout, stage: int) -> list[Weight]:
    """Return the weights of a pipeline stage, by their names in the whole model."""
    model = layout.model
    held = [] if stage else list(model.weights(-1))
    for layer in stage_layers(model.layers, layout.pp)[stage]:
        held += [replace(weight, name=f"layers.{layer}.{weight.name}") for weight in model.weights(0)]
    return held + (list(model.weights(1)) if stage == layout.pp - 1 else [])


def _shard(
    layout: ModelLayout,
    where: dict[str, int],
    weight: Weight,
    kind: tuple[str, str],
    *,
    over_dp: bool,
    index: int,
    present: Collection[int] | None,
) -> tuple[Shard, tuple[int, ...]]:
    """Return the box of one weight on one rank, and the ranks that hold it."""
    offsets, lengths = [0] * len(weight.shape), list(weight.shape)
    if weight.cut is not None:
        offsets[weight.cut], lengths[weight.cut] = cut(weight.shape[weight.cut], layout.tp, where["tp"])
    if over_dp:
        start, length = cut(lengths[0], layout.dp, where["dp"])
        offsets[0], lengths[0] = offsets[0] + start, length
    holders = [
        _rank_of(layout, where["pp"], dp, tp)
        for dp in ([where["dp"]] if over_dp else range(layout.dp))
        for tp in (range(layout.tp) if weight.cut is None else [where["tp"]])
        if present is None or _rank_of(layout, where["pp"], dp, tp) in present
    ]
    # Tensors are dealt out whole to their replicas in turn: layers repeat, so the bytes come out even.
    owner = index % len(holders)
    replica = (holders.index(_rank_of(layout, where["pp"], where["dp"], where["tp"])) - owner) % len(holders)
    shard = Shard(
        fqn=kind[0].format(weight.name),
        dtype=kind[1],
        global_shape=weight.shape,
        offsets=tuple(offsets),
        lengths=tuple(lengths),
        replica=replica,
    )
    return shard, tuple(holders)


def _rank_of(layout: ModelLayout, pp: int, dp: int, tp: int) -> int:
    return (pp * layout.dp + dp) * layout.tp + tp


def held_bytes(shards: Collection[Shard]) -> int:
    """Return the bytes a rank keeps in memory."""
    return sum(shard.nbytes for shard in shards)


def persisted_bytes(shards: Collection[Shard]) -> int:
    """Return the bytes a rank writes to storage."""
    return sum(shard.nbytes for shard in shards if shard.replica == 0)


def scaled(layout: ModelLayout, factor: float) -> ModelLayout:
    """Return the layout of a smaller model with about `factor` of the bytes and the same kinds of shards.

    Layers, widths and the vocabulary shrink together (a cube root each for layers and width, and twice that for the
    vocabulary), so that the mix of large and small tensors stays that of the model; there is at least one layer per
    stage, and widths stay multiples of what TP and DP cut.

    Raises:
        LayoutError: `factor` is not in (0, 1], or nothing would be left to cut.
    """
    if not 0 < factor <= 1:
        raise LayoutError("--scale must be above 0 and at most 1", found=f"{factor:g}", expected="for example 1/64")
    model, unit = layout.model, max(8, layout.tp * layout.dp)
    if factor == 1:
        return layout
    layers = max(layout.pp, round(model.layers * factor ** (1 / 3)))
    width = math.sqrt(factor * model.layers / layers)

    def narrow(length: int, share: float) -> int:
        return max(unit, round(length * share / unit) * unit)

    hidden = narrow(model.hidden, width)
    smaller = replace(
        model,
        layers=layers,
        hidden=hidden,
        ffn=narrow(model.ffn, width),
        kv=min(hidden, narrow(model.kv, width)),
        vocab=narrow(model.vocab, min(1.0, factor * model.hidden / hidden)),
    )
    result = replace(layout, model=smaller)
    if result.total_bytes > 2 * max(factor * layout.total_bytes, 1):
        raise LayoutError(
            f"{model.name} cannot be scaled down that far on {layout.tp} x {layout.pp} x {layout.dp} ranks",
            found=f"scale {factor:g}",
            expected=f"at least about {result.total_bytes / layout.total_bytes:.2g} (one layer per stage, {unit} rows per tensor)",
        )
    return result


def shards_of(table: Mapping[str, Any], rank: int) -> list[Shard]:
    """Return the shards of one rank of a table description, as processes hand it to each other; see `copies_of`."""
    return [shard for shard, _ in copies_of(table, rank)]


def copies_of(table: Mapping[str, Any], rank: int) -> list[tuple[Shard, tuple[int, ...]]]:
    """Return the shards of one rank, each as a separate tensor, with the ranks that hold a copy of it.

    A separate tensor: a checkpoint of some ranks of a layout only would have gaps otherwise.

    Args:
        table: `uniform_bytes` for one flat float32 tensor per rank; or the fields of a ModelLayout with `model` as the
            fields of a Model, and `ranks`, how many of its first ranks take part.
        rank: Which.
    """
    if "uniform_bytes" in table:
        return [(shard, (rank,)) for shard in uniform(int(table["uniform_bytes"]), rank, int(table["ranks"]))]
    fields = {key: value for key, value in table.items() if key != "ranks"}
    layout = ModelLayout(**{**fields, "model": Model(**table["model"])})
    held = _held(layout, rank, range(int(table["ranks"])))
    return [(_own_tensor(shard), holders) for shard, holders in held]


def uniform(nbytes: int, rank: int, ranks: int) -> list[Shard]:
    """Return float32 shards of at most 64 MiB each, `nbytes` in all, of tensors cut along dimension 0."""
    shards: list[Shard] = []
    left = nbytes // 4
    while left > 0:
        size = min(left, 16 << 20)
        name = f"state.{len(shards)}"
        shards.append(
            Shard(fqn=name, dtype="float32", global_shape=(size * ranks,), offsets=(size * rank,), lengths=(size,))
        )
        left -= size
    return shards


def _own_tensor(shard: Shard) -> Shard:
    """Return the box as a separate tensor."""
    name = f"{shard.fqn}[{','.join(map(str, shard.offsets))}]"
    nothing = (0,) * len(shard.offsets)
    return Shard(
        fqn=name,
        dtype=shard.dtype,
        global_shape=shard.lengths,
        offsets=nothing,
        lengths=shard.lengths,
        replica=shard.replica,
    )
