"""A MANIFEST that names indexes: the same checkpoint as with a row for each box, in every way that it is read and damaged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from support.memory import killed_at
from support.slots import FakePin, make_pin

from flashckpt.checkpoint import indexes, merging
from flashckpt.checkpoint.catalog import list_checkpoints, manifest_from, read_manifest, verify_manifest
from flashckpt.checkpoint.indexes import put_indexes
from flashckpt.checkpoint.spread_reads import read_part
from flashckpt.checkpoint.writer import PersistOptions, commit, write_packs
from flashckpt.commands.verify import verify_checkpoint
from flashckpt.console.copying import copy_checkpoint
from flashckpt.core.manifest import by_design, decode_manifest, encode_manifest, header_of
from flashckpt.core.schema import HEAD_BYTES, TensorFigures, decode_manifest_header
from flashckpt.core.shard import Shard
from flashckpt.core.spread import Spread, is_spread
from flashckpt.errors import DamagedError, FormatVersionError, ShardGapError
from flashckpt.planning.read_plan import SourceNames, plan_reads
from flashckpt.restore.candidate_sources import SpreadSource
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

PREFIX = "step-000000010.g1"
WORLD = 6


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(indexes, "RANGED_FROM", 1)
    monkeypatch.setattr(merging, "SPREAD_BYTES", 0)
    monkeypatch.setattr(merging, "ROWS_PER_PATTERN_ROW", 1)
    return open_store(tmp_path / "root")


def shards(rank: int, *, world: int = WORLD, size: int = 24) -> list[Shard]:
    """Two tensors cut along their first dimension, and one of rank 0 alone."""
    part = size // world
    cut = [
        Shard(fqn=name, dtype="float32", global_shape=(size, 50), offsets=(part * rank, 0), lengths=(part, 50))
        for name in ("a", "b")
    ]
    own = Shard(fqn="t", dtype="int64", global_shape=(), offsets=(), lengths=())
    return [*cut, own] if rank == 0 else cut


def pin(rank: int, made: list[Shard] | None = None) -> FakePin:
    values = {"step": 10, "odd": rank % 2, f"rng@rank{rank}": bytes([rank]) * 300}
    found = make_pin(shards(rank) if made is None else made, rank=rank, world_size=WORLD, values=values)
    rows = len(found.manifest_.table)
    known = TensorFigures(np.ones(rows, np.float32), np.ones(rows, np.float32), np.zeros(rows, np.bool_))
    if rank == 4:
        known.largest[0] = np.inf
    if rank == 5:
        at = min(1, rows - 1)
        known.largest[at], known.suspect[at] = np.inf, True
    found.manifest_ = replace(found.manifest_, figures=known)
    return found


def put(store: Store, ranks: Sequence[int], *, options: PersistOptions | None = None) -> None:
    put_indexes(store, PREFIX, [write_packs(pin(rank), store, PREFIX, options=options) for rank in ranks])


def path(store: Store, name: str) -> Path:
    return Path(store.url) / PREFIX / name


def spread_of(store: Store) -> Spread:
    found = manifest_from(store.url, PREFIX, store.get(f"{PREFIX}/MANIFEST"))
    assert isinstance(found, Spread)
    return found


NODES = ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0, 1, 2, 3], [3, 4, 5]], [[0], [1], [2], [3, 4], [5]])


@pytest.mark.parametrize("held", [64, 2], ids=["at once", "two at a time"])
@pytest.mark.parametrize("nodes", NODES)
def test_it_is_the_same_checkpoint_as_with_a_row_for_each_box(
    store: Store, nodes: Sequence[Sequence[int]], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "HELD", held)
    for ranks in nodes:
        put(store, ranks)
    assert commit(store, PREFIX, range(WORLD))
    assert not commit(store, PREFIX, range(WORLD)), "once"
    raw = store.get(f"{PREFIX}/MANIFEST")
    assert is_spread(raw)
    found, alone = read_manifest(store, PREFIX), read_manifest(store, PREFIX, values=False)
    monkeypatch.setattr(merging, "SPREAD_BYTES", 1 << 30)
    path(store, "MANIFEST").unlink()
    assert commit(store, PREFIX, range(WORLD))
    rows = store.get(f"{PREFIX}/MANIFEST")
    assert not is_spread(rows)
    assert encode_manifest(alone) == rows
    assert encode_manifest(found) == encode_manifest(read_manifest(store, PREFIX))
    summary = decode_manifest_header(raw[:HEAD_BYTES], len(raw))
    assert summary == header_of(alone)
    assert summary is not None
    assert (summary.tensors, summary.suspects) == (3, 1)


def test_a_program_that_does_not_know_it_refuses_it_as_a_newer_format(store: Store) -> None:
    put(store, range(WORLD))
    commit(store, PREFIX, range(WORLD))
    with pytest.raises(FormatVersionError, match="format this program does not read") as caught:
        decode_manifest(store.get(f"{PREFIX}/MANIFEST"))  # as releases before 1.3 do
    assert "format version 3.0" in str(caught.value)
    index = decode_manifest(store.get(f"{PREFIX}/r00000-00005.idx"))
    assert index.outline, "while indexes stay as they were, with a key more"


@pytest.mark.parametrize("world", [6, 4, 12, 1])
def test_a_rank_of_any_layout_reads_its_state_from_the_fewest_indexes(
    store: Store, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(0, WORLD, 2):
        put(store, [first, first + 1])
    commit(store, PREFIX, range(WORLD))
    whole = read_manifest(store, PREFIX)
    asked: list[str] = []
    real = store.get

    def get(key: str) -> bytes:
        asked.append(key.rpartition("/")[2])
        return real(key)

    monkeypatch.setattr(store, "get", get)
    for rank in range(world):
        spread = spread_of(store)
        asked.clear()
        source = SpreadSource(store, spread, PREFIX, f"rank{rank}")
        assert (asked, source.manifest.table.fqns) == ([], whole.table.fqns)
        assert (by_design([source.manifest]), source.manifest.suspects) == (by_design([whole]), whole.suspects)
        assert source.manifest.values.get("rng@rank5") == (whole.values["rng@rank5"] if rank == 5 else None)
        wanted = shards(rank, world=world)
        memory = [bytearray(one.nbytes) for one in wanted]
        targets = [Target(shard=one, buffer=memoryview(held)) for one, held in zip(wanted, memory, strict=True)]
        table = plan_reads(wanted, []).wanted
        source.bring(table)
        if world == WORLD:
            assert asked == [f"r{rank // 2 * 2:05d}-{rank // 2 * 2 + 1:05d}.idx"]
        asked.clear()
        source.bring(table)
        assert asked == [], "once"
        execute_reads(targets, [source])
        assert by_design([source.manifest]) == by_design([whole])
        for one, held in zip(wanted, memory, strict=True):
            assert bytes(held) == bytes_of(one)


def test_two_tensors_that_one_live_tensor_stands_for_are_known_whole_so_that_they_can_be_compared(store: Store) -> None:
    for first in range(0, WORLD, 2):
        put(store, [first, first + 1])
    commit(store, PREFIX, range(WORLD))
    source = SpreadSource(store, spread_of(store), PREFIX, "rank0")
    source.bring_both({"a": "gone"})
    assert int(source.manifest.table.nbytes.sum()) == 8, "the scalar, of which there is a row without a place"
    source.bring_both({"a": "gone", "b": "a"})
    assert source.manifest.table.fqns == ["a", "b", "t"]
    names = SourceNames([source.manifest])
    assert not names.are_equal("a", "b")
    assert len(names._contents("a")) == WORLD


def bytes_of(wanted: Shard) -> bytes:
    """Return what the ranks wrote of a box."""
    pins = [make_pin(shards(rank), rank=rank, world_size=WORLD) for rank in range(WORLD)]
    number = ["a", "b", "t"].index(wanted.fqn)
    whole = b"".join(bytes(one.row(number)) for one in (pins[:1] if wanted.fqn == "t" else pins))
    if not wanted.offsets:
        return whole
    return whole[wanted.offsets[0] * 200 : (wanted.offsets[0] + wanted.lengths[0]) * 200]


def test_boxes_that_overlap_are_kept_as_rows_and_a_gap_is_refused(store: Store) -> None:
    put(store, [0, 1, 2, 3, 4])
    twice = write_packs(pin(5, [*shards(5), *shards(0)[2:]]), store, PREFIX)
    put_indexes(store, PREFIX, [twice])
    assert commit(store, PREFIX, range(WORLD))
    assert not is_spread(store.get(f"{PREFIX}/MANIFEST"))
    assert len(read_manifest(store, PREFIX).table) == 2 * WORLD + 1, "equal boxes count once"
    path(store, "MANIFEST").unlink()
    put_indexes(store, PREFIX, [write_packs(pin(5, shards(5)[:1]), store, PREFIX)])
    with pytest.raises(ShardGapError, match="do not hold the whole tensor 'b'"):
        commit(store, PREFIX, range(WORLD))
    assert not path(store, "MANIFEST").exists()


@pytest.mark.parametrize(
    "outline", [b"", b"?", msgpack.packb({"names": []})], ids=["an earlier release", "junk", "half"]
)
def test_an_index_without_an_outline_that_can_be_used_is_taken_with_rows(store: Store, outline: bytes) -> None:
    put(store, [0, 1, 2, 3])
    for rank in (4, 5):
        index = write_packs(pin(rank), store, PREFIX)
        index = replace(index, outline=outline, needs=(1,) * len(index.objects))
        store.put(f"{PREFIX}/r{rank:05d}.idx", encode_manifest(index))
    assert commit(store, PREFIX, range(WORLD))
    assert not is_spread(store.get(f"{PREFIX}/MANIFEST"))


@pytest.mark.parametrize("fault", ["missing", "flipped", "cut", "of other bytes", "a pack"])
def test_what_is_damaged_before_the_commit_is_refused_and_after_it_is_named(store: Store, fault: str) -> None:
    put(store, [0, 1, 2])
    put(store, [3, 4, 5])
    assert commit(store, PREFIX, range(WORLD))
    name = "r00003-00005.idx" if fault != "a pack" else "r00004.p0.fck"
    raw = bytearray(path(store, name).read_bytes())
    if fault == "missing":
        path(store, name).unlink()
    elif fault == "of other bytes":  # whole in itself, and not what was committed
        other = replace(decode_manifest(raw), digests=decode_manifest(raw).digests + np.uint64(1))
        path(store, name).write_bytes(encode_manifest(other))
    else:
        raw[len(raw) // 2] ^= 1
        path(store, name).write_bytes(raw[:-1] if fault == "cut" else raw)
    if fault == "a pack":
        path(store, name).write_bytes(b"")
    else:
        for read in (read_manifest, verify_manifest):
            with pytest.raises(DamagedError, match=f"{PREFIX}/{name} of .* is damaged"):
                read(store, PREFIX)
        spread = spread_of(store)
        read_part(store, PREFIX, spread, spread.near(plan_reads(shards(1), []).wanted))  # the other one is whole
    (info,) = list_checkpoints(store)
    assert verify_checkpoint(store, info, lambda _: None)["damaged"]
    if fault == "of other bytes":
        return
    path(store, "MANIFEST").unlink()
    with pytest.raises(DamagedError if fault != "missing" else Exception, match=r"r0000[34]"):
        commit(store, PREFIX, range(WORLD))
    assert not path(store, "MANIFEST").exists()


def test_a_writer_that_is_late_and_writes_its_packs_otherwise_changes_nothing(store: Store) -> None:
    """A node that was frozen before its index, and goes on after another one has written and committed the same."""
    for ranks in ([0, 1, 2], [3, 4, 5]):
        put(store, ranks)
    commit(store, PREFIX, range(WORLD))
    before = path(store, "r00003-00005.idx").read_bytes()
    put(store, [3, 4, 5], options=PersistOptions(compression="zstd"))
    assert path(store, "r00003-00005.idx").read_bytes() != before
    verify_manifest(store, PREFIX)
    (info,) = list_checkpoints(store)
    assert verify_checkpoint(store, info, lambda _: None)["damaged"] == []
    assert {name.rpartition(".")[2] for name in read_manifest(store, PREFIX).objects} == {"fck", "fcz"}


@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_byte_of_it_is_found(store: Store, bit: int) -> None:
    put(store, range(WORLD))
    commit(store, PREFIX, range(WORLD))
    raw = store.get(f"{PREFIX}/MANIFEST")
    for at in range(bit, len(raw), 8):
        bad = bytearray(raw)
        bad[at] ^= 1 << bit
        with pytest.raises((DamagedError, FormatVersionError)):
            manifest_from(store.url, PREFIX, bytes(bad))


POINTS = [
    "ranges.before-put",
    "persist.before-index",
    "persist.before-index:2",
    "persist.before-manifest",
    "persist.after-manifest",
]


@pytest.mark.parametrize("point", [*POINTS, *(f"store.before-publish:{count}" for count in range(7, 12))])
def test_killed_anywhere_it_is_there_whole_or_not_at_all_and_the_next_writer_ends_it(store: Store, point: str) -> None:
    def work() -> None:
        for ranks in ([0, 1, 2], [3, 4, 5]):
            put(store, ranks)
        commit(store, PREFIX, range(WORLD))

    killed_at(point, work)
    for info in list_checkpoints(store, damaged=True):
        assert verify_checkpoint(store, info, lambda _: None)["damaged"] == []
    assert path(store, "MANIFEST").exists() == (point == "persist.after-manifest")
    work()
    assert is_spread(store.get(f"{PREFIX}/MANIFEST"))
    (info,) = list_checkpoints(store, whole=True)
    assert verify_checkpoint(store, info, lambda _: None)["damaged"] == []


def test_a_copy_takes_its_indexes_along(store: Store, tmp_path: Path) -> None:
    for ranks in ([0, 1, 2], [3, 4, 5]):
        put(store, ranks)
    commit(store, PREFIX, range(WORLD))
    target = open_store(tmp_path / "target")
    copy_checkpoint(store, PREFIX, target)
    assert encode_manifest(read_manifest(target, PREFIX)) == encode_manifest(read_manifest(store, PREFIX))
    assert target.get(f"{PREFIX}/MANIFEST") == store.get(f"{PREFIX}/MANIFEST")
    (info,) = list_checkpoints(target)
    assert verify_checkpoint(target, info, lambda _: None)["damaged"] == []


def test_the_indexes_of_any_ranks_are_found(store: Store) -> None:
    for ranks in ([0, 1, 2, 3], [3, 4, 5]):
        put(store, ranks)
    commit(store, PREFIX, range(WORLD))
    spread = spread_of(store)
    for count in range(WORLD + 1):
        for some in itertools.combinations(range(WORLD), count):
            held = [one.first for one in spread.of_ranks(some)]
            assert held == sorted({0 if rank < 4 else 3 for rank in some})
