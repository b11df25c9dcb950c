"""What torchtitan 0.3.0 asks of GPUs and of torch nightly, replaced: its loop runs unchanged on processors with gloo.

`prepare()` is called before anything of torchtitan is imported. Written for torch 2.13.
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


def prepare() -> None:
    """Replace what is missing, and import torchtitan."""
    _give_device()
    _mask_no_documents()
    importlib.import_module("torchtitan.distributed.utils").__dict__["set_pg_timeouts"] = lambda **_: None
    _end_at_once()
    _divide_outside_of_gloo()
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        kind.step = _whole_batch(kind.step)  # type: ignore[method-assign]


def _give_device() -> None:
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = unittest.mock.MagicMock()  # imports triton
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=24 << 30)
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    importlib.import_module("torch._utils").__dict__["_get_available_device_type"] = lambda: "cpu"


def _mask_no_documents() -> None:
    """Attend causally over the whole row: flex attention needs a compiler, varlen CUDA."""
    attention = importlib.import_module("torchtitan.models.common.attention")
    plain = attention.ScaledDotProductAttention.Config
    importlib.import_module("torchtitan.models.llama3").__dict__["get_attention_config"] = lambda _: plain()


def _end_at_once() -> None:
    """Let rank 0 not sleep for two seconds when it is done."""
    clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    importlib.import_module("torchtitan.trainer").__dict__["time"] = clock


def _divide_outside_of_gloo() -> None:
    """Gloo has no PREMUL_SUM."""
    divide: Any = FSDPModule.set_gradient_divide_factor

    def divide_outside(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_outside  # type: ignore[method-assign]


def _whole_batch(step: Callable[..., Any]) -> Callable[..., Any]:
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
