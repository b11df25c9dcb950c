"""What whole steps and runs took that were published, with the layouts that they were published with.

Layouts that were not are what `--search` finds best on as many GPUs as the authors had. Models of two matrices in the feed-forward
part have the same weights in three of 2/3 of its width. "selective" of arXiv 2205.05198 (attention again) is what "none" is
with a kernel that keeps no scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.flops import flops_per_token, recomputed_flops_per_token
from flashckpt.trainer.parallel.layout import Layout, resolve_layout
from flashckpt.trainer.plan.gpus import GPUS, Gpu

A100, A100_40, H100 = GPUS["a100-80"], GPUS["a100-40"], GPUS["h100"]
H100_HBM2 = replace(H100, memory=96 * 10**9, memory_rate=2.4e12)  # as torchtitan's page gives it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """One row: `unit` of `value` is s (step), mfu, tflops (of a device, with what is computed again), tokens/s (of a device), GPU hours or days."""

    name: str
    gpu: Gpu
    gpus: int
    model: dict[str, Any]
    seq_len: int
    batch: int
    micro_batch: int
    unit: str
    value: float
    tokens: float = 0.0
    parallel: dict[str, Any] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """Whether it is a whole run, with what is outside of its steps."""
        return self.unit in ("GPU hours", "days")

    def config(self) -> RunConfig:
        """Return it as a run."""
        train = {"seq_len": self.seq_len, "global_batch": self.batch, "micro_batch": self.micro_batch}
        return from_values({
            "model": self.model, "parallel": self.parallel, "train": {**train, "precision": "bfloat16"}
        })  # fmt: skip

    def built(self) -> tuple[RunConfig, Layout]:
        """Return it as a run and its layout."""
        config = self.config()
        return config, resolve_layout(config, self.gpus)

    def seconds(self, config: RunConfig) -> float:
        """Return the seconds per step that were published."""
        tokens, flops = self.batch * self.seq_len, flops_per_token(config.model, self.seq_len)
        again = recomputed_flops_per_token(config.model, self.seq_len, config.parallel.activation_checkpoint)
        of_run = tokens / self.tokens if self.tokens else 0.0
        return {
            "s": self.value,
            "mfu": tokens * flops / (self.gpus * self.gpu.flops * self.value),
            "tflops": tokens * (flops + again) / (self.gpus * 1e12 * self.value),
            "tokens/s": tokens / (self.gpus * self.value),
            "GPU hours": self.value * 3600 / self.gpus * of_run,
            "days": self.value * 86400 * of_run,
        }[self.unit]


def gpt(dim: int, layers: int, heads: int, vocab: int = 51200) -> dict[str, Any]:
    """Return a GPT with a feed-forward part of 4 x its width, in three matrices."""
    return {
        "vocab": vocab, "dim": dim, "layers": layers, "heads": heads, "kv_heads": heads, "ffn": round(dim / 3) * 8,
        "tied_embeddings": True,
    }  # fmt: skip


def llama(dim: int, layers: int, heads: int, ffn: int, kv: int = 0, vocab: int = 32000) -> dict[str, Any]:
    """Return a Llama."""
    return {"vocab": vocab, "dim": dim, "layers": layers, "heads": heads, "kv_heads": kv or heads, "ffn": ffn}


def _interleaved(pp: int, stages: int) -> dict[str, Any]:
    return {"pp": pp} | ({"schedule": "Interleaved1F1B", "stages_per_rank": stages} if stages > 1 else {})


_OLD: dict[str, Any] = {"activation_checkpoint": "full", "sequence_parallel": False}


def _megatron() -> Iterator[Published]:
    """arXiv 2104.04473, table 1: everything computed twice, DGX A100."""
    rows = (
        ("1.7B", 2304, 24, 24, 1, 1, 1, 32, 512, 8, 137), ("3.6B", 3072, 30, 32, 2, 1, 1, 64, 512, 4, 138),
        ("7.5B", 4096, 36, 32, 4, 1, 1, 128, 512, 4, 142), ("18.4B", 6144, 40, 48, 8, 1, 1, 256, 1024, 4, 135),
        ("39.1B", 8192, 48, 64, 8, 2, 3, 512, 1536, 1, 138), ("76.1B", 10240, 60, 80, 8, 4, 3, 1024, 1792, 1, 140),
        ("145.6B", 12288, 80, 96, 8, 8, 2, 1536, 2304, 1, 148),
        ("310.1B", 16384, 96, 128, 8, 16, 3, 1920, 2160, 1, 155),
        ("529.6B", 20480, 105, 128, 8, 35, 3, 2520, 2520, 1, 163),
        ("1008B", 25600, 128, 160, 8, 64, 2, 3072, 3072, 1, 163),
    )  # fmt: skip
    for name, dim, layers, heads, tp, pp, stages, gpus, batch, micro, value in rows:
        yield Published(
            name=f"Megatron {name}", gpu=A100, gpus=gpus, model=gpt(dim, layers, heads), seq_len=2048, batch=batch,
            micro_batch=micro, unit="tflops", value=value, parallel={"tp": tp, "zero": 0, **_OLD, **_interleaved(pp, stages)},
        )  # fmt: skip


def _selective() -> Iterator[Published]:
    """arXiv 2205.05198, table 5."""
    rows = (
        ("22B", 6144, 48, 64, 8, 4, 4, 1, 1, 1.10), ("175B", 12288, 96, 96, 64, 64, 1, 8, 3, 13.75),
        ("530B", 20480, 105, 128, 280, 280, 1, 35, 3, 37.83), ("1T", 25600, 128, 160, 512, 512, 1, 64, 2, 71.49),
    )  # fmt: skip
    for name, dim, layers, heads, gpus, batch, micro, pp, stages, value in rows:
        yield Published(
            name=f"selective {name}", gpu=A100, gpus=gpus, model=gpt(dim, layers, heads), seq_len=2048, batch=batch,
            micro_batch=micro, unit="s", value=value, parallel={"tp": 8, **_interleaved(pp, stages)},
        )  # fmt: skip


def _megascale() -> Iterator[Published]:
    """arXiv 2402.15627, table 2, its rows of Megatron-LM: 175B, TP 8, PP 8, six stages per rank."""
    rows = (
        (256, 768, 40.0), (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9), (3072, 6144, 29.02),
        (6144, 6144, 14.78), (8192, 6144, 12.24), (12288, 6144, 8.57),
    )  # fmt: skip
    for gpus, batch, value in rows:
        yield Published(
            name=f"Megatron-LM on {gpus}", gpu=A100, gpus=gpus, model=gpt(12288, 96, 96, 64000), seq_len=2048,
            batch=batch, micro_batch=1, unit="s", value=value, parallel={"tp": 8, "zero": 1, **_interleaved(8, 6)},
        )  # fmt: skip


def _mosaic() -> Iterator[Published]:
    """github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: FSDP, where it says so everything computed twice."""
    sizes = {
        "70b": (8192, 80, 64), "30b": (7168, 48, 56), "13b": (5120, 40, 40), "7b": (4096, 32, 32), "3b": (2560, 32, 20),
        "1b": (2048, 24, 16),
    }  # fmt: skip
    rows = (
        (A100, "70b", 2048, 64, 8, 2048, True, 53.33), (A100, "70b", 2048, 32, 2, 1024, True, 48.56),
        (A100, "30b", 2048, 8, 3, 504, True, 55.3), (A100, "30b", 8192, 8, 1, 168, True, 39.38),
        (A100, "13b", 2048, 8, 2, 48, False, 59.57), (A100, "13b", 8192, 8, 5, 120, True, 56.07),
        (A100, "7b", 2048, 8, 6, 96, False, 64.23), (A100, "7b", 8192, 8, 8, 128, True, 54.47),
        (A100, "7b", 32768, 8, 2, 32, True, 49.46), (A100, "3b", 2048, 8, 10, 160, False, 62.11),
        (A100, "1b", 2048, 8, 14, 448, False, 59.86), (A100_40, "70b", 2048, 128, 4, 512, True, 48.91),
        (A100_40, "30b", 2048, 128, 6, 768, True, 52.25), (A100_40, "13b", 2048, 128, 16, 2048, True, 51.93),
        (A100_40, "7b", 2048, 128, 18, 2304, True, 50.14), (A100_40, "3b", 2048, 128, 6, 768, False, 54.8),
        (H100, "70b", 2048, 64, 8, 2048, True, 42.57), (H100, "30b", 2048, 32, 14, 1344, True, 43.92),
        (H100, "30b", 2048, 8, 3, 504, True, 38.11), (H100, "13b", 2048, 64, 2, 128, False, 39.86),
        (H100, "13b", 4096, 8, 10, 240, True, 41.6), (H100, "7b", 2048, 8, 6, 48, False, 46.44),
        (H100, "7b", 8192, 8, 8, 128, True, 37.14), (H100, "3b", 2048, 64, 6, 1152, False, 40.8),
        (H100, "1b", 2048, 64, 20, 1280, False, 40.85),
    )  # fmt: skip
    for gpu, name, seq_len, gpus, micro, batch, again, value in rows:
        yield Published(
            name=f"MPT {name} of {seq_len} on {gpus} {gpu.name}", gpu=gpu, gpus=gpus, model=gpt(*sizes[name], 50368),
            seq_len=seq_len, batch=batch, micro_batch=micro, unit="mfu", value=value / 100,
            parallel={"zero": 3, "activation_checkpoint": "full" if again else "none"},
        )  # fmt: skip


_405B = llama(16384, 126, 128, 53248, 8, 128256)
_OF_405B = {"tp": 8, **_interleaved(16, 7)}
_ZBV = {"schedule": "ZBVZeroBubble"}


def _row(name: str, gpu: Gpu, gpus: int, model: dict[str, Any], batch: tuple[int, int, int], unit: str, value: float,
         tokens: float = 0.0, **parallel: Any) -> Published:  # fmt: skip
    seq_len, rows, micro = batch
    return Published(
        name=name, gpu=gpu, gpus=gpus, model=model, seq_len=seq_len, batch=rows, micro_batch=micro, unit=unit,
        value=value, tokens=tokens, parallel=parallel,
    )  # fmt: skip


_8B = llama(4096, 32, 32, 14336, 8, 128256)
_GPT3 = gpt(12288, 96, 96)
PUBLISHED = (
    *_megatron(), *_selective(), *_megascale(), *_mosaic(),
    # arXiv 2311.05610: the best layouts of the study
    _row("LLaMA 13B of the study", A100, 64, llama(5120, 40, 40, 13824, vocab=128000), (2048, 2048, 1), "mfu", 0.705, zero=1),
    _row("LLaMA 65B of the study", A100, 128, llama(8192, 80, 64, 22016, vocab=128000), (2048, 2048, 1), "mfu", 0.596,
         tp=2, pp=8, zero=1),
    # arXiv 2407.21783, table 4, and the model card
    _row("Llama 3 405B on 8,192", H100, 8192, _405B, (8192, 2048, 1), "mfu", 0.43, **_OF_405B),
    _row("Llama 3 405B on 16,384", H100, 16384, _405B, (8192, 2048, 1), "mfu", 0.41, **_OF_405B),
    _row("Llama 3 405B, rows of 131,072", H100, 16384, _405B, (131072, 128, 1), "mfu", 0.38, cp=16, **_OF_405B),
    _row("Llama 3.1 405B", H100, 16384, _405B, (8192, 2048, 1), "GPU hours", 30.84e6, 15.6e12, **_OF_405B),
    _row("Llama 3.1 70B", H100, 2048, llama(8192, 80, 64, 28672, 8, 128256), (8192, 2048, 1), "GPU hours", 7.0e6, 15e12,
         tp=4, pp=4, zero=1),
    # pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
    _row("torchtitan 8B on 8", H100_HBM2, 8, _8B, (8192, 16, 2), "tokens/s", 6667, zero=3, activation_checkpoint="selective"),
    _row("torchtitan 8B on 128", H100_HBM2, 128, _8B, (8192, 256, 2), "tokens/s", 6514, zero=3,
         activation_checkpoint="selective"),
    # arXiv 2307.09288, table 2, and 2302.13971, table 15: layouts not published
    _row("Llama 2 7B", A100, 1024, llama(4096, 32, 32, 11008), (4096, 1024, 1), "GPU hours", 184320, 2e12, zero=3),
    _row("Llama 2 13B", A100, 1024, llama(5120, 40, 40, 13824), (4096, 1024, 1), "GPU hours", 368640, 2e12, zero=3),
    _row("Llama 2 70B", A100, 2048, llama(8192, 80, 64, 28672, 8), (4096, 1024, 2), "GPU hours", 1720320, 2e12, tp=4, zero=3,
         activation_checkpoint="selective"),
    _row("LLaMA 7B", A100, 1024, llama(4096, 32, 32, 11008), (2048, 2048, 2), "GPU hours", 82432, 1e12, zero=3),
    _row("LLaMA 13B", A100, 1024, llama(5120, 40, 40, 13824), (2048, 2048, 2), "GPU hours", 135168, 1e12, zero=3),
    _row("LLaMA 33B", A100, 2048, llama(6656, 60, 52, 17920), (2048, 2048, 1), "GPU hours", 530432, 1.4e12, tp=2, pp=16,
         **_ZBV),
    _row("LLaMA 65B", A100, 2048, llama(8192, 80, 64, 22016), (2048, 2048, 4), "GPU hours", 1022362, 1.4e12, tp=4, zero=3,
         activation_checkpoint="selective"),
    # arXiv 2104.04473, section 5.1: 34 and 84 days at the speed of steps
    _row("GPT-3 175B", A100, 1024, _GPT3, (2048, 1536, 1), "days", 34, 300e9, tp=8, zero=0, **_interleaved(8, 3), **_OLD),
    _row("GPT 1T", A100, 3072, gpt(25600, 128, 160), (2048, 3072, 1), "days", 84, 450e9, tp=8, zero=0,
         **_interleaved(64, 2), **_OLD),
    # arXiv 2211.05100: 3.5 months; 2205.01068: 147 TFLOPS; 2201.11990, section 2.3; MosaicML's notes on MPT-7B: 9.5 days on 440
    _row("BLOOM 176B", A100, 384, gpt(14336, 70, 112, 250880), (2048, 2048, 2), "days", 105, 350e9, tp=4, pp=12, zero=1, **_OLD),
    _row("OPT 175B", A100, 992, gpt(12288, 96, 96, 50272), (2048, 992, 8), "tflops", 147, tp=8, zero=3, **_OLD),
    _row("MT-NLG 530B", A100, 2240, gpt(20480, 105, 128), (2048, 1920, 1), "s", 60.1, tp=8, pp=35, zero=1, **_OLD),
    _row("MPT-7B", A100_40, 440, gpt(4096, 32, 32, 50432), (2048, 1760, 4), "days", 9.5, 1e12, zero=3,
         activation_checkpoint="full"),
)  # fmt: skip

HELD_OUT = (
    # Read after the number was fitted, and not fitted to. docs.nvidia.com/nemo/automodel, performance summary (bfloat16)
    _row("AutoModel, Llama 3 70B", H100, 64, llama(8192, 80, 64, 28672, 8, 128256), (8192, 128, 1), "s", 18.9, cp=2, zero=3,
         activation_checkpoint="full"),
    # catalog.ngc.nvidia.com, DGXC benchmarking, Nemotron 15B 24.11
    _row("Nemotron-4 15B", H100, 64, gpt(6144, 32, 48, 256000) | {"kv_heads": 8, "tied_embeddings": False}, (4096, 256, 4),
         "s", 2.86, tp=4, zero=1, loss_parallel=True),
    # The model card: two months
    _row("Falcon 40B", A100_40, 384, gpt(8192, 60, 128, 65024) | {"kv_heads": 8}, (2048, 1152, 1), "days", 60, 1e12, tp=8,
         pp=4, zero=1),
    # engineered.at/articles/minipost-olmo-3-training-cost, restarts included: layouts not published
    _row("Olmo 3 7B", H100, 512, llama(4096, 32, 32, 11008, vocab=100278), (8192, 512, 1), "GPU hours", 234e3, 5.93e12, zero=3),
    _row("Olmo 3 32B", H100, 1024, llama(5120, 64, 40, 27648, 8, 100278), (8192, 1024, 1), "GPU hours", 1.05e6, 5.5e12, zero=3,
         activation_checkpoint="full"),
)  # fmt: skip

NOT_MET = (
    # arXiv 2210.02414: 60 days from the first step to the last, with failures of hardware and spikes in them
    _row("GLM-130B", A100_40, 768, llama(12288, 70, 96, 32768, vocab=150528), (2048, 4224, 1), "days", 60, 400e9, tp=4, pp=8,
         zero=1, activation_checkpoint="full"),
    # Attention and feed-forward part side by side, which the model here has not; arXiv 2204.06745 and 2311.16867
    _row("GPT-NeoX 20B", A100_40, 96, gpt(6144, 44, 64, 50432), (2048, 1536, 4), "tflops", 117, tp=2, pp=4, zero=1, **_OLD),
    _row("Falcon 180B", A100_40, 4096, gpt(14848, 80, 232, 65024) | {"kv_heads": 8}, (2048, 2048, 1), "GPU hours", 7.0e6,
         3.5e12, tp=8, pp=8, zero=1),
    # Hours of all that was done for a model, it seems: 38 and 17 % of the peak, where its larger sisters reach more
    _row("Llama 2 34B", A100, 2048, llama(8192, 48, 64, 22016, 8), (4096, 1024, 2), "GPU hours", 1038336, 2e12, tp=4, zero=3),
    _row("Llama 3.1 8B", H100, 1024, _8B, (8192, 1024, 1), "GPU hours", 1.46e6, 15e12, zero=3),
)  # fmt: skip
"""Rows that were read and are not within 25 %: too slow in the plan (Falcon), or too fast (the others)."""
