"""Which linear layers are computed in float8, and when they cannot be. Pure and torch-free."""

from __future__ import annotations

import importlib.util

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model.recompute import RECOMPUTES_ATTENTION, RECOMPUTES_FEED_FORWARD, recompute_of

MULTIPLE = 16
"""Sizes of float8 products are multiples of it: rows and columns of a rank's weights, and tokens, over which gradients of weights add up."""
ATTENTION = "attention."


def uses_float8(config: RunConfig) -> bool:
    """Return whether the products of the layers are computed in float8."""
    return config.train.float8 != "off"


def float8_layers(model: ModelConfig, tp: int) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a block that are computed in float8: name -> outputs, inputs on a tensor-parallel rank.

    Not among them: routers, gates and experts, and with tensor parallelism what is computed on local tensors: keys and
    values whose heads do not divide, and a shared expert.
    """
    dim, queries, keys = model.dim, model.heads * model.head_size // tp, model.kv_heads * model.head_size // tp
    found = {f"{ATTENTION}wq": (queries, dim)}
    if model.kv_heads % tp == 0:
        found |= {f"{ATTENTION}wk": (keys, dim), f"{ATTENTION}wv": (keys, dim)}
    found[f"{ATTENTION}wo"] = (dim, queries)
    if not model.experts:
        return found | _feed_forward("feed_forward.", dim, model.ffn // tp)
    if model.shared_ffn and tp == 1:
        return found | _feed_forward("feed_forward.shared.", dim, model.shared_ffn)
    return found


def _feed_forward(prefix: str, dim: int, ffn: int) -> dict[str, tuple[int, int]]:
    return {f"{prefix}w1": (ffn, dim), f"{prefix}w2": (dim, ffn), f"{prefix}w3": (ffn, dim)}


def float8_flops_per_token(config: RunConfig, tp: int) -> float:
    """Return the FLOPs per token, of all ranks and with what is computed again, that are products in float8."""
    if not uses_float8(config):
        return 0.0
    weights = {name: tp * rows * columns for name, (rows, columns) in float8_layers(config.model, tp).items()}
    attention = sum(size for name, size in weights.items() if name.startswith(ATTENTION))
    feed_forward = sum(weights.values()) - attention
    total = 0.0
    for layer in range(config.model.layers):
        mode = recompute_of(config.parallel.activation_checkpoint, layer)
        total += attention * (8 if mode in RECOMPUTES_ATTENTION else 6)
        total += feed_forward * (8 if mode in RECOMPUTES_FEED_FORWARD else 6)
    return total


def check_float8(config: RunConfig, *, tp: int, tokens: int) -> None:
    """Refuse float8 whose products have sizes that a device has no kernels for, and that would go nowhere.

    Args:
        config: The run.
        tp: Ranks that cut the weights.
        tokens: Of a micro-batch on a rank.

    Raises:
        LayoutError: A size is no multiple of 16.
        ConfigError: On a CPU without emulation.
    """
    if not uses_float8(config):
        return
    if config.train.device == "cpu" and not config.train.float8_emulate:
        raise needs_device("a CPU: train.device = cpu")
    sizes = {
        f"layers.*.{name} on a rank of parallel.tp = {tp}": f"{rows} x {columns}"
        for name, (rows, columns) in float8_layers(config.model, tp).items()
        if rows % MULTIPLE or columns % MULTIPLE
    }
    if tokens % MULTIPLE:
        sizes["tokens of a micro-batch on a rank, over which gradients of weights add up"] = str(tokens)
    if sizes:
        name, size = next(iter(sizes.items()))
        raise LayoutError(
            f"train.float8 = {config.train.float8} does not go with these sizes: there are no float8 products of them",
            found=f"{name}: {size}" + (f", and {len(sizes) - 1} more" if len(sizes) > 1 else ""),
            expected=f"multiples of {MULTIPLE}",
            state="Nothing was started.",
            remedy='change model.*, train.micro_batch, train.seq_len or parallel.*, or set train.float8 = "off"',
        )


def refuse_without_torchao(config: RunConfig) -> None:
    """Raise ConfigError if a run needs torchao and it is not installed."""
    if uses_float8(config) and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"train.float8 = {config.train.float8} needs torchao",
            found="torchao is not installed",
            expected="torchao 0.18 or newer",
            state="Nothing was started.",
            remedy="pip install 'flashckpt[float8]', or set train.float8 = \"off\"",
        )


def needs_device(found: str) -> ConfigError:
    """Return the refusal of a device that has no float8 products."""
    return ConfigError(
        "train.float8 needs a GPU with float8 products",
        found=found,
        expected="compute capability 8.9 or more (L4, L40S, H100, B200; MI300X)",
        state="Nothing was started.",
        remedy='set train.float8 = "off", or train.float8_emulate = true to try it at the speed of float32',
    )
