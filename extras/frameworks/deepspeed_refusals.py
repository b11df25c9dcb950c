"""What of DeepSpeed keeps state where no snapshot would find it, or lays it out in another way: one error for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from flashckpt.errors import ConfigError

_OPTIMIZERS = frozenset(
    {
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
        "BF16_Optimizer",
        "FP16_Optimizer",
        "FP16_UnfusedOptimizer",
    }
)
_ONE_BIT = frozenset({"OnebitAdam", "OnebitLamb", "ZeroOneAdam"})


class _Refusal(NamedTuple):
    """One of them.

    Attributes:
        found: What the engine has of it; "" where it has nothing.
        problem: What is wrong with that.
        remedy: What to do.
    """

    found: Callable[[Any], str]
    problem: str
    remedy: str


def refuse_unsupported(engine: Any) -> None:
    """Refuse an engine whose state would not all be in a snapshot, or not come back as it was.

    Raises:
        ConfigError: It is one.
    """
    for refusal in _REFUSALS:
        if found := refusal.found(engine):
            raise ConfigError(
                refusal.problem,
                found=found,
                expected="a DeepSpeedEngine with data-parallel ranks, ZeRO 0 to 3, and all of its state in memory",
                state="Nothing was tracked.",
                remedy=refusal.remedy,
            )


def _another_engine(engine: Any) -> str:
    kind = type(engine)
    return "" if kind is DeepSpeedEngine else f"{kind.__module__}.{kind.__qualname__}"


def _pipeline(engine: Any) -> str:
    return type(engine).__qualname__ if getattr(engine, "pipeline_parallelism", False) else ""


def _offload(device: str) -> Callable[[Any], str]:
    def found(engine: Any) -> str:
        given = {"offload_optimizer": engine.zero_offload_optimizer(), "offload_param": engine.zero_offload_param()}
        places = {name: str(getattr(one.device, "value", one.device)) for name, one in given.items() if one is not None}
        return ", ".join(f"{name} to {place}" for name, place in places.items() if place == device)

    return found


def _model_parallel(engine: Any) -> str:
    sizes = {
        "model parallel": engine.mp_world_size,
        "sequence parallel": engine.sequence_parallel_size,
        "autotp_size": engine.autotp_size(),
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size and size > 1)


def _zero_plus_plus(engine: Any) -> str:
    given = {
        "zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "zero_quantized_weights": engine.zero_quantized_weights(),
        "zero_quantized_nontrainable_weights": engine.zero_quantized_nontrainable_weights(),
        "zero_quantized_gradients": engine.zero_quantized_gradients(),
    }
    return ", ".join(name for name, is_given in given.items() if is_given)


def _one_bit(engine: Any) -> str:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return name if (name := type(inner).__qualname__) in _ONE_BIT else ""


def _autocast_scaler(engine: Any) -> str:
    has_one = getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(
        engine.optimizer, "torch_autocast_gradscaler", None
    )
    return "torch_autocast with float16" if has_one else ""


def _data_schedules(engine: Any) -> str:
    given = {
        "curriculum learning": engine.curriculum_learning_enabled(),
        "data efficiency": engine.data_efficiency_enabled(),
        "random_ltd": engine.random_ltd_enabled(),
    }
    return ", ".join(name for name, is_given in given.items() if is_given)


def _another_optimizer(engine: Any) -> str:
    kind = type(engine.optimizer)
    is_known = kind.__qualname__ in _OPTIMIZERS or issubclass(kind, torch.optim.Optimizer)
    return "" if is_known else f"{kind.__module__}.{kind.__qualname__}"


_REFUSALS = (
    _Refusal(
        _pipeline,
        "the pipeline engine gives each rank other layers, whose names are not those of the model",
        "train without a PipelineModule, or with the stages of docs/parallelism.md",
    ),
    _Refusal(_another_engine, "this is not what deepspeed.initialize() returns for training", "pass the engine itself"),
    _Refusal(
        _offload("nvme"),
        "ZeRO-Infinity keeps state on NVMe, where no snapshot would find it",
        "leave offload_optimizer and offload_param out, or keep to engine.save_checkpoint()",
    ),
    _Refusal(
        _offload("cpu"),
        "ZeRO-Offload moves state between host and device while it trains",
        "leave offload_optimizer and offload_param out, or keep to engine.save_checkpoint()",
    ),
    _Refusal(
        lambda engine: "an MoE layer" if engine.has_moe_layers else "",
        "each group of ranks has other experts",
        "train a model without deepspeed.moe, or keep to engine.save_checkpoint()",
    ),
    _Refusal(
        _model_parallel,
        "this class resumes data-parallel training only",
        "train with as many data-parallel ranks as ranks, or keep to engine.save_checkpoint()",
    ),
    _Refusal(
        _zero_plus_plus,
        "ZeRO++ keeps a second, or a quantized, copy of the parameters",
        "leave these settings out, or keep to engine.save_checkpoint()",
    ),
    _Refusal(
        _one_bit,
        "a 1-bit optimizer keeps the errors of its compression on each rank",
        "use AdamW, or keep to engine.save_checkpoint()",
    ),
    _Refusal(
        lambda engine: "load_universal" if engine.load_universal_checkpoint() else "",
        "the engine waits for a universal checkpoint, which this class does not load",
        "leave checkpoint.load_universal out: snapshots continue on any number of ranks; "
        "or read the folder: flashckpt import FOLDER ROOT",
    ),
    _Refusal(
        _autocast_scaler,
        "the loss scale of torch_autocast is where no snapshot would find it",
        "use bfloat16 with torch_autocast, or the fp16 section of the configuration",
    ),
    _Refusal(
        _data_schedules,
        "DeepSpeed changes what it trains on by a schedule that is in no snapshot",
        "leave these settings out, or keep to engine.save_checkpoint()",
    ),
    _Refusal(
        _another_optimizer,
        "this class does not know where this optimizer keeps its state",
        "pass an optimizer to deepspeed.initialize(), or keep to engine.save_checkpoint()",
    ),
)
