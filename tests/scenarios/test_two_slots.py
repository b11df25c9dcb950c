"""With two slots a snapshot follows behind the persist of the one before it in its slot: what is persisted, and what is kept.

Segment, locks and the writing of packs are the product's own; hypothesis chooses what the rank does while a pack is on its
way, and who dies then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.memory import bytes_of, killed_at, request_of, restorable, shards_of, spec_of, take

from flashckpt.checkpoint.writer import PersistOptions, write_packs
from flashckpt.core.manifest import Manifest, encode_manifest
from flashckpt.core.records import chunk_digests
from flashckpt.core.shard import place
from flashckpt.core.shard_table import ShardTable
from flashckpt.errors import StoreError
from flashckpt.shm.lease import Pin
from flashckpt.shm.segment import Segment, SlotPinned, SlotWriter
from flashckpt.snapshot.following import are_free
from flashckpt.storage.store import Store

SIZES = (9000, 4096, 20_000, 5000, 12_000, 300, 8)
PACK = PersistOptions(pack_bytes=8192)
ACTIONS = ("take", "copy", "copy", "give up", "die", "persister dies", "storage fails")


LATER = ["copy"] * 5
"""Until the first pack is durable, with the next one on its way."""


class PersisterDiedError(Exception):
    """Nothing of the persister is left but what is durable."""


class TwoSlots:
    """One rank with two slots, and the persister of its node."""

    def __init__(self, path: Path, actions: Iterable[str]) -> None:
        self.path, self._actions = path, iter(actions)
        self.url = "memory://"
        self.segment = Segment.create(path, spec_of(slots=2, sizes=SIZES))
        self.durable: dict[str, bytes] = {}
        self.writer: SlotWriter | None = None
        self.left: list[int] = []
        self.step, self.overlapped = 2, 0
        take(self.segment, 0, 1, sizes=SIZES, persist=True)
        take(self.segment, 1, 2, sizes=SIZES)
        self.offset = place(shards_of(0, SIZES)).offsets
        self.nbytes = np.array(SIZES, np.int64)

    # -- what a store is asked -------------------------------------------------------------------------

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """A pack on its way: training does what it does, before, within and after each of its parts."""
        self.act()
        taken = bytearray()
        for part in parts:
            taken += part
            self.act()
        self.durable[key] = bytes(taken)

    def act(self) -> None:
        action = next(self._actions, "copy")
        if action == "persister dies":
            raise PersisterDiedError
        if action == "storage fails":
            raise StoreError("the storage fails", state="")
        {"take": self.begin, "copy": self.copy, "give up": self.give_up, "die": self.die}[action]()
        self.check()

    # -- what the rank does ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Slot 0 is the older one always: it is what M1 allows once slot 1 is common."""
        if self.writer is None and max(restorable(self.path)) == 2:
            with contextlib.suppress(SlotPinned):
                self.step += 1
                follows = request_of(1, self.step)
                self.writer = self.segment.begin(0, follows, follows=lambda start, stop: stop > start)
                self.left = [*range(len(SIZES))]

    def copy(self) -> None:
        if self.writer is None:
            return
        start, stop = self.writer.still_read()
        self.overlapped += stop > start
        free = are_free(self.offset[self.left], self.nbytes[self.left], start, stop)
        data = bytes_of(0, self.step, SIZES)
        for row in np.array(self.left, np.int64)[free].tolist():
            at = int(self.offset[row])
            self.writer.data[at : at + SIZES[row]] = data[row].tobytes()
            self.left.remove(row)
        if not self.left and self.writer.still_read() == (0, 0):
            manifest = Manifest(
                job="job", generation=1, step=self.step, parent=None, world_size=1, rank=0, writers=[0], coordinates={},
                table=ShardTable.from_shards(shards_of(0, SIZES), self.offset),
                digests=np.concatenate([chunk_digests(one) for one in data]), values={"step": self.step},
            )  # fmt: skip
            self.writer.commit(encode_manifest(manifest))
            self.writer = None

    def give_up(self) -> None:
        if self.writer is not None:
            self.writer.discard()
            self.writer = None

    def die(self) -> None:
        """SIGKILL, and another process in its place."""
        self.writer = None
        self.segment.close()
        self.segment = Segment.attach(self.path, writable=True)
        self.segment.own()

    # -- what must hold --------------------------------------------------------------------------------

    def check(self) -> None:
        """The other slot is whole whatever happens to this one; `restorable` compares every byte."""
        assert 2 in restorable(self.path)

    def persist(self, pin: Pin, done: dict[int, str]) -> None:
        index = write_packs(pin, cast("Store", self), "c", options=PACK, done=done, keep_only=pin.keep_only)
        truth = bytes_of(0, 1, SIZES)
        assert len(index.objects) > 3
        for row in range(len(index.table)):
            at, size = int(index.table.byte_offset[row]), int(index.table.nbytes[row])
            found = self.durable[f"c/{index.objects[int(index.table.object_id[row])]}"][at : at + size]
            name = index.table.fqn(row)
            assert found == truth[int(name.rpartition("t")[2])].tobytes(), (
                f"{name} was overwritten before it was durable"
            )


def run(path: Path, actions: Iterable[str]) -> TwoSlots:
    one = TwoSlots(path, actions)
    try:
        _run(one)
    finally:
        one.segment.close()
        path.unlink()
    return one


def _run(one: TwoSlots) -> None:
    pin = one.segment.pin(0)
    assert pin is not None
    done: dict[int, str] = {}
    with pin, contextlib.suppress(PersisterDiedError):
        while True:
            try:
                one.persist(pin, done)
                break
            except StoreError:  # tried again: what is durable is not written again, for its bytes may be gone
                one.check()
    for action in ("take", "copy"):  # whoever died, the next snapshot finds its slot free
        {"take": one.begin, "copy": one.copy}[action]()
    one.check()
    assert max(restorable(one.path)) > 2, "no lock outlives its holder"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=30))
def test_whatever_is_copied_and_killed_behind_a_persist_it_is_whole_and_so_is_the_other_slot(
    tmp_path: Path, actions: list[str]
) -> None:
    run(tmp_path / "s", actions)


def test_a_copy_follows_behind_the_persist_and_ends_with_it(tmp_path: Path) -> None:
    assert run(tmp_path / "s", [*LATER, "take"]).overlapped > 1


def test_storage_that_fails_behind_a_copy_is_tried_again_with_what_is_still_there(tmp_path: Path) -> None:
    assert run(tmp_path / "s", [*LATER, "take", "copy", "storage fails"]).overlapped > 1


@pytest.mark.parametrize("pack", range(1, 6))
def test_a_persister_killed_behind_each_pack_leaves_the_slot_to_training(tmp_path: Path, pack: int) -> None:
    """SIGKILL: the kernel takes back what it kept, and the snapshot that follows is whole at once."""
    path = tmp_path / "s"
    one = TwoSlots(path, [])
    kept = tmp_path / "kept"

    def persist() -> None:
        pin = Segment.attach(path).pin(0)
        assert pin is not None

        def keep_only(start: int, stop: int) -> None:
            pin.keep_only(start, stop)
            kept.write_text(f"{start} {stop}")

        write_packs(pin, cast("Store", Sink()), "c", options=PACK, keep_only=keep_only)

    killed_at(f"persist.after-pack:{pack}", persist)
    start, stop = map(int, kept.read_text().split())
    assert (stop > start) == (pack < 6), "each pack gives some of it back, the last one all"
    assert one.segment.still_read(0) == (0, 0)
    take(one.segment, 0, 3, sizes=SIZES)
    assert restorable(path) == [2, 3]
    one.segment.close()


class Sink:
    """A store that keeps nothing."""

    url = "sink://root"

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        del key, nbytes
        for _ in parts:
            pass
