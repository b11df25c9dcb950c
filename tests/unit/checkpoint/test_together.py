"""Packs of several ranks in one object: read as any other, all of it or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from support.requests import RequestStore
from support.slots import FakePin, make_pin, shard

from flashckpt.checkpoint import indexes
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.indexes import put_indexes, read_indexes
from flashckpt.checkpoint.writer import commit, persist_slot, write_together
from flashckpt.core.manifest import Manifest
from flashckpt.core.shard import Shard
from flashckpt.errors import DamagedError, PersistError, StoreError
from flashckpt.planning.packs import PAGE_BYTES, together
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

PREFIX = "step-000000010.g1"
SHARDS: tuple[list[Shard], ...] = (
    [shard("first", (9_000,)), shard("first.small", (3,))],
    [],
    [shard("of another", (500,), replica=1), shard("empty", (0, 2)), shard("odd", (70_001,), dtype="uint8")],
    [shard("last", (300_001,)), shard("seen.in.all", (5,))],
)
NAME = "r00000-00003.p0.fck"


def made() -> list[FakePin]:
    pins = [make_pin(shards, rank=rank, world_size=len(SHARDS)) for rank, shards in enumerate(SHARDS)]
    for pin in pins:  # a slot that ends within a page
        table = pin.manifest().table
        pin.nbytes = int((table.byte_offset + table.nbytes).max(initial=0))
    return pins


def assert_equal(store: Store, merged: Manifest, pins: list[FakePin]) -> None:
    """Every row that a rank writes is where MANIFEST says, bit for bit, and at the place of a page that it had in the slot."""
    for pin in pins:
        table = pin.manifest().table
        for row in np.flatnonzero(table.replica == 0).tolist():
            (found,) = merged.table.rows(table.fqn(row))
            out, at = bytearray(int(table.nbytes[row])), int(merged.table.byte_offset[found])
            if out:
                name = merged.objects[int(merged.table.object_id[found])]
                store.get_range(f"{PREFIX}/{name}", at, memoryview(out))
                assert at % PAGE_BYTES == int(table.byte_offset[row]) % PAGE_BYTES
            assert bytes(out) == bytes(pin.row(row)), table.fqn(row)


@pytest.mark.parametrize("is_copied", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize("ranged_from", [1, 64])
def test_ranks_share_an_object_and_every_row_is_read_where_manifest_says(
    tmp_path: Path, ranged_from: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "RANGED_FROM", ranged_from)
    store, pins = open_store(tmp_path / "root"), made()
    for pin in pins:
        pin.is_copied = is_copied
    put_indexes(store, PREFIX, write_together(pins, store, PREFIX))
    assert commit(store, PREFIX, range(len(pins)))
    assert sorted(path.name for path in (tmp_path / "root" / PREFIX).iterdir() if path.suffix == ".fck") == [NAME]
    assert (tmp_path / "root" / PREFIX / NAME).stat().st_size % PAGE_BYTES == 0
    assert_equal(store, read_manifest(store, PREFIX), pins)


def test_one_request_instead_of_one_per_rank() -> None:
    counted = RequestStore()
    store = cast("Store", counted)
    write_together(made(), store, PREFIX)
    assert dict(counted.requests) == {"put": 1}
    counted.reset()
    without = [make_pin([shard("of another", (9,), replica=1)], rank=rank, world_size=2) for rank in (0, 1)]
    found = write_together(without, store, PREFIX)
    assert (counted.total, [index.objects for index in found]) == (0, [[], []])


def test_ranks_written_together_and_others_alone_are_one_checkpoint(tmp_path: Path) -> None:
    """As with ranks of another node, or those of which an earlier release wrote packs."""
    store, pins = open_store(tmp_path / "root"), made()
    put_indexes(store, PREFIX, write_together(pins[:3], store, PREFIX))
    persist_slot(pins[3], store, PREFIX)
    assert commit(store, PREFIX, range(len(pins)))
    merged = read_manifest(store, PREFIX)
    assert merged.objects == ["r00000-00002.p0.fck", "r00003.p0.fck"]
    assert_equal(store, merged, pins)


def test_an_index_that_was_there_alone_may_be_written_again_for_all(tmp_path: Path) -> None:
    """A persister that was killed behind some packs and an index, and its successor that writes the ranks together."""
    store, pins = open_store(tmp_path / "root"), made()
    persist_slot(pins[0], store, PREFIX)
    put_indexes(store, PREFIX, write_together(pins, store, PREFIX))
    assert len(read_indexes(store, PREFIX, range(4))) == 1
    assert commit(store, PREFIX, range(4))
    assert_equal(store, read_manifest(store, PREFIX), pins)


def test_damage_in_one_slot_names_its_rank_and_leaves_no_object_and_no_index(tmp_path: Path) -> None:
    store, pins = open_store(tmp_path / "root"), made()
    held = bytes(pins[3].data)
    pins[3].memory[100_000] ^= 1
    with pytest.raises(DamagedError, match=r"'last' is damaged .*\(rank 3, memory\)"):
        write_together(pins, store, PREFIX)
    assert store.list() == []
    pins[3].memory[: len(held)] = held  # the slots of the others were not touched
    put_indexes(store, PREFIX, write_together(pins, store, PREFIX))
    assert commit(store, PREFIX, range(4))
    assert_equal(store, read_manifest(store, PREFIX), pins)


def test_one_that_was_abandoned_meanwhile_ends_the_write_of_all_without_an_index(tmp_path: Path) -> None:
    store, pins = open_store(tmp_path / "root"), made()
    pins[2].current = False
    with pytest.raises(PersistError, match="abandoned while rank 2 was being persisted"):
        write_together(pins, store, PREFIX)
    assert not [info for info in store.list() if info.key.endswith(".idx")]


def test_memory_that_went_away_under_the_write_is_the_error_whatever_the_storage_says() -> None:
    def lost() -> None:
        raise DamagedError("a page of the snapshot was lost")

    def refused(*_: object) -> None:
        raise StoreError("bad address")

    store, pins = RequestStore(), made()
    store.put_object = refused  # type: ignore[method-assign, assignment]
    pins[2].check_whole = lost  # type: ignore[method-assign]
    with pytest.raises(DamagedError, match="was lost"):
        write_together(pins, cast("Store", store), PREFIX)


@pytest.mark.parametrize(
    ("nbytes", "groups"),
    [
        ({0: 5, 1: 5, 2: 0, 3: 1}, [[0, 1, 2], [3]]),
        ({3: 1, 1: 1, 0: 1}, [[0, 1], [3]]),
        ({0: 11, 1: 1, 2: 9}, [[0], [1, 2]]),
        ({0: 1, 1: 11, 2: 1, 3: 1}, [[0], [1], [2, 3]]),
        ({}, []),
    ],
)
def test_groups_are_ranks_that_follow_each_other_and_have_little(
    nbytes: dict[int, int], groups: list[list[int]]
) -> None:
    assert together(nbytes, 10) == groups
    for group in groups:  # asked again for those that failed: the same groups
        assert together({rank: nbytes[rank] for rank in group}, 10) == [group]
