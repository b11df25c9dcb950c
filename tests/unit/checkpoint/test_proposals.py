"""What nodes offer each other on the root, and what it costs to read it again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from flashckpt.checkpoint.intents import Proposals, clear_proposals, encode_proposal, put_intent, read_intents
from flashckpt.core.intent import Intent, NodeProposal
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Objects, Store

FIRST = NodeProposal(ranks=(0, 1), world_size=4, pinned=SnapshotId(1, 10))
SECOND = NodeProposal(ranks=(2, 3), world_size=4)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests so far."""
    counted: Counter[str] = Counter()
    get, list_all = store.get, store.list

    def getting(key: str) -> bytes:
        counted["get"] += 1
        return get(key)

    def listing(prefix: str = "") -> Objects:
        counted["list"] += 1
        return list_all(prefix)

    monkeypatch.setattr(store, "get", getting)
    monkeypatch.setattr(store, "list", listing)
    return counted


def test_only_what_has_changed_is_read_again(store: Store, asked: Counter[str]) -> None:
    writers, reader = [Proposals(), Proposals()], Proposals()
    for writer, proposal in zip(writers, (FIRST, SECOND), strict=True):
        writer.publish(store, 1, proposal)
    asked.clear()
    assert reader.read(store, 1) == [FIRST, SECOND]
    assert asked == {"list": 1, "get": 2}
    assert reader.read(store, 1) == [FIRST, SECOND]
    assert asked == {"list": 2, "get": 2}
    changed = replace(SECOND, pinned=SnapshotId(1, 10))
    writers[1].publish(store, 1, changed)
    assert asked == {"list": 3, "get": 2}, "the writer looks for what it said before"
    assert reader.read(store, 1) == [FIRST, changed]
    assert asked == {"list": 4, "get": 3}
    assert reader.read(store, 2) == []


def test_of_the_leader_alone_the_listing_names_no_other_node(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for proposal in (SECOND, FIRST):
        Proposals().publish(store, 1, proposal)
    prefixes: list[str] = []
    list_all = store.list

    def listing(prefix: str = "") -> Objects:
        prefixes.append(prefix)
        return list_all(prefix)

    monkeypatch.setattr(store, "list", listing)
    reader = Proposals()
    assert reader.read(store, 1, of_all=False) == [FIRST]
    assert prefixes == ["intents/ready-000001/r00000"]
    assert reader.read(store, 1) == [FIRST, SECOND]
    prefixes.clear()
    read_intents(store, 99_999)
    assert prefixes == ["intents/0"], "what nodes propose is not listed with the intents"
    put_intent(store, Intent(generation=100_001, step=1, writers=(0,)))
    assert [one.generation for one in read_intents(store, 100_001)[0]] == [100_001]


def test_a_persister_that_starts_again_proposes_after_what_it_said_before(store: Store) -> None:
    for step in (10, 20, 30):
        Proposals().publish(store, 1, replace(FIRST, pinned=SnapshotId(1, step)))
    assert [info.key for info in store.list()] == ["intents/ready-000001/r00000.000000002"]
    assert Proposals().read(store, 1) == [replace(FIRST, pinned=SnapshotId(1, 30))]


def test_what_is_proposed_next_counts_where_a_listing_lags_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Proposals()
    for step in (10, 20):
        writer.publish(store, 1, replace(FIRST, pinned=SnapshotId(1, step)))
    with monkeypatch.context() as lagging:
        lagging.setattr(store, "list", lambda _: [])
        writer.publish(store, 1, FIRST)
    assert Proposals().read(store, 1) == [FIRST]


def test_the_newest_counts_where_a_node_died_between_its_write_and_the_removal_of_the_one_before(store: Store) -> None:
    writer, reader = Proposals(), Proposals()
    writer.publish(store, 1, FIRST)
    before = store.get("intents/ready-000001/r00000.000000000")
    changed = replace(FIRST, pinned=None)
    writer.publish(store, 1, changed)
    store.put("intents/ready-000001/r00000.000000000", before)
    store.put("intents/ready-000001/r00000", before)  # of a release that did not number them
    assert reader.read(store, 1) == [changed]
    Proposals().publish(store, 1, FIRST)
    assert reader.read(store, 1) == [FIRST]
    assert len(store.list()) == 1


def test_one_that_is_replaced_while_it_is_read_is_left_out_until_the_next_look(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, list_all = Proposals(), Proposals(), store.list
    writer.publish(store, 1, FIRST)
    changed = replace(FIRST, pinned=None)

    def replaced(prefix: str = "") -> Objects:
        found = list_all(prefix)
        monkeypatch.setattr(store, "list", list_all)
        writer.publish(store, 1, changed)
        return found

    monkeypatch.setattr(store, "list", replaced)
    assert reader.read(store, 1) == []
    assert reader.read(store, 1) == [changed]


def test_a_damaged_one_is_named_and_replaced_by_the_next(store: Store) -> None:
    writer = Proposals()
    writer.publish(store, 1, FIRST)
    raw = bytearray(encode_proposal(FIRST))
    raw[-1] ^= 1
    store.put("intents/ready-000001/r00000.000000000", bytes(raw))
    with pytest.raises(DamagedError, match=r"intents/ready-000001/r00000\.000000000"):
        Proposals().read(store, 1)
    writer.publish(store, 1, FIRST)
    assert Proposals().read(store, 1) == [FIRST]


def test_those_of_earlier_generations_are_removed(store: Store) -> None:
    for generation in (1, 2, 3):
        Proposals().publish(store, generation, FIRST)
    clear_proposals(store, 3)
    assert [info.key for info in store.list()] == ["intents/ready-000003/r00000.000000000"]
