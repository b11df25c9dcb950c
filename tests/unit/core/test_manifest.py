"""The manifest's bytes: what goes in comes out, nothing damaged or newer is ever read as good."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.core.manifest import Manifest, ShardTable, decode_manifest, encode_manifest, encode_table, merge
from flashckpt.core.records import CHUNK_BYTES, chunk_digests, digest
from flashckpt.core.schema import cut_tensors_with_gaps
from flashckpt.core.shard import Shard, place
from flashckpt.errors import DamagedError, DisagreementError, FormatVersionError, UnsupportedStateError


def shards_of(rank: int) -> list[Shard]:
    return [
        Shard(fqn="w", dtype="float32", global_shape=(8, 4), offsets=(4 * rank, 0), lengths=(4, 4)),
        Shard(fqn="scalar", dtype="int64", global_shape=(), offsets=(), lengths=(), replica=rank),
        Shard(fqn="empty", dtype="bool", global_shape=(0, 3), offsets=(0, 0), lengths=(0, 3)),
        Shard(
            fqn=f"big.{rank}", dtype="uint8", global_shape=(2 * CHUNK_BYTES + 1,), offsets=(0,),
            lengths=(2 * CHUNK_BYTES + 1,),
        ),
    ]  # fmt: skip


def manifest(rank: int = 0, **changes: Any) -> Manifest:
    shards = shards_of(rank)
    table = ShardTable.from_shards(shards, place(shards).offsets)
    fields: dict[str, Any] = {
        "job": "run", "generation": 3, "step": 120, "parent": (2, 100), "world_size": 2, "rank": rank,
        "writers": [0, 1], "coordinates": {"pp": 0, "tp": rank}, "table": table,
        "digests": np.arange(table.chunks, dtype=np.uint64) + np.uint64(100 * rank),
        "values": {"lr": 0.1, f"rng@rank{rank}": b"\x00\xff", "groups": [{"betas": (0.9, 0.95), 3: None}]},
        "objects": [],
    }  # fmt: skip
    return Manifest(**(fields | changes))


def same(a: Manifest, b: Manifest) -> bool:
    return encode_manifest(a) == encode_manifest(b)


def test_a_manifest_comes_back_as_it_was() -> None:
    m = manifest()
    back = decode_manifest(memoryview(encode_manifest(m)))
    assert same(m, back)
    assert back.identity == (3, 120)
    assert back.parent == (2, 100)
    assert back.values == m.values
    assert back.values["groups"][0]["betas"] == (0.9, 0.95)
    assert [back.table.shard(i) for i in range(4)] == shards_of(0)
    assert back.table.rows("scalar") == [1]
    assert back.table.rows("absent") == ()
    assert back.table.first_chunk.tolist() == [0, 1, 2, 2]
    assert back.table.chunks == 5


def test_a_cached_table_gives_the_same_bytes() -> None:
    m = manifest()
    assert encode_manifest(m, table_bytes=encode_table(m.table)) == encode_manifest(m)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), v, max_size=4)
    | st.lists(v, max_size=4).map(tuple),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(), json_like, max_size=4))
def test_values_keep_type_and_bits(values: Any) -> None:
    back = decode_manifest(encode_manifest(manifest(values=values))).values
    assert back == values
    assert repr(back) == repr(values)


def test_nan_and_signed_zero_keep_their_bits() -> None:
    back = decode_manifest(encode_manifest(manifest(values={"a": math.nan, "b": -0.0}))).values
    assert math.isnan(back["a"])
    assert math.copysign(1, back["b"]) == -1


@pytest.mark.parametrize("bad", [{1, 2}, object(), np.float64(1.0), np.zeros(2), 1j, lambda: 0])
def test_a_value_of_another_type_is_refused_by_its_key(bad: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"optimizer\.groups\[1\]\.lr"):
        encode_manifest(manifest(values={"ok": 1, "optimizer": {"groups": [{}, {"lr": bad}]}}))


def test_any_flipped_byte_is_found() -> None:
    good = encode_manifest(manifest())
    rng = random.Random(1)
    for position in [*range(40), *(rng.randrange(len(good)) for _ in range(300))]:
        bad = bytearray(good)
        bad[position] ^= 1 << rng.randrange(8)
        with pytest.raises((DamagedError, FormatVersionError)):
            decode_manifest(bad)


def test_a_manifest_cut_short_or_with_a_tail_is_refused() -> None:
    good = encode_manifest(manifest())
    for bad in (b"", good[:7], good[:31], good[:-1], good + b"\0"):
        with pytest.raises(DamagedError):
            decode_manifest(bad)


def sealed(body: bytes, *, major: int = 1, minor: int = 0) -> bytes:
    prefix = struct.pack("<8sHHIQ", b"FCKMANIF", major, minor, 0, len(body))
    return prefix + struct.pack("<Q", digest(prefix + body)) + body


def test_an_unknown_minor_version_with_new_keys_is_read_and_an_unknown_major_refused() -> None:
    body = msgpack.unpackb(encode_manifest(manifest())[32:])
    newer = msgpack.packb(body | {"something_new": [1, 2]})
    assert decode_manifest(sealed(newer, minor=9)).step == 120
    with pytest.raises(FormatVersionError, match=r"3\.0"):
        decode_manifest(sealed(newer, major=3))


@pytest.mark.parametrize(
    "change",
    [
        {"table": b"\xc0"},
        {"digests": b""},
        {"digest": "md5"},
        {"parent": 7},
        {"chunk_bytes": 4096},
        {"values": b"\xc1"},
    ],
)
def test_a_sealed_manifest_that_breaks_the_schema_is_damaged_not_a_crash(change: Any) -> None:
    body = msgpack.unpackb(encode_manifest(manifest())[32:])
    with pytest.raises(DamagedError):
        decode_manifest(sealed(msgpack.packb(body | change)))


def test_columns_that_do_not_fit_together_are_damaged() -> None:
    m = manifest()
    body = msgpack.unpackb(encode_manifest(m)[32:])
    table = msgpack.unpackb(body["table"])
    for change in ({"fqn_id": b""}, {"fqns": ["w"]}, {"dtypes": ["qint", "a", "b", "c"]}, {"lengths": b"\0" * 8}):
        with pytest.raises(DamagedError):
            decode_manifest(sealed(msgpack.packb(body | {"table": msgpack.packb(table | change)})))


def test_merge_keeps_one_copy_of_equal_boxes_and_renumbers_objects_and_digests() -> None:
    a, b = manifest(0, objects=["a0", "a1"]), manifest(1, objects=["b0"])
    both = merge([b, a])
    assert (both.rank, both.writers, both.objects) == (-1, [0, 1], ["a0", "a1", "b0"])
    names = [both.table.fqn(i) for i in range(len(both.table))]
    assert names == ["w", "scalar", "empty", "big.0", "w", "big.1"]
    assert both.table.object_id.tolist() == [0, 0, 0, 0, 2, 2]
    assert both.table.rows("w") == [0, 4]
    assert both.table.shard(4) == shards_of(1)[0]
    row = both.table.rows("big.1")[0]
    first = int(both.table.first_chunk[row])
    assert both.digests[first : first + 3].tolist() == [102, 103, 104]
    assert both.digests[int(both.table.first_chunk[4])] == 100
    assert set(both.values) == {"lr", "groups", "rng@rank0", "rng@rank1"}
    assert same(both, decode_manifest(encode_manifest(both)))


def test_merge_loses_no_value_where_ranks_differ() -> None:
    a, b = manifest(0, values={"k": 1}), manifest(1, values={"k": 1.0})
    assert merge([a, b]).values == {"k": 1, "k@rank1": 1.0}


def test_merge_of_different_snapshots_is_refused() -> None:
    for change in ({"step": 121}, {"generation": 4}, {"parent": None}, {"job": "other"}, {"world_size": 3}):
        with pytest.raises(DisagreementError):
            merge([manifest(0), manifest(1, **change)])


def test_digests_never_straddle_shards_and_the_last_chunk_may_be_short() -> None:
    data = np.random.default_rng(0).integers(0, 255, 2 * CHUNK_BYTES + 5, np.uint8)
    found = chunk_digests(data)
    assert found.tolist() == [digest(data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]) for i in range(3)]
    for empty in (b"", np.zeros((0, 3)), np.zeros((3, 0), np.uint8)):
        assert chunk_digests(empty).size == 0
    assert chunk_digests(np.array(1.0)).size == 1
    assert digest(b"") == 0x2D06800538D394C2, "golden: xxh3_64 of nothing, seed 0"


def test_the_table_of_twenty_thousand_tensors_is_encoded_once_and_not_per_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = [
        Shard(fqn=f"model.layers.{i}.weight", dtype="float32", global_shape=(64, 8), offsets=(0, 0), lengths=(64, 8))
        for i in range(20_000)
    ]
    table = ShardTable.from_shards(shards, place(shards).offsets)
    m = manifest(table=table, digests=np.zeros(table.chunks, np.uint64))
    cached, whole = encode_table(table), encode_manifest(m)
    monkeypatch.setattr("flashckpt.core.manifest.encode_table", lambda table: pytest.fail("encoded again"))
    assert encode_manifest(m, table_bytes=cached) == whole
    assert decode_manifest(whole).table.shard(19_999) == shards[19_999]


def test_going_over_all_rows_of_a_large_table_keeps_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashckpt.core.shard_table.KEPT_SHARDS", 2)
    shards = shards_of(0)
    table = ShardTable.from_shards(shards, place(shards).offsets)
    for _ in range(2):
        assert [table.shard(row) for row in range(len(table))] == shards
        assert len(table._shards) <= 2


def columns(m: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(msgpack.unpackb(encode_manifest(m)[32:])["table"])
    return found


def with_table(m: Manifest, **change: Any) -> bytes:
    body = msgpack.unpackb(encode_manifest(m)[32:])
    return sealed(msgpack.packb(body | {"table": msgpack.packb(columns(m) | change)}))


def int64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def flat(*boxes: tuple[int, int], length: int = 8, **changes: Any) -> Manifest:
    """A MANIFEST of one tensor of `length` bytes in boxes (offset, length), one behind the other in one pack."""
    shards = [Shard(fqn="w", dtype="uint8", global_shape=(length,), offsets=(at,), lengths=(n,)) for at, n in boxes]
    table = ShardTable.from_shards(shards, [64 * i for i in range(len(shards))])
    fields: dict[str, Any] = {
        "rank": -1,
        "table": table,
        "digests": np.zeros(table.chunks, np.uint64),
        "objects": ["r00000.p0.fck"],
        "coordinates": {},
    }
    return replace(manifest(), **(fields | changes))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"nbytes": int64(0, 4)}, "another size"),
        ({"nbytes": int64(5, 4)}, "another size"),
        ({"offsets": int64(5, 4)}, "is not inside its tensor"),
        ({"offsets": int64(-1, 4)}, "negative"),
        ({"lengths": int64(2**62, 4)}, "is not inside its tensor"),
        ({"global_shape": int64(2**63 - 1, 2**63 - 1), "lengths": int64(2**63 - 1, 4)}, "."),
        ({"global_shape": int64(2**62, 2**62)}, "more bytes than there are"),
        ({"byte_offset": int64(-64, 64)}, "outside every object"),
        ({"byte_offset": int64(2**63 - 1, 64)}, "outside every object"),
        ({"byte_offset": int64(0, 3)}, "share bytes"),
        ({"object_id": np.array([1, 0], "<i4").tobytes()}, "pack 1 of 1"),
        ({"object_id": np.array([-1, 0], "<i4").tobytes()}, "pack"),
        ({"first_chunk": int64(0, 0)}, "not in the order"),
        ({"first_chunk": int64(0, 2**62)}, "not in the order"),
        ({"fqns": [7]}, "list of names"),
        ({"fqns": "w"}, "list of names"),
        ({"fqns": ["w", "w"]}, "list of names"),
        ({"rows": 2.0}, "different lengths"),
        ({"dtypes": ["float64"]}, "another size"),
    ],
)
def test_rows_that_contradict_themselves_are_damaged(change: dict[str, Any], what: str) -> None:
    m = flat((0, 4), (4, 4))
    decode_manifest(with_table(m))
    with pytest.raises(DamagedError, match=what):
        decode_manifest(with_table(m, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"job": 1}, {"step": "120"}, {"step": True}, {"generation": -1}, {"step": 1 << 63}, {"parent": []}, {"parent": [1]},
        {"parent": [1, "2"]}, {"parent": [1, 2, 3]}, {"parent": "ab"}, {"world_size": None}, {"rank": -2}, {"writers": 5},
        {"writers": [None]}, {"coordinates": [["dp", 0]]}, {"coordinates": {"dp": "0"}}, {"coordinates": {1: 0}},
        {"objects": "r00000.p0.fck"}, {"objects": [1]}, {"objects": []}, {"values": b"\x90"}, {"values": b"\x81\x01\x01"},
        {"values": msgpack.packb({"t": msgpack.Timestamp(1, 2)})}, {"digests": bytes(24)}, {"digests": bytes(9)},
        {"digests": bytes(8)}, {"table": b"\x90"}, {"chunk_bytes": [1]},
    ],
)  # fmt: skip
def test_fields_of_another_type_or_range_are_damaged(change: dict[str, Any]) -> None:
    body = msgpack.unpackb(encode_manifest(flat((0, 4), (4, 4)))[32:])
    decode_manifest(sealed(msgpack.packb(body)))
    with pytest.raises(DamagedError, match="does not follow its schema"):
        decode_manifest(sealed(msgpack.packb(body | change)))


@pytest.mark.parametrize("name", ["", ".", "..", "../r0.fck", "/etc/passwd", "a/b", "a\0b", "x" * 256])
def test_a_pack_name_that_leaves_the_folder_is_damaged(name: str) -> None:
    body = msgpack.unpackb(encode_manifest(flat((0, 8)))[32:])
    with pytest.raises(DamagedError, match="not a pack name"):
        decode_manifest(sealed(msgpack.packb(body | {"objects": [name]})))


def test_a_slot_or_an_index_may_hold_a_part_of_a_tensor_and_a_merged_manifest_may_not() -> None:
    part = flat((2, 4))
    with pytest.raises(DamagedError, match="do not cover it"):
        decode_manifest(encode_manifest(part))
    for rank, objects in ((0, ["r00000.p0.fck"]), (0, [])):
        decode_manifest(encode_manifest(flat((2, 4), rank=rank, objects=objects)))


@pytest.mark.parametrize(
    ("boxes", "covered"),
    [
        ([(0, 8)], True),
        ([(0, 4), (4, 4)], True),
        ([(4, 4), (0, 4)], True),
        ([(0, 5), (3, 5)], True),  # two sets of replicas, cut at different rows
        ([(0, 4), (0, 4)], False),  # as many elements as the tensor, and a gap
        ([(0, 3), (4, 4)], False),
        ([(0, 0)], False),
        ([(0, 6), (1, 2)], False),
    ],
)
def test_gaps_are_found_whatever_overlaps(boxes: list[tuple[int, int]], covered: bool) -> None:
    raw = encode_manifest(flat(*boxes))
    if covered:
        decode_manifest(raw)
    else:
        with pytest.raises(DamagedError, match="do not cover it"):
            decode_manifest(raw)


@given(st.data())
def test_gaps_are_those_that_a_bitmap_shows(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    held = np.zeros(shape, np.bool_)
    shards = []
    for _ in range(data.draw(st.integers(1, 6))):
        ranges = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
        if data.draw(st.booleans()) and shape:  # mostly slabs, so that some of them tile
            dim = data.draw(st.integers(0, len(shape) - 1))
            ranges = [one if i == dim else [0, n] for i, (one, n) in enumerate(zip(ranges, shape, strict=True))]
        held[tuple(slice(a, b) for a, b in ranges)] = True
        offsets, lengths = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
        shards.append(Shard(fqn="t", dtype="uint8", global_shape=shape, offsets=offsets, lengths=lengths))
    table = ShardTable.from_shards(shards, np.arange(len(shards)) * 64)
    assert bool(cut_tensors_with_gaps(table)) == (not held.all())


@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: [v], lambda v: {"k": v}, lambda v: [(v, 1)]])
def test_values_nest_up_to_a_limit_and_are_refused_by_their_key_beyond_it(wrap: Any) -> None:
    value: Any = 1
    each = 2 if type(wrap(0)) is list and wrap(0) == [(0, 1)] else 1
    for _ in range(62 // each):  # two maps are around it
        value = wrap(value)
        back = decode_manifest(encode_manifest(manifest(values={"state": {"deep": value}}))).values
        assert back == {"state": {"deep": value}}
    for _ in range(2000):  # far beyond what the C stack of a decoder that calls itself holds
        value = wrap(value)
        with pytest.raises(UnsupportedStateError, match=r"state\.deep") as caught:
            encode_manifest(manifest(values={"state": {"deep": value}}))
        assert "nested more than 64 deep" in caught.value.found


def test_a_list_that_holds_itself_and_text_without_bytes_are_refused() -> None:
    ring: list[Any] = [1]
    ring += [ring, ring]
    with pytest.raises(UnsupportedStateError, match="'ring"):
        encode_manifest(manifest(values={"ring": ring}))
    with pytest.raises(UnsupportedStateError, match=r"a\[1\]"):
        encode_manifest(manifest(values={"a": ["ok", "\ud800"]}))
