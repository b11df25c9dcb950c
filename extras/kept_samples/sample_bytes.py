"""One sample of a data set as bytes, and back, equal in every bit: msgpack, never pickle."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

_TUPLE, _BIG_INT, _TENSOR, _ARRAY, _SCALAR = range(1, 6)
_NUMBERS = "biufc"
"""Kinds of numpy types that are nothing but their bytes."""


def sample_bytes(sample: Any) -> bytes:
    """Return the bytes of tensors and arrays in host memory, numbers, text, bytes, None, and dicts, lists and tuples of them.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: It holds something else.
    """
    return bytes(msgpack.packb(sample, strict_types=True, default=_packed))


def sample_of(raw: Any) -> Any:
    """Return the sample in `raw`, in new memory; ValueError, TypeError, KeyError or RecursionError where it is none."""
    return msgpack.unpackb(raw, strict_map_key=False, ext_hook=_unpacked)


def _packed(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, sample_bytes(list(value)))
    if type(value) is int:
        return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if type(value) is Tensor and _is_plain(value):
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts = [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride()), flat]
        return msgpack.ExtType(_TENSOR, msgpack.packb(parts))
    if (
        type(value) is np.ndarray
        and value.dtype.kind in _NUMBERS
        and (value.flags.c_contiguous or value.flags.f_contiguous)
    ):
        is_c = value.flags.c_contiguous
        parts = [value.dtype.str, list(value.shape), "C" if is_c else "F", value.tobytes("C" if is_c else "F")]
        return msgpack.ExtType(_ARRAY, msgpack.packb(parts))
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return msgpack.ExtType(_SCALAR, msgpack.packb([value.dtype.str, value.tobytes()]))
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its type, shape, strides and numbers, and nothing else."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad or tensor.is_quantized:
        return False
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    overlaps = any(small * size > large for (small, size), (large, _) in pairwise(steps)) or (steps and not steps[0][0])
    return not (overlaps or tensor.is_conj() or tensor.is_neg())


def _tensor(data: bytes) -> Tensor:
    name, shape, strides, flat = msgpack.unpackb(data)
    kind = getattr(torch, name)
    if type(kind) is not torch.dtype:
        raise ValueError(f"{name} is no type of numbers")
    found = torch.empty_strided(shape, strides, dtype=kind)
    if found.numel():
        found.copy_(torch.frombuffer(bytearray(flat), dtype=kind).view(shape))
    return found


def _array(data: bytes) -> np.ndarray:
    name, shape, order, flat = msgpack.unpackb(data)
    return np.ndarray(shape, np.dtype(name), bytearray(flat), order=order)


def _scalar(data: bytes) -> Any:
    name, flat = msgpack.unpackb(data)
    return np.frombuffer(flat, np.dtype(name))[0]


_READ: dict[int, Callable[[bytes], Any]] = {
    _TUPLE: lambda data: tuple(sample_of(data)),
    _BIG_INT: lambda data: int.from_bytes(data, "little", signed=True),
    _TENSOR: _tensor,
    _ARRAY: _array,
    _SCALAR: _scalar,
}


def _unpacked(code: int, data: bytes) -> Any:
    return _READ[code](data)
