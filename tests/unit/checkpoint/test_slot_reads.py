"""How a slot's bytes are read for a persist: in place or in bounded copies, and what happens when they are lost meanwhile."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.memory import SIZES, bytes_of, spec_of, take
from support.ranks import wait_for
from support.slots import make_pin, shard

from flashckpt.checkpoint import slot_parts
from flashckpt.checkpoint.indexes import missing_writers
from flashckpt.checkpoint.slot_parts import COPIED_PART_BYTES, Buffers, SlotParts, parts_of
from flashckpt.checkpoint.writer import PersistOptions, persist_slot, write_packs
from flashckpt.errors import DamagedError, StoreError
from flashckpt.native import guarding
from flashckpt.planning.packs import plan_packs
from flashckpt.shm.segment import Pin, Segment
from flashckpt.storage.direct_io import WRITERS
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import PART_BYTES, Store

PREFIX = "step-000000005.g1"
LARGE = (3 * PART_BYTES + 17, 70_000)

needs_guard = pytest.mark.skipif(not hasattr(guarding._c, "guard"), reason="needs the C part")


@dataclass
class Slot:
    """A pinned slot of step 5 in a real segment."""

    path: Path
    pin: Pin
    sizes: tuple[int, ...]

    def cut(self) -> None:
        """Do what another process may: the data is gone, the headers are not."""
        os.truncate(self.path, self.pin.spec.data_at(0))


@pytest.fixture
def slot_of(shm_dir: Path) -> Iterator[Callable[..., Slot]]:
    made: list[Slot] = []

    def make(sizes: tuple[int, ...] = SIZES) -> Slot:
        path = shm_dir / f"r{len(made):05d}.seg"
        segment = Segment.create(path, spec_of(sizes=sizes))
        take(segment, 0, 5, sizes=sizes)
        segment.close()
        reader = Segment.attach(path)
        pin = reader.pin(0)
        reader.close()
        assert pin is not None
        made.append(Slot(path, pin, sizes))
        return made[-1]

    yield make
    for slot in made:
        slot.pin.close()


@pytest.fixture(params=["in place", "copied"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with slots read in place, and copied as where there is no C part."""
    if request.param == "copied":
        monkeypatch.setattr(guarding.GuardedMap, "of", classmethod(lambda *_: None))
    elif not hasattr(guarding._c, "guard"):
        pytest.skip("needs the C part")
    return str(request.param)


@pytest.fixture(params=["directory", "memory", "zstd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, PersistOptions]:
    """A store that writes from the slot by system calls, one that copies in Python, one that is given other bytes."""
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}"), PersistOptions()
    compression = "zstd" if request.param == "zstd" else "off"
    return open_store(tmp_path / "root"), PersistOptions(compression=compression)


class Interrupted:
    """A store that does something while an object is sent: before its first part, or once it has a part."""

    def __init__(self, store: Store, work: Callable[[], None], *, after: int) -> None:
        self._store, self._work, self._after = store, work, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        store = self

        class Parts:
            def __iter__(self) -> Iterator[memoryview]:
                for number, part in enumerate(parts):
                    if number == store._after:
                        store._work()
                    yield part

        if self._after < 0:
            self._work()
        self._store.put_object(key, Parts(), nbytes)


def packed(store: Store, pin: Pin) -> bytes:
    """Return what one persist without compression writes as packs."""
    index = persist_slot(pin, store, PREFIX)
    return b"".join(store.get(f"{PREFIX}/{name}") for name in index.objects)


def test_both_ways_write_the_same_bytes(how: str, slot_of: Callable[..., Slot], tmp_path: Path) -> None:
    slot = slot_of(LARGE)
    assert (slot.pin.view() is None) == (how == "copied")
    written = packed(open_store(tmp_path / "root"), slot.pin)
    large, small = bytes_of(0, 5, LARGE)
    assert written.startswith(large.tobytes())
    assert small.tobytes() in written
    slot.pin.check_whole()


@pytest.mark.parametrize("after", [-1, 0, 1])
def test_a_slot_that_is_cut_at_any_time_is_an_error_of_it_and_gets_no_index(
    how: str, after: int, place: tuple[Store, PersistOptions], slot_of: Callable[..., Slot]
) -> None:
    """Also where every part was verified before: what a store copies later may be zeros, or a bad address to a system call."""
    store, options = place
    slot = slot_of(LARGE if after == 1 else SIZES)
    interrupted = Interrupted(store, slot.cut, after=after)
    if how == "copied" and after == 0 and options.compression == "off":  # one part, and it was copied before
        assert persist_slot(slot.pin, interrupted, PREFIX, options=options).step == 5
        return
    with pytest.raises(DamagedError, match="is truncated"):
        persist_slot(slot.pin, interrupted, PREFIX, options=options)
    assert missing_writers(store, PREFIX, [0]) == [0]


@needs_guard
def test_memory_that_was_lost_and_is_back_is_an_error_all_the_same(
    slot_of: Callable[..., Slot], place: tuple[Store, PersistOptions]
) -> None:
    """The file has its size again, as after a page that the hardware took: only the mark of the mapping tells."""
    store, options = place
    slot = slot_of()

    def lose() -> None:
        size = slot.path.stat().st_size
        slot.cut()
        assert guarded is not None
        assert guarded[0] == 0
        os.truncate(slot.path, size)

    guarded = slot.pin.view()
    assert guarded is not None
    with pytest.raises(DamagedError, match="was lost while it was read"):
        persist_slot(slot.pin, Interrupted(store, lose, after=0), PREFIX, options=options)
    assert missing_writers(store, PREFIX, [0]) == [0]


def test_an_error_of_the_storage_stays_one_where_the_slot_is_whole(
    how: str, slot_of: Callable[..., Slot], tmp_path: Path
) -> None:
    def fail() -> None:
        raise StoreError("no")

    slot, store = slot_of(), open_store(tmp_path / "root")
    with pytest.raises(StoreError, match="no"):
        persist_slot(slot.pin, Interrupted(store, fail, after=0), PREFIX)
    assert persist_slot(slot.pin, store, PREFIX).step == 5, "the next attempt finds it usable"


def test_views_outlive_the_pin(slot_of: Callable[..., Slot]) -> None:
    slot = slot_of()
    view = slot.pin.view()
    if view is None:
        pytest.skip("needs the C part")
    first = bytes(view[:9])
    slot.pin.close()
    assert bytes(view[:9]) == first == bytes_of(0, 5)[0][:9].tobytes()


# -- copies are bounded ---------------------------------------------------------------------------------


class Counted(Buffers):
    """Knows how large the buffers are that were made: their sizes by address."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, int] = {}

    def take(self, nbytes: int) -> memoryview:
        view = super().take(nbytes)
        self.made[np.frombuffer(view, np.uint8).ctypes.data] = len(view)
        return view


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    made: list[Counted] = []

    class Remembered(Counted):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("flashckpt.checkpoint.writer.Buffers", Remembered)
    return made


IN_FLIGHT = 2 * WRITERS + 1  # written, waiting, being read
MOST_BYTES = IN_FLIGHT * (COPIED_PART_BYTES + slot_parts._STEP)


@pytest.mark.parametrize("parts", [6, 24])
def test_memory_of_a_copy_does_not_grow_with_the_snapshot(parts: int, tmp_path: Path, counted: list[Counted]) -> None:
    pin = make_pin([shard("w", (parts * COPIED_PART_BYTES + 5,), dtype="uint8")])
    pin.is_copied = True
    persist_slot(pin, open_store(tmp_path / "root"), PREFIX)
    (buffers,) = counted
    assert 0 < sum(buffers.made.values()) <= MOST_BYTES < 32 << 20


def test_two_persists_at_once_have_their_own_buffers(tmp_path: Path, counted: list[Counted]) -> None:
    pins = [make_pin([shard("w", (6 * COPIED_PART_BYTES,), dtype="uint8")], rank=rank, world_size=2) for rank in (0, 1)]
    store = open_store(tmp_path / "root")
    with ThreadPoolExecutor(2) as pool:
        for pin in pins:
            pin.is_copied = True
        list(pool.map(lambda pin: persist_slot(pin, store, PREFIX), pins))
    for pin in pins:
        assert store.get(f"{PREFIX}/r{pin.manifest().rank:05d}.p0.fck") == bytes(pin.data)
    assert len(counted) == 2
    assert max(sum(one.made.values()) for one in counted) <= MOST_BYTES


def test_buffers_come_back_after_an_error_of_the_consumer() -> None:
    pin = make_pin([shard("w", (4 * COPIED_PART_BYTES,), dtype="uint8")])
    pin.is_copied = True
    (pack,) = plan_packs(pin.manifest().table, pin.nbytes)
    buffers = Counted()
    stream = SlotParts(pin, pin.manifest(), pack, parts_of(pack, pin), buffers)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="the consumer"):
            _consume_one(stream)
    assert len(buffers.made) == 1


def _consume_one(stream: SlotParts) -> None:
    for _ in stream:
        raise RuntimeError("the consumer")


def test_a_part_is_not_overwritten_while_somebody_holds_it() -> None:
    """As a thread does that was handed a part and has not ended yet when its writer has failed."""
    pin = make_pin([shard("w", (4 * COPIED_PART_BYTES,), dtype="uint8")])
    pin.is_copied = True
    (pack,) = plan_packs(pin.manifest().table, pin.nbytes)
    stream = SlotParts(pin, pin.manifest(), pack, parts_of(pack, pin), Buffers())
    assert [bytes(part) for part in list(stream)] == [bytes(pin.data[a:b]) for a, b in parts_of(pack, pin)]


def test_a_writer_thread_that_dies_ends_the_write_with_its_error(
    how: str, slot_of: Callable[..., Slot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> int:
        raise MemoryError("a thread of the write")

    slot, store, before = slot_of(LARGE), open_store(tmp_path / "root"), threading.active_count()
    with monkeypatch.context() as broken:
        broken.setattr("flashckpt.storage.direct_io._write_all", die)
        with pytest.raises(MemoryError, match="a thread of the write"):
            persist_slot(slot.pin, store, PREFIX)
    wait_for(lambda: threading.active_count() <= before, what="the end of the writer threads")
    assert persist_slot(slot.pin, store, PREFIX).step == 5


class Slow:
    """A store whose objects become durable only when the next one is on its way, or no other comes."""

    url = "slow://root"

    def __init__(self, objects: int) -> None:
        self.begun = [threading.Event() for _ in range(objects)]
        self.names: list[str] = []

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        number = len(self.names)
        self.names.append(key)
        self.begun[number].set()
        for _ in parts:
            pass
        assert number + 1 == len(self.begun) or self.begun[number + 1].wait(30), "the next pack waits for this one"


def test_the_next_pack_is_begun_before_the_last_one_is_durable(slot_of: Callable[..., Slot]) -> None:
    slot = slot_of((20_000, 20_000, 20_000))
    store = Slow(3)
    write_packs(slot.pin, store, PREFIX, options=PersistOptions(pack_bytes=20_000))  # type: ignore[arg-type]
    assert store.names == [f"{PREFIX}/r00000.p{number}.fck" for number in (2, 0, 1)]


@needs_guard
def test_a_slot_is_mapped_once_for_all_its_persists_and_until_its_file_is_gone(
    slot_of: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[guarding.GuardedMap]] = []
    real = guarding.GuardedMap.of

    def of(*arguments: Any) -> guarding.GuardedMap | None:
        found = real(*arguments)
        assert found is not None
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(guarding.GuardedMap, "of", of)
    slot = slot_of()
    for _ in range(3):
        with Segment.attach(slot.path).pin(0) as pin:  # type: ignore[union-attr]  # COMPLETE
            assert pin.view() is not None
        guarding.kept_maps.let_go()
    assert len(made) == 1
    assert made[0]() is not None
    slot.path.unlink()
    guarding.kept_maps.let_go()
    assert made[0]() is None, "it would keep the memory of a segment that was removed"


@needs_guard
def test_a_mapping_that_lost_a_page_is_not_used_again(slot_of: Callable[..., Slot]) -> None:
    slot = slot_of()
    reader = Segment.attach(slot.path)
    with reader.pin(0) as pin:  # type: ignore[union-attr]  # COMPLETE
        view = pin.view()
        assert view is not None
        size = slot.path.stat().st_size
        slot.cut()
        assert bytes(view[:100]) == bytes(100)
        del view
        os.truncate(slot.path, size)
        with pytest.raises(DamagedError, match="bus error"):
            pin.check_whole()
    with reader.pin(0) as pin:  # type: ignore[union-attr]
        assert pin.view() is not None
        pin.check_whole()
    reader.close()
