"""Boxes, their intersection and their places in a data area."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.core import shard_table
from flashckpt.core.shard import ALIGN_LARGE, ALIGN_SMALL, SMALL_BYTES, Box, Shard, layout_hash, place
from flashckpt.core.shard_table import ShardTable, columns_of, table_from_columns
from flashckpt.errors import UnsupportedStateError


def shard(fqn: str, *lengths: int, dtype: str = "float32", offsets: tuple[int, ...] | None = None) -> Shard:
    offsets = offsets or (0,) * len(lengths)
    whole = tuple(o + n for o, n in zip(offsets, lengths, strict=True))
    return Shard(fqn=fqn, dtype=dtype, global_shape=whole, offsets=offsets, lengths=lengths)


def test_bytes_of_a_box_count_elements_and_dtype() -> None:
    assert shard("a", 3, 5).nbytes == 60
    assert shard("a", 3, 5, dtype="bfloat16").nbytes == 30
    assert shard("a", dtype="complex128").nbytes == 16
    assert shard("a", 3, 0).nbytes == 0


@pytest.mark.parametrize("box", [((1,), (4,)), ((-1,), (2,)), ((0, 0), (1, 1))])
def test_a_box_outside_its_tensor_is_refused_by_name(box: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"model\.w"):
        Shard(fqn="model.w", dtype="float32", global_shape=(4,), offsets=box[0], lengths=box[1])


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match=r"(?s)model\.w.*qint8"):
        shard("model.w", 3, dtype="qint8")


@given(st.lists(st.integers(0, 3 * SMALL_BYTES), max_size=30))
def test_places_are_aligned_and_never_overlap(sizes: Any) -> None:
    shards = [shard(f"t{i}", size, dtype="uint8") for i, size in enumerate(sizes)]
    placement = place(shards)
    taken = []
    for size, offset in zip(sizes, placement.offsets.tolist(), strict=True):
        assert offset % (ALIGN_LARGE if size > SMALL_BYTES else ALIGN_SMALL) == 0
        if size:
            taken.append((offset, offset + size))
    taken.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    assert placement.total % ALIGN_LARGE == 0
    assert not taken or taken[-1][1] <= placement.total


boxes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=0, max_size=3)


@given(st.data())
def test_the_common_box_holds_exactly_the_common_elements(data: Any) -> None:
    a = data.draw(boxes)
    b = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=len(a), max_size=len(a)))

    def box_of(pairs: Any) -> Box:
        return Box(*zip(*pairs, strict=True)) if pairs else Box((), ())

    def mask(box: Any) -> Any:
        out = np.zeros((12,) * len(a), bool)
        out[tuple(slice(o, o + n) for o, n in box)] = True
        return out

    common = box_of(a).intersection(box_of(b))
    expected = mask(a) & mask(b)
    if common is None:
        assert not expected.any()
    else:
        assert np.array_equal(mask(list(zip(*common, strict=True))), expected)


def test_layout_hash_is_frozen_and_sees_every_field() -> None:
    base = Shard(fqn="w", dtype="float32", global_shape=(8, 4), offsets=(0, 0), lengths=(4, 4))
    others = [
        Shard(fqn="v", dtype="float32", global_shape=(8, 4), offsets=(0, 0), lengths=(4, 4)),
        Shard(fqn="w", dtype="int32", global_shape=(8, 4), offsets=(0, 0), lengths=(4, 4)),
        Shard(fqn="w", dtype="float32", global_shape=(9, 4), offsets=(0, 0), lengths=(4, 4)),
        Shard(fqn="w", dtype="float32", global_shape=(8, 4), offsets=(4, 0), lengths=(4, 4)),
        Shard(fqn="w", dtype="float32", global_shape=(8, 4), offsets=(0, 0), lengths=(2, 4)),
        Shard(fqn="w", dtype="float32", global_shape=(8, 4), offsets=(0, 0), lengths=(4, 4), replica=1),
    ]
    hashes = {layout_hash([s]) for s in [base, *others]}
    assert len(hashes) == 7
    assert layout_hash([base, others[0]]) != layout_hash([others[0], base])
    assert layout_hash([base]) == 14967543578775886577, "golden"


@pytest.mark.parametrize("kinds", [2, 40])
def test_layout_hash_is_that_of_one_packed_list_of_rows(kinds: int) -> None:
    """The rows are put together by hand: names of all lengths, some beyond ASCII, few kinds and many."""
    names = [f"{'blocks.' * (k % 7)}{'ä' * (k % 3)}w{k}{'x' * (k * 9 % 300)}" for k in range(40)]
    shards = [
        Shard(fqn=name, dtype="float32", global_shape=(64, k % kinds + 1), offsets=(0, 0), lengths=(64, k % kinds + 1))
        for k, name in enumerate(names)
    ]
    rows = [[s.fqn, s.dtype, s.global_shape, s.offsets, s.lengths, s.replica] for s in shards]
    assert layout_hash(shards) == xxhash.xxh3_64_intdigest(msgpack.packb(rows))
    assert layout_hash([]) == xxhash.xxh3_64_intdigest(msgpack.packb([]))


def test_names_of_a_table_are_each_there_once_in_any_order() -> None:
    def read(*fqns: str) -> list[str]:
        shards = [
            Shard(fqn=str(k), dtype="int8", global_shape=(1,), offsets=(0,), lengths=(1,)) for k in range(len(fqns))
        ]
        columns = columns_of(ShardTable.from_shards(shards, np.arange(len(fqns))))
        return table_from_columns(columns | {"fqns": list(fqns)}).fqns

    assert read("a", "b", "c") == ["a", "b", "c"]
    assert read("c", "a", "b") == ["c", "a", "b"]
    for names in (("a", "a", "b"), ("b", "a", "b")):
        with pytest.raises(ValueError, match="fqns is not a list of names, each once"):
            read(*names)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), collide=st.booleans())
def test_the_first_row_of_each_box_is_kept_whatever_the_hashes(data: Any, collide: bool) -> None:
    boxes = st.tuples(
        st.sampled_from(["a", "b"]), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=2)
    )
    rows = data.draw(st.lists(boxes, max_size=12))
    shards = [
        Shard(fqn=f"{fqn}{len(box)}", dtype="uint8", global_shape=(4,) * len(box), offsets=tuple(at for at, _ in box),
              lengths=tuple(length for _, length in box))
        for fqn, box in rows
    ]  # fmt: skip
    tables = [ShardTable.from_shards(part, [0] * len(part)) for part in (shards[::2], shards[1::2])]
    digests = [np.arange(table.chunks, dtype=np.uint64) + 100 * k for k, table in enumerate(tables)]
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(shard_table, "_hashes", lambda table: np.zeros(len(table), np.uint64))
        merged, found, _ = ShardTable.concatenate([(t, d, 1) for t, d in zip(tables, digests, strict=True)])
    expected: dict[Any, Any] = {}
    for number, (table, own) in enumerate(zip(tables, digests, strict=True)):
        for row in range(len(table)):
            one = table.shard(row)
            first = int(table.first_chunk[row])
            chunks = own[first : first + bool(one.nbytes)].tolist()
            expected.setdefault((one.fqn, one.offsets, one.lengths), (number, chunks))
    kept = [
        ((one.fqn, one.offsets, one.lengths), int(merged.object_id[row]))
        for row, one in ((row, merged.shard(row)) for row in range(len(merged)))
    ]
    assert kept == [(key, number) for key, (number, _) in expected.items()]
    assert found.tolist() == [digest for _, chunks in expected.values() for digest in chunks]


def test_what_another_process_maps_is_what_a_table_computes_itself() -> None:
    shards = [shard(f"t{at % 3}", 2, 3, offsets=(2 * (at // 3), 0)) for at in range(12)] + [shard("scalar")]
    table = ShardTable.from_shards(shards, np.arange(13))
    other = table_from_columns(columns_of(table))
    other.adopt({name: one.copy() for name, one in table.derived.items()})
    assert all(
        np.array_equal(one, table_from_columns(columns_of(table)).derived[name]) for name, one in other.derived.items()
    )
    assert other.derived["follow"].tolist() == [True, True, True, False]
