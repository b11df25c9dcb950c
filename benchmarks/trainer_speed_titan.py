"""A rank of torchtitan for benchmarks/trainer_speed.py, in its own Python: `python trainer_speed_titan.py [torchtitan options]`.

torchtitan is made for GPUs and torch nightly. What it asks of them is replaced here, so that its loop runs unchanged on
processors with gloo. Written for torchtitan 0.3.0 with torch 2.13.
"""

from __future__ import annotations

import importlib
import sys
import time
import types
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.pipelining.schedules as schedules
from torch.distributed.fsdp import FSDPModule
from trainer_speed_turns import Over, Turns


def no_gpu() -> None:
    """Give torchtitan a device: before it is imported."""
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = unittest.mock.MagicMock()  # imports triton
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=24 << 30)
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    importlib.import_module("torch._utils").__dict__["_get_available_device_type"] = lambda: "cpu"


def no_nightly() -> None:
    """Replace what torch 2.13 and gloo lack."""
    attention = importlib.import_module("torchtitan.models.common.attention")
    llama: Any = importlib.import_module("torchtitan.models.llama3")
    # flex attention needs a compiler, varlen CUDA; so documents of a row are not masked
    llama.get_attention_config = lambda _: attention.ScaledDotProductAttention.Config()
    distributed: Any = importlib.import_module("torchtitan.distributed.utils")
    distributed.set_pg_timeouts = lambda **_: None
    divide: Any = FSDPModule.set_gradient_divide_factor

    def divide_outside(self: Any, factor: float) -> None:  # gloo has no PREMUL_SUM
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_outside  # type: ignore[method-assign]
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        kind.step = whole_batch(kind.step)  # type: ignore[method-assign]


def whole_batch(step: Callable[..., Any]) -> Callable[..., Any]:
    """Hand a pipeline one batch, which it cuts itself, where torchtitan has lists of micro-batches."""

    def call(
        self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **rest: Any
    ) -> Any:
        if kwarg_mbs is None:
            return step(self, *args, **rest)
        rest |= {key: torch.cat([one[key] for one in kwarg_mbs]) for key in kwarg_mbs[0]}
        inputs = [torch.cat([one[0] for one in arg_mbs])] if arg_mbs else []
        return step(self, *inputs, target=None if target_mbs is None else torch.cat(target_mbs), **rest)

    return call


def pace(trainer: Any, turns: Turns) -> None:
    """Let each step wait for its turn, and count the CPU time of its batches."""
    train_step, batches = trainer.train_step, trainer.batch_generator

    def paced(self: Any, batches: Any) -> None:
        turns.step_begins()
        train_step(self, batches)

    def counted(self: Any, source: Any) -> Any:
        inner = batches(self, source)
        while True:
            began = time.thread_time()
            found = next(inner)
            turns.data_s += time.thread_time() - began
            yield found

    trainer.train_step, trainer.batch_generator = paced, counted


def main() -> None:
    no_gpu()
    training = importlib.import_module("torchtitan.train")
    no_nightly()
    turns = Turns()
    pace(training.Trainer, turns)
    configs: Any = importlib.import_module("torchtitan.models.llama3.config_registry")
    debug = configs.llama3_debugmodel

    def without_validation() -> Any:
        config = debug()
        config.validator.enable = config.checkpoint.enable = False
        return config

    configs.llama3_debugmodel = without_validation
    try:
        training.main()
    except Over:
        pass


if __name__ == "__main__":
    main()
