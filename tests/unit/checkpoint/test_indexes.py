"""Indexes of several ranks in one object, and the values that lie beside them: written, found, chosen, damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.slots import FakePin, make_pin, shard

from flashckpt.checkpoint import indexes
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.indexes import missing_writers, put_indexes, read_indexes
from flashckpt.checkpoint.spread_reads import with_values
from flashckpt.checkpoint.writer import commit, persist_slot, write_packs
from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.errors import DamagedError, PersistError
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

PREFIX = "step-000000010.g1"
WORLD = 6


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "root")


def pin(rank: int) -> FakePin:
    values = {"step": 10, "odd": rank % 2, f"rng@rank{rank}": bytes([rank]) * 3000}
    return make_pin([shard(f"w{rank}", (600,))], rank=rank, world_size=WORLD, values=values)


def put(store: Store, ranks: Sequence[int]) -> list[Manifest]:
    """What a node with these ranks writes."""
    found = [write_packs(pin(rank), store, PREFIX) for rank in ranks]
    put_indexes(store, PREFIX, found)
    return found


def names(store: Store) -> list[str]:
    return [info.key.rpartition("/")[2] for info in store.list(f"{PREFIX}/r") if not info.key.endswith("p0.fck")]


def test_ranks_that_follow_each_other_share_one_index(store: Store) -> None:
    put(store, [5, 0, 1, 3])
    assert names(store) == ["r00000-00001.idx", "r00003.idx", "r00005.idx"]
    assert missing_writers(store, PREFIX, range(WORLD)) == [2, 4]
    with pytest.raises(PersistError, match="cannot be committed yet") as caught:
        commit(store, PREFIX, range(WORLD))
    assert "r00002.idx is missing" in caught.value.found
    put(store, [2, 4])
    assert commit(store, PREFIX, range(WORLD))


def test_a_node_of_many_asks_only_for_what_lies_near_its_ranks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (0, 8, 996, 9992, 16376):
        store.put(f"{PREFIX}/r{first:05d}-{first + 7:05d}.idx", b"")
    asked = Mock(side_effect=store.list)
    monkeypatch.setattr(store, "list", asked)
    assert missing_writers(store, PREFIX, range(16376, 16384)) == []
    assert missing_writers(store, PREFIX, range(996, 1006)) == [1004, 1005]
    assert missing_writers(store, PREFIX, range(9990, 10000)) == [9990, 9991]
    assert missing_writers(store, PREFIX, range(10000, 10008)) == [*range(10000, 10008)]
    assert [call.args[0].rpartition("/")[2] for call in asked.call_args_list] == [
        "r15",
        "r16",
        "r00",
        "r01",
        "r08",
        "r09",
        "r09",
        "r10",
    ]


@pytest.mark.parametrize("ranged_from", [1, 64], ids=["in ranges", "in MANIFEST"])
def test_every_rank_finds_what_it_had_however_the_ranks_lie_on_nodes(
    store: Store, ranged_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "RANGED_FROM", ranged_from)
    for ranks in ([0, 1, 2], [4], [3, 5]):
        put(store, ranks)
    assert commit(store, PREFIX, range(WORLD))
    alone = read_manifest(store, PREFIX, values=False)
    assert (len(alone.ranged) == WORLD) == (ranged_from == 1)
    assert ("rng@rank3" in alone.values) == (ranged_from == 64)
    whole = read_manifest(store, PREFIX)
    assert len(whole.ranged) == 0
    for rank in range(WORLD):
        assert whole.values[f"rng@rank{rank}"] == bytes([rank]) * 3000
        assert whole.values.get(f"odd@rank{rank}", whole.values["odd"]) == rank % 2
        own = with_values(store, PREFIX, alone, owner=f"rank{rank}")
        assert own.values[f"rng@rank{rank}"] == bytes([rank]) * 3000
        assert ranged_from == 64 or [key for key in own.values if key.startswith("rng")] == [f"rng@rank{rank}"]
    assert set(with_values(store, PREFIX, alone, owner="rank99").values) == set(alone.values), "another world"


def test_own_values_are_one_request_and_all_of_a_node_are_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "RANGED_FROM", 1)
    put(store, [0, 1, 2, 3])
    put(store, [4, 5])
    commit(store, PREFIX, range(WORLD))
    alone = read_manifest(store, PREFIX, values=False)
    asked: list[str] = []
    real = store.get_range

    def get_range(key: str, start: int, out: memoryview) -> None:
        asked.append(key.rpartition("/")[2])
        real(key, start, out)

    monkeypatch.setattr(store, "get_range", get_range)
    with_values(store, PREFIX, alone, owner="rank3")
    assert asked == ["r00000-00003.values.fck"]
    asked.clear()
    with_values(store, PREFIX, alone)
    assert sorted(asked) == ["r00000-00003.values.fck", "r00004-00005.values.fck"]


@pytest.mark.parametrize("fault", ["missing", "truncated", "flipped"])
def test_values_that_are_damaged_are_named_before_the_commit_or_when_they_are_read(
    store: Store, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "RANGED_FROM", 1)
    put(store, range(WORLD))
    path = Path(store.url) / PREFIX / "r00000-00005.values.fck"
    raw = bytearray(path.read_bytes())
    if fault == "flipped":
        raw[7] ^= 1
        path.write_bytes(raw)
        commit(store, PREFIX, range(WORLD))
        with pytest.raises(DamagedError, match=r"values of step-000000010\.g1") as caught:
            read_manifest(store, PREFIX)
        assert "r00000-00005.values.fck" in caught.value.found
        assert "'rng@rank0' is damaged" in caught.value.found
        return
    path.unlink()
    if fault == "truncated":
        path.write_bytes(raw[:-1])
    with pytest.raises(DamagedError, match=f"values.fck of .* is {fault}"):
        commit(store, PREFIX, range(WORLD))
    path.write_bytes(raw)
    assert commit(store, PREFIX, range(WORLD))
    path.unlink()
    with pytest.raises(DamagedError, match="values of step"):
        read_manifest(store, PREFIX)


def test_the_widest_index_counts_where_a_rank_is_in_several(store: Store) -> None:
    """As after a persister that was killed, and another one that wrote the ranks of a smaller node."""
    put(store, [2, 3])
    put(store, [0, 1, 2, 3, 4, 5])
    persist_slot(pin(5), store, PREFIX)
    assert [m.covers for m in read_indexes(store, PREFIX, range(WORLD))] == [tuple(range(WORLD))]
    assert commit(store, PREFIX, range(WORLD))
    manifest = read_manifest(store, PREFIX)
    assert len(manifest.table) == WORLD
    assert sorted(set(manifest.objects)) == sorted(manifest.objects)


def test_indexes_that_overlap_give_every_row_once(store: Store) -> None:
    put(store, [0, 1, 2, 3])
    put(store, [3, 4, 5])
    assert commit(store, PREFIX, range(WORLD))
    manifest = read_manifest(store, PREFIX)
    assert len(manifest.table) == WORLD
    assert manifest.values["rng@rank3"] == bytes([3]) * 3000
    assert manifest.values.get("odd@rank3", manifest.values["odd"]) == 1


def test_an_index_of_other_ranks_than_its_name_says_is_refused(store: Store) -> None:
    put(store, [0, 1])
    found = write_packs(pin(2), store, PREFIX)
    store.put(f"{PREFIX}/r00002-00005.idx", encode_manifest(found))
    with pytest.raises(PersistError, match=r"r00002-00005.idx belongs to other ranks"):
        read_indexes(store, PREFIX, range(WORLD))
