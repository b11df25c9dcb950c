"""Outlines: what they say of boxes is what the rows say, for any cut; and no damaged one is taken for whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from flashckpt.core.outline import Outline, decode_outline, encode_outline, merge_outlines, outline_of
from flashckpt.core.shard import Box, Shard
from flashckpt.core.shard_table import ShardTable

SHAPES = {"wide": (24, 6), "odd": (7, 5), "line": (30,), "scalar": (), "empty": (0, 3), "cube": (4, 6, 8)}


def part(size: int, parts: int, number: int) -> tuple[int, int]:
    """Return (first, count) as FSDP2 cuts: equal parts, a short one, then none."""
    length = -(-size // parts)
    first = min(size, number * length)
    return first, min(length, size - first)


def tables(outer: int, inner: int) -> list[tuple[int, ShardTable]]:
    """Return the tables of outer * inner ranks: the last dimension cut `inner` times, the first one `outer` times."""
    found = []
    for rank, (a, b) in enumerate(itertools.product(range(outer), range(inner))):
        shards = []
        for name, shape in SHAPES.items():
            at, n = [0] * len(shape), list(shape)
            if len(shape) > 1:
                at[-1], n[-1] = part(shape[-1], inner, b)
            if shape:
                at[0], n[0] = part(shape[0], outer, a) if len(shape) > 1 else part(shape[0], outer * inner, rank)
            elif rank:
                continue
            dtype = "float32" if name != "odd" else "bfloat16"
            shards.append(Shard(fqn=name, dtype=dtype, global_shape=shape, offsets=tuple(at), lengths=tuple(n)))
        found.append((rank, ShardTable.from_shards(shards, np.zeros(len(shards), np.int64))))
    return found


def boxes(parts: Sequence[tuple[int, ShardTable]]) -> dict[int, list[tuple[str, Box]]]:
    return {
        rank: [(s.fqn, Box(s.offsets, s.lengths)) for s in map(table.shard, range(len(table)))] for rank, table in parts
    }


def boxes_of(outline: Outline) -> dict[int, list[tuple[str, Box]]]:
    found = {}
    for pattern, places, coordinates in outline.of_patterns():
        for place, starts in zip(places.tolist(), pattern.starts(coordinates), strict=True):
            rows = zip(pattern.fqn_id.tolist(), pattern.kind.tolist(), strict=True)
            dims = pattern.ndim.tolist()
            found[int(outline.ranks[place])] = [
                (
                    pattern.fqns[n],
                    Box(tuple(starts[k, : dims[k]].tolist()), tuple(pattern.lengths[k, : dims[k]].tolist())),
                )
                for n, k in rows
            ]
    return dict(sorted(found.items()))


def through_bytes(outline: Outline) -> Outline:
    again = decode_outline(msgpack.unpackb(msgpack.packb(encode_outline(outline))))
    again.check()
    return again


CUTS = [(1, 1), (1, 4), (4, 1), (3, 2), (5, 3), (16, 1), (8, 8)]


@pytest.mark.parametrize(("outer", "inner"), CUTS)
def test_outline_has_each_box_of_each_rank_and_sees_that_they_tile(outer: int, inner: int) -> None:
    parts = tables(outer, inner)
    outline = through_bytes(outline_of(parts))
    assert boxes_of(outline) == boxes(parts)
    assert outline.is_tiling()
    assert outline.nbytes == sum(int(table.nbytes.sum()) for _, table in parts)
    assert outline.fqns == list(SHAPES)
    named = outline.without_boxes(outline.fqns)
    assert {s.fqn: s.global_shape for s in map(named.shard, range(len(named)))} == SHAPES


def test_ranks_that_cut_alike_share_a_pattern_whatever_their_number() -> None:
    few, many = (outline_of(tables(outer, 1)) for outer in (12, 24))
    assert len(many.packed) <= len(few.packed) + 1
    assert len(many.names) == 2, "with the scalar, and without"


@pytest.mark.parametrize(("outer", "inner"), CUTS)
def test_outlines_of_nodes_are_that_of_the_job(outer: int, inner: int) -> None:
    parts = tables(outer, inner)
    nodes = [through_bytes(outline_of(parts[at : at + 3])) for at in range(0, len(parts), 3)]
    whole = merge_outlines([*nodes, outline_of(parts[:2])])
    assert boxes_of(through_bytes(whole)) == boxes(parts)
    assert whole.is_tiling(), "a rank in two of them counts once"


@pytest.mark.parametrize(("outer", "inner"), CUTS)
def test_holders_of_any_boxes_are_the_ranks_that_meet_them(outer: int, inner: int) -> None:
    parts = tables(outer, inner)
    outline, held = outline_of(parts), boxes(parts)
    for wanted_outer, wanted_inner in ((outer, inner), (2, 3), (7, 1)):
        for _, wanted in tables(wanted_outer, wanted_inner):
            asked = [(s.fqn, Box(s.offsets, s.lengths)) for s in map(wanted.shard, range(len(wanted)))]
            meet = {
                rank
                for rank, mine in held.items()
                for (name, box), (other, want) in itertools.product(mine, asked)
                if name == other and (not box.lengths or box.intersection(want) is not None)
            }
            assert outline.holders(wanted).tolist() == sorted(meet)


@pytest.mark.parametrize("fault", ["missing rank", "twice", "shifted", "other dtype", "other shape"])
def test_boxes_that_do_not_tile_are_found(fault: str) -> None:
    parts = tables(4, 2)
    if fault == "missing rank":
        del parts[5]
    else:
        _, table = parts[3]
        shards = [table.shard(row) for row in range(len(table))]
        first = shards[0]
        change = {
            "twice": replace(parts[2][1].shard(0)),
            "shifted": replace(first, offsets=(first.offsets[0] - 1, *first.offsets[1:])),
            "other dtype": replace(first, dtype="int32"),
            "other shape": replace(first, global_shape=(25, 6)),
        }
        shards[0] = change[fault]
        parts[3] = 3, ShardTable.from_shards(shards, np.zeros(len(shards), np.int64))
    assert not outline_of(parts).is_tiling()


def test_outline_that_contradicts_itself_is_refused() -> None:
    good = encode_outline(outline_of(tables(4, 2)))
    ranks = np.frombuffer(good["ranks"], "<u4")
    coordinates = np.frombuffer(good["coordinates"], "<i8")
    bad: list[dict[str, object]] = [
        {"ranks": ranks[::-1].tobytes()},
        {"ranks": ranks[:-1].tobytes()},
        {"pattern": (np.frombuffer(good["pattern"], "<u4") + 99).tobytes()},
        {"coordinates": coordinates[:-1].tobytes()},
        {"coordinates": (coordinates + 1000).tobytes()},
        {"coordinates": (coordinates * 0 - 1).tobytes()},
        {"names": ["a"]},
        {"names": [msgpack.packb(["a"])] * len(good["names"])},
        {"patterns": [[7, b""]]},
        {"patterns": [[0, msgpack.packb({"dtypes": []})]] * len(good["patterns"])},
    ]
    for change in bad:
        with pytest.raises((ValueError, TypeError, KeyError)):
            decode_outline(good | change).check()
