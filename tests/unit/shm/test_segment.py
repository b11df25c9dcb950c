"""Segments and slots: a writer or reader killed anywhere never makes a torn snapshot readable."""

from __future__ import annotations

import gc
import os
import signal
import stat
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.memory import (
    SIZES,
    bytes_of,
    ended,
    fork,
    killed_at,
    request_of,
    restorable,
    shards_of,
    spec_of,
    take,
    verified,
)
from support.ranks import wait_for

from flashckpt.core import superblock
from flashckpt.core.manifest import Manifest, ShardTable, encode_manifest
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.superblock import (
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    PAGE,
    SegmentSpec,
    SlotHeader,
    decode_header,
    encode_header,
    newest_copy,
)
from flashckpt.errors import ConfigError, DamagedError, FormatVersionError, JobInUseError, SharedMemoryError
from flashckpt.faults import CRASH_POINTS
from flashckpt.shm.segment import Segment, SlotPinned, SlotState
from flashckpt.shm.segment_file import fill_holes


@pytest.fixture
def path(shm_dir: Path) -> Path:
    return shm_dir / "r00000.seg"


def new(path: Path, *steps: int, slots: int = 2, **spec: Any) -> Segment:
    segment = Segment.create(path, spec_of(slots=slots, **spec))
    for slot, step in enumerate(steps):
        take(segment, slot, step, sizes=spec.get("sizes", SIZES))
    return segment


# -- what goes in comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_every_slot_holds_its_own_snapshot(path: Any, slots: Any) -> None:
    segment = new(path, *range(10, 10 + slots), slots=slots)
    segment.reserve()
    assert restorable(path) == list(range(10, 10 + slots))
    take(segment, 1, 99)
    assert restorable(path) == sorted({*range(10, 10 + slots), 99} - {11})
    segment.close()
    assert restorable(path) == sorted({*range(10, 10 + slots), 99} - {11}), "a segment outlives its owner"


def test_the_header_tells_what_the_slot_is(path: Any) -> None:
    segment = new(path)
    take(segment, 1, 20, generation=3, world_size=4, parent=SnapshotId(2, 15), persist=True)
    segment.close()
    reader = Segment.attach(path)
    empty, full = reader.headers()
    assert (empty.sequence, empty.state) == (0, SlotState.EMPTY)
    assert (full.identity, full.parent, full.world_size, full.rank, full.persist) == ((3, 20), (2, 15), 4, 0, True)
    assert full.data_bytes == reader.spec.data_capacity
    assert reader.spec == spec_of()
    reader.close()


def test_files_are_private_to_the_user_and_data_is_page_aligned(path: Any) -> None:
    segment = new(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(segment.spec.data_at(slot) % 4096 == 0 for slot in range(2))
    assert path.stat().st_size == segment.spec.nbytes
    segment.close()


def test_a_closed_segment_leaves_buffers_in_use_alone(path: Any) -> None:
    segment = new(path)
    writer = segment.begin(0, request_of(1, 1))
    view = np.frombuffer(writer.data, np.uint8)
    segment.close()
    view[:10] = 1  # would be a segmentation fault
    assert view[:10].sum() == 10


def test_one_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 to 8"):
        spec_of(slots=1)


# -- killed writer --------------------------------------------------------------------------------------

WRITER_POINTS = [name for name in CRASH_POINTS if name.startswith("slot.")]


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_writer_killed_anywhere_in_a_snapshot_the_previous_one_survives(path: Any, point: Any) -> None:
    new(path, 10, 20).close()

    def overwrite() -> None:
        segment = Segment.attach(path, writable=True)
        segment.own()
        take(segment, 0, 30)

    killed_at(point, overwrite)

    expected = {"slot.before-writing": [10, 20], "slot.after-complete": [20, 30]}.get(point, [20])
    assert restorable(path) == expected
    segment = Segment.attach(path, writable=True)
    segment.own()
    assert segment.busy() == set(), "no lock outlives the killed writer"
    take(segment, 0, 40)
    assert restorable(path) == [20, 40]
    segment.close()


def test_writer_killed_at_each_chunk_of_the_copy_the_previous_one_survives(path: Any) -> None:
    new(path, 10, 20).close()

    def overwrite() -> None:
        segment = Segment.attach(path, writable=True)
        segment.own()
        take(segment, 0, 30)

    for chunk in range(1, 8):
        killed_at(f"slot.during-copy:{chunk}", overwrite)
        assert restorable(path) == [20]


def test_writer_killed_in_its_first_snapshot_nothing_is_restorable(path: Any) -> None:
    killed_at("slot.before-complete", lambda: take(new(path), 0, 10))
    assert restorable(path) == []


@pytest.mark.parametrize("point", [name for name in CRASH_POINTS if name.startswith("segment.")])
def test_creator_killed_before_the_segment_has_its_name_nothing_is_there(path: Any, point: Any) -> None:
    killed_at(point, lambda: new(path))
    assert path.exists() == (point == "segment.after-rename")
    if path.exists():
        Segment.attach(path).unlink()
    new(path, 10).close()
    assert restorable(path) == [10]
    assert [p.name for p in path.parent.iterdir()] == [path.name], "what the killed creator left is swept"


def test_a_header_torn_at_any_byte_never_wins() -> None:
    old = encode_header(SlotHeader(sequence=4, generation=1, step=10, state=SlotState.COMPLETE, manifest_digest=9))
    fresh = encode_header(SlotHeader(sequence=5, generation=1, step=20, state=SlotState.WRITING))
    for cut in range(HEADER_BYTES):
        torn = fresh[:cut] + b"\xff" * (HEADER_BYTES - cut)
        page = old.ljust(HEADER_COPY_BYTES, b"\0") + torn.ljust(HEADER_COPY_BYTES, b"\0")
        header, next_copy = newest_copy(page)
        assert (header.sequence, next_copy) == (4, 1)
    assert newest_copy(bytes(PAGE)) == (SlotHeader(), 0)
    assert decode_header(fresh) == SlotHeader(sequence=5, generation=1, step=20, state=SlotState.WRITING)


def test_damage_to_the_newest_header_never_brings_an_overwritten_snapshot_back(path: Any) -> None:
    segment = new(path, 10, 20)
    segment.begin(0, request_of(1, 30))
    segment.close()
    at = segment.spec.header_at(0)
    for copy in (0, 1):
        with path.open("r+b") as file:
            file.seek(at + copy * HEADER_COPY_BYTES)
            whole = file.read(HEADER_BYTES)
            file.seek(at + copy * HEADER_COPY_BYTES + 20)
            file.write(b"\xff\xff")
        assert restorable(path) == [20]
        with path.open("r+b") as file:
            file.seek(at + copy * HEADER_COPY_BYTES)
            file.write(whole)


# -- damage ---------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_the_manifest_is_found_before_anything_is_read(path: Any) -> None:
    new(path, 10).close()
    reader = Segment.attach(path)
    with path.open("r+b") as file:
        file.seek(reader.spec.manifest_at(0) + 50)
        file.write(b"\xff\xff\xff")
    pin = reader.pin(0)
    assert pin is not None
    with pin, pytest.raises(DamagedError, match="step 10"):
        pin.manifest()
    reader.close()


def test_a_discarded_snapshot_never_existed(path: Any) -> None:
    segment = new(path, 10, 20)
    writer = segment.begin(0, request_of(1, 30))
    writer.data[:100] = bytes(100)
    writer.discard()
    assert restorable(path) == [20]
    assert segment.busy() == set()
    segment.close()


def test_an_oversized_manifest_discards_only_its_own_snapshot(path: Any) -> None:
    segment = new(path, 10)
    writer = segment.begin(1, request_of(1, 20))
    with pytest.raises(SharedMemoryError, match="step 20"):
        writer.commit(bytes(1 << 20))
    assert restorable(path) == [10]
    segment.close()


@pytest.mark.parametrize(
    ("offset", "value", "error", "text"),
    [
        (0, b"NOTASEGM", DamagedError, "not a segment"),
        (8, struct.pack("<H", 2), FormatVersionError, "2.0"),
        (30, b"\x99", DamagedError, "superblock"),
    ],
)
def test_a_foreign_newer_or_damaged_superblock_is_refused(
    path: Any, offset: Any, value: Any, error: Any, text: Any
) -> None:
    new(path, 10).close()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)
    with pytest.raises(error, match=text):
        Segment.attach(path)


def test_a_newer_minor_version_is_read(path: Any, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(superblock, "MINOR", 7)
        new(path, 10).close()
    assert restorable(path) == [10]


def test_a_segment_cut_short_is_refused_not_read_into_a_bus_error(path: Any) -> None:
    new(path, 10).close()
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(DamagedError, match="wrong size"):
        Segment.attach(path)


def test_a_segment_of_an_earlier_boot_is_refused(path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("flashckpt.shm.segment.boot_id", lambda: bytes(16))
    new(path, 10).close()
    monkeypatch.undo()
    with pytest.raises(DamagedError, match="earlier boot"):
        Segment.attach(path)


def test_a_segment_of_another_user_is_refused(path: Any, monkeypatch: Any) -> None:
    new(path, 10).close()
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(DamagedError, match="another user"):
            Segment.attach(path)
        os.chown(path, 0, 0)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(DamagedError, match="another user"):
        Segment.attach(path)


def test_a_symbolic_link_in_place_of_a_segment_is_not_followed(path: Any) -> None:
    new(path, 10).close()
    link = path.with_name("link.seg")
    link.symlink_to(path)
    with pytest.raises(DamagedError, match=r"found: +a link"):
        Segment.attach(link)


# -- leases ---------------------------------------------------------------------------------------------


def test_a_pinned_slot_is_not_overwritten_and_stays_readable(path: Any) -> None:
    segment = new(path, 10, 20)
    reader = Segment.attach(path)
    pin = reader.pin(0)
    assert pin is not None
    assert segment.busy() == {0}
    with pytest.raises(SlotPinned):
        segment.begin(0, request_of(1, 30))
    assert segment.header(0).identity == (1, 10)
    reader.close()
    assert verified(pin) == 10, "a pin outlives the segment it was made by"
    pin.close()
    take(segment, 0, 30)
    assert restorable(path) == [20, 30]
    segment.close()


def test_two_readers_share_a_slot_and_the_writer_waits_for_both(path: Any) -> None:
    segment = new(path, 10, 20)
    first, second = segment.pin(0), segment.pin(0)
    assert first is not None
    assert second is not None
    first.close()
    assert segment.busy() == {0}
    second.close()
    assert segment.busy() == set()
    segment.close()


def test_a_slot_being_written_cannot_be_pinned_or_begun_again(path: Any) -> None:
    segment = new(path, 10, 20)
    writer = segment.begin(0, request_of(1, 30))
    assert segment.pin(0) is None
    assert segment.busy() == {0}
    with pytest.raises(SlotPinned):
        segment.begin(0, request_of(1, 35))
    writer.discard()
    segment.close()


def test_a_persister_that_dies_holding_a_pin_gives_the_slot_back(path: Any) -> None:
    segment = new(path, 10, 20)

    def pin_and_hang() -> None:
        pin = Segment.attach(path).pin(0)
        assert pin is not None
        _ = pin.data
        signal.pause()

    child = fork(pin_and_hang)
    wait_for(lambda: segment.busy() == {0}, what="the pin")
    os.kill(child, signal.SIGKILL)
    ended(child)
    take(segment, 0, 30)
    assert restorable(path) == [20, 30]
    segment.close()


def test_reader_killed_in_the_middle_changes_nothing(path: Any) -> None:
    segment = new(path, 10, 20)

    def read_half() -> None:
        pin = Segment.attach(path).pin(1)
        assert pin is not None
        pin.manifest()
        bytes(pin.data[: len(pin.data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(read_half)) == -signal.SIGKILL
    assert restorable(path) == [10, 20]
    take(segment, 1, 30)
    segment.close()


def test_a_snapshot_abandoned_while_it_is_read_is_not_taken(path: Any) -> None:
    segment = new(path, 10)
    pin = segment.pin(0)
    assert pin is not None
    segment.mark_empty(0)
    assert not pin.is_current()
    with pytest.raises(DamagedError, match="rolled back"):
        pin.manifest()
    pin.close()
    assert restorable(path) == []
    segment.close()


def test_abandoned_slots_of_dead_ranks_can_be_marked_but_not_those_of_live_ones(path: Any) -> None:
    segment = new(path, 10, 20)
    other = Segment.attach(path)
    with pytest.raises(JobInUseError):
        other.mark_empty(0)
    segment.close()
    other.mark_empty(0)
    assert not other.is_owned
    assert restorable(path) == [20]
    other.close()


# -- one owner ------------------------------------------------------------------------------------------


def test_a_second_owner_is_refused_and_told_who_holds_it(path: Any) -> None:
    def own_and_hang() -> None:
        segment = new(path, 10)
        signal.pause()
        segment.close()

    child = fork(own_and_hang)
    wait_for(path.exists, what="the segment")
    wait_for(lambda: restorable(path) == [10], what="the snapshot")
    with pytest.raises(JobInUseError, match=f"process {child}"):
        Segment.create(path, spec_of())
    second = Segment.attach(path, writable=True)
    with pytest.raises(JobInUseError, match=f"process {child}"):
        second.own()
    with pytest.raises(JobInUseError):
        second.unlink()
    os.kill(child, signal.SIGKILL)
    ended(child)
    second.own()
    assert restorable(path) == [10]
    second.close()


def test_creating_over_the_segment_of_a_dead_owner_never_replaces_it(path: Any) -> None:
    new(path, 10).close()
    with pytest.raises(FileExistsError):
        Segment.create(path, spec_of())
    assert restorable(path) == [10]
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_owning_a_segment_that_was_removed_meanwhile_is_refused(path: Any) -> None:
    new(path, 10).close()
    late = Segment.attach(path, writable=True)
    remover = Segment.attach(path)
    remover.unlink()
    remover.close()
    with pytest.raises(FileNotFoundError):
        late.own()
    late.close()


def test_a_forgotten_pin_gives_its_slot_back(path: Any) -> None:
    segment = new(path, 10)
    pin = segment.pin(0)
    assert segment.busy() == {0}
    del pin
    gc.collect()
    assert segment.busy() == set()
    segment.close()


def test_forked_child_that_outlives_its_rank_holds_no_lease(path: Any) -> None:
    """A dataloader worker of a killed rank keeps the mapping, but neither ownership nor a slot nor a pin."""
    told, tell = os.pipe()

    def rank() -> None:
        segment = new(path, 10, 20)
        pin = segment.pin(1)
        assert pin is not None
        _ = pin.data
        segment.begin(0, request_of(1, 30))
        worker = fork(signal.pause)
        os.write(tell, struct.pack("i", worker))
        signal.pause()

    child = fork(rank)
    (worker,) = struct.unpack("i", os.read(told, 4))
    os.close(told)
    os.close(tell)
    try:
        observer = Segment.attach(path, writable=True)
        assert (observer.is_owned, observer.busy()) == (True, {0, 1})
        os.kill(child, signal.SIGKILL)
        ended(child)
        os.kill(worker, 0)  # it lives
        assert (observer.is_owned, observer.busy()) == (False, set())
        observer.own()
        take(observer, 0, 40)
        assert restorable(path) == [20, 40]
        observer.close()
    finally:
        os.kill(worker, signal.SIGKILL)


# -- memory ---------------------------------------------------------------------------------------------


def test_reserving_touches_every_page_and_keeps_what_is_there(path: Any) -> None:
    segment = new(path, 10)
    segment.reserve()
    assert path.stat().st_blocks * 512 >= segment.spec.nbytes
    segment.reserve()
    assert restorable(path) == [10]
    segment.close()


def test_reserving_writes_zeros_where_nothing_was_written_and_nowhere_else(path: Any) -> None:
    segment = new(path, 10, slots=3)
    before = path.read_bytes()
    segment.reserve()
    spec, fd = segment.spec, segment._fd
    assert path.read_bytes() == before
    assert restorable(path) == [10]
    holes = [at for at in range(0, spec.nbytes, PAGE) if os.lseek(fd, at, os.SEEK_HOLE) == at]
    assert set(holes) <= {spec.header_at(slot) for slot in range(spec.slots)}, "headers belong to those who write them"
    segment.close()


def test_memory_that_is_there_is_searched_for_holes_once(path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashckpt.shm import segment as module

    segment = new(path, sizes=(3 << 20,) * len(SIZES))
    segment.reserve()
    searched: list[int] = []

    def search(fd: int, spec: SegmentSpec, start: int, stop: int) -> int:
        searched.append(start)
        return fill_holes(fd, spec, start, stop)

    monkeypatch.setattr(module, "fill_holes", search)
    monkeypatch.setattr(module, "_LOCKED_BYTES", PAGE)
    segment.reserve()
    assert len(searched) <= 1 + segment.spec.slots, "once, and once at each header that is not written yet"
    segment.close()


def test_a_stopped_reserve_ends_at_once(path: Any) -> None:
    import threading

    stop = threading.Event()
    stop.set()
    segment = new(path)
    segment.reserve(stop)
    assert path.stat().st_blocks * 512 < segment.spec.nbytes
    segment.close()


def test_reading_is_lock_free_beside_a_busy_writer(path: Any) -> None:
    """A reader beside a writer that overwrites without pause sees whole snapshots only (seqlock and lease)."""
    new(path, 1, 2, sizes=(200_000, 64)).close()

    def write_on() -> None:
        segment = Segment.attach(path, writable=True)
        segment.own()
        step = 3
        while True:
            try:
                take(segment, step % 2, step, sizes=(200_000, 64))
            except SlotPinned:
                pass
            step += 1

    child = fork(write_on)
    try:
        seen: set[int] = set()
        deadline = time.monotonic() + 30
        while len(seen) < 20 and time.monotonic() < deadline:
            seen |= set(restorable(path))
        assert len(seen) >= 20
    finally:
        os.kill(child, signal.SIGKILL)
        ended(child)


def test_empty_table_and_the_smallest_segment(path: Any) -> None:
    segment = Segment.create(path, spec_of(sizes=()))
    writer = segment.begin(0, request_of(1, 1))
    m = Manifest(
        job="job", generation=1, step=1, parent=None, world_size=1, rank=0, writers=[0], coordinates={},
        table=ShardTable.from_shards([], []), digests=np.zeros(0, np.uint64), values={"step": 1},
    )  # fmt: skip
    writer.commit(encode_manifest(m), data_bytes=0)
    assert restorable(path) == [1]
    assert shards_of(0, ()) == bytes_of(0, 1, ()) == []
    segment.close()


@pytest.mark.parametrize("damaged", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("snapshots", [0, 1, 2, 3])
def test_both_headers_are_written_as_one_after_the_other_is(
    path: Path, snapshots: int, damaged: tuple[int, ...]
) -> None:
    segment = new(path)
    for step in range(1, snapshots + 1):
        take(segment, 0, step)
    at = segment.spec.header_at(0)
    for copy in damaged:
        os.pwrite(segment._fd, b"\0\1" * 8, at + copy * HEADER_COPY_BYTES)
    before = os.pread(segment._fd, PAGE, at)
    header = SlotHeader(generation=7, step=9, state=SlotState.WRITING, world_size=1)
    one_by_one = [segment._put_header(0, header), segment._put_header(0, header)][-1]
    expected = os.pread(segment._fd, PAGE, at)
    os.pwrite(segment._fd, before, at)
    assert segment._put_both_headers(0, header) == one_by_one
    assert os.pread(segment._fd, PAGE, at) == expected
    segment.close()
