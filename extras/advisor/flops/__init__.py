"""FLOPs and parameters of a model, and what devices can do at most. Pure."""

from __future__ import annotations

import re

from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model.recompute import RECOMPUTES_ATTENTION, RECOMPUTES_FEED_FORWARD, recompute_of

PEAK_TFLOPS = (
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH200 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b|\bH200\b|\bH800\b|\bGH200\b", 989.0),
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bV100\b", 125.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA10\b", 125.0),
    (r"\bRTX 4090\b(?! D| Laptop)", 165.0),
    (r"\bMI300X\b|\bMI325X\b", 1307.0),
    (r"\bMI250X\b", 191.5),
)
"""Names that drivers report, and the peak of dense bfloat16 matrix products with float32 sums, in TFLOPS of one device.

From the data sheets of NVIDIA (V100: of float16, it has no bfloat16; A100, H100, H200, Blackwell, L40S, L4, A10: half of what they give with sparsity; the
RTX 4090 from the Ada GPU architecture white paper) and AMD (Instinct MI300X, MI325X; MI250X: one of its two dies, which
are two devices to a program).
"""


def count_parameters(config: ModelConfig, *, active: bool = False) -> int:
    """Return the number of parameters of the whole model, a tied head not counted; `active`: that one token meets."""
    attention = attention_parameters(config)
    feed_forward = 3 * config.dim * config.ffn
    if config.experts:
        experts = config.experts_per_token if active else config.experts
        feed_forward = experts * feed_forward + config.dim * config.experts
        feed_forward += (3 * config.shared_ffn + 1) * config.dim if config.shared_ffn else 0
    block = attention + feed_forward + 2 * config.dim
    ends = config.vocab * config.dim * (1 if config.tied_embeddings else 2)
    return config.layers * block + ends + config.dim


def attention_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of one layer's attention, without its norm."""
    heads = config.heads + 2 * config.kv_heads
    biases = heads * config.head_size if config.qkv_bias else 0
    norms = 2 * config.head_size if config.qk_norm else 0
    return config.dim * config.head_size * (heads + config.heads) + biases + norms


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return training FLOPs per token, 6 N + 12 L H Q T (PaLM, appendix B).

    N: parameters that a token is multiplied with: of experts those that it meets, and not the table of embeddings, of
    which it reads a row (a tied one is counted once, as the head). T: tokens that attention reaches back to, in layers
    with a window that many; causal masks are not subtracted, as in the paper. Queries have H heads however many keys have.
    """
    table = 0 if model.tied_embeddings else model.vocab * model.dim
    reach = sum(attention_reach(model, layer, seq_len) for layer in range(model.layers))
    return 6.0 * (count_parameters(model, active=True) - table) + 12.0 * model.heads * model.head_size * reach


def recomputed_flops_per_token(model: ModelConfig, seq_len: int, mode: str) -> float:
    """Return the FLOPs per token that `parallel.activation_checkpoint` adds: what is forward twice."""
    norms = 2 * model.dim
    head = model.dim * (model.vocab + 1)  # with its norm
    table = 0 if model.tied_embeddings else model.vocab * model.dim
    block = (count_parameters(model, active=True) - table - head) // model.layers
    attention = attention_parameters(model)
    feed_forward = block - attention - norms
    total = 0.0
    for layer in range(model.layers):
        part = recompute_of(mode, layer)
        if part in RECOMPUTES_FEED_FORWARD:
            total += 2 * feed_forward
        if part in RECOMPUTES_ATTENTION:
            total += 2 * attention + 4 * model.heads * model.head_size * attention_reach(model, layer, seq_len)
    return total


def attention_reach(model: ModelConfig, layer: int, seq_len: int) -> int:
    """Return the tokens that attention of a layer reaches back to."""
    return min(seq_len, model.window) if model.window and layer >= model.window_from else seq_len


def peak_tflops(device: str) -> float:
    """Return the peak of a device by its name, 0.0 where it is not known; a slice of one (MIG) is not known."""
    if "MIG" in device:
        return 0.0
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, device, re.IGNORECASE)), 0.0)


def mfu(tokens_per_s: float, flops: float, peak: float, devices: int) -> float:
    """Return the share of the devices' peak that so many tokens per second need, at `flops` per token (with recomputation: HFU)."""
    return tokens_per_s * flops / (peak * devices)


def training_days(tokens: float, tokens_per_s: float) -> float:
    """Return the days that so many tokens take."""
    return tokens / tokens_per_s / 86400
