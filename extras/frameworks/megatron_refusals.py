"""What of Megatron keeps state where no snapshot would find it: one error for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashckpt.errors import ConfigError
from flashckpt.integrations.megatron_state import optimizers_of, unwrapped_chunk

_OPTIMIZERS = frozenset({"DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer"})
_KEEP = "keep to Megatron's own checkpoints"


class _MegatronRefusal(NamedTuple):
    """One of them.

    Attributes:
        found: What the model and the optimizer have of it; "" where they have nothing.
        problem: What is wrong with that.
        remedy: What to do.
    """

    found: Callable[[Sequence[Any], Any], str]
    problem: str
    remedy: str


def refuse_unsupported(chunks: Sequence[Any], optimizer: Any) -> None:
    """Refuse a model or an optimizer whose state would not all be in a snapshot, or not come back as it was.

    Raises:
        ConfigError: It is one.
    """
    for refusal in _REFUSALS:
        if found := refusal.found(chunks, optimizer):
            raise ConfigError(
                refusal.problem,
                found=found,
                expected="a model with tensor, pipeline, context and data parallel ranks, in fp32, bf16 or fp16, and Adam",
                state="Nothing was tracked.",
                remedy=refusal.remedy,
            )


def _another_optimizer(_chunks: Sequence[Any], optimizer: Any) -> str:
    outer = [optimizer] if hasattr(optimizer, "chained_optimizers") else []
    odd = [one for one in outer if type(one).__qualname__ != "ChainedOptimizer"]
    odd += [one for one in optimizers_of(optimizer) if type(one).__qualname__ not in _OPTIMIZERS]
    return ", ".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in odd)


def _another_rule(_chunks: Sequence[Any], optimizer: Any) -> str:
    inners = [one.optimizer for one in optimizers_of(optimizer)]
    odd = [one for one in inners if not _is_adam(type(one))]
    return ", ".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in odd)


def _is_adam(kind: type) -> bool:
    fused = kind.__qualname__ == "FusedAdam" and kind.__module__.startswith(("apex.", "transformer_engine."))
    return kind in {torch.optim.Adam, torch.optim.AdamW} or fused


def _precision_aware(_chunks: Sequence[Any], optimizer: Any) -> str:
    given = [one.config for one in optimizers_of(optimizer)]
    return (
        "use_precision_aware_optimizer"
        if any(getattr(c, "use_precision_aware_optimizer", False) for c in given)
        else ""
    )


def _low_precision(chunks: Sequence[Any], _optimizer: Any) -> str:
    configs = [getattr(unwrapped_chunk(chunk), "config", None) for chunk in chunks]
    return ", ".join(key for key in ("fp8", "fp4") if any(getattr(config, key, None) for config in configs))


def _experts(_chunks: Sequence[Any], _optimizer: Any) -> str:
    from megatron.core import parallel_state as state

    size, tensor = state.get_expert_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size()
    if size > 1:
        return f"expert model parallel {size}"
    return "" if tensor in {None, state.get_tensor_model_parallel_world_size()} else f"expert tensor parallel {tensor}"


def _megatron_fsdp(chunks: Sequence[Any], _optimizer: Any) -> str:
    given = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    is_used = any(getattr(config, "use_megatron_fsdp", False) for config in given)
    return "use_megatron_fsdp" if is_used else ""


def _instances(chunks: Sequence[Any], _optimizer: Any) -> str:
    given = [getattr(getattr(chunk, "ddp_config", None), "num_distributed_optimizer_instances", 1) for chunk in chunks]
    return f"num_distributed_optimizer_instances={max(given)}" if max(given, default=1) > 1 else ""


def _unfenced_gather(chunks: Sequence[Any], optimizer: Any) -> str:
    is_overlapped = any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)
    has_fp32 = any(len(group) for one in optimizers_of(optimizer) for group in getattr(one, "shard_fp32_groups", ()))
    return "overlap_param_gather with fp32 parameters" if is_overlapped and has_fp32 else ""


_REFUSALS = (
    _MegatronRefusal(_megatron_fsdp, "Megatron's FSDP lays parameters out in another way", f"leave it out, or {_KEEP}"),
    _MegatronRefusal(
        _another_optimizer, "it is not known where this optimizer keeps its state", f"use Adam, or {_KEEP}"
    ),
    _MegatronRefusal(
        _another_rule, "it is not known what this optimizer keeps before its first step", f"use Adam, or {_KEEP}"
    ),
    _MegatronRefusal(_precision_aware, "the fp32 weights are inside the fused optimizer", f"leave it out, or {_KEEP}"),
    _MegatronRefusal(
        _low_precision, "the layers keep scales of past steps beside their weights", f"use bf16, or {_KEEP}"
    ),
    _MegatronRefusal(_experts, "each group of ranks has other experts", f"leave expert parallelism out, or {_KEEP}"),
    _MegatronRefusal(
        _instances, "several instances of the optimizer deal the state in another way", f"leave it out, or {_KEEP}"
    ),
    _MegatronRefusal(
        _unfenced_gather,
        "parameters are gathered in place while a snapshot reads them",
        "train in bf16, or without overlap_param_gather",
    ),
)
