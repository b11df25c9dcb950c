"""Runs of host memory: copied and digested by one call, in C and in Python, held while they are read, refused in another form."""

from __future__ import annotations

import concurrent.futures.thread
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flashckpt import faults
from flashckpt.core.records import CHUNK_BYTES, chunk_digests
from flashckpt.native import UnusableMemoryError, copy_and_digest
from flashckpt.native.descriptors import FIGURES
from flashckpt.snapshot import runs
from flashckpt.snapshot.copy import Buffer, Item, StalePlanError
from flashckpt.snapshot.runs import HostRuns, digest_in_slot, places_of
from flashckpt.state.placement import LocalBox

SIZES = (0, 1, 3, 64, 4096, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 700_001)
"""Elements of float32: nothing, less than a line, one chunk exactly, one and a bit, several."""


def items_of(tensors: Sequence[torch.Tensor]) -> tuple[list[Item], int]:
    items, offset, chunk = [], 0, 0
    for number, tensor in enumerate(tensors):
        zero, shape = (0,) * tensor.ndim, tuple(tensor.shape)
        box = LocalBox(global_shape=shape, offsets=zero, lengths=shape, starts=zero)
        form = (tensor.nbytes, tensor.dtype, tensor.shape)
        items.append(Item(f"t{number}", box, tensor, offset, tensor.nbytes, chunk, 0, *form))
        offset += -(-tensor.nbytes // 64) * 64 + 64
        chunk += -(-tensor.nbytes // CHUNK_BYTES)
    return items, chunk


class Slot:
    """A slot and the runs that go into it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.items, chunks = items_of(tensors)
        self.data = bytearray(max(item.offset + item.nbytes for item in self.items) + 64)
        self.digests = np.zeros(chunks, np.uint64)
        self.buffer, self.runs = Buffer(memoryview(self.data)), HostRuns(self.items)

    def take(self) -> None:
        self.runs.check_forms()
        self.runs.copy_and_digest(self.buffer, self.digests)


class Watched:
    """The memory of a tensor, watched without being held."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    @property
    def is_free(self) -> bool:
        return bool(self._storage.expired())  # type: ignore[no-untyped-call]


def test_bytes_and_digests_are_those_of_the_format_whatever_copies(copied_by: str) -> None:
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    for _ in range(3):  # the third time every storage is kept
        slot.digests[:] = 0
        slot.take()
        expected = np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors])
        assert np.array_equal(slot.digests, expected)
        for item, tensor in zip(slot.items, tensors, strict=True):
            assert bytes(slot.data[item.offset : item.offset + item.nbytes]) == tensor.numpy().tobytes()
            tensor.add_(1)


@pytest.mark.parametrize("taken", [1, 4])
def test_other_memory_of_a_tensor_is_copied_and_another_form_refused_also_after_many_copies(
    copied_by: str, taken: int
) -> None:
    tensors = [torch.randn(24) for _ in range(3)]
    slot = Slot(tensors)
    for _ in range(taken):
        slot.take()
        slot.runs.copy(slot.buffer)
    tensors[1].data = torch.randn(24)
    slot.take()
    for copy in (slot.take, lambda: slot.runs.copy(slot.buffer)):
        slot.data[:] = bytes(len(slot.data))
        copy()
        for item, tensor in zip(slot.items, tensors, strict=True):
            assert bytes(slot.data[item.offset : item.offset + item.nbytes]) == tensor.numpy().tobytes()
    tensors[2].data = torch.zeros(4, 6)
    with pytest.raises(StalePlanError, match="t2"):
        slot.take()
    tensors[2].data = torch.zeros(23)
    with pytest.raises(StalePlanError, match="t2"):
        slot.runs.copy(slot.buffer)


def test_what_is_copied_without_digests_gets_the_same_ones_in_the_slot(copied_by: str) -> None:
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    slot.runs.copy(slot.buffer)
    digest_in_slot(places_of(slot.items), slot.buffer, slot.digests)
    assert np.array_equal(slot.digests, np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors]))


@pytest.mark.parametrize("threads", [1, 3])
def test_what_arrives_gets_the_same_digests_from_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, copied_by: str, threads: int
) -> None:
    monkeypatch.setattr(runs, "_HANDED_BYTES", CHUNK_BYTES)
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    slot.runs.copy(slot.buffer)
    handed: list[int] = []
    digest = runs.digest_in_slot

    def counted(places: Any, *of: Any) -> None:
        handed.append(len(places))
        digest(places, *of)

    monkeypatch.setattr(runs, "digest_in_slot", counted)
    batches = [slot.items[:3], [], slot.items[3:]]
    noted, alone = (np.zeros(len(slot.digests), FIGURES) for _ in range(2))
    digest(places_of(slot.items), slot.buffer, slot.digests.copy(), alone)
    assert runs.digest_arrivals(batches, slot.buffer, slot.digests, noted, threads=threads) > 0
    assert (noted == alone).all()
    assert noted["top"].any()
    assert len(handed) >= 5, "a long tensor is for several threads"
    assert np.array_equal(slot.digests, np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors]))


@pytest.mark.parametrize("why", ["the interpreter is ending", "a limit on threads"])
def test_where_no_thread_can_be_started_the_calling_one_digests(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if why == "a limit on threads":
        monkeypatch.setattr(threading.Thread, "start", refused)
    else:
        monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    slot.runs.copy(slot.buffer)
    runs.digest_arrivals([slot.items], slot.buffer, slot.digests, threads=2)
    assert np.array_equal(slot.digests, np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors]))


def test_a_batch_that_fails_to_arrive_is_raised_when_no_thread_reads_the_slot_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot, running = Slot([torch.ones(9)]), threading.Event()
    read: list[bool] = []

    def digest(*_: Any) -> None:
        running.wait(30)
        read.append(True)

    def arrivals() -> Any:
        yield slot.items
        running.set()
        raise OSError("the device is lost")

    monkeypatch.setattr(runs, "digest_in_slot", digest)
    with pytest.raises(OSError, match="the device is lost"):
        runs.digest_arrivals(arrivals(), slot.buffer, slot.digests, threads=2)
    assert read == [True]


def test_any_number_of_tensors_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(rows: Any, **more: Any) -> Any:
        calls.append(len(rows))
        return copy_and_digest(rows, **more)

    monkeypatch.setattr(runs, "copy_and_digest", counted)
    slot = Slot([torch.ones(3) for _ in range(3000)])
    slot.take()
    slot.runs.copy(slot.buffer)
    assert calls == [3000, 3000]


@pytest.mark.parametrize("still", [0, 1, 2], ids="{} snapshots before it moves".format)
def test_memory_that_is_given_up_while_it_is_copied_stays_until_the_copy_has_ended(
    monkeypatch: pytest.MonkeyPatch, copied_by: str, still: int
) -> None:
    parameter = torch.nn.Parameter(torch.full((1000,), 7.0))
    slot = Slot([parameter])
    given_up: list[Watched] = []

    def call(rows: Any, **more: Any) -> None:
        given_up.append(Watched(parameter))
        parameter.data = torch.full((1000,), 7.0 + len(given_up))
        assert not given_up[-1].is_free
        copy_and_digest(rows, **more)

    for _ in range(still):
        slot.take()
    monkeypatch.setattr(runs, "copy_and_digest", call)
    for value in (7.0, 8.0, 9.0):
        slot.take()
        assert slot.digests[0] == chunk_digests(np.full(1000, value, np.float32))[0]
        assert given_up[-1].is_free, "nothing keeps a tensor's memory after its copy"


def test_no_memory_is_kept_between_snapshots() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    slot = Slot([parameter])
    for _ in range(3):
        slot.take()
        slot.runs.copy(slot.buffer)
    given_up = Watched(parameter)
    parameter.data = torch.ones(1000)
    assert given_up.is_free


def lose_by_resizing(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def lose_by_sharing(tensor: torch.Tensor) -> None:
    tensor.share_memory_()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("lose", [lose_by_resizing, lose_by_sharing])
@pytest.mark.parametrize("how", ["copy", "copy and digest"])
def test_memory_that_is_replaced_while_it_is_copied_discards_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, copied_by: str, how: str, lose: Callable[[torch.Tensor], None]
) -> None:
    tensor = torch.ones(1000)
    slot = Slot([torch.zeros(5), tensor])

    def call(rows: Any, **more: Any) -> None:
        copy_and_digest(rows, **more)
        lose(tensor)

    slot.take()
    monkeypatch.setattr(runs, "copy_and_digest", call)
    with pytest.raises(StalePlanError, match="memory of 't1'"):
        slot.runs.copy(slot.buffer) if how == "copy" else slot.take()


@pytest.mark.parametrize("nbytes", [0, 3996])
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(copied_by: str, nbytes: int) -> None:
    tensor = torch.ones(1000)
    slot = Slot([torch.zeros(5), tensor])
    slot.take()
    tensor.untyped_storage().resize_(nbytes)
    slot.data[:] = bytes(len(slot.data))
    for attempt in (slot.take, lambda: slot.runs.copy(slot.buffer)):
        with pytest.raises(StalePlanError, match="memory of 't1'"):
            attempt()
    assert not any(slot.data), "nothing was copied"


def test_a_tensor_without_memory_is_refused(copied_by: str) -> None:
    tensor = torch.ones(1000)
    slot = Slot([torch.zeros(5), tensor])
    torch.utils.swap_tensors(tensor, torch.ones(1000, device="meta"))  # type: ignore[no-untyped-call]
    for attempt in (slot.take, lambda: slot.runs.copy(slot.buffer)):
        with pytest.raises(StalePlanError, match="memory of 't1'"):
            attempt()


@pytest.mark.parametrize("how", ["copy", "copy and digest"])
def test_a_file_that_was_cut_short_below_its_tensor_is_refused_each_time(
    tmp_path: Path, copied_by: str, how: str
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 16))
    slot = Slot([torch.zeros(5), torch.from_file(str(path), shared=True, size=1 << 16, dtype=torch.uint8)])
    os.truncate(path, 0)
    for _ in range(3):
        with pytest.raises(UnusableMemoryError):
            slot.runs.copy(slot.buffer) if how == "copy" else slot.take()


@pytest.mark.parametrize(
    "other",
    [torch.zeros(10, 30), torch.zeros(30, 10, dtype=torch.int32), torch.zeros(10, 30).t(), torch.zeros(30, 9)],
    ids=["shape", "dtype", "strides", "size"],
)
def test_a_tensor_of_another_form_is_refused(other: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(torch.zeros(30, 10), requires_grad=False)
    slot = Slot([torch.ones(5), parameter])
    slot.take()
    parameter.data = other
    slot.data[:] = bytes(len(slot.data))
    with pytest.raises(StalePlanError, match="t1"):
        slot.take()
    assert not any(slot.data), "nothing was copied"


@pytest.mark.parametrize("asked", ["_STORAGE", "_ADDRESS"])
def test_a_tensor_that_moves_while_it_is_looked_up_is_refused_or_copied_as_it_was(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(30))
    slot, real = Slot([parameter]), getattr(runs, asked)
    held: list[torch.Tensor] = []

    def moved(tensor: torch.Tensor) -> Any:
        found = real(tensor)
        held.append(parameter.data)  # its memory stays, so that the new one is elsewhere
        parameter.data = torch.ones(30)
        return found

    monkeypatch.setattr(runs, asked, moved)
    if asked == "_STORAGE":
        with pytest.raises(StalePlanError, match="memory of 't0'"):
            slot.take()
    else:  # storage and address belong together: what was found is copied
        slot.take()
        assert slot.digests[0] == chunk_digests(np.zeros(30, np.float32))[0]


def test_the_crash_point_is_behind_each_chunk(monkeypatch: pytest.MonkeyPatch, copied_by: str) -> None:
    tensors = [torch.randn(size) for size in SIZES]
    slot = Slot(tensors)
    seen: list[int] = []
    monkeypatch.setattr(faults, "crash_point", lambda _name: seen.append(int(np.count_nonzero(slot.digests))))
    faults.arm("slot.during-copy:1000000")
    try:
        slot.take()
    finally:
        faults.arm(None)
    assert seen == [0, *range(1, len(slot.digests) + 1)], "the first tensor is empty"
    assert np.array_equal(slot.digests, np.concatenate([chunk_digests(tensor.numpy()) for tensor in tensors]))


def test_memory_is_checked_each_time_in_c_and_once_per_slot_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bool] = []

    def noted(rows: Any, **more: Any) -> Any:
        checks.append(more["check"])
        return copy_and_digest(rows, **more)

    monkeypatch.setattr(runs, "copy_and_digest", noted)
    monkeypatch.setattr(runs, "is_native", lambda: False)
    tensor = torch.nn.Parameter(torch.ones(100))
    slot = Slot([tensor])
    slot.take()
    slot.take()
    tensor.data = torch.ones(100)
    slot.take()
    monkeypatch.setattr(runs, "is_native", lambda: True)
    slot.take()
    assert checks == [True, False, True, True]
