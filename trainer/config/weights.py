"""Parameters of a model by name: their shapes, and which dimension tensor parallelism cuts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from flashckpt.trainer.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter.

    Attributes:
        name: Its name in the model; of a layer's, the part behind `layers.N.`.
        shape: Its whole shape.
        cut: The dimension that tensor parallelism cuts; None where every rank holds all of it.
        is_expert: Whether its first dimension counts experts.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    is_expert: bool = False


@cache
def weights(model: ModelConfig, place: int) -> tuple[Weight, ...]:
    """Return the parameters of the embedding (place -1), of a layer (0), or of final norm and head (1)."""
    table = (model.vocab, model.dim)
    if place == -1:
        return (Weight("tok_embeddings.weight", table, 0),)
    if place == 1:
        return Weight("norm.weight", (model.dim,)), Weight("output.weight", table, 0)
    return (*_attention(model), *_feed_forward(model), *(Weight(f"{one}_norm.weight", (model.dim,)) for one in _NORMS))


def parameter_names(model: ModelConfig) -> Iterator[str]:
    """Yield the names of all parameters of a model."""
    for place in (-1, 1):
        yield from (weight.name for weight in weights(model, place))
    yield from (f"layers.{layer}.{weight.name}" for layer in range(model.layers) for weight in weights(model, 0))


_NORMS = ("attention", "ffn")


def _attention(model: ModelConfig) -> Iterator[Weight]:
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    rows = {"wq": queries, "wk": keys, "wv": keys}
    yield from (Weight(f"attention.{name}.weight", (length, model.dim), 0) for name, length in rows.items())
    yield Weight("attention.wo.weight", (model.dim, queries), 1)
    if model.qkv_bias:
        yield from (Weight(f"attention.{name}.bias", (length,), 0) for name, length in rows.items())
    if model.qk_norm:
        yield from (Weight(f"attention.{name}_norm.weight", (model.head_size,)) for name in ("q", "k"))


def _feed_forward(model: ModelConfig) -> Iterator[Weight]:
    dim, ffn, count = model.dim, model.ffn, model.experts
    if not count:
        yield from _swiglu("feed_forward", dim, ffn)
        return
    yield Weight("feed_forward.router.weight", (count, dim))
    for name, shape, cut in (("w1", (ffn, dim), 1), ("w2", (dim, ffn), 2), ("w3", (ffn, dim), 1)):
        yield Weight(f"feed_forward.experts.{name}", (count, *shape), cut, is_expert=True)
    if model.shared_ffn:
        yield Weight("feed_forward.shared_gate.weight", (1, dim))
        yield from _swiglu("feed_forward.shared", dim, model.shared_ffn)


def _swiglu(where: str, dim: int, ffn: int) -> Iterator[Weight]:
    yield Weight(f"{where}.w1.weight", (ffn, dim), 0)
    yield Weight(f"{where}.w2.weight", (dim, ffn), 1)
    yield Weight(f"{where}.w3.weight", (ffn, dim), 0)
