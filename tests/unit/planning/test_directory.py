"""The directory of who holds what: every wanted element that somebody holds is found, replicas are shared out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.core.manifest import Manifest, decode_manifest, encode_manifest
from flashckpt.core.shard import Shard
from flashckpt.core.shard_table import ShardTable
from flashckpt.planning import peer_index
from flashckpt.planning.peer_index import PeerQuery
from flashckpt.planning.read_plan import coverage


def box(fqn: str, shape: tuple[int, ...], at: tuple[int, ...], lengths: tuple[int, ...]) -> Shard:
    return Shard(fqn=fqn, dtype="float32", global_shape=shape, offsets=at, lengths=lengths)


def manifest(rank: int, shards: Sequence[Shard], values: dict[str, object] | None = None) -> Manifest:
    places = np.cumsum([0, *(s.nbytes for s in shards)])[:-1]
    table = ShardTable.from_shards(shards, places)
    return Manifest(
        job="j",
        generation=1,
        step=10,
        parent=None,
        world_size=4,
        rank=rank,
        writers=[],
        coordinates={},
        table=table,
        digests=np.arange(table.chunks, dtype=np.uint64),
        values=dict(values or {}),
    )


def found(
    manifests: Sequence[Manifest], queries: Sequence[tuple[str, str, Shard | None]], rank: int = 0
) -> list[tuple[int, int, int]]:
    """Ask all parts of a directory of three ranks."""
    held = np.concatenate([peer_index.encode_held_rows(m, slot) for slot, m in enumerate(manifests)])
    asked = peer_index.encode_queries(itertools.starmap(PeerQuery, queries))
    answers: list[tuple[int, int, int]] = []
    for owner in range(3):
        mine, wanted = (r[peer_index.owner_of(r["key"], 3) == owner] for r in (held, asked))
        answers += peer_index.lookup(mine, {rank: wanted})[rank].tolist()
    return sorted(answers)


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into boxes along one dimension after another, unevenly."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [(tuple(0 for _ in shape), shape)]
    for dim in range(len(shape)):
        edges = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
        boxes = [
            ((*at[:dim], a, *at[dim + 1 :]), (*n[:dim], b - a, *n[dim + 1 :]))
            for at, n in boxes
            for a, b in itertools.pairwise(edges)
        ]
    return boxes


@pytest.mark.matrix
@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), min_size=0, max_size=5))
def test_what_is_found_covers_everything_that_was_wanted(data: st.DataObject, dims: list[int]) -> None:
    """Random boxes on both sides, up to five dimensions (a record tells four), each box held by several slots."""
    shape = tuple(dims)
    slots = data.draw(st.integers(1, 4))
    shards: list[list[Shard]] = [[] for _ in range(slots)]
    for at, lengths in data.draw(cut(shape)):
        for slot in data.draw(st.sets(st.integers(0, slots - 1), min_size=1)):
            shards[slot].append(box("w", shape, at, lengths))
    manifests = [manifest(k, own) for k, own in enumerate(shards)]
    wanted = [box("w", shape, at, lengths) for at, lengths in data.draw(cut(shape))]
    answers = found(manifests, [("w", "w", one) for one in wanted], rank=data.draw(st.integers(0, 3)))
    rows: dict[int, list[int]] = {}
    for slot, row, copy in answers:
        if not copy:
            rows.setdefault(slot, []).append(row)
    told = [
        decode_manifest(encode_manifest(peer_index.part_of(manifests[slot], rows[slot], values=False))) for slot in rows
    ]
    assert coverage(wanted, [m.table for m in told])[1] == 0
    for slot, one in zip(rows, told, strict=True):  # places and digests are those of the whole table
        whole = manifests[slot]
        for new, old in enumerate(rows[slot]):
            assert one.table.byte_offset[new] == whole.table.byte_offset[old]
            assert (
                one.digests[one.table.first_chunk[new] :][:1].tolist()
                == (whole.digests[whole.table.first_chunk[old] :][:1].tolist() if one.table.nbytes[new] else [])
                or not one.table.nbytes[new]
            )


def test_boxes_that_do_not_meet_are_not_answered() -> None:
    held = [manifest(0, [box("w", (8, 4), (0, 0), (4, 4))]), manifest(1, [box("w", (8, 4), (4, 0), (4, 4))])]
    assert found(held, [("w", "w", box("w", (8, 4), (0, 0), (2, 4)))]) == [(0, 0, 0)]


def test_ranks_that_ask_alike_are_sent_to_different_replicas_each_with_one_in_reserve() -> None:
    held = [manifest(k, [box("w", (8,), (0,), (8,))]) for k in range(4)]
    first = {rank: [slot for slot, _, copy in found(held, [("w", "w", box("w", (8,), (0,), (8,)))], rank) if not copy]
             for rank in range(4)}  # fmt: skip
    assert sorted(slots[0] for slots in first.values()) == [0, 1, 2, 3]
    assert len(found(held, [("w", "w", box("w", (8,), (0,), (8,)))], 2)) == peer_index.COPIES


def test_state_of_a_parameter_is_found_below_its_name_whatever_it_is_called_and_however_shaped() -> None:
    rows = [box("optimizer.a.w.exp_avg", (8, 4), (0, 0), (4, 4)), box("optimizer.a.w.step", (), (), ())]
    others = [box("optimizer.a.w.exp_avg", (8, 4), (4, 0), (4, 4)), box("optimizer.a.wb.step", (), (), ())]
    held = [manifest(0, rows), manifest(1, others)]
    query = ("optimizer.a.w.*", "", box("a.w", (8, 4), (0, 0), (4, 4)))
    assert found(held, [query]) == [(0, 0, 0), (0, 1, 0)]


def test_state_of_one_rank_is_found_under_its_own_name_else_without_coordinate_else_the_first_ones() -> None:
    shape: tuple[int, ...] = (4,)
    held = [manifest(k, [box(f"x@rank{k}", shape, (0,), (4,))]) for k in range(3)]
    assert found(held, [("x", "x@rank2", box("x", shape, (0,), (4,)))]) == [(2, 0, 0)]
    assert found(held, [("x", "x@rank7", box("x", shape, (0,), (4,)))]) == [(0, 0, 0)]
    plain = [*held, manifest(3, [box("x", shape, (0,), (4,))])]
    assert found(plain, [("x", "x@rank7", box("x", shape, (0,), (4,)))]) == [(3, 0, 0)]


def test_tied_tensor_is_found_under_its_other_name_and_values_by_their_key() -> None:
    held = [manifest(0, [box("model.a", (4,), (0,), (4,))], {"aliases": {"model.b": "model.a"}, "rng@rank0": 1})]
    assert found(held, [("model.b", "model.b", box("model.b", (4,), (0,), (4,)))]) == [(0, 0, 0)]
    assert found(held, [("=rng@rank0", "", None)]) == [(0, -1, 0)]
    assert found(held, [("=rng@rank1", "", None)]) == []
