"""Restores from slots in shared memory: verified, any layout, storage for what memory lacks, sources left intact."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.daemons import daemon_of, steps, turn_until
from support.memory_tier import FakeJob, FakeRank, split

from flashckpt import faults
from flashckpt.checkpoint.catalog import list_checkpoints, read_manifest
from flashckpt.core.lineage import Generation
from flashckpt.core.shard import Shard
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.errors import DamagedError, ShardGapError
from flashckpt.planning.selection import Candidates
from flashckpt.restore import gather
from flashckpt.restore.candidate_sources import open_memory
from flashckpt.restore.executor import RestoreCounts, Target, execute_reads
from flashckpt.restore.sources import MemorySource, Source, StorageSource
from flashckpt.shm.segment import Segment
from flashckpt.storage.factory import open_store

SHAPES = {"w": (3000, 1000), "b": (13,)}  # w: 12 MB, 6 chunks per rank


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(str(tmp_path / "root"), shapes=SHAPES)
    fake.step(10, persist=True)
    yield fake
    fake.die()


@contextlib.contextmanager
def sources_of(job: FakeJob, identity: tuple[int, int] = (1, 10)) -> Iterator[list[Source]]:
    """Every slot of the job directory that holds the snapshot, by rank."""
    with contextlib.ExitStack() as stack:
        found: list[Source] = []
        for path in job.directory.segments():
            with contextlib.closing(Segment.attach(path)) as segment:
                for slot, header in enumerate(segment.headers()):
                    if header.is_complete and header.identity == identity:
                        found.append(MemorySource(segment, slot, identity=identity))
                        stack.callback(found[-1].close)
        yield found


def storage_of(job: FakeJob) -> StorageSource:
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [10], "the commit")
    store = open_store(job.root)
    (info,) = list_checkpoints(store)
    return StorageSource(store, read_manifest(store, info), info.prefix)


def test_a_segment_that_this_process_owns_is_read_through_the_mapping_it_has(job: FakeJob) -> None:
    own = job.ranks[0].segment
    with contextlib.ExitStack() as stack:
        found = open_memory(job.directory.segments(), SnapshotId(1, 10), 0, stack, own=own)
        assert [source.manifest.rank for source in found] == list(range(len(job.ranks)))
        start = np.frombuffer(own.buffer, np.uint8).ctypes.data
        places = [source._map() for source in found]
        inside = [start <= place.ctypes.data < start + own.spec.nbytes for place in places]
        assert inside == [True] + [False] * (len(job.ranks) - 1)
        assert not any(place.flags.writeable for place in places)
        out = bytearray(int(found[0].manifest.table.nbytes[0]))
        found[0].read(0, 0, memoryview(out))
        whole = own.spec.data_at(found[0]._slot) + int(found[0].manifest.table.byte_offset[0])
        assert bytes(own.buffer[whole : whole + len(out)]) == bytes(out)
        del places
    own.reserve()  # its mapping is as it was


def wanted(ranks: int) -> list[Shard]:
    return [shard for fqn, shape in SHAPES.items() for shard in split(fqn, shape, ranks)]


def restored(shards: list[Shard], sources: list[Source], threads: int = 2) -> RestoreCounts:
    buffers = [bytearray(b"\xaa" * shard.nbytes) for shard in shards]
    targets = [Target(shard=s, buffer=memoryview(b)) for s, b in zip(shards, buffers, strict=True)]
    counts = execute_reads(targets, sources, threads=threads)
    for shard, buffer in zip(shards, buffers, strict=True):
        assert bytes(buffer) == FakeRank.bytes_of(shard, 1, 10)
    return counts


def flip(job: FakeJob, rank: int, at: int) -> None:
    segment = job.ranks[rank].segment
    slot = next(k for k, header in enumerate(segment.headers()) if header.identity == (1, 10))
    with segment.path.open("r+b") as file:
        file.seek(segment.spec.data_at(slot) + at)
        raw = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([raw[0] ^ 1]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_restores_from_two_bitwise_and_only_from_memory(job: FakeJob, ranks: int) -> None:
    with sources_of(job) as sources:
        counts = restored(wanted(ranks), sources)
    assert counts.needed_bytes == {"memory": 12_000_052}
    assert counts.damaged == []


MIB, END = 1 << 20, 6_000_000
EDGES = (0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB, 3 * MIB + 7, 5 * MIB, END - 1, END)
"""Of a row of 5 chunks and a part: on a chunk's edge, beside it, within the last chunk, at the end."""


def row_of_w(source: Source) -> int:
    return next(row for row in range(len(source.manifest.table.nbytes)) if source.manifest.table.fqn(row) == "w")


def test_any_range_of_a_slot_is_read_bit_for_bit_and_no_byte_beside_it(job: FakeJob, copied_by: str) -> None:
    whole = FakeRank.bytes_of(next(s for s in job.ranks[0].shards if s.fqn == "w"), 1, 10)
    assert len(whole) == END
    with sources_of(job) as sources:
        row = row_of_w(sources[0])
        for start, stop in itertools.combinations_with_replacement(EDGES, 2):
            into = bytearray(b"\xaa" * (stop - start + 2))
            sources[0].read(row, start, memoryview(into)[1:-1])
            assert bytes(into) == b"\xaa" + whole[start:stop] + b"\xaa", (start, stop)
        rounded = sum(
            min(-(-stop // MIB) * MIB, END) - start // MIB * MIB
            for start, stop in itertools.combinations_with_replacement(EDGES, 2)
        )
        assert sources[0].meter.read_bytes == rounded


@pytest.mark.parametrize("damaged", [0, MIB, 3 * MIB + 9, END - 1], ids="byte {}".format)
def test_a_flipped_bit_is_found_by_every_read_that_touches_its_chunk_and_named(
    job: FakeJob, copied_by: str, damaged: int
) -> None:
    table = job.ranks[0].table
    row = next(row for row in range(len(table.nbytes)) if table.fqn(row) == "w")
    flip(job, 0, int(table.byte_offset[row]) + damaged)
    chunk = damaged // MIB
    with sources_of(job) as sources:
        for start, stop in itertools.combinations(EDGES, 2):
            into = memoryview(bytearray(stop - start))
            if start // MIB <= chunk < -(-stop // MIB):
                with pytest.raises(DamagedError, match=f"bytes {chunk * MIB} to {min((chunk + 1) * MIB, END)}"):
                    sources[0].read(row, start, into)
            else:
                sources[0].read(row, start, into)


def test_segment_of_one_rank_gone_exactly_its_part_comes_from_storage(job: FakeJob) -> None:
    storage = storage_of(job)
    with sources_of(job) as sources:
        counts = restored(wanted(3), [sources[0], storage])
    first = sum(shard.nbytes for shard in job.ranks[0].shards)
    assert counts.needed_bytes == {"memory": first, "storage": 12_000_052 - first}
    with sources_of(job) as sources, pytest.raises(ShardGapError, match=r"'w'.*\n.*first index \[1500, 0\].*rank 0"):
        restored(wanted(3), sources[:1])


def test_flipped_bit_in_a_slot_that_chunk_comes_from_storage(job: FakeJob) -> None:
    storage = storage_of(job)
    flip(job, 1, 3_000_000)
    with sources_of(job) as sources:
        counts = restored(wanted(2), [*sources, storage])
    assert counts.needed_bytes["storage"] == 1 << 20
    (message,) = counts.damaged
    assert "'w' is damaged in rank 1 (memory)" in message
    with sources_of(job) as sources, pytest.raises(DamagedError, match="'w' is damaged in rank 1"):
        restored(wanted(2), sources)


def test_slot_with_a_damaged_manifest_is_left_out_and_named(job: FakeJob, caplog: pytest.LogCaptureFixture) -> None:
    segment = job.ranks[1].segment
    (slot,) = [k for k, header in enumerate(segment.headers()) if header.identity == (1, 10)]
    flip(job, 1, segment.spec.manifest_at(slot) + 100 - segment.spec.data_at(slot))
    with contextlib.ExitStack() as stack:
        found = open_memory(job.directory.segments(), SnapshotId(1, 10), 1, stack)
        assert [source.manifest.rank for source in found] == [0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"slot {slot} of {segment.path} is left out: the snapshot of step 10 in memory is damaged"


def test_flipped_bit_that_a_strided_read_does_not_need_is_found_all_the_same(job: FakeJob) -> None:
    """A chunk is believed as a whole or not at all."""
    flip(job, 0, 4 * 999)  # last column of the first row
    shard = Shard(fqn="w", dtype="float32", global_shape=(3000, 1000), offsets=(0, 0), lengths=(3000, 10))
    with sources_of(job) as sources, pytest.raises(DamagedError, match="bytes 0 to 1048576"):
        restored([shard], sources)


@pytest.mark.parametrize("way", [0, 1], ids=["its number is another's", "the root alone knows that it was rolled back"])
def test_slots_that_no_longer_count_are_emptied_though_nothing_was_restored(job: FakeJob, way: int) -> None:
    job.step(10)
    held = list(gather._slots(job.directory))
    for rank in job.ranks:
        rank.segment.close()
    record = Generation(number=3, world_size=job.world)
    found = Candidates(found=(), next_generation=3, lineage=(), lost=frozenset({(1, 7)}))
    for number in range(job.world):
        gather.begin(job.directory, record, rank=number, ranks=range(job.world), own=None, found=found)
    assert list(gather._slots(job.directory)) == held != []
    ways = (
        replace(found, lost=frozenset({(1, 0)})),
        replace(found, lineage=(Generation(number=2, parent=SnapshotId(1, 9)),)),
    )
    gather.begin(job.directory, record, rank=0, ranks=[0], own=None, found=ways[way])
    assert list(gather._slots(job.directory)) == []


def test_snapshot_abandoned_while_it_is_read_is_replaced_by_storage(job: FakeJob) -> None:
    storage = storage_of(job)
    with sources_of(job) as sources:
        segment = job.ranks[0].segment
        segment.mark_empty(next(k for k, h in enumerate(segment.headers()) if h.identity == (1, 10)))
        counts = restored(wanted(2), [*sources, storage])
    assert counts.needed_bytes["storage"] >= sum(shard.nbytes for shard in job.ranks[0].shards)
    assert any("no longer there: rank 0 (memory)" in message for message in counts.damaged)


def test_slot_without_the_snapshot_is_refused(job: FakeJob) -> None:
    segment = job.ranks[0].segment
    slot = next(k for k, header in enumerate(segment.headers()) if header.identity == (1, 10))
    with pytest.raises(DamagedError, match="no longer there"):
        MemorySource(segment, slot, identity=SnapshotId(1, 11))
    with pytest.raises(DamagedError, match="holds no complete snapshot"):
        MemorySource(segment, (slot + 1) % 3)
    assert segment.busy() == set()


@pytest.mark.parametrize("point", ["restore.before-read", "restore.during-read"])
def test_restore_killed_at_point_leaves_every_source_intact(job: FakeJob, point: str) -> None:
    storage = storage_of(job)
    pid = os.fork()
    if pid == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faults.arm(point)
            with sources_of(job) as sources:
                restored(wanted(3), [sources[0], storage])
        finally:
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with sources_of(job) as sources:
        assert restored(wanted(2), sources).damaged == []
    assert restored(wanted(2), [storage]).damaged == []
    assert all(rank.segment.busy() == set() for rank in job.ranks)
