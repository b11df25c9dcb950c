"""From a slot to a committed checkpoint and back, and what a crash, a bad byte or a full disk leaves behind."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.slots import FakePin, make_pin, shard

from flashckpt import faults
from flashckpt.checkpoint.catalog import list_checkpoints, newest_checkpoint, read_manifest
from flashckpt.checkpoint.compression import PackedObjects, worth_compressing
from flashckpt.checkpoint.indexes import missing_writers
from flashckpt.checkpoint.root_records import MANIFEST, prefix_of
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.checkpoint.writer import PersistOptions, commit, persist_slot
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import Shard
from flashckpt.errors import (
    DamagedError,
    FencedError,
    NoCheckpointError,
    PersistError,
    RootError,
    ShardGapError,
    StoreError,
)
from flashckpt.planning.packs import index_name, plan_packs
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import ObjectInfo, Store

SHARDS = [
    shard("big", (700, 1000)),
    shard("tiny", (3,)),
    shard("scalar", ()),
    shard("half", (130_001,), dtype="bfloat16"),
    shard("empty", (0, 4)),
    shard("bytes", (70_001,), dtype="uint8"),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "root")


def persist_all(store: Store, pins: list[FakePin], **options: object) -> str:
    prefix = prefix_of(*pins[0].manifest().identity)
    for pin in pins:
        persist_slot(pin, store, prefix, options=PersistOptions(**options))  # type: ignore[arg-type]
    commit(store, prefix, [pin.manifest().rank for pin in pins])
    return prefix


def assert_equal(store: Store, prefix: str, pins: list[FakePin]) -> None:
    """Every row of every pin that rank wrote is on storage, bit for bit."""
    merged = read_manifest(store, prefix)
    packs = PackedObjects(store)
    for pin in pins:
        table = pin.manifest().table
        for row in range(len(table)):
            if table.replica[row] != 0:
                continue
            wanted = table.shard(row)
            (found,) = (r for r in merged.table.rows(wanted.fqn) if merged.table.shard(r).offsets == wanted.offsets)
            out = bytearray(wanted.nbytes)
            if out:
                key = f"{prefix}/{merged.objects[int(merged.table.object_id[found])]}"
                packs.get_range(key, int(merged.table.byte_offset[found]), memoryview(out))
            assert bytes(out) == bytes(pin.row(row)), wanted.fqn
            first = int(merged.table.first_chunk[found])
            digests = chunk_digests(bytes(out))
            assert np.array_equal(digests, merged.digests[first : first + len(digests)])


@pytest.mark.parametrize("pack_bytes", [64 << 10, 1 << 20, 256 << 20])
def test_snapshot_is_read_back_bit_for_bit(store: Store, pack_bytes: int) -> None:
    pin = make_pin(SHARDS)
    prefix = persist_all(store, [pin], pack_bytes=pack_bytes)
    assert_equal(store, prefix, [pin])
    assert read_manifest(store, prefix).values == {"step": 10}
    (info,) = list_checkpoints(store)
    assert (info.identity, info.prefix, info.world_size) == ((1, 10), "step-000000010.g1", 1)
    assert info.nbytes == sum(s.nbytes for s in SHARDS)


def test_rows_of_other_replicas_are_not_written(store: Store) -> None:
    first = [shard("a", (50_000,)), shard("b", (50_000,), replica=1), shard("c", (9,)), shard("d", (9,), replica=1)]
    second = [shard("a", (50_000,), replica=1), shard("b", (50_000,)), shard("c", (9,), replica=1), shard("d", (9,))]
    pins = [make_pin(first, rank=0, world_size=2), make_pin(second, rank=1, world_size=2)]
    prefix = persist_all(store, pins)
    assert_equal(store, prefix, pins)
    written = sum(info.nbytes for info in store.list(f"{prefix}/r") if info.key.endswith(".fck"))
    assert written < 50_000 * 4 * 2 + 4 * 4096


def test_commit_waits_for_every_writer(store: Store) -> None:
    pins = [make_pin([shard(f"t{rank}", (100,))], rank=rank, world_size=2) for rank in range(2)]
    persist_slot(pins[0], store, "step-000000010.g1")
    assert missing_writers(store, "step-000000010.g1", [0, 1]) == [1]
    with pytest.raises(PersistError, match="cannot be committed yet"):
        commit(store, "step-000000010.g1", [0, 1])
    assert list_checkpoints(store) == []
    persist_slot(pins[1], store, "step-000000010.g1")
    assert commit(store, "step-000000010.g1", [0, 1])
    assert not commit(store, "step-000000010.g1", [0, 1])


def test_gap_between_the_writers_is_refused(store: Store) -> None:
    half = shard("w", (100, 8), offsets=(0, 0), lengths=(50, 8))
    persist_slot(make_pin([half]), store, "step-000000010.g1")
    with pytest.raises(ShardGapError, match="'w'"):
        commit(store, "step-000000010.g1", [0])
    assert list_checkpoints(store) == []


def test_bad_byte_in_the_slot_commits_nothing(store: Store) -> None:
    pin = make_pin(SHARDS)
    pin.row(3)[200_000] ^= 1
    with pytest.raises(DamagedError, match="'half' is damaged in the snapshot of step 10"):
        persist_slot(pin, store, "step-000000010.g1")
    assert store.list() == []


def test_abandoned_slot_writes_no_index(store: Store) -> None:
    pin = make_pin(SHARDS)
    pin.current = False
    with pytest.raises(PersistError, match="abandoned"):
        persist_slot(pin, store, "step-000000010.g1")
    assert missing_writers(store, "step-000000010.g1", [0]) == [0]


def test_concurrent_committers_of_one_checkpoint_exactly_one_wins(store: Store) -> None:
    pin = make_pin(SHARDS)
    persist_slot(pin, store, "step-000000010.g1")
    wins: list[bool] = []
    barrier = threading.Barrier(6)

    def run() -> None:
        barrier.wait(30)
        wins.append(commit(store, "step-000000010.g1", [0]))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == [False] * 5 + [True]
    assert_equal(store, "step-000000010.g1", [pin])


def test_manifest_that_vanishes_is_not_taken_for_our_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    persist_slot(make_pin(SHARDS), store, "step-000000010.g1")
    monkeypatch.setattr(store, "put_if_absent", lambda key, data: False)
    with pytest.raises(PersistError, match="could not be committed"):
        commit(store, "step-000000010.g1", [0])


def in_child(work: Callable[[], object], crash_at: str) -> int:
    """Run `work` in a forked process that dies by SIGKILL at a crash point; return the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm(crash_at)
            work()
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


POINTS = [
    "persist.during-pack",
    "persist.before-index",
    "persist.before-manifest",
    "persist.after-manifest",
    *(f"store.before-publish:{hit}" for hit in (1, 2, 3, 4)),
    *(f"store.after-publish:{hit}" for hit in (1, 2, 3, 4)),
]


@pytest.mark.parametrize("point", POINTS)
def test_killed_writer_leaves_the_last_commit_and_the_next_one_finishes(store: Store, point: str) -> None:
    earlier = make_pin(SHARDS, step=10)
    persist_all(store, [earlier])
    pin = make_pin(SHARDS, step=20)
    assert in_child(lambda: persist_all(store, [pin]), point) == signal.SIGKILL

    visible = list_checkpoints(store)
    assert [info.step for info in visible] in ([10], [20, 10])
    for info in visible:
        assert_equal(store, info.prefix, [earlier if info.step == 10 else pin])

    persist_all(store, [pin])  # the next daemon
    assert [info.step for info in list_checkpoints(store)] == [20, 10]
    assert_equal(store, prefix_of(1, 20), [pin])
    sweep(store)
    assert not list(Path(store.url).rglob("*.tmp"))


@pytest.mark.parametrize("shows", ["all", "shorter", "no packs"])
def test_a_commit_lists_once_and_asks_for_a_pack_alone_where_the_listing_lags(
    store: Store, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = [
        make_pin([shard(f"t{rank}.{n}", (30_000,)) for n in range(2)], rank=rank, world_size=3) for rank in range(3)
    ]
    for pin in pins:
        persist_slot(pin, store, "step-000000010.g1", options=PersistOptions(pack_bytes=64 << 10))
    listed, asked, list_all, head = [], [], store.list, store.head

    def lagging(prefix: str = "") -> list[ObjectInfo]:
        listed.append(prefix)
        found = [info for info in list_all(prefix) if shows != "no packs" or not info.key.endswith(".fck")]
        return [replace(info, nbytes=info.nbytes // 2) for info in found] if shows == "shorter" else found

    def counted(key: str) -> ObjectInfo | None:
        asked.append(key)
        return head(key)

    monkeypatch.setattr(store, "list", lagging)
    monkeypatch.setattr(store, "head", counted)
    assert commit(store, "step-000000010.g1", range(3))
    packs = [info.key for info in list_all("step-000000010.g1/r") if info.key.endswith(".fck")]
    assert len(packs) > 3
    assert listed == ["step-000000010.g1/r"]
    assert sorted(asked) == sorted(["step-000000010.g1/MANIFEST", *([] if shows == "all" else packs)])
    assert_equal(store, "step-000000010.g1", pins)


def test_pack_truncated_before_the_commit_is_named(store: Store) -> None:
    persist_slot(make_pin(SHARDS), store, "step-000000010.g1")
    path = Path(store.url) / "step-000000010.g1/r00000.p0.fck"
    os.truncate(path, path.stat().st_size - 4096 * 20)
    with pytest.raises(DamagedError, match=r"r00000.p0.fck.*truncated"):
        commit(store, "step-000000010.g1", [0])
    path.unlink()
    with pytest.raises(DamagedError, match=r"r00000.p0.fck.*missing"):
        commit(store, "step-000000010.g1", [0])
    assert list_checkpoints(store) == []


def test_index_with_a_flipped_bit_is_named_and_written_again(store: Store) -> None:
    pin = make_pin(SHARDS)
    persist_slot(pin, store, "step-000000010.g1")
    path = Path(store.url) / "step-000000010.g1" / index_name(0)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    with pytest.raises(DamagedError, match=r"r00000.idx.*damaged"):
        commit(store, "step-000000010.g1", [0])
    persist_all(store, [pin])
    assert_equal(store, "step-000000010.g1", [pin])


@pytest.mark.parametrize("fault", ["flip", "truncate", "empty"])
def test_damaged_manifest_is_no_checkpoint_and_the_older_one_is_offered(store: Store, fault: str) -> None:
    persist_all(store, [make_pin(SHARDS, step=10)])
    persist_all(store, [make_pin(SHARDS, step=20)])
    path = Path(store.url) / prefix_of(1, 20) / MANIFEST
    raw = bytearray(path.read_bytes())
    if fault == "flip":
        raw[100] ^= 1
    path.write_bytes({"flip": bytes(raw), "truncate": bytes(raw[: len(raw) // 2]), "empty": b""}[fault])
    assert [info.step for info in list_checkpoints(store)] == [10]
    newest = newest_checkpoint(store)
    assert newest is not None
    assert newest.step == 10
    (broken, _) = list_checkpoints(store, damaged=True)
    assert broken.step == 20
    assert "damaged" in broken.problem
    with pytest.raises(DamagedError, match=r"step-000000020.g1"):
        read_manifest(store, broken)


def test_swept_checkpoint_cannot_be_committed_by_a_late_writer(store: Store) -> None:
    late = make_pin(SHARDS, step=10)
    persist_slot(late, store, prefix_of(1, 10))
    persist_all(store, [make_pin(SHARDS, step=20)])
    assert sweep(store, older_than_s=0).orphans == (prefix_of(1, 10),)
    with pytest.raises(FencedError, match="was abandoned"):
        commit(store, prefix_of(1, 10), [0])
    with pytest.raises(NoCheckpointError, match="deleted"):
        read_manifest(store, prefix_of(1, 10))
    assert [info.step for info in list_checkpoints(store)] == [20]


@pytest.mark.parametrize("compression", ["zstd", "zstd:5", "auto"])
def test_compressed_packs_restore_any_range(store: Store, compression: str) -> None:
    pin = make_pin([shard("w", (600, 1000)), shard("b", (17,)), shard("h", (99_999,), dtype="bfloat16")], smooth=True)
    prefix = persist_all(store, [pin], compression=compression, pack_bytes=1 << 20)
    assert_equal(store, prefix, [pin])
    merged = read_manifest(store, prefix)
    packs = PackedObjects(store)
    (row,) = merged.table.rows("w")
    place, key = int(merged.table.byte_offset[row]), f"{prefix}/{merged.objects[int(merged.table.object_id[row])]}"
    whole = bytes(pin.row(0))
    for start, length in ((0, 1), (1_048_575, 2), (5, 1 << 20), (len(whole) - 3, 3), (77, 0)):
        out = bytearray(length)
        packs.get_range(key, place + start, memoryview(out))
        assert bytes(out) == whole[start : start + length]
    if compression != "auto":
        stored = sum(info.nbytes for info in store.list(f"{prefix}/r") if info.key.endswith(".fcz"))
        assert stored < 0.95 * sum(len(pin.row(r)) for r in range(3))


def test_auto_compresses_where_the_storage_is_slower_than_the_codec(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 10 GB/s a codec of one core only costs time; at 20 MB/s it saves a fifth. What decides is what was measured."""
    assert not worth_compressing(upload_bytes_s=10e9, encode_bytes_s=0.6e9, ratio=0.8, threads=2)
    assert worth_compressing(upload_bytes_s=20e6, encode_bytes_s=0.6e9, ratio=0.8, threads=2)
    assert not worth_compressing(upload_bytes_s=20e6, encode_bytes_s=0.6e9, ratio=0.97, threads=2), "nothing to gain"
    kinds: dict[float, str] = {}
    for bytes_s in (1e15, 1e3):
        monkeypatch.setattr("flashckpt.checkpoint.writer._upload_bytes_s", {store.url: bytes_s})
        pin = make_pin([shard("w", (600, 1000))], smooth=True, step=len(kinds) + 1)
        prefix = persist_all(store, [pin], compression="auto")
        (kinds[bytes_s],) = {info.key[-4:] for info in store.list(f"{prefix}/r") if ".p" in info.key}
        assert_equal(store, prefix, [pin])
    assert kinds == {1e15: ".fck", 1e3: ".fcz"}


@pytest.mark.parametrize("where", ["frame", "directory", "footer", "truncated"])
def test_damaged_compressed_pack_is_named(store: Store, where: str) -> None:
    pin = make_pin([shard("w", (600, 1000))], smooth=True)
    prefix = persist_all(store, [pin], compression="zstd")
    path = Path(store.url) / prefix / "r00000.p0.fcz"
    raw = bytearray(path.read_bytes())
    at = {"frame": 1000, "directory": -60, "footer": -40, "truncated": 0}[where]
    raw[at] ^= 0xFF
    path.write_bytes(raw[:-100] if where == "truncated" else raw)
    merged = read_manifest(store, prefix)
    out = bytearray(1 << 20)
    named = False
    try:
        PackedObjects(store).get_range(f"{prefix}/r00000.p0.fcz", 0, memoryview(out))
    except DamagedError as error:
        named = "r00000.p0.fcz" in str(error)
    # zstd without checksums may read over a flipped byte: then the digest of the chunk tells
    assert named or (where == "frame" and int(chunk_digests(out)[0]) != int(merged.digests[0]))


def test_full_disk_is_named_leaves_nothing_and_the_next_persist_succeeds(tmp_path: Path) -> None:
    pin = make_pin(SHARDS)
    store = open_store(tmp_path / "root")

    def limited() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(StoreError, match=r"r00000.p0.fck"):
            persist_slot(pin, store, "step-000000010.g1")
        assert store.list() == []
        assert not list(tmp_path.rglob("*.tmp"))
        os._exit(7)

    pid = os.fork()
    if pid == 0:
        try:
            limited()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    persist_all(store, [pin])
    assert_equal(store, "step-000000010.g1", [pin])


def test_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a directory")
    store = open_store(tmp_path / "root")
    with pytest.raises(RootError, match="root"):
        store.check()
    with pytest.raises((RootError, StoreError), match="root"):
        persist_slot(make_pin(SHARDS), store, "step-000000010.g1")


def test_tensor_that_several_replicas_persist_in_parts_is_whole_again(store: Store) -> None:
    """Its rows lie in four slots and four packs; every other part comes from another writer."""
    cuts = [0, 300, 301, 900, 1000]
    parts = [
        Shard(fqn="w", dtype="float32", global_shape=(1000, 70), offsets=(a, 0), lengths=(b - a, 70), replica=i)
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    pins = [
        make_pin([replace(part, replica=(part.replica - rank) % 4) for part in parts], rank=rank, world_size=4)
        for rank in range(4)
    ]
    prefix = persist_all(store, pins)
    written = [[i.nbytes for i in store.list(f"{prefix}/r{rank:05d}.p")] for rank in range(4)]
    assert written == [[86016], [4096], [167936], [28672]], "the pages of its part and of no other"
    merged = read_manifest(store, prefix)
    assert [merged.table.shard(row).offsets for row in merged.table.rows("w")] == [(0, 0), (300, 0), (301, 0), (900, 0)]
    assert_equal(store, prefix, pins)


def test_packs_hold_every_row_once_within_their_size(store: Store) -> None:
    pin = make_pin([shard(f"t{index}", (1 + 977 * index,)) for index in range(60)])
    table = pin.manifest().table
    packs = plan_packs(table, len(pin.data), 256 << 10)
    assert sorted(row for pack in packs for row in pack.rows) == list(range(60))
    for pack in packs:
        assert pack.nbytes <= 256 << 10
        assert all(start % 4096 == 0 for start, _ in pack.runs)
        for row, at in zip(pack.rows, pack.offsets, strict=True):
            joined = b"".join(bytes(pin.data[a:b]) for a, b in pack.runs)
            assert joined[at : at + int(table.nbytes[row])] == bytes(pin.row(row))
