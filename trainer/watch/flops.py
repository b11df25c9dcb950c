"""Model FLOPs utilisation: how many FLOPs a token needs, and how many a device could do. Torch-free but for sizes."""

from __future__ import annotations

import re

from flashckpt.trainer.model.initial import count_parameters
from flashckpt.trainer.model_config import ModelConfig

PEAK_TFLOPS = (
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH200 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b|\bH200\b|\bH800\b|\bGH200\b", 989.0),
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA10\b", 125.0),
    (r"\bRTX 4090\b(?! D| Laptop)", 165.0),
    (r"\bMI300X\b|\bMI325X\b", 1307.0),
    (r"\bMI250X\b", 191.5),
)
"""Names that drivers report, and the peak of dense bfloat16 matrix products with float32 sums, in TFLOPS of one device.

From the data sheets of NVIDIA (A100, H100, H200, Blackwell, L40S, L4, A10: half of what they give with sparsity; the
RTX 4090 from the Ada GPU architecture white paper) and AMD (Instinct MI300X, MI325X; MI250X: one of its two dies, which
are two devices to a program).
"""


def peak_tflops(device: str) -> float:
    """Return the peak of a device by its name, 0.0 where it is not known; a slice of one (MIG) is not known."""
    if "MIG" in device:
        return 0.0
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, device, re.IGNORECASE)), 0.0)


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return training FLOPs per token, 6 N + 12 L H Q T (PaLM, appendix B).

    N: parameters that a token is multiplied with: of experts those that it meets, and not the table of embeddings, of
    which it reads a row (a tied one is counted once, as the head). T: tokens that attention reaches back to, in layers
    with a window that many; causal masks are not subtracted, as in the paper. Queries have H heads however many keys have.
    """
    table = 0 if model.tied_embeddings else model.vocab * model.dim
    reach = sum(
        min(seq_len, model.window) if model.window and layer >= model.window_from else seq_len
        for layer in range(model.layers)
    )
    return 6.0 * (count_parameters(model, active=True) - table) + 12.0 * model.heads * model.head_size * reach
