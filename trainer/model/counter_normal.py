"""Normal numbers by counter: element i of the stream of (seed, name) is a pure function of those three.

So any box of a tensor can be made alone, and is the same to the bit whatever else its rank holds. Only integer
operations and +, -, *, /, sqrt are used, which round alike on every processor and at every place of a vector;
`torch.log` or `torch.cos` do not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 15
"""Elements that are made at a time; about 40 bytes of scratch memory for each."""

_WEYL, _MIX1, _MIX2 = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # splitmix64's, as the int64 that torch multiplies with wrap-around
# Wichura's rational approximations of the inverse normal distribution (AS 241, PPND7): relative error 1e-7.
_CENTRE = (5.9109374720e01, 1.5929113202e02, 5.0434271938e01, 3.3871327179e00)
_CENTRE_BELOW = (6.7187563600e01, 7.8757757664e01, 1.7895169469e01, 1.0)
_TAIL = (1.7023821103e-01, 1.3067284816e00, 2.7568153900e00, 1.4234372777e00)
_TAIL_BELOW = (1.2021132975e-01, 7.3700164250e-01, 1.0)
_CENTRE_EDGE = 0.425


def stream_keys(seed: int, name: str) -> tuple[int, int]:
    """Return the two int64 keys of the stream of (seed, name), the same on every machine."""
    raw = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return int.from_bytes(raw[:8], "little", signed=True), int.from_bytes(raw[8:], "little", signed=True)


def fill_normal(out: Tensor, keys: tuple[int, int], shape: Sequence[int], offsets: Sequence[int], std: float) -> None:
    """Fill `out` with a box of a normal tensor; needs `out` and one block of memory.

    Args:
        out: The box, contiguous, floating point.
        keys: From `stream_keys`.
        shape: Of the whole tensor; its elements are counted in row-major order.
        offsets: Where the box begins in it, per dimension.
        std: Standard deviation.
    """
    flat = out.view(-1)
    for start, index in _blocks(tuple(out.shape), shape, offsets, out.device):
        flat[start : start + index.numel()] = _normal(_bits(index, keys)).mul_(std)


def _blocks(
    lengths: Sequence[int], shape: Sequence[int], offsets: Sequence[int], device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Yield (place in the flat box, global indices of the elements there), at most BLOCK of them at a time."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)  # from here on the box is one run of the whole tensor
    while inner > 0 and (inner == len(shape) or lengths[inner] == shape[inner]):
        inner -= 1
    run = math.prod(lengths[inner:])
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    rows = torch.full((1,), begin, dtype=torch.int64, device=device)
    for length, stride in zip(lengths[:inner], strides[:inner], strict=True):
        steps = torch.arange(length, dtype=torch.int64, device=device) * stride
        rows = (rows[:, None] + steps).flatten()
    together = max(1, BLOCK // max(1, run))
    for first in range(0, len(rows) if run else 0, together):
        for at in range(0, run, BLOCK):
            steps = torch.arange(at, min(at + BLOCK, run), dtype=torch.int64, device=device)
            yield first * run + at, (rows[first : first + together, None] + steps).flatten()


def _bits(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """Return 32 random bits per index as int64 in [-2^31, 2^31). Overwrites `index`.

    splitmix64 without its last shift, which only touches bits that are dropped; the second key comes in between
    the rounds, so that streams whose first keys lie close together have nothing in common.
    """
    x = index.mul_(_WEYL).add_(keys[0])
    x ^= (x >> 32) & 0xFFFFFFFF  # shifts of int64 keep the sign: mask it off
    x *= _MIX1
    x ^= (x >> 29) & 0x7FFFFFFFF
    x += keys[1]
    x *= _MIX2
    x >>= 32
    return x


def _normal(bits: Tensor) -> Tensor:
    """Return the standard normal numbers (float32) whose distribution function is (bits + 2^31 + 1/2) / 2^32."""
    q = bits.to(torch.float32).add_(0.5).mul_(2.0**-32)
    r = (q * q).neg_().add_(_CENTRE_EDGE**2)
    value = _polynomial(r, _CENTRE).div_(_polynomial(r, _CENTRE_BELOW)).mul_(q)
    tail = (q.abs() >= _CENTRE_EDGE).nonzero().squeeze(1)
    value[tail] = _tail_normal(bits[tail])
    return value


def _tail_normal(bits: Tensor) -> Tensor:
    """The same far from zero, where float32 could not tell the distance to 1; r stays below 5 with 32 bits."""
    below = torch.where(bits < 0, bits + (1 << 31), (1 << 31) - 1 - bits)
    r = _log(below.to(torch.float64).add_(0.5).mul_(2.0**-32)).neg_().sqrt_().sub_(1.6)
    value = _polynomial(r, _TAIL).div_(_polynomial(r, _TAIL_BELOW))
    return torch.where(bits < 0, -value, value).to(torch.float32)


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of float64 numbers to 1e-8, in operations that round alike everywhere."""
    mantissa, exponent = torch.frexp(x)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(s * s, tuple(2.0 / (2 * n + 1) for n in range(7, -1, -1)))
    return exponent.to(torch.float64).mul_(math.log(2.0)).add_(series.mul_(s))


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the polynomial with these coefficients, highest power first."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[-1])
