"""How many requests listing, commit, retention and sweep cost, as the checkpoints of a root become many."""

from __future__ import annotations

import os
import signal
import time
from math import ceil
from pathlib import Path

import pytest
from support.requests import PAGE, RequestStore
from support.slots import make_pin, shard

from flashckpt import faults
from flashckpt.checkpoint import catalog
from flashckpt.checkpoint.catalog import VERIFIED_NEWEST, entry_from, list_checkpoints, newest_checkpoint, read_contents
from flashckpt.checkpoint.retention import TOMBSTONE_AGE_S, Policy, prune
from flashckpt.checkpoint.root_records import (
    CATALOG,
    LATEST,
    MANIFEST,
    TOMBSTONE,
    CommittedEntry,
    decode_entry,
    encode_entry,
    prefix_of,
    read_names,
)
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.storage.factory import open_store

SIZES = [10, 100, 1000, 3000]


def commit_step(store: RequestStore, step: int) -> None:
    prefix = prefix_of(1, step)
    persist_slot(make_pin([shard("w", (9,))], step=step), store, prefix)
    commit(store, prefix, [0])


def root_of(count: int) -> RequestStore:
    """Return a root with `count` checkpoints, steps 10, 20, ..., the newest six real and the others copies."""
    store = RequestStore()
    commit_step(store, 10 * count)
    newest = prefix_of(1, 10 * count)
    (info,) = list_checkpoints(store)
    for step in range(10 * count - 10, max(0, 10 * count - 60), -10):
        commit_step(store, step)
    parts = {key.rpartition("/")[2]: held for key, held in store.objects.items() if key.startswith(newest)}
    for step in range(10, 10 * count, 10):
        for name, held in parts.items():
            store.objects.setdefault(f"{prefix_of(1, step)}/{name}", held)
        entry = CommittedEntry(manifest_bytes=info.manifest_bytes, created_ms=1_700_000_000_000, nbytes=info.nbytes,
                               world_size=1, writers=1, tensors=1, parent=None)  # fmt: skip
        store.objects[encode_entry(prefix_of(1, step), entry)] = (b"", time.time())
    prune(store, Policy(keep_last=None))  # adds the newest one
    store.reset()
    return store


@pytest.mark.parametrize("count", SIZES)
def test_listing_takes_the_time_of_its_pages_and_reads_only_the_newest(count: int) -> None:
    store = root_of(count)
    contents = read_contents(store)
    assert len(contents.infos) == count, "copies among the newest are damaged, and shown"
    assert contents.uncommitted == ()
    assert store.most_pages <= ceil((count + 1) / PAGE), "folders and catalogue are listed at the same time"
    assert store.requests["list"] <= 2 * ceil((count + 1) / PAGE)
    assert store.requests["head"] <= VERIFIED_NEWEST
    assert store.requests["get"] <= VERIFIED_NEWEST
    assert store.total == sum(store.requests[kind] for kind in ("list", "head", "get")), "a listing writes nothing"


@pytest.mark.parametrize("count", SIZES)
def test_retention_after_a_commit_reads_no_old_checkpoint(count: int) -> None:
    store = root_of(count)
    commit_step(store, 10 * count + 10)
    oldest, newest = prefix_of(1, 10), prefix_of(1, 10 * count + 10)
    store.reset()
    assert prune(store, Policy(keep_last=count)).checkpoints == (oldest,)
    recent = {prefix_of(1, step) for step in (10 * count - 10, 10 * count, 10 * count + 10)}
    assert {key.partition("/")[0] for key in store.read if key.startswith("step-")} <= recent
    fixed = store.total - store.requests["list"]
    assert fixed <= 20
    assert store.requests["list"] <= 2 * ceil((count + 2) / PAGE) + 10
    assert set(read_names(store).committed) == {info.prefix for info in list_checkpoints(store, damaged=True)}
    assert newest in read_names(store).committed, "the commit was added to the catalogue"
    assert read_names(store).unknown == []


@pytest.mark.parametrize("count", SIZES)
def test_sweep_of_a_root_in_order_costs_listings_only(count: int) -> None:
    store = root_of(count)
    assert sweep(store).orphans == ()
    assert store.total <= 2 * ceil((count + 1) / PAGE) + 10
    assert store.total <= 100
    assert store.read == []


@pytest.mark.parametrize("count", SIZES)
def test_sweep_of_tombstones_reads_each_once_in_all_and_removes_them_in_batches(count: int) -> None:
    store = root_of(1)
    for step in range(1, count + 1):
        prefix = prefix_of(0, step)
        store.objects[f"{prefix}/{MANIFEST}"] = (TOMBSTONE + b" pruned at 1\n", time.time())
    store.reset()
    sweep(store)
    assert store.requests["head"] == store.requests["get"] == count, "the catalogue lacks them: they are looked at"
    assert len(read_names(store).deleted) == count
    store.reset()
    sweep(store)
    assert store.read == [], "they are in the catalogue"
    assert store.total <= 100
    sweep(store, now_s=time.time() + TOMBSTONE_AGE_S + 1)
    assert store.requests["get"] == count, "each is read once more before it is removed"
    assert store.requests["delete"] <= 2 * ceil(count / PAGE) + 1
    assert [name for name in store.folders() if name.startswith("step-")] == [prefix_of(1, 10)]
    assert len(store.list(CATALOG)) == 1


@pytest.mark.parametrize("count", SIZES)
def test_many_expired_checkpoints_are_deleted_in_batches(count: int) -> None:
    store = root_of(count)
    swept = prune(store, Policy(keep_last=5))
    gone = count - 5
    assert len(swept.checkpoints) == gone
    assert store.requests["delete"] <= 3 * ceil(gone / 256) + ceil(4 * gone / 1000)
    assert store.requests["put"] <= 3 * gone + 5, "a claim, a tombstone and an entry each"
    assert store.requests["get"] + store.requests["head"] <= 20
    assert [info.step for info in list_checkpoints(store)] == [10 * count - 10 * i for i in range(5)]


def test_root_without_a_catalogue_is_read_and_gets_one(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    for step in (10, 20, 30):
        prefix = prefix_of(1, step)
        persist_slot(make_pin([shard("w", (9,))], step=step), store, prefix)
        commit(store, prefix, [0])
    before = list_checkpoints(store)
    assert [info.step for info in before] == [30, 20, 10]
    assert read_names(store).committed == {}
    sweep(store)
    assert set(read_names(store).committed) == {info.prefix for info in before}
    named = read_contents(store, verify=0).infos
    for ours, theirs in zip(named, before, strict=True):
        for field in ("identity", "parent", "nbytes", "world_size", "writers", "tensors", "manifest_bytes"):
            assert getattr(ours, field) == getattr(theirs, field)
        assert abs(ours.created_s - theirs.created_s) < 0.001


def test_entry_without_its_checkpoint_promises_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    entry = CommittedEntry(manifest_bytes=1, created_ms=1, nbytes=1, world_size=1, writers=1, tensors=1, parent=None)
    store.put(encode_entry(prefix_of(1, 99), entry), b"")  # its folder has gone
    for step in (10, 20):
        persist_slot(make_pin([shard("w", (9,))], step=step), store, prefix_of(1, step))
        commit(store, prefix_of(1, step), [0])
    store.put(encode_entry(prefix_of(1, 10), entry), b"")
    store.put(encode_entry(prefix_of(1, 10), None), b"")  # a deletion outweighs a commit
    assert read_names(store).committed == {}
    assert [info.step for info in list_checkpoints(store)] == [20]
    store.put(f"catalog/{prefix_of(1, 11)}_of_a_later_release", b"")
    sweep(store)
    (newest,) = list_checkpoints(store)
    assert {info.key for info in store.list(CATALOG)} == {
        encode_entry(prefix_of(1, 10), None),
        encode_entry(newest.prefix, entry_from(newest)),
        f"catalog/{prefix_of(1, 11)}_of_a_later_release",
    }
    sweep(store, now_s=time.time() + TOMBSTONE_AGE_S + 1)
    assert store.head(f"{prefix_of(1, 10)}/{MANIFEST}") is not None, "what is not a tombstone is never removed as one"
    assert [info.step for info in list_checkpoints(store)] == [20, 10], "its folder is looked at again"


def test_entries_that_outlived_their_folders_neither_hide_nor_make_a_checkpoint(tmp_path: Path) -> None:
    """Somebody removed the folders by hand and started over: the same names, other contents."""
    store = open_store(tmp_path / "root")
    entry = CommittedEntry(manifest_bytes=1, created_ms=1, nbytes=1, world_size=1, writers=1, tensors=1, parent=None)
    for step, was_deleted in ((10, False), (20, True), (30, False)):
        store.put(encode_entry(prefix_of(1, step), None if was_deleted else entry), b"")
        persist_slot(make_pin([shard("w", (9,))], step=step), store, prefix_of(1, step))
        if step < 30:  # its packs are written, and its MANIFEST is not
            commit(store, prefix_of(1, step), [0])
    store.delete(encode_entry(prefix_of(1, 30), entry))
    for _ in range(2):
        assert [info.step for info in list_checkpoints(store)] == [20, 10]
        newest = newest_checkpoint(store)
        assert newest is not None
        assert newest.step == 20
        prune(store, Policy(keep_last=2))
    assert read_names(store).deleted == {}
    store.put(encode_entry(prefix_of(1, 30), entry), b"")
    assert [info.step for info in list_checkpoints(store)] == [20, 10]
    assert prune(store, Policy(keep_last=1)).checkpoints == (prefix_of(1, 10),)
    assert [info.step for info in list_checkpoints(store)] == [20]


def test_nothing_is_kept_in_memory_of_checkpoints_that_are_gone(tmp_path: Path) -> None:
    """A daemon that kept what it has read of each grew by kilobytes with every commit."""
    store = open_store(tmp_path / "root")
    for step in (10, 20, 30, 40):
        persist_slot(make_pin([shard("w", (9,))], step=step), store, prefix_of(1, step))
        commit(store, prefix_of(1, step), [0])
        prune(store, Policy(keep_last=1))
        read_contents(store)
    assert [prefix for url, prefix, *_ in catalog._infos if url == store.url] == [prefix_of(1, 40)]


@pytest.mark.parametrize("point", ["sweep.before-entries", "sweep.before-tombstones"])
def test_sweep_killed_at_point_is_finished_by_the_next_one(tmp_path: Path, point: str) -> None:
    store = open_store(tmp_path / "root")
    for step in (10, 20, 30):
        persist_slot(make_pin([shard("w", (9,))], step=step), store, prefix_of(1, step))
    commit(store, prefix_of(1, 30), [0])
    store.put(f"{prefix_of(1, 20)}/{MANIFEST}", TOMBSTONE + b" pruned at 1\n")
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm(point)
            sweep(store, older_than_s=0, now_s=time.time() + TOMBSTONE_AGE_S + 1)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert [info.step for info in list_checkpoints(store)] == [30]
    sweep(store, older_than_s=0)
    sweep(store, older_than_s=0, now_s=time.time() + TOMBSTONE_AGE_S + 1)
    keys = [info.key for info in store.list()]
    assert [info.step for info in list_checkpoints(store)] == [30]
    assert all(key == LATEST or prefix_of(1, 30) in key for key in keys)


def test_names_of_entries_are_read_as_they_are_written() -> None:
    """The golden names of docs/format.md."""
    entry = CommittedEntry(manifest_bytes=4213, created_ms=1_732_260_000_123, nbytes=123_456_789, world_size=8,
                           writers=8, tensors=345, parent=SnapshotId(2, 110))  # fmt: skip
    name = "catalog/step-000000120.g3_4213_1732260000123_123456789_8_8_345_2-110"
    assert encode_entry(prefix_of(3, 120), entry) == name
    assert decode_entry(name) == (prefix_of(3, 120), entry)
    assert decode_entry("catalog/step-000000100.g3_deleted") == (prefix_of(3, 100), None)
    assert encode_entry(prefix_of(3, 100), None) == "catalog/step-000000100.g3_deleted"
    root = name.rpartition("_")[0] + "_-"
    found = decode_entry(root)
    assert found is not None
    assert found[1] is not None
    assert found[1].parent is None
    for other in (
        "catalog/x",
        "catalog/step-000000120.g3",
        name + "_1",
        name.replace("345", "x"),
        name + "-",
        "catalog/",
    ):
        assert decode_entry(other) is None, other
