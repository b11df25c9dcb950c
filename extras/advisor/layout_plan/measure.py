"""`--measure`: times two blocks of a candidate on this machine, forward and backward, and says what share of the peak they reach.

In the sizes of one rank: heads and inner features divided by tp, one micro-batch, the precision and recomputation of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.flops import flops_per_token, recomputed_flops_per_token
from flashckpt.trainer.model.recompute import parse_recompute
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.plan.activations import itemsize
from flashckpt.trainer.plan.gpus import Gpu
from flashckpt.trainer.plan.search import LayoutChoice

BLOCKS = 2
ROUNDS = 3
MOST_SECONDS = 60.0
"""What a measurement of one candidate may take by the table's peak at a tenth of it; beyond, it is refused."""


class BlockTimer:
    """Times blocks, each size once.

    Args:
        gpu: What the plan is for.

    Raises:
        ConfigError: This machine has none.
    """

    def __init__(self, gpu: Gpu) -> None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        if not (gpu.is_named(name) if gpu.device else True):
            raise ConfigError(
                f"--measure cannot time a {gpu.name} on this machine",
                found=name or "no GPU",
                expected=gpu.device,
                state="Nothing was computed.",
                remedy="run it on a machine with that GPU, plan for --gpu cpu, or give --efficiency",
            )
        self._gpu, self._device = gpu, torch.device("cuda" if gpu.device else "cpu")
        self.device_name = name if gpu.device else "this processor"
        self._known: dict[tuple[object, ...], float] = {}

    def efficiency(self, one: LayoutChoice) -> float:
        """Return the share of the peak, above 0, that two blocks of a candidate reach.

        Raises:
            ConfigError: They would take too long.
        """
        config, tp = one.config, one.layout.tp
        key = (tp, config.train.micro_batch, config.parallel.activation_checkpoint)
        if key not in self._known:
            self._known[key] = self._measure(config, tp)
        return self._known[key]

    def _measure(self, config: RunConfig, tp: int) -> float:
        model = blocks_of(config.model, tp)
        mode = config.parallel.activation_checkpoint
        tokens = config.train.micro_batch * config.train.seq_len
        head = 6 * (model.vocab * model.dim + model.dim)  # not timed: blocks alone
        flops = flops_per_token(model, config.train.seq_len) - head
        flops = tokens * (flops + recomputed_flops_per_token(model, config.train.seq_len, mode))
        if flops * (ROUNDS + 1) / (0.1 * self._gpu.flops) > MOST_SECONDS:
            raise ConfigError(
                "--measure would take too long: two blocks are too large for this device",
                found=f"{flops / 1e12:.3g} TFLOPs",
                expected=f"at most {MOST_SECONDS * 0.1 * self._gpu.flops / (ROUNDS + 1) / 1e12:.3g}",
                state="Nothing was computed.",
                remedy="give a shorter train.seq_len or a smaller train.micro_batch",
            )
        seconds = self._seconds(model, config, mode)
        return min(1.0, flops / seconds / self._gpu.flops)

    def _seconds(self, model: ModelConfig, config: RunConfig, mode: str) -> float:
        """Return the fastest of some rounds: what disturbs a machine only ever adds."""
        train = config.train
        part = Transformer(model, train.seq_len, layers=range(BLOCKS), first=False, last=False)
        for parameter in part.parameters():
            nn.init.normal_(parameter, std=0.02)
        kind = torch.bfloat16 if itemsize(config) == 2 else torch.float32
        part = part.to(self._device, kind)
        part.set_recompute(parse_recompute(mode))
        rows = torch.randn(train.micro_batch, train.seq_len, model.dim, device=self._device, dtype=kind)
        rows.requires_grad_()

        def once() -> None:
            out = part(rows)
            out.backward(torch.ones_like(out))

        once()
        return min(self._timed(once) for _ in range(ROUNDS))

    def _timed(self, work: Callable[[], None]) -> float:
        self._settle()
        began = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - began

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def blocks_of(model: ModelConfig, tp: int) -> ModelConfig:
    """Return a model of two blocks in the sizes of one tensor-parallel rank."""
    return replace(
        model, layers=BLOCKS, head_dim=model.head_size, heads=model.heads // tp, kv_heads=model.kv_heads // tp,
        ffn=model.ffn // tp, shared_ffn=model.shared_ffn // tp, dropout=0.0,
    )  # fmt: skip
