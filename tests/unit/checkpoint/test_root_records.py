"""What decides which checkpoint is chosen is sealed: one wrong bit is an error, never an older step or a fresh start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints, newest_checkpoint, read_root
from flashckpt.checkpoint.intents import list_intents, put_intent
from flashckpt.checkpoint.retention import ReadLease, leased_prefixes
from flashckpt.checkpoint.root_records import check_fence, claim_generation, claimed_token, prefix_of, read_generations
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.core.intent import Intent
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import decode_manifest, encode_manifest
from flashckpt.core.records import mark_of
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, FencedError, PersistError
from flashckpt.planning.packs import index_name
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store


@pytest.fixture
def store(shm_dir: Path) -> Store:
    """A root with steps 10, 20 and 30 of generation 1, and a second life that was restored from step 30; in memory, for thousands of writes."""
    store = open_store(shm_dir / "root")
    claim_generation(store, Generation(number=1, token="a", world_size=1, created_s=1.5))
    for step in (10, 20, 30):
        persist_slot(make_pin([shard("w", (400,))], step=step, generation=1), store, prefix_of(1, step))
        commit(store, prefix_of(1, step), [0])
    claim_generation(store, Generation(number=2, token="b" * 16, parent=SnapshotId(1, 30), world_size=1, created_s=2.5))
    return store


def flipped(raw: bytes, bit: int) -> bytes:
    bad = bytearray(raw)
    bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


def test_no_flipped_bit_of_a_claim_chooses_another_checkpoint(store: Store) -> None:
    newest = newest_checkpoint(store)
    assert newest is not None
    assert newest.identity == (1, 30)
    for key in ("generations/000001", "generations/000002"):
        good = store.get(key)
        for bit in range(8 * len(good)):
            store.put(key, flipped(good, bit))
            with pytest.raises(DamagedError, match=key) as caught:
                newest_checkpoint(store)
            assert "delete it" in caught.value.remedy
        store.put(key, good)
    store.put("generations/000002", flipped(good, 500))
    assert "is damaged" in read_root(store.url, {}).error, "a cold start reports it, and does not start over"


def test_a_generation_that_others_went_on_without_claims_nothing_late(store: Store) -> None:
    """It began from memory, behind one that was not claimed either; others have claimed that number since."""
    late = Generation(number=3, token="c", parent=SnapshotId(1, 35), world_size=1, line=(mark_of("x"),))
    with pytest.raises(FencedError, match="generation 2") as caught:
        check_fence(store, late)
    assert [claim.number for claim in read_generations(store)] == [1, 2], caught.value
    check_fence(store, replace(late, line=(mark_of("b" * 16), mark_of("a"))))
    assert [claim.line for claim in read_generations(store)] == [(), (), ()], "a claim does not say it"


def test_a_start_that_died_behind_its_claim_has_overtaken_nobody(store: Store) -> None:
    """Memory did not know of it, and took the same number; the next start goes on from there."""
    assert claim_generation(store, Generation(number=3, token="died", parent=None, world_size=1))
    late = Generation(number=4, token="d", parent=SnapshotId(1, 35), world_size=1, line=(mark_of("x"),))
    store.put(f"{prefix_of(3, 40)}/r00000.p0.fck", b"1")
    with pytest.raises(FencedError, match="generation 3"):
        check_fence(store, late)
    store.delete(f"{prefix_of(3, 40)}/r00000.p0.fck")
    check_fence(store, late)
    assert [claim.token for claim in read_generations(store)][2:] == ["died", "d"]


def test_an_index_of_another_run_that_has_the_same_number_is_not_committed(store: Store) -> None:
    pin = make_pin([shard("w", (400,))], step=40, generation=2)
    persist_slot(pin, store, prefix_of(2, 40))
    index = decode_manifest(store.get(f"{prefix_of(2, 40)}/{index_name(0)}"))
    store.put(f"{prefix_of(2, 40)}/{index_name(0)}", encode_manifest(replace(index, token="x")))
    with pytest.raises(PersistError, match="another run"):
        commit(store, prefix_of(2, 40), [0], token=claimed_token(store, 2))
    assert claimed_token(store, 9) == ""
    assert commit(store, prefix_of(2, 40), [0], token=claimed_token(store, 9))


def test_a_claim_under_another_name_is_damaged(store: Store) -> None:
    store.put("generations/000003", store.get("generations/000002"))
    with pytest.raises(DamagedError, match="000003"):
        newest_checkpoint(store)


def test_claims_written_before_1_2_are_read_as_strictly_as_they_allow(store: Store) -> None:
    good = store.get("generations/000002")[24:]
    store.put("generations/000002", good)
    assert [claim.parent for claim in read_generations(store)] == [None, (1, 30)]
    fresh = 0
    for bit in range(8 * len(good)):
        store.put("generations/000002", flipped(good, bit))
        try:
            newest = newest_checkpoint(store)
        except DamagedError:
            continue
        fresh += newest is None
    assert not fresh, "no bit makes a fresh start"


def test_no_flipped_bit_of_an_intent_is_another_decision(store: Store) -> None:
    intent = Intent(generation=2, step=40, writers=(0, 1, 2, 3), leader="node0", created_s=1.5)
    put_intent(store, intent)
    key = "intents/000002-000000040"
    good = store.get(key)
    for bit in range(8 * len(good)):
        store.put(key, flipped(good, bit))
        with pytest.raises(DamagedError, match=key) as caught:
            list_intents(store)
        assert f"delete the object {key}" in caught.value.remedy
    store.put(key, good)
    assert list_intents(store) == [intent]


def test_a_damaged_lease_counts_as_one_that_was_just_taken(store: Store) -> None:
    lease = ReadLease(store, prefix_of(1, 10))
    (key,) = [info.key for info in store.list("leases/")]
    good = store.get(key)
    for bit in range(0, 8 * len(good), 3):
        store.put(key, flipped(good, bit))
        assert leased_prefixes(store) == {prefix_of(1, 10)}
    for old in (b"nan", b"inf", b"-inf", b"\xff", b""):
        store.put(key, old)
        assert leased_prefixes(store) == {prefix_of(1, 10)}
    lease.close()
    assert len(list_checkpoints(store)) == 3
