"""A keyed permutation of [0, n) with random access both ways, in O(1) memory.

Large n: an alternating Feistel network over a rectangle of `rows` x 2**right_bits cells that holds n. Each
round adds to one coordinate a hash of the other (modulo the rows, or by XOR), so the network is a
bijection for any hash. Only the last row may be partly outside [0, n): at most one value in 256
is sent through again (cycle walking) for any n; a network on whole bits walks twice for n = 2**k + 1.
Both coordinates fit in 31 bits, so the rounds run in uint32, where numpy vectorises.
Small n (below 2**16): a table, sorted by our own counter-based generator. numpy's generators are not used
anywhere: their streams may change between versions, and an order that checkpoints rely on must not.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from flashckpt.errors import SamplerStateError

Int64Array = npt.NDArray[np.int64]
Rounds = list[tuple[int, Any]]

PERMUTATION_ID = "feistel10.1"
"""Recorded in every sampler state; changing any constant of this file requires a new id."""

ROUNDS = 10
MAX_LENGTH = 1 << 62
TABLE_BELOW = 1 << 16
CHUNK = 1 << 15  # indices per pass: all scratch arrays together fit in the second-level cache

_MULTIPLY_1, _MULTIPLY_2 = 0x7FEB352D, 0x846CA68B  # 32-bit mixers with low bias
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64
_MASK_32 = (1 << 32) - 1


class Bijection(Protocol):
    """A permutation of [0, n): one value, or a whole array, in both directions."""

    def forward(self, index: int) -> int:
        """Return the value at `index`."""
        ...

    def backward(self, value: int) -> int:
        """Return the index of `value`."""
        ...

    def forward_array(self, indices: Int64Array) -> Int64Array:
        """Return the values at `indices` (1-d)."""
        ...

    def backward_array(self, values: Int64Array) -> Int64Array:
        """Return the indices of `values` (1-d)."""
        ...


def derive_keys(*parts: int | str) -> list[int]:
    """Return 16 independent 32-bit keys for the given parts; the same on every platform, for integers of any size."""
    text = ",".join(str(part) for part in parts).encode()
    digest = hashlib.blake2b(text, digest_size=64, person=b"flashckpt-perm-1").digest()
    return [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 64, 4)]


class Cells(NamedTuple):
    """The rectangle of one network, or of one network for each value, as numpy integers or arrays of them."""

    right_bits: Any  # uint64
    right_mask: Any  # uint64
    shift: Any  # uint32
    rows: Any  # uint32
    wide_rows: Any  # uint64

    @classmethod
    def of(cls, right_bits: Any, rows: Any) -> Cells:
        """Return the cells of `rows` (uint32) x 2**right_bits (uint64)."""
        shift = (np.uint64(32) - right_bits).astype(np.uint32)
        return cls(right_bits, (np.uint64(1) << right_bits) - np.uint64(1), shift, rows, rows.astype(np.uint64))


class Network:
    """The Feistel network on [0, n), n >= 2. Exposed for tests, which run it with fewer rounds and at small n.

    Args:
        n: Number of values, up to 2**62.
        keys: One 32-bit key per round; even rounds change the row, odd ones the column.
    """

    def __init__(self, n: int, keys: Sequence[int]) -> None:
        self.n = n
        self.right_bits = max(1, (n - 1).bit_length() // 2)
        self.rows = -(-n >> self.right_bits)  # ceil(n / columns), at most 2**31
        self.keys = list(keys)
        self._rounds = list(enumerate(keys))
        self._cells = Cells.of(np.uint64(self.right_bits), np.uint32(self.rows))

    def forward(self, index: int) -> int:
        """Return the value at `index`."""
        return self._walk(index, self._rounds, 1)

    def backward(self, value: int) -> int:
        """Return the index of `value`."""
        return self._walk(value, self._rounds[::-1], -1)

    def forward_array(self, indices: Int64Array) -> Int64Array:
        """Return the values at `indices` (1-d)."""
        return self._walk_array(indices, self._rounds, 1)

    def backward_array(self, values: Int64Array) -> Int64Array:
        """Return the indices of `values` (1-d)."""
        return self._walk_array(values, self._rounds[::-1], -1)

    def _walk(self, value: int, rounds: Rounds, sign: int) -> int:
        while True:
            row, column = value >> self.right_bits, value & ((1 << self.right_bits) - 1)
            for number, key in rounds:
                mixed = (((column, row)[number & 1] ^ key) * _MULTIPLY_1) & _MASK_32
                mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLY_2) & _MASK_32
                if number & 1:
                    column ^= mixed >> (32 - self.right_bits)
                else:
                    row = (row + sign * (mixed * self.rows >> 32)) % self.rows
            value = (row << self.right_bits) | column
            if value < self.n:
                return value

    def _walk_array(self, values: Int64Array, rounds: Rounds, sign: int) -> Int64Array:
        out = np.empty(len(values), np.int64)
        for start in range(0, len(values), CHUNK):
            block = feistel_pass(values[start : start + CHUNK], self._cells, rounds, sign)
            outside = np.flatnonzero(block >= self.n)
            while len(outside):
                block[outside] = feistel_pass(block[outside], self._cells, rounds, sign)
                outside = outside[block[outside] >= self.n]
            out[start : start + CHUNK] = block
        return out


def feistel_pass(values: Int64Array, cells: Cells, rounds: Rounds, sign: int) -> Int64Array:
    """Send every value through its network once; results may be outside [0, n).

    Args:
        values: Indices, 1-d.
        cells: Cells of the one network, or of the network of each value.
        rounds: (number, key) in the order in which they are applied; a key may be an array, one for each value.
        sign: 1 forward, -1 backward.
    """
    unsigned = values.view(np.uint64)
    row = (unsigned >> cells.right_bits).astype(np.uint32)
    column = (unsigned & cells.right_mask).astype(np.uint32)
    mixed, scratch, wide = np.empty_like(row), np.empty_like(row), np.empty(len(row), np.uint64)
    for number, key in rounds:
        np.bitwise_xor(row if number & 1 else column, np.uint32(key), out=mixed)
        np.multiply(mixed, np.uint32(_MULTIPLY_1), out=mixed)
        np.right_shift(mixed, np.uint32(16), out=scratch)
        np.bitwise_xor(mixed, scratch, out=mixed)
        np.multiply(mixed, np.uint32(_MULTIPLY_2), out=mixed)
        if number & 1:
            np.right_shift(mixed, cells.shift, out=mixed)
            np.bitwise_xor(column, mixed, out=column)
            continue
        np.multiply(mixed, cells.wide_rows, out=wide, dtype=np.uint64)  # the high word is uniform in [0, rows)
        np.right_shift(wide, np.uint64(32), out=wide)
        if sign > 0:
            np.add(row, wide, out=row, casting="unsafe")
            np.subtract(row, cells.rows, out=scratch)  # wraps to a large value where row < rows
        else:
            np.subtract(row, wide, out=row, casting="unsafe")  # wraps where row < wide
            np.add(row, cells.rows, out=scratch)
        np.minimum(row, scratch, out=row)
    joined = row.astype(np.uint64)
    np.left_shift(joined, cells.right_bits, out=joined)
    np.bitwise_or(joined, column, out=joined)
    result: Int64Array = joined.view(np.int64)
    return result


class Table:
    """A materialised permutation for small n: positions sorted by 48 random bits each (128 KiB at most)."""

    def __init__(self, n: int, keys: Sequence[int]) -> None:
        state = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(keys[0] | keys[1] << 32)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
        # 48 random bits above the position: keys are distinct, so every sort gives the same order.
        keyed = (state ^ (state >> np.uint64(31))) & ~np.uint64(0xFFFF) | np.arange(n, dtype=np.uint64)
        keyed.sort()
        self._values = keyed.astype(np.uint16)

    @cached_property
    def _indices(self) -> npt.NDArray[np.uint16]:
        inverse = np.empty_like(self._values)
        inverse[self._values] = np.arange(len(self._values), dtype=np.uint16)
        return inverse

    def forward(self, index: int) -> int:
        """Return the value at `index`."""
        return int(self._values[index])

    def backward(self, value: int) -> int:
        """Return the index of `value`."""
        return int(self._indices[value])

    def forward_array(self, indices: Int64Array) -> Int64Array:
        """Return the values at `indices` (1-d)."""
        return self._values[indices].astype(np.int64)

    def backward_array(self, values: Int64Array) -> Int64Array:
        """Return the indices of `values` (1-d)."""
        return self._indices[values].astype(np.int64)


class Permutation:
    """A permutation of [0, n), a pure function of (n, seed, epoch): the same on every platform and numpy version.

    `p[i]` costs microseconds and `p.take` about 20 ns per index, for all n and i; nothing is
    materialised for n >= 65536.

    Args:
        n: Length, 1 to 2**62.
        seed: Any integer.
        epoch: Any integer; each epoch has its own order.

    Raises:
        SamplerStateError: `n` is out of range.
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        self._n, self.seed, self.epoch = operator.index(n), operator.index(seed), operator.index(epoch)
        if not 1 <= self._n <= MAX_LENGTH:
            raise SamplerStateError(
                "a permutation needs a length from 1 to 2**62",
                found=f"length {n}",
                remedy="check the data set's length",
            )
        keys = derive_keys(self._n, self.seed, self.epoch)
        self.core: Bijection = Table(self._n, keys) if self._n < TABLE_BELOW else Network(self._n, keys[:ROUNDS])

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"Permutation(n={self._n}, seed={self.seed}, epoch={self.epoch})"

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Int64Array: ...
    def __getitem__(self, index: int | slice) -> int | Int64Array:
        if isinstance(index, slice):
            return self.core.forward_array(np.arange(*index.indices(self._n), dtype=np.int64))
        place = operator.index(index)
        return self.core.forward(self._checked(place + self._n if place < 0 else place))

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._n, CHUNK):
            yield from self[start : start + CHUNK].tolist()

    def index(self, value: int) -> int:
        """Return i with `self[i] == value`; IndexError outside [0, n)."""
        return self.core.backward(self._checked(operator.index(value)))

    def take(self, indices: npt.ArrayLike) -> Int64Array:
        """Return `self[i]` for every i of an integer array, in its shape, as int64; IndexError outside [0, n)."""
        array = self._checked_array(indices)
        return self.core.forward_array(array.ravel()).reshape(array.shape)

    def index_of(self, values: npt.ArrayLike) -> Int64Array:
        """Return `self.index(v)` for every v of an integer array, in its shape, as int64."""
        array = self._checked_array(values)
        return self.core.backward_array(array.ravel()).reshape(array.shape)

    def _checked(self, value: int) -> int:
        if not 0 <= value < self._n:
            raise IndexError(f"{value} is outside a permutation of length {self._n}")
        return value

    def _checked_array(self, values: npt.ArrayLike) -> Int64Array:
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"indices are integers, not {array.dtype}")
        if array.size and (array.min() < 0 or array.max() >= self._n):
            raise IndexError(f"indices {array.min()} to {array.max()} are outside a permutation of length {self._n}")
        return np.ascontiguousarray(array, dtype=np.int64)
