"""Values that are byte ranges of an object: what is cut off, found again, merged and refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slots import make_pin, shard

from flashckpt.core.manifest import Manifest, cover, decode_manifest, encode_manifest, merge
from flashckpt.core.schema import decode_manifest_header
from flashckpt.core.values import RangedValues, concatenate, cut, ranged_from
from flashckpt.errors import DamagedError

VALUES = {"step": 3, "rng@rank0": {"torch": b"\x01\x02"}, "data@rank0": [1], "rng@pp0.dp1": (1, 2**90), "rng": 5}


def index(rank: int, values: dict[str, Any], *, world: int = 8) -> Manifest:
    """The index of a rank with one tensor, all of it in one pack."""
    found = make_pin([shard(f"w{rank}", (4,))], rank=rank, world_size=world, values=values).manifest()
    return replace(found, objects=[f"r{rank:05d}.p0.fck"])


def ranged(manifest: Manifest, blobs: dict[str, bytes]) -> dict[str, Any]:
    """All values that a manifest names by range."""
    found = {}
    for entry in range(len(manifest.ranged)):
        number, offset, nbytes = manifest.ranged.range(entry)
        key, value = manifest.ranged.value(entry, blobs[manifest.objects[number]][offset : offset + nbytes])
        found[key] = value
    return found


def test_only_what_no_other_rank_asks_for_is_cut_off_and_comes_back_as_it_was() -> None:
    stays, ranges, blob = cut(VALUES, 100)
    assert stays == {"step": 3, "data@rank0": [1], "rng": 5}
    assert ranges.keys == ["rng@rank0", "rng@pp0.dp1"]
    for entry, key in enumerate(ranges.keys):
        number, offset, nbytes = ranges.range(entry)
        assert number == 0
        assert ranges.value(entry, blob[offset - 100 : offset - 100 + nbytes]) == (key, VALUES[key])
    assert ranges.of_owner("pp0.dp1") == [1]
    assert ranges.ends(2) == [100 + len(blob), 0]


def test_a_manifest_with_ranges_comes_back_and_a_program_that_does_not_know_them_refuses_it() -> None:
    stays, ranges, _ = cut(VALUES, 0)
    m = replace(index(0, stays), objects=["r00000.p0.fck", "r00000.values.fck"])
    m = replace(m, ranged=concatenate([(ranges, 1)]), covers=(0, 1))
    raw = encode_manifest(m)
    back = decode_manifest(raw)
    assert encode_manifest(back) == raw
    assert (back.ranged.keys, back.covers, back.values) == (ranges.keys, (0, 1), stays)
    assert raw[8:10] == b"\2\0", "another major version"
    whole = encode_manifest(merge([m]))
    found = decode_manifest_header(whole[:4096], len(whole))
    assert found is not None
    assert found.step == m.step
    assert encode_manifest(replace(m, ranged=RangedValues()))[8:10] == b"\1\0"


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ["a@b"]}, {"keys": ["a@b", "a@b"]}, {"keys": ["step", "x"]}, {"keys": [1, 2]}, {"keys": "ab"},
        {"object_id": np.array([0, 2], "<i4").tobytes()}, {"object_id": np.array([-1, 0], "<i4").tobytes()},
        {"offset": np.array([0, -1], "<i8").tobytes()}, {"nbytes": np.array([0, -1], "<i8").tobytes()},
        {"nbytes": np.array([0, 1 << 31], "<i8").tobytes()}, {"digest": b""}, {"digest": b"1"}, {"offset": 1},
    ],
)  # fmt: skip
def test_ranges_that_contradict_themselves_are_damaged(change: dict[str, Any]) -> None:
    stays, ranges, _ = cut(VALUES, 0)
    good = replace(index(0, stays), objects=["r00000.p0.fck", "v"], ranged=ranges)
    body = msgpack.unpackb(encode_manifest(good)[32:])
    ranged_from(body["ranged"], objects=2, others=stays)
    with pytest.raises((ValueError, TypeError)):
        ranged_from(body["ranged"] | change, objects=2, others=stays)


def test_bytes_that_are_not_those_of_the_value_are_damaged() -> None:
    _, ranges, blob = cut(VALUES, 0)
    (_, at, nbytes), (_, other, more) = ranges.range(0), ranges.range(1)
    raw = bytearray(blob[at : at + nbytes])
    raw[-1] ^= 1
    with pytest.raises(DamagedError, match="'rng@rank0' is damaged"):
        ranges.value(0, bytes(raw))
    swapped = replace(ranges, columns=ranges.columns | {"digest": ranges.columns["digest"][::-1].copy()})
    with pytest.raises(DamagedError, match="in its place"):
        swapped.value(0, blob[other : other + more])


VALUE_MAPS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), max_size=4)


@given(ranks=st.lists(VALUE_MAPS, min_size=1, max_size=8), cuts=st.sets(st.integers(1, 7)))
def test_indexes_of_several_ranks_merge_to_what_those_of_all_ranks_merge_to(
    ranks: list[dict[str, int]], cuts: set[int]
) -> None:
    """Every rank finds under its name, else under that of all, what it would have found."""
    indexes = [index(rank, values) for rank, values in enumerate(ranks)]
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ranks)), len(ranks)]
    nodes = [cover(indexes[low:high]) for low, high in pairwise(bounds)]
    flat, nested = merge(indexes), merge(nodes)
    assert (nested.objects, nested.writers, nested.rank, nested.covers) == (flat.objects, flat.writers, -1, ())
    assert [nested.table.shard(row) for row in range(len(nested.table))] == [
        flat.table.shard(row) for row in range(len(flat.table))
    ]
    assert nested.digests.tolist() == flat.digests.tolist()
    for rank, values in enumerate(ranks):
        for key in values:
            assert found_by(nested, key, rank) == found_by(flat, key, rank) == values[key]


def found_by(manifest: Manifest, key: str, rank: int) -> object:
    own = f"{key}@rank{rank}"
    return manifest.values[own if own in manifest.values else key]


def test_ranges_of_several_nodes_keep_their_objects() -> None:
    blobs: dict[str, bytes] = {}
    nodes, wanted = [], {}
    for first in (0, 2, 4):
        parts, at = [], 0
        for rank in (first, first + 1):
            values = {"step": 9, f"rng@rank{rank}": bytes([rank]) * 5}
            wanted[f"rng@rank{rank}"] = values[f"rng@rank{rank}"]
            stays, ranges, blob = cut(values, at)
            name = f"r{first:05d}.values.fck"
            blobs[name] = blobs.get(name, b"") + blob
            at += len(blob)
            parts.append((index(rank, stays), ranges))
        head = parts[0][0]
        held = concatenate((ranges, len(head.objects)) for _, ranges in parts)
        head = replace(head, objects=[*head.objects, f"r{first:05d}.values.fck"], ranged=held)
        nodes.append(cover([head, parts[1][0]]))
    merged = decode_manifest(encode_manifest(merge(nodes)))
    assert merged.values == {"step": 9}
    assert ranged(merged, blobs) == wanted
