"""`plan`: its arithmetic against published numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.flops import flops_per_token, mfu, recomputed_flops_per_token, training_days
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.failures import chance, gpu_hours
from flashckpt.trainer.plan.forecast import memory, step_time
from flashckpt.trainer.plan.gpus import GPUS
from flashckpt.trainer.plan.held import zero_bytes
from flashckpt.trainer.plan.wire import (
    data_elements,
    pipeline_elements,
    sharded_passes,
)


def test_mixed_precision_takes_112_gb_for_7_g_parameters() -> None:
    found = zero_bytes(7e9, 1, 0)
    assert (found.total, found.parameters, found.gradients, found.optimizer) == (112e9, 14e9, 14e9, 84e9)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_each_stage_of_zero_cuts_what_was_published(stage: int, gigabytes: float) -> None:
    assert zero_bytes(7.5e9, 64, stage).total / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert sharded_passes(stage) == (3 if stage == 3 else 2)  # 1.5 times as much on the wire


def test_stages_of_zero_are_known() -> None:
    with pytest.raises(LayoutError, match="no such stage of ZeRO"):
        zero_bytes(1, 1, 4)


def test_175_g_parameters_take_2_8_tb_and_288_years() -> None:
    assert zero_bytes(175e9, 1, 0).total == 2.8e12
    flops = 6 * 175e9
    # one V100 at 28 % of its peak, 300 G tokens
    years = training_days(300e9, 0.28 * GPUS["v100"].flops / flops) / 365.25
    assert years == pytest.approx(288, rel=0.02)


def test_70_g_parameters_take_140_140_and_840_gb() -> None:
    found = zero_bytes(70e9, 1, 0)
    assert (found.parameters, found.gradients, found.optimizer) == (140e9, 140e9, 840e9)


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "tflops", "days"), [(175e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)]
)
def test_days_are_those_published_with_everything_computed_twice(
    parameters: float, tokens: float, gpus: int, tflops: float, days: float
) -> None:
    """arXiv 2104.04473: 8 T P / (n X)."""
    assert training_days(tokens, gpus * tflops * 1e12 / (8 * parameters)) == pytest.approx(days, rel=0.01)


def gpt(dim: int, layers: int, heads: int) -> ModelConfig:
    """A GPT: its two matrices of 4 h in the feed-forward part have as many weights as three of 8 h / 3."""
    return ModelConfig(vocab=51200, dim=dim, layers=layers, heads=heads, kv_heads=heads, ffn=round(8 * dim / 3))


MFU_TABLE = [
    (6144, 48, 64, 8, 4, 1.10, 41.5, 43.7),
    (12288, 96, 96, 64, 64, 13.75, 51.4, 52.8),
    (20480, 105, 128, 280, 280, 37.83, 56.0, 57.0),
    (25600, 128, 160, 512, 512, 71.49, 56.3, 57.0),
]
"""arXiv 2205.05198, tables 3 and 5: width, layers, heads, A100s, batch of 2,048 tokens, seconds, MFU, HFU."""


@pytest.mark.parametrize("row", MFU_TABLE)
def test_mfu_is_that_of_the_published_table(row: tuple[float, ...]) -> None:
    dim, layers, heads, gpus, batch, seconds, published, published_hfu = row
    model = gpt(int(dim), int(layers), int(heads))
    flops = flops_per_token(model, 2048)
    tokens_per_s = batch * 2048 / seconds
    peak = GPUS["a100-80"].flops
    assert 100 * mfu(tokens_per_s, flops, peak, int(gpus)) == pytest.approx(published, abs=0.2)
    # The paper counts attention's products twice where it computes them again in backward.
    attention = 12 * layers * dim * 2048
    assert 100 * mfu(tokens_per_s, flops + attention, peak, int(gpus)) == pytest.approx(published_hfu, abs=0.3)


def test_mfu_of_a_published_llama() -> None:
    """65.2 G parameters at 380 tokens/s on an A100 (LLaMA, arXiv 2302.13971): 49.4 % (arXiv 2311.05610)."""
    model = ModelConfig(vocab=32000, dim=8192, layers=80, heads=64, kv_heads=64, ffn=22016)
    assert 100 * mfu(380, flops_per_token(model, 2048), 312e12, 1) == pytest.approx(49.4, abs=0.5)


def test_computing_all_layers_again_takes_a_third_more_but_for_the_head() -> None:
    """arXiv 2104.04473: 96 B s l h^2 (1 + s / 6h + V / 16lh) per step."""
    model, seq_len = gpt(12288, 96, 96), 2048
    flops = flops_per_token(model, seq_len) + recomputed_flops_per_token(model, seq_len, "full")
    dim, layers = 12288, 96
    wanted = 96 * layers * dim**2 * (1 + seq_len / (6 * dim) + 51200 / (16 * layers * dim))
    assert flops == pytest.approx(wanted, rel=1e-4)
    half = recomputed_flops_per_token(model, seq_len, "every:2")
    assert half == recomputed_flops_per_token(model, seq_len, "full") / 2
    assert recomputed_flops_per_token(model, seq_len, "ffn") == 2 * layers * 3 * dim * model.ffn
    assert recomputed_flops_per_token(model, seq_len, "none") == 0


def test_no_published_run_is_faster_than_the_lower_bound_of_its_step() -> None:
    """arXiv 2205.05198: tp 8, pipelines of 8, 35 and 64 with interleaved stages; see MFU_TABLE."""
    for (dim, layers, heads, gpus, batch, seconds, _, _), pp, stages in zip(
        MFU_TABLE, (1, 8, 35, 64), (0, 3, 3, 2), strict=True
    ):
        values: dict[str, Any] = {"pp": pp, "tp": 8, "dp_shard": 1}
        values |= {"schedule": "Interleaved1F1B", "stages_per_rank": stages} if pp > 1 else {}
        config = from_values({
            "parallel": values, "train": {"seq_len": 2048, "global_batch": batch, "precision": "bfloat16"},
        })  # fmt: skip
        model = replace(gpt(int(dim), int(layers), int(heads)), ffn=round(dim / 3) * 8)  # divides by tp
        config = replace(config, model=model)
        layout = resolve_layout(config, int(gpus))
        needed = memory(config, layout)
        fast = step_time(config, layout, GPUS["a100-80"], needed, ranks_per_node=8, efficiency=1.0)
        assumed = step_time(config, layout, GPUS["a100-80"], needed, ranks_per_node=8)
        assert fast.lower_s < seconds < 1.6 * assumed.upper_s


def test_volumes_on_the_wire_are_those_published() -> None:
    dim = 7
    assert data_elements(2 * 4 * dim * dim) == 16 * dim * dim
    assert pipeline_elements(2, 3, 5) == 2 * 2 * 3 * 5


def test_failures_are_those_published() -> None:
    assert chance(0.01, 128) == pytest.approx(0.7237, abs=1e-4)
    month = gpu_hours("8-percent-month")
    assert month == 9000
    assert chance(24 / month, 1000) == pytest.approx(0.93, abs=0.005)
    assert gpu_hours("llama3") == pytest.approx(50677, abs=1)
    assert gpu_hours("1234h") == 1234
    with pytest.raises(ConfigError, match="neither a preset nor hours"):
        gpu_hours("lama3")
