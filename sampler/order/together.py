"""Many permutations at once: each index goes through its own permutation, in the same few numpy calls for all.

A batch of a mixture of a thousand sources has about one sample of each: asking each source's permutation
separately would cost a thousand times the calls of one. The results are those of `Permutation.take`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flashckpt.sampler.order.block import BlockCore
from flashckpt.sampler.order.permutation import CHUNK, Cells, Int64Array, Network, Permutation, feistel_pass


def take_each(
    make: Callable[[int, int], Permutation], first: Int64Array, second: Int64Array, indices: Int64Array
) -> Int64Array:
    """Return for every i the value at `indices[i]` of the permutation `make(first[i], second[i])`; 1-d arrays."""
    order = np.lexsort((second, first))
    ones, others = first[order], second[order]
    starts = np.flatnonzero(np.diff(ones, prepend=-1) | np.diff(others, prepend=-1))
    permutations = [make(one, other) for one, other in zip(ones[starts].tolist(), others[starts].tolist(), strict=True)]
    values = np.empty_like(indices)
    values[order] = take_together(permutations, np.diff(starts, append=len(order)), indices[order])
    return values


def take_together(permutations: Sequence[Permutation], counts: Int64Array, indices: Int64Array) -> Int64Array:
    """Return the values at `indices`: the first `counts[0]` belong to `permutations[0]`, and so on."""
    values = np.empty_like(indices)
    networks: dict[int, Network] = {}
    blocks: dict[int, BlockCore] = {}
    stops = np.cumsum(counts)
    for number, (permutation, stop, count) in enumerate(
        zip(permutations, stops.tolist(), counts.tolist(), strict=True)
    ):
        core = permutation.core
        if isinstance(core, Network):
            networks[number] = core
        elif isinstance(core, BlockCore):
            blocks[number] = core
        else:
            values[stop - count : stop] = core.forward_array(indices[stop - count : stop])
    owners = np.repeat(np.arange(len(permutations)), counts)
    if networks:
        here = np.flatnonzero(np.isin(owners, list(networks)))
        mine = np.repeat(np.arange(len(networks)), counts[list(networks)])
        values[here] = _through_networks(list(networks.values()), mine, indices[here])
    if blocks:
        here = np.flatnonzero(np.isin(owners, list(blocks)))
        mine = np.repeat(np.arange(len(blocks)), counts[list(blocks)])
        values[here] = _through_blocks(list(blocks.values()), mine, indices[here])
    return values


def _through_networks(networks: Sequence[Network], owners: Int64Array, indices: Int64Array) -> Int64Array:
    """Return the values at `indices`, each in the network `owners` says; as `Network.forward_array`."""
    lengths = np.array([network.n for network in networks], np.int64)
    bits = np.array([network.right_bits for network in networks], np.uint64)
    rows = np.array([network.rows for network in networks], np.uint32)
    keys = np.array([network.keys for network in networks], np.uint32).T

    def send(values: Int64Array, mine: Int64Array) -> Int64Array:
        return feistel_pass(values, Cells.of(bits[mine], rows[mine]), list(enumerate(keys[:, mine])), 1)

    out = np.empty_like(indices)
    for start in range(0, len(indices), CHUNK):
        mine = owners[start : start + CHUNK]
        block, limit = send(indices[start : start + CHUNK], mine), lengths[mine]
        outside = np.flatnonzero(block >= limit)
        while len(outside):
            block[outside] = send(block[outside], mine[outside])
            outside = outside[block[outside] >= limit[outside]]
        out[start : start + CHUNK] = block
    return out


def _through_blocks(cores: Sequence[BlockCore], owners: Int64Array, indices: Int64Array) -> Int64Array:
    """Return the values at `indices`, each in the block order `owners` (ascending) says; as `BlockCore.forward_array`."""
    block, window, missing, short_at = np.array(
        [(core.block, core.window, core.missing, core.short_at) for core in cores], np.int64
    ).T[:, owners]
    windows, inside = np.divmod(indices, window)
    place = take_each(lambda owner, number: cores[owner].inside(number), owners, windows, inside) + windows * window
    place += np.where(place >= (short_at + 1) * block - missing, missing, 0)
    slots, rest = np.divmod(place, block)
    shuffled: Int64Array = take_each(lambda owner, _: cores[owner].order, owners, np.zeros_like(owners), slots)
    return np.asarray(shuffled * block + rest)
