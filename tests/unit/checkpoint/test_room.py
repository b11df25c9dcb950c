"""A root without room: what retention and sweep would delete goes at once, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from support.ranks import wait_for
from support.slots import make_pin, shard

from flashckpt import faults
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.intents import abandon_intent, put_intent
from flashckpt.checkpoint.retention import Policy, ReadLease, keep, prune
from flashckpt.checkpoint.root_records import MANIFEST, prefix_of
from flashckpt.checkpoint.sweeping import is_full, make_room
from flashckpt.checkpoint.writer import PersistOptions, commit, persist_slot
from flashckpt.core.intent import Intent
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.flush import Flush
from flashckpt.daemon.persister.protocol import WriteFailed, WriteFinished
from flashckpt.errors import FencedError, StoreError
from flashckpt.shm.segment import Pin
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

PACK = "r00000.p0.fck"
KEPT = Policy(keep_last=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "root")


def write(store: Store, step: int) -> None:
    persist_slot(make_pin([shard("w", (40_000,))], step=step, generation=1), store, prefix_of(1, step))


def make(store: Store, *steps: int) -> None:
    for step in steps:
        write(store, step)
        commit(store, prefix_of(1, step), (0,))


def give_up(store: Store, step: int) -> None:
    write(store, step)
    put_intent(store, Intent(generation=1, step=step, writers=(0,)))
    abandon_intent(store, 1, step, "its writer has gone")


def steps_of(store: Store) -> list[int]:
    return sorted(info.step for info in list_checkpoints(store))


def has_data(store: Store, step: int) -> bool:
    return store.head(f"{prefix_of(1, step)}/{PACK}") is not None


def test_room_is_made_of_old_checkpoints_and_abandoned_parts_alone(store: Store) -> None:
    make(store, 10, 20, 30, 40, 50)
    keep(store, prefix_of(1, 10))
    lease = ReadLease(store, prefix_of(1, 20))
    give_up(store, 60)
    write(store, 70)
    put_intent(store, Intent(generation=1, step=70, writers=(0,)))  # what is being written
    write(store, 80)  # nobody has given it up
    made = make_room(store, KEPT)
    assert made.checkpoints == (prefix_of(1, 30), prefix_of(1, 40))
    assert made.orphans == (prefix_of(1, 60),)
    assert made.nbytes > 3 * 4 * 40_000
    assert steps_of(store) == [10, 20, 50]
    assert [step for step in range(10, 90, 10) if has_data(store, step)] == [10, 20, 50, 70, 80]
    with pytest.raises(FencedError):
        commit(store, prefix_of(1, 60), (0,))  # by a writer that wakes up late
    assert make_room(store, KEPT).nbytes == 0
    lease.close()
    assert make_room(store, KEPT).checkpoints == (prefix_of(1, 20),)


def test_a_policy_that_keeps_all_gives_up_no_checkpoint(store: Store) -> None:
    make(store, 10, 20)
    give_up(store, 5)
    made = make_room(store, Policy(keep_last=None))
    assert (made.checkpoints, made.orphans) == ((), (prefix_of(1, 5),))
    assert steps_of(store) == [10, 20]


def test_killed_while_room_is_made_nothing_half_is_visible_and_the_next_one_ends_it(store: Store) -> None:
    make(store, 10, 20)
    give_up(store, 30)
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm("room.after-abandoned")
            make_room(store, KEPT)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert steps_of(store) == [10, 20]
    assert not has_data(store, 30)
    assert make_room(store, KEPT).checkpoints == (prefix_of(1, 10),)
    assert store.head(f"{prefix_of(1, 30)}/{MANIFEST}") is not None


def test_data_behind_a_tombstone_is_room_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store, 10, 20)
    taken: list[ReadLease] = []

    def between(name: str) -> None:
        if name == "persist.during-prune":
            taken.append(ReadLease(store, prefix_of(1, 10)))

    monkeypatch.setattr("flashckpt.checkpoint.retention.crash_point", between)
    prune(store, KEPT)  # a reader came in between: its data stays until a sweep
    assert has_data(store, 10)
    assert make_room(store, KEPT).nbytes == 0
    taken[0].close()
    assert make_room(store, KEPT).orphans == (prefix_of(1, 10),)
    assert not has_data(store, 10)


# -- the daemon's writes


class Small:
    """A root on which no further object with data fits while it holds more than `room` packs."""

    def __init__(self, store: Store, room: int, number: int = errno.ENOSPC) -> None:
        self._store, self._room, self._number = store, room, number
        self.refused = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put_object(self, key: str, *args: Any, **kwargs: Any) -> None:
        if key.endswith(".fck") and sum(one.key.endswith(".fck") for one in self._store.list("step-")) >= self._room:
            self.refused += 1
            why = OSError(self._number, os.strerror(self._number))
            raise StoreError(f"cannot write {key}", found=os.strerror(self._number)) from why
        self._store.put_object(key, *args, **kwargs)


def flushed(store: Store, step: int, policy: Policy) -> tuple[Flush, object]:
    pin = make_pin([shard("w", (40_000,))], step=step, generation=1)
    flush = Flush(SnapshotId(1, step), {0: cast("Pin", pin)}, PersistOptions(), policy)
    flush.start(store, [0])
    found: list[object] = []

    def is_done() -> bool:
        found[:] = [flush.result()]
        return found[0] is not None

    wait_for(is_done, what="the write to end")
    return flush, found[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_root_makes_room_and_is_written_again(
    store: Store, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    make(store, 10, 20)
    small = Small(store, 2, number)
    _, result = flushed(small, 30, KEPT)  # type: ignore[arg-type]  # stands for a store
    assert isinstance(result, WriteFinished)
    assert (small.refused, steps_of(store), has_data(store, 30)) == (1, [20], True)
    assert f"the root is full: deleted {prefix_of(1, 10)} (" in caplog.text


@pytest.mark.parametrize(("number", "policy"), [(errno.ENOSPC, Policy(keep_last=2)), (errno.EIO, KEPT)])
def test_where_nothing_may_be_deleted_or_the_disk_is_not_full_the_error_is_as_before(
    store: Store, number: int, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    make(store, 10, 20)
    small = Small(store, 2, number)
    flush, result = flushed(small, 30, policy)  # type: ignore[arg-type]  # as above
    assert isinstance(result, WriteFailed)
    assert isinstance(flush.error, StoreError)
    assert is_full(flush.error) == (number == errno.ENOSPC)
    assert (small.refused, steps_of(store)) == (1, [10, 20])
    assert "deleted" not in caplog.text


def test_killed_between_the_deletion_and_the_next_attempt_the_newest_checkpoint_is_there(store: Store) -> None:
    make(store, 10, 20)
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm("room.before-retry")
            flushed(Small(store, 2), 30, KEPT)  # type: ignore[arg-type]  # as above
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert (steps_of(store), has_data(store, 30)) == ([20], False)
    _, result = flushed(Small(store, 2), 30, KEPT)  # type: ignore[arg-type]  # as above
    assert isinstance(result, WriteFinished)
    commit(store, prefix_of(1, 30), (0,))
    assert steps_of(store) == [20, 30]
