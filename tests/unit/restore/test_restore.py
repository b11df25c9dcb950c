"""Every restored byte is verified and right, whichever source it comes from and whatever is damaged on the way."""

from __future__ import annotations

import functools
import itertools
import mmap
from math import prod
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cuda import LateCuda

from flashckpt.core.manifest import Manifest
from flashckpt.core.records import CHUNK_BYTES, chunk_digests
from flashckpt.core.shard import ITEMSIZE, Shard, place
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import DamagedError, ShardGapError
from flashckpt.planning.pieces import JOB_BYTES, cut_pieces
from flashckpt.planning.read_plan import as_table, plan_reads
from flashckpt.restore import device_rows, sources
from flashckpt.restore import executor as restore
from flashckpt.restore.destinations import Destinations
from flashckpt.restore.device_rows import DeviceRows
from flashckpt.restore.executor import RestoreCounts, Target, execute_reads
from flashckpt.restore.sources import Source, StorageSource
from flashckpt.shm.segment_file import address_of
from flashckpt.storage.factory import open_store
from flashckpt.storage.posix import PosixStore

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Packs:
    """Global tensors and their shards in one pack per group, written without the persist code."""

    def __init__(self, root: Path, *, seed: int = 0) -> None:
        self.store = open_store(root)
        self.rng = np.random.default_rng(seed)
        self.arrays: dict[str, np.ndarray] = {}
        self.root = root

    def array(self, fqn: str, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        if fqn not in self.arrays:
            raw = self.rng.integers(0, 256, prod(shape) * ITEMSIZE[dtype], dtype=np.uint8)
            self.arrays[fqn] = raw.view(f"V{ITEMSIZE[dtype]}").reshape(shape)
        return self.arrays[fqn]

    def cut(self, shard: Shard) -> bytes:
        box = tuple(slice(a, a + n) for a, n in zip(shard.offsets, shard.lengths, strict=True))
        return self.array(shard.fqn, shard.global_shape, shard.dtype)[box].tobytes()

    def source(self, prefix: str, groups: list[list[Shard]]) -> StorageSource:
        shards, offsets, objects = [], [], []
        for number, group in enumerate(groups):
            placement = place(group)
            pack = bytearray(placement.total)
            for shard, at in zip(group, placement.offsets, strict=True):
                pack[at : at + shard.nbytes] = self.cut(shard)
            self.store.put_object(f"{prefix}/r{number}.fck", [memoryview(pack)])
            shards += group
            offsets += placement.offsets.tolist()
            objects += [number] * len(group)
        digests = [chunk_digests(self.cut(shard)) for shard in shards]
        manifest = Manifest(
            job="j",
            generation=1,
            step=5,
            parent=None,
            world_size=len(groups),
            rank=-1,
            writers=list(range(len(groups))),
            coordinates={},
            table=ShardTable.from_shards(shards, offsets, object_ids=objects),
            digests=np.concatenate(digests) if digests else np.zeros(0, np.uint64),
            objects=[f"r{number}.fck" for number in range(len(groups))],
        )
        return StorageSource(self.store, manifest, prefix)

    def flip(self, key: str, at: int) -> None:
        path = self.root / key
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)


@pytest.fixture
def packs(tmp_path: Path) -> Packs:
    return Packs(tmp_path / "root")


def shard(fqn: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "float32") -> Shard:
    at, lengths = box or (tuple(0 for _ in shape), shape)
    return Shard(fqn=fqn, dtype=dtype, global_shape=shape, offsets=at, lengths=lengths)


def rows(fqn: str, shape: tuple[int, ...], parts: int, dim: int = 0, dtype: str = "float32") -> list[Shard]:
    edges = [shape[dim] * k // parts for k in range(parts + 1)]
    boxes = []
    for a, b in itertools.pairwise(edges):
        at, lengths = [0] * len(shape), list(shape)
        at[dim], lengths[dim] = a, b - a
        boxes.append((tuple(at), tuple(lengths)))
    return [shard(fqn, shape, box, dtype) for box in boxes]


def restored(packs: Packs, wanted: list[Shard], sources: list[Source], *, threads: int | None = None) -> RestoreCounts:
    buffers = [bytearray(b"\xaa" * one.nbytes) for one in wanted]
    targets = [Target(shard=one, buffer=memoryview(buffer)) for one, buffer in zip(wanted, buffers, strict=True)]
    counts = execute_reads(targets, sources, threads=threads)
    for one, buffer in zip(wanted, buffers, strict=True):
        assert bytes(buffer) == packs.cut(one), one
    assert sum(counts.needed_bytes.values()) == sum(one.nbytes for one in wanted)
    return counts


@pytest.mark.parametrize(("held", "wanted"), [((4, 0), (4, 0)), ((4, 0), (3, 1)), ((2, 1), (5, 0)), ((3, 1), (1, 0))])
def test_other_split_is_restored_bitwise(packs: Packs, held: tuple[int, int], wanted: tuple[int, int]) -> None:
    shape = (1111, 1234)
    small = [shard(f"s{k}", (k + 1,)) for k in range(50)]
    groups = [[one, *small[k :: held[0]]] for k, one in enumerate(rows("w", shape, *held))]
    source = packs.source("step", groups)
    counts = restored(packs, rows("w", shape, *wanted) + small, [source], threads=3)
    assert counts.damaged == []
    assert counts.read_s > 0
    assert counts.verify_s > 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_from_any_grid_with_small_jobs(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    packs = Packs(tmp_path_factory.mktemp("root"))
    shape = tuple(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(("uint8", "float32", "complex128")))
    dim, parts = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    source = packs.source("step", [[one] for one in rows("w", shape, parts, dim, dtype)])
    at = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = at, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, at, strict=True))
    most = data.draw(st.sampled_from((1, 7, 1 << 16)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "cut_pieces", functools.partial(cut_pieces, max_runs=most))
        restored(packs, [shard("w", shape, box, dtype)], [source], threads=1)


def test_reads_at_most_the_needed_bytes_rounded_to_chunks(packs: Packs) -> None:
    shape = (64, CHUNK_BYTES // 8)  # 32 MiB: two rows per chunk
    source = packs.source("step", [[shard("w", shape)]])
    counts = restored(packs, [shard("w", shape, ((5, 0), (2, 17)))], [source])
    assert counts.read_bytes == {"storage": 2 * CHUNK_BYTES}
    assert counts.needed_bytes == {"storage": 2 * 17 * 4}


def test_strided_column_reads_only_chunks_that_hold_it(packs: Packs) -> None:
    shape = (6, 5 * CHUNK_BYTES // 4)  # one row is 5 chunks; a narrow column touches one chunk of each
    source = packs.source("step", [[shard("w", shape)]])
    counts = restored(packs, [shard("w", shape, ((0, 300), (6, 10)))], [source])
    assert counts.read_bytes == {"storage": 6 * CHUNK_BYTES}


def test_neighbours_are_read_in_one_request(packs: Packs) -> None:
    small = [shard(f"s{k}", (100,)) for k in range(200)]
    source = packs.source("step", [small])
    assert restored(packs, small, [source]).requests == {"storage": 1}


def test_flipped_bit_falls_back_for_that_chunk_only_and_is_named(packs: Packs) -> None:
    shape = (12, CHUNK_BYTES // 4)
    near, far = packs.source("near", [[shard("w", shape)]]), packs.source("far", [[one] for one in rows("w", shape, 3)])
    packs.flip("near/r0.fck", 7 * CHUNK_BYTES + 5)
    far.tier = "peer"
    counts = restored(packs, [shard("w", shape)], [near, far])
    assert counts.needed_bytes == {"storage": 11 * CHUNK_BYTES, "peer": CHUNK_BYTES}
    assert counts.fallback_bytes == CHUNK_BYTES
    (message,) = counts.damaged
    assert "'w' is damaged in near (ranks 0)" in message
    assert "far (ranks 0-2) instead" in message


def test_small_tensors_are_copied_and_compared_with_their_digests_in_one_pass(
    packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_pass(*_: object) -> None:
        raise AssertionError("bytes that were copied are read again for their digest")

    many = [shard(f"t{k:03d}", (k + 1, 3)) for k in range(200)]
    found = packs.source("a", [many])
    with monkeypatch.context() as patched:
        patched.setattr(sources, "digest_ranges", second_pass)
        restored(packs, many, [found])
    packs.flip("a/r0.fck", int(found.manifest.table.byte_offset[77]) + 5)
    counts = restored(packs, many, [found, packs.source("b", [many])])
    assert len(counts.damaged) == 1
    assert "'t077'" in counts.damaged[0]


def on_device(
    packs: Packs, wanted: list[Shard], sources: list[StorageSource], late: LateCuda
) -> tuple[RestoreCounts, int]:
    """Restore every third shard to the host and the others to a device; return also how many blocks were filled."""
    live = [torch.full((one.nbytes,), 0xAA, dtype=torch.uint8) for one in wanted]
    away = {row: part for row, part in enumerate(live) if row % 3 and part.nbytes}
    addresses = np.array([0 if row in away else part.data_ptr() for row, part in enumerate(live)], np.int64)
    table = as_table(wanted)
    with late:
        writer = DeviceRows(away)
        asked = Mock(side_effect=writer.filling)
        writer.filling = asked  # type: ignore[method-assign]
        destinations = Destinations(addresses=addresses, nbytes=table.nbytes, owners=live, writer=writer)
        counts = restore.execute_table(table, destinations, sources, threads=1)
        writer.wait()
    for one, part in zip(wanted, live, strict=True):
        assert part.numpy().tobytes() == packs.cut(one), one
    return counts, asked.call_count


@pytest.mark.parametrize("is_slot", [True, False], ids=["memory", "storage"])
@pytest.mark.parametrize("eager", ["", "main", "side"])
def test_rows_of_host_and_device_come_back_from_one_source(
    packs: Packs, eager: str, is_slot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateCuda(eager)
    monkeypatch.setattr(device_rows, "cuda", late)
    monkeypatch.setattr(device_rows, "BLOCKS", 1)  # used again and again
    many = [shard(f"t{k:03d}", (k + 1, 3)) for k in range(200)] + [shard("big", (10, CHUNK_BYTES // 4))] * 2
    whole = [*many, shard("w", (300, 5000)), *rows("v", (6000, 700), 2)]
    source = packs.source("a", [whole])
    source.in_place, source.tier = is_slot, "memory" if is_slot else "storage"
    counts, blocks = on_device(
        packs, [*whole[:-3], *rows("w", (300, 5000), 3, dim=1), shard("v", (6000, 700))], [source], late
    )
    assert counts.damaged == []
    assert counts.threads == 1
    assert blocks <= 16, "not one for each of 130 tensors"


@pytest.mark.parametrize("eager", ["", "side"])
def test_damage_on_the_way_to_a_device_is_replaced_there(
    packs: Packs, eager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateCuda(eager)
    monkeypatch.setattr(device_rows, "cuda", late)
    many = [shard(f"t{k:03d}", (k + 1, 30)) for k in range(100)] + [shard("w", (40, CHUNK_BYTES // 4))]
    near, far = packs.source("near", [many]), packs.source("far", [[one] for one in many])
    near.in_place, near.tier = True, "memory"
    for name, at in (("t076", 5), ("w", 33 * CHUNK_BYTES)):
        (row,) = near.manifest.table.rows(name)
        packs.flip("near/r0.fck", int(near.manifest.table.byte_offset[row]) + at)
    counts, _ = on_device(packs, many, [near, far], late)
    assert len(counts.damaged) == 2
    assert counts.needed_bytes["storage"] == many[76].nbytes + CHUNK_BYTES


@pytest.mark.parametrize("at", [0, 64], ids=["a page", "where malloc puts it"])
@pytest.mark.parametrize(("rows", "number"), [(1100, 1), (10, 60)], ids=["a large one", "many small ones"])
def test_tensors_are_read_so_that_the_disk_needs_no_buffer(
    packs: Packs, monkeypatch: pytest.MonkeyPatch, at: int, rows: int, number: int
) -> None:
    held = [shard("before", (77,)), *(shard(f"{n}", (rows, 1000)) for n in range(number))]
    source, memory, asked = packs.source("p", [held]), mmap.mmap(-1, 5 << 20), []
    with memoryview(memory) as whole:
        targets = []
        for one in held[1:]:
            targets.append(Target(shard=one, buffer=whole[at : at + one.nbytes]))
            at += one.nbytes
        real = PosixStore.get_range

        def get_range(store: PosixStore, key: str, start: int, out: memoryview) -> None:
            asked.append((start % 4096, address_of(out) % 4096))
            real(store, key, start, out)

        monkeypatch.setattr(PosixStore, "get_range", get_range)
        execute_reads(targets, [source])
        assert asked == [(0, 0)]
        for target in targets:
            assert bytes(target.buffer) == packs.cut(target.shard)
            target.buffer.release()


def test_small_tensors_that_lie_in_the_same_memory_are_restored_one_after_another(packs: Packs) -> None:
    """Live tensors may be views of each other: the later one has its bytes there."""
    many = [shard("a", (4, 3)), shard("b", (4, 3)), shard("c", (2, 3))]
    source = packs.source("a", [many])
    memory = np.zeros(96, np.uint8)
    at = address_of(memory)
    nbytes = source.manifest.table.nbytes
    places = Destinations(addresses=np.array([at, at + 48, at + 24]), nbytes=nbytes, owners=[memory])
    restore.execute(plan_reads(many, [source.manifest.table]), places, [source])
    whole = packs.cut(many[0])[:24] + packs.cut(many[2]) + packs.cut(many[1])
    assert memory[24:48].tobytes() == packs.cut(many[2])
    assert memory[:24].tobytes() + memory[24:48].tobytes() + memory[48:].tobytes() == whole


def test_damage_in_a_strided_read_falls_back_bitwise(packs: Packs) -> None:
    shape = (40, 3, CHUNK_BYTES // 32)
    near, far = packs.source("near", [[shard("w", shape)]]), packs.source("far", [rows("w", shape, 4, 2)])
    packs.flip("near/r0.fck", 2 * CHUNK_BYTES + 9)
    counts = restored(packs, rows("w", shape, 3, 2), [near, far])
    assert len(counts.damaged) >= 1
    assert 0 < counts.fallback_bytes <= CHUNK_BYTES


def test_vanished_object_is_replaced_by_the_next_source(packs: Packs) -> None:
    near, far = packs.source("near", [rows("w", (999, 999), 2)]), packs.source("far", [[shard("w", (999, 999))]])
    (packs.root / "near/r0.fck").unlink()
    counts = restored(packs, [shard("w", (999, 999))], [near, far])
    assert counts.fallback_bytes == 999 * 999 * 4


def test_truncated_object_is_replaced_and_its_intact_head_is_used(packs: Packs) -> None:
    shape = (20, CHUNK_BYTES // 4)
    near, far = packs.source("near", [[shard("w", shape)]]), packs.source("far", [[shard("w", shape)]])
    with (packs.root / "near/r0.fck").open("r+b") as file:
        file.truncate(18 * CHUNK_BYTES + 7)
    counts = restored(packs, [shard("w", shape)], [near, far])
    assert counts.fallback_bytes == 2 * CHUNK_BYTES


def test_damage_without_another_source_is_an_error_that_names_it(packs: Packs) -> None:
    source = packs.source("step", [rows("w", (100, 100), 2)])
    packs.flip("step/r0.fck", 3)
    with pytest.raises(DamagedError, match="'w' is damaged in step") as error:
        restored(packs, [shard("w", (100, 100))], [source])
    assert "no other source holds these bytes" in str(error.value)


def test_gap_is_found_before_anything_is_written(packs: Packs) -> None:
    source = packs.source("step", [rows("w", (100, 100), 2)[:1]])
    buffer = bytearray(b"\xaa" * 40000)
    with pytest.raises(ShardGapError, match=r"first index \[50, 0\].*ranks 0"):
        execute_reads([Target(shard=shard("w", (100, 100)), buffer=memoryview(buffer))], [source])
    assert set(buffer) == {0xAA}


def test_empty_and_zero_dimensional_shards(packs: Packs) -> None:
    scalar, empty = shard("step", (), dtype="int64"), shard("none", (0, 7))
    source = packs.source("step", [[scalar, empty]])
    restored(packs, [scalar, empty, shard("w", (4, 4), ((2, 0), (0, 4)))], [source])
    execute_reads([Target(shard=empty, buffer=np.empty((0, 7), np.float32).data)], [source])


def test_buffer_of_the_wrong_size_or_read_only_is_refused(packs: Packs) -> None:
    source = packs.source("step", [[shard("w", (4, 4))]])
    for buffer in (memoryview(bytearray(63)), memoryview(bytes(64))):
        with pytest.raises(ValueError, match="buffer of 'w'"):
            execute_reads([Target(shard=shard("w", (4, 4)), buffer=buffer)], [source])


def test_extra_memory_is_bounded_by_a_job_per_thread(packs: Packs) -> None:
    import tracemalloc

    shape = (4096, 16384)  # 64 MiB of bytes, read as columns, so that every byte goes through scratch
    source = packs.source("step", [[shard("w", shape, dtype="uint8")]])
    wanted = shard("w", shape, ((0, 0), (4096, 16000)), "uint8")
    buffer = bytearray(wanted.nbytes)
    tracemalloc.start()
    try:
        execute_reads([Target(shard=wanted, buffer=memoryview(buffer))], [source], threads=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * JOB_BYTES + (4 << 20)
