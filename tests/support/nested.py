"""Nested dicts compared exactly: types, order, bits of numbers, strides of tensors."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Bit for bit, type for type, in the same order."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.requires_grad) == (
            expected.dtype,
            expected.shape,
            expected.requires_grad,
        )
        assert found.stride() == expected.stride(), where
        assert found.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8)) if found.dim() else (
            found.reshape(1).view(torch.uint8).equal(expected.reshape(1).view(torch.uint8))
        ), where  # fmt: skip
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), (
            where
        )
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        assert list(map(type, found)) == list(map(type, expected)), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
        assert_same(getattr(found, "_metadata", 0), getattr(expected, "_metadata", 0), f"{where}._metadata")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}.{i}")
    elif isinstance(expected, io.BytesIO):
        assert (found.getvalue(), found.tell()) == (expected.getvalue(), expected.tell()), where
    elif isinstance(expected, float):
        assert found.hex() == expected.hex(), where
    else:
        assert found == expected, where
