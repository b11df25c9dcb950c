"""Floating-point casts of raw bytes, as torch rounds them (to nearest even), without torch. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError

FLOATS = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Types that are cast and that may be cast to; bfloat16 has no numpy type and is held as its bits."""


def parse_dtype(name: str | None) -> str | None:
    """Return the dtype's name; ConfigError for one that is not cast to."""
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    if name is None:
        return None
    found = short.get(name, name)
    if found not in FLOATS:
        raise ConfigError("tensors cannot be cast to this dtype", found=name, expected=", ".join(FLOATS))
    return found


def target_dtype(dtype: str, wanted: str | None) -> str:
    """Return the dtype a tensor gets: `wanted` for floating-point ones of 16 bits and more, its own for all others."""
    return wanted if wanted is not None and dtype in FLOATS else dtype


def cast(raw: npt.NDArray[np.uint8], dtype: str, wanted: str) -> npt.NDArray[np.uint8]:
    """Return the elements of `raw` (bytes of `dtype`) as bytes of `wanted`; both keys of FLOATS, or equal."""
    if dtype == wanted:
        return raw
    numbers = raw.view(FLOATS[dtype])
    if dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if wanted != "bfloat16":
            return np.ascontiguousarray(numbers.astype(FLOATS[wanted])).view(np.uint8)
        bits = numbers.astype(np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    rounded[np.isnan(bits.view(np.float32))] = 0x7FC0
    return rounded.view(np.uint8)
