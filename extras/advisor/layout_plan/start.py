"""What a run says of itself at its start, and the MFU that is expected of it. Pure."""

from __future__ import annotations

from dataclasses import replace

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.flops import flops_per_token, peak_tflops
from flashckpt.trainer.parallel.layout import Layout
from flashckpt.trainer.plan.forecast import Memory, is_plain, memory, speed, step_time
from flashckpt.trainer.plan.gpus import GPUS, Gpu, gpu_of_device

RANKS_PER_NODE = 8


def device_of_run(config: RunConfig, device: str) -> Gpu | None:
    """Return what this run's devices can do; None where their peak is not known.

    Args:
        config: The run; its `log.peak_tflops` is the peak where it is set.
        device: Name of the device, "" for a processor.
    """
    peak = config.log.peak_tflops or peak_tflops(device)
    found = gpu_of_device(device)
    if not peak or found is None:
        return None
    return replace(found, flops=peak * 1e12)


def start_line(config: RunConfig, layout: Layout, device: str) -> str:
    """Return the line that a run logs at its start: bytes of the fullest rank, idle share, FLOPs per token, expected MFU.

    Args:
        config: The run.
        layout: Its layout.
        device: Name of the device, "" for a processor.
    """
    needed = _memory(config, layout, device)
    parts = {
        "parameters": needed.held.parameters, "gradients": needed.held.gradients, "optimizer": needed.held.optimizer,
        "gathered*": needed.gathered, "activations*": needed.activations,
    }  # fmt: skip
    shares = ", ".join(f"{name} {_short(nbytes)}B" for name, nbytes in parts.items() if nbytes)
    flops = flops_per_token(config.model, config.train.seq_len)
    text = f"plan: {_short(needed.peak)}B on the fullest rank ({shares}; *: by formula), bubble {layout.bubble:.1%}, "
    expected = expected_mfu(config, layout, device)
    return f"{text}{_short(flops)}FLOPs per token" + ("" if expected is None else f", MFU of {expected:.1%} expected")


def expected_mfu(config: RunConfig, layout: Layout, device: str) -> float | None:
    """Return the MFU that the estimate of a step comes to; None where the peak is not known. Arguments as `start_line`."""
    gpu = device_of_run(config, device)
    if gpu is None:
        return None
    time = step_time(config, layout, gpu, _memory(config, layout, device), ranks_per_node=RANKS_PER_NODE)
    return speed(config, time, gpu, layout.world, time.estimate_s).mfu


def _memory(config: RunConfig, layout: Layout, device: str) -> Memory:
    return memory(config, layout, is_plain=not device and is_plain(config, layout, GPUS["cpu"]))


def _short(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit else f"{value:.0f} "
        value /= 1000
    return f"{value:.1f} T"
